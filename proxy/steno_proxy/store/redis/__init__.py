"""Sessions, runs, leases and policies in Redis, one script per write."""
