"""The trainer's side: what recorded samples weigh, how they are packed, what their loss is, and where each token went.

This is the pure part: values and tensors in, values and tensors out, no sockets, no clock, no process group. The optimisation
step, the loop around it, leases and weight updates are not here yet (docs/training.md).
"""
