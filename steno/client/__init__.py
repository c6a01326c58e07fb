"""The REST client of the control plane, blocking and asynchronous."""
