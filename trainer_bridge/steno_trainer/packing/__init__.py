"""Which sample goes into which micro-batch of which rank, and its tensors."""
