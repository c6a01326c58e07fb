"""The embedded engine: transformers on CPU or one GPU, batched."""
