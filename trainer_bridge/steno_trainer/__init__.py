"""The trainer's side: what recorded samples weigh, how they are packed, what their loss is, and where each token went.

Most of it is pure: values and tensors in, values and tensors out. Processes and devices begin with `ranks`, `zero_engine` and
`step` (docs/objective.md).
"""
