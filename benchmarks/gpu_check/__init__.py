"""What only a GPU can show, by one command on one machine without a network: `scripts/gpu-check`.

`parts.py` says what is looked at and what must come out of it; each thing is done by a process of its own (`facts`, `one_step`,
`lengths`, `collectives`, `sampled`, `scored`), so that a kernel that fails takes nothing with it.
"""
