"""Keys, and how often a trial may ask."""
