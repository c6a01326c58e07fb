"""What happens to the groups, leases and tokens of a run (I4): asked by both stores."""
