"""Checkpoints: written, read on any number of ranks, and what led to them."""
