"""One turn, from a parsed request to its record ("One turn" in docs/architecture.md)."""
