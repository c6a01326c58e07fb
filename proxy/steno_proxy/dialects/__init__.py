"""The agents' protocols: requests in, answers out. Pure."""
