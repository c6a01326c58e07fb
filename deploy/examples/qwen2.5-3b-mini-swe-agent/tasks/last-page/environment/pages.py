def pages(items, size):
    """Cut a list into lists of `size`."""
    return [items[i * size : (i + 1) * size] for i in range(len(items) // size)]
