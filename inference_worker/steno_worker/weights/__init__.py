"""New weights on their way into an engine: staged, checked, loaded, probed (docs/trainer-operations.md)."""
