"""Pods as Harbor's sandboxes. Runs in the interpreter that has Harbor, and imports nothing of Steno's but itself."""
