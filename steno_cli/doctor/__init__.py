"""`steno doctor`: what is looked at, and what to do about it."""
