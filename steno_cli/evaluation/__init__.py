"""`steno evaluate`: a proxy and a worker of its own, and the checkpoints of a run that it follows."""
