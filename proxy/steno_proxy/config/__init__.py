"""How the proxy is set: its settings, and what the URL of a Redis names."""
