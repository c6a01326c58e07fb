"""The worker's end of the relay: its connection to a proxy, and the generations on it."""
