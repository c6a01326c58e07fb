"""The server process: wires the parts, listens, and runs them on uvicorn."""
