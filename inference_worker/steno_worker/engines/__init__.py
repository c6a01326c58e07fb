"""The engines: what samples tokens."""
