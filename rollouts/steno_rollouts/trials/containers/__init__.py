"""Trials in containers of Docker or Podman, each with a way to its own URLs and to nothing else."""
