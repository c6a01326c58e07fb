"""What this process knows of open sessions: conversation trees, turns in flight, notes."""
