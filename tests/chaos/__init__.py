"""A small deployment that is beaten by a seed's schedule, and what must hold afterwards: `python -m tests.chaos --seed N`."""
