"""When two messages are the same message, however a client wrote it back. Pure."""
