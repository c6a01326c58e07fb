"""Harbor's sandboxes as pods of a Kubernetes cluster: what these rollouts do about it. `pods/` is what runs where Harbor does."""
