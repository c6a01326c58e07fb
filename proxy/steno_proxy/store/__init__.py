"""Where sessions rest: the `SessionStore` protocol (interface.py), kept in memory (`memory/`) and in Redis (`redis/`)."""
