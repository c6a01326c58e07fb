"""From messages to token ids and back, by the model's own chat template."""
