"""The control plane's routes: groups, sessions, leases, runs, policies, workers, health and metrics."""
