"""Trials as episodes of verifiers' (https://github.com/PrimeIntellect-ai/verifiers): its tasks, agents, sandboxes and rewards."""
