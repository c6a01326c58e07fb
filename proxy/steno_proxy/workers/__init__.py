"""The workers: their sockets and channels, the streams open on them, and which worker gets a turn."""
