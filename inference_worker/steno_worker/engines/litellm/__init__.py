"""Providers behind their APIs, through LiteLLM: text, no token ids."""
