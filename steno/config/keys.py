"""The key that a program shows to a proxy, out of a text that may hold several.

A proxy takes several keys at a time, one a line, while they are rotated (`steno_proxy/auth/keys.py`). Its clients and workers
often read the same file: they show the first line.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, SecretStr


def first_key(text: str) -> str | None:
    """The first line that is not blank; None: there is none.

    Raises: ValueError: no HTTP header can have it. It says nothing of what is in the text.
    """
    key = next((line.strip() for line in text.splitlines() if line.strip()), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError("the first line has a character that is not printable ASCII; a key must be printable ASCII")
    return key


def _first(secret: SecretStr | None) -> SecretStr | None:
    key = first_key(secret.get_secret_value()) if secret is not None else None
    return SecretStr(key) if key is not None else None


ShownKey = Annotated[SecretStr | None, AfterValidator(_first)]
"""A setting: the key that a program shows. Of several, one a line, the first."""
