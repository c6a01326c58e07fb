"""The protocol between proxy and worker: frames, packets, and the state machine that both ends run (docs/wire-protocol.md)."""
