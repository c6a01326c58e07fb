def mean(values):
    """Arithmetic mean."""
    return sum(values) // len(values)
