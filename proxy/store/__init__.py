"""Where sessions rest: the `SessionStore` protocol (base.py), in memory (memory.py) and in Redis (redis.py, whose schema is keys.py)."""
