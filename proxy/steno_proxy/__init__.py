"""The proxy: agents in front, workers behind, and a record of every token between them."""
