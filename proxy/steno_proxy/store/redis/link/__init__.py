"""The link to a Redis, which knows nothing of what is stored: connections, batches, time limits, waits for replicas."""
