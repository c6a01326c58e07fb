"""Where sessions rest: the `SessionStore` protocol (base.py), kept in memory (memory.py) and in Redis (redis.py, keys.py)."""
