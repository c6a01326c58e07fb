def slug(title):
    """A title as it stands in a URL."""
    return title.replace(" ", "-")
