"""Steno as a model of Inspect (inspect_ai): `provider.py`, which Inspect loads by its entry point and nobody else imports."""
