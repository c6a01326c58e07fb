"""The model that ships with the project: `TINY` is its directory (Hugging Face layout). Made by `scripts/make_tiny.py`."""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
