"""The loss: importance ratios, clipping, mismatch corrections, aggregation."""
