"""A vLLM or SGLang server behind its HTTP API, with token ids."""
