"""Trials on the nodes of a Ray cluster, each in what trials of one machine run in."""
