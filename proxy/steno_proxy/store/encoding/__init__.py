"""What is stored, byte for byte the same in both stores: turns (`codec.py`), sessions (`head.py`), the texts that they share."""
