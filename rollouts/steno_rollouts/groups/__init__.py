"""Groups of a run: how each is registered and when, whose trials are run here, and what a whole group is worth."""
