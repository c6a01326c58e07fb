"""OpenAI's chat completions and completions, with vLLM's fields."""
