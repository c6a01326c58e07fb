"""The training program: the loop on the first rank, and its hold of the run."""
