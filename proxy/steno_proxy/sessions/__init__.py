"""Conversation trees: how a request finds its place in one, and what a trainer reads from it. Pure."""
