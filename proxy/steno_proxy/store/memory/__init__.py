"""Sessions, runs and leases in the memory of one process."""
