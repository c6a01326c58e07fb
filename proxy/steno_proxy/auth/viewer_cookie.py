"""What a browser shows in the place of a key, once its person has logged in at `/ui`: signed, kept nowhere, good at every
replica.

`EXPIRES.SIGNATURE`: an HMAC over the time and the key that was shown, under the secret that all replicas share. It is
valid until it expires, or until its key or the trial secret is removed. It opens what a viewer key opens, for GET alone
(`api/common.py` checks that).

Browsers send the cookies of all ports of a host to each of them. So its name has a digest of the secret: proxies of one host that
share none do not log each other's browsers out.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Sequence

PREFIX = "steno_viewer_"
LASTS_S = 12 * 3600
"""A working day: whoever comes back the next morning shows the key again."""


def name_of(secret: bytes) -> str:
    return PREFIX + hashlib.blake2b(key=secret, person=b"viewer's name", digest_size=4).hexdigest()


def made(key: bytes, secret: bytes) -> str:
    expires = b"%d" % (time.time() + LASTS_S)
    return f"{expires.decode()}.{_signature(secret, key, expires)}"


def holds(cookie: bytes, secrets: Sequence[bytes], keys: Sequence[bytes]) -> bool:
    """Whether it was made for one of these keys, under one of these secrets, and is not over."""
    expires, _, signature = cookie[:200].partition(b".")
    if not expires.isdigit() or len(expires) > 12 or int(expires) < time.time():
        return False
    good = False
    for secret in secrets:
        for key in keys:
            good |= hmac.compare_digest(_signature(secret, key, expires).encode(), signature)
    return good


def cookies_of(header: bytes) -> dict[str, bytes]:
    """By name, those in a `Cookie` header that a proxy made, this one or another."""
    pairs = (pair.strip().partition(b"=") for pair in header.split(b";"))
    return {name.decode("latin-1"): value for name, _, value in pairs if name.startswith(PREFIX.encode())}


def _signature(secret: bytes, key: bytes, expires: bytes) -> str:
    own = hashlib.blake2b(key, key=secret, person=b"steno viewer", digest_size=32).digest()
    return base64.urlsafe_b64encode(hmac.digest(own, b"viewer\0" + expires, "sha256")[:24]).decode()
