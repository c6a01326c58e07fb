"""A run's numbers: what they are, and where they go."""
