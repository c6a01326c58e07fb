"""A vLLM server behind its HTTP API, with token ids."""
