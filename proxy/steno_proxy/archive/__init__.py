"""Ended sessions as objects: what a session's lines are, where they are kept, and who moves them there (docs/adr/0018)."""
