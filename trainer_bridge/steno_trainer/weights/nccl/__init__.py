"""Weights straight into the engines over NCCL, without files (I10).

transport    feeds them from a model, bucket by bucket
vllm_group   vLLM's own engine for that, the trainer's end
address      where the workers meet the trainer
"""
