"""An engine that says what a script tells it."""
