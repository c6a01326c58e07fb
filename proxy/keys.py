"""Who may do what: the four kinds of key (I8). Derived, never stored; compared in constant time.

    admin     opens the control plane
    worker    opens the workers' socket
    harness   one group: reads its sessions, completes them, deletes nothing else
    agent     one trial: its generation routes, nothing else

An agent's key is an HMAC of its trial id, a harness key one of its group id, each in a domain of its own, so that no key of one
kind is ever one of another. Without an admin key there are no keys at all, and everybody may do everything: the
settings allow that on loopback only.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable

from proxy.config import ProxySettings
from proxy.contracts.errors import Forbidden, StoreUnavailable, Unauthorized

_BEARER = b"bearer "


class Keyring:
    """The proxy's keys.

    Attributes:
        enabled: whether any key is asked for.
        pending: what the trial secret will be, unless the store has kept another; None: it is settled. Until then no agent's and
            no harness's key can be told from a wrong one, and asking for one is StoreUnavailable.
        worker: what a worker must show; "" where none is asked for.
    """

    def __init__(self, admin_key: str | None, worker_key: str | None = None, trial_secret: str | None = None) -> None:
        self.enabled = admin_key is not None
        self._admin = (admin_key or "").encode()
        self.worker = (worker_key or admin_key or "") if self.enabled else ""
        secret = trial_secret or admin_key or ""
        self._secret = hashlib.blake2b(secret.encode(), person=b"steno trials", digest_size=32).digest()
        self._derived = self.enabled and trial_secret is None
        self.pending: bytes | None = None

    def await_store(self) -> None:
        """A secret that nobody gave is made of the admin key once, and kept in the store: a new admin key then ends no running
        trial. It is not known before the store is there (`settle`)."""
        self.pending = self._secret if self._derived else None

    def check_settled(self) -> None:
        """Raises: StoreUnavailable."""
        if self.pending is not None:
            raise StoreUnavailable("the proxy has not reached its store yet")

    def settle(self, secret: bytes) -> None:
        self._secret, self.pending = secret, None

    @classmethod
    def of(cls, settings: ProxySettings) -> Keyring:
        secrets = (settings.admin_key, settings.worker_key, settings.trial_secret)
        return cls(*(secret.get_secret_value() if secret else None for secret in secrets))

    def agent_key(self, trial_id: str) -> str | None:
        """The key that opens the generation routes of this trial; None where no key is asked for."""
        return f"sk-steno-{self._derive(b'agent', trial_id)}" if self.enabled else None

    def harness_key(self, group_id: str) -> str | None:
        """The key that completes and reads the trials of this group; None where no key is asked for."""
        return f"hk-steno-{self._derive(b'harness', group_id)}" if self.enabled else None

    def _derive(self, kind: bytes, name: str) -> str:
        self.check_settled()
        digest = hmac.digest(self._secret, kind + b"\0" + name.encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:24]).decode()

    def check_agent(self, key: bytes | None, trial_id: str) -> None:
        """Raises: Unauthorized without a key, Forbidden with one that does not open this trial. The admin key opens none
        of the generation routes: it has no business inside a sandbox."""
        if self.enabled:
            self._check(key, (self.agent_key(trial_id),))

    def check_admin(self, key: bytes | None) -> None:
        """Raises: Unauthorized, Forbidden."""
        if self.enabled:
            self._check(key, (self._admin,))

    def check_harness(self, key: bytes | None, group_id: str | None) -> None:
        """The admin key, or the harness key of this group. Raises: Unauthorized, Forbidden."""
        if self.enabled:
            self._check(key, (self._admin, self.harness_key(group_id) if group_id is not None else None))

    def is_admin(self, key: bytes | None) -> bool:
        return not self.enabled or (key is not None and hmac.compare_digest(key, self._admin))

    @staticmethod
    def _check(key: bytes | None, good: tuple[bytes | str | None, ...]) -> None:
        if not key:
            raise Unauthorized("no key was given: send it as `Authorization: Bearer …` or `x-api-key`")
        opened = False
        for candidate in good:
            expected = candidate.encode() if isinstance(candidate, str) else candidate or b""
            opened |= hmac.compare_digest(key, expected)
        if not opened:
            raise Forbidden("this key does not open this")


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request carries, in whichever header its client uses: `Authorization: Bearer`, `x-api-key` or
    `x-goog-api-key`. Header names are lower case, as ASGI gives them."""
    found: bytes | None = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _BEARER:
            return value[7:].strip()
        if name in (b"x-api-key", b"x-goog-api-key") and found is None:
            found = value.strip()
    return found
