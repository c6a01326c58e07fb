"""Weights as files (I10).

shards        safetensors with their digests, written in one pass
copies        full copies of them, written by all ranks, beside and renamed; pruned
patches       what changed in one shard since it was last pushed
differences   copies by difference: a full one now and then, and patches between
"""
