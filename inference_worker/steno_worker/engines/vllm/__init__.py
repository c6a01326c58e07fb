"""vLLM in this process, its chat format and its weight updates."""
