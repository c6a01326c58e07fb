"""One optimisation step: its plan, the samples' scores, the update."""
