"""The worker: an engine, and one connection to each proxy."""
