"""Authorisation: the seven kinds of key and what each opens (I8). Derived, never stored; compared in constant time.

    admin     opens the control plane
    worker    opens the workers' socket
    metrics   what Prometheus reads, nothing else
    viewer    reads what the control plane has on record, writes nothing, is shown no key
    run       one run: reads it, makes its groups, claims, reads and completes its trials, says that its rollouts are over
    harness   one group: claims, reads and completes its trials, deletes nothing
    agent     one trial: its generation routes, nothing else

An agent's key is an HMAC of its trial id, a harness key one of its group id, a run's key one of its run id, each in a domain
of its own, so that no key of one kind is ever one of another. Without an admin key there are no keys at all, and everybody may
do everything: the settings allow that on loopback only.

Several admin, worker, metrics and viewer keys and trial secrets are valid at a time, one per line. So each is rotated without a
moment in which a client has no valid key: add the new one, hand it out, remove the old one. Derived keys come from the first
trial secret.
A browser that has shown the admin key or a viewer key once reads by a cookie from then on (`viewer_cookie.py`).
A trial's own key has a generation: `sk-steno-…` is the first, `sk-steno-2-…` the one after it. Which of them is still good is
on the session's record, where whoever serves the request looks (`Session.key_generation`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from steno.contracts.errors import Forbidden, StoreUnavailable, Unauthorized
from steno.contracts.rest import RUN_KEY
from steno_proxy import metrics
from steno_proxy.auth import viewer_cookie
from steno_proxy.config.settings import ProxySettings

_BEARER = b"bearer "
_HARNESS_KEY = "hk-steno-"
_AGENT = re.compile(rb"sk-steno-(?:([1-9][0-9]{0,8})-)?[A-Za-z0-9_-]{32}")
FIRST = 1
"""Generation of the key that a trial begins with."""
NO_COOKIES: Mapping[str, bytes] = {}


class Keyring:
    """The proxy's keys. Args: each of the keys and the trial secret may be several, one a line.

    Attributes:
        enabled: whether any key is asked for. Settled at the start; `replace` never changes it.
        pending: what the trial secret will be, unless the store has kept another; None: it is settled. Until then no agent's and
            no harness's key can be told from a wrong one, and asking for one is StoreUnavailable.
        generation_of: trial id -> generation of its key that is good, as the store has it.
        own: what workers of this very process show, good until it ends; "" where no key is asked for.
    """

    def __init__(
        self,
        admin_key: str | None,
        worker_key: str | None = None,
        trial_secret: str | None = None,
        metrics_key: str | None = None,
        viewer_key: str | None = None,
    ) -> None:
        self.enabled = admin_key is not None
        self.own = f"wk-steno-{secrets.token_urlsafe(24)}" if self.enabled else ""
        self.pending: bytes | None = None
        self.generation_of: Callable[[str], Awaitable[int]] = _first
        self._derived = self.enabled and trial_secret is None
        self._secrets: tuple[bytes, ...] = (_stretched(listed(trial_secret or admin_key or "")[:1] or [""])[0],)
        self.replace(admin_key, worker_key, trial_secret, metrics_key, viewer_key)

    def replace(
        self,
        admin_key: str | None,
        worker_key: str | None,
        trial_secret: str | None,
        metrics_key: str | None = None,
        viewer_key: str | None = None,
    ) -> None:
        """From now on these are the keys. A trial secret that nobody gave stays what it was."""
        self._admin = tuple(key.encode() for key in listed(admin_key))
        self._metrics = tuple(key.encode() for key in listed(metrics_key))
        self._viewers = tuple(key.encode() for key in listed(viewer_key))
        self.workers = listed(worker_key or admin_key) if self.enabled else []
        if trial_secret is not None:
            self._secrets = tuple(_stretched(listed(trial_secret)))

    @property
    def worker(self) -> str:
        """What a worker should show; "" where none is asked for."""
        return self.workers[0] if self.workers else ""

    def __repr__(self) -> str:
        return f"Keyring(enabled={self.enabled})"

    def await_store(self) -> None:
        """A secret that nobody gave is made of the admin key once, and kept in the store: a new admin key then ends no running
        trial. It is not known before the store is there (`settle`)."""
        self.pending = self._secrets[0] if self._derived else None

    def check_settled(self) -> None:
        """Raises: StoreUnavailable."""
        if self.pending is not None:
            raise StoreUnavailable("the proxy has not reached its store yet")

    def settle(self, secret: bytes) -> None:
        self._secrets, self.pending = (secret,), None

    @classmethod
    def of(cls, settings: ProxySettings) -> Keyring:
        given = (
            settings.admin_key,
            settings.worker_key,
            settings.trial_secret,
            settings.metrics_key,
            settings.viewer_key,
        )
        return cls(*(secret.get_secret_value() if secret else None for secret in given))

    def agent_key(self, trial_id: str, generation: int = FIRST) -> str | None:
        """The key that opens the generation routes of this trial; None where no key is asked for."""
        self.check_settled()
        return _agent(self._secrets[0], trial_id, generation) if self.enabled else None

    def harness_key(self, group_id: str) -> str | None:
        """The key that completes and reads the trials of this group; None where no key is asked for."""
        self.check_settled()
        return _harness(self._secrets[0], group_id) if self.enabled else None

    def run_key(self, run_id: str) -> str | None:
        """The key that rollouts of this run need; None where no key is asked for."""
        self.check_settled()
        return _run(self._secrets[0], run_id) if self.enabled else None

    def check_agent(self, key: bytes | None, trial_id: str) -> int | None:
        """The generation of this trial's key that was shown; None where no key is asked for.

        Whether the trial has gone on to a later one is for its record to say (`check_generation`).

        Raises: Unauthorized without a key, Forbidden with one that does not open this trial. The admin key opens none
        of the generation routes: it has no business inside a sandbox."""
        if not self.enabled:
            return None
        self.check_settled()
        shape = _AGENT.fullmatch(key) if key else None
        generation = int(shape[1]) if shape and shape[1] else FIRST
        self._check(key, [_agent(secret, trial_id, generation).encode() for secret in self._secrets], "agents")
        return generation

    async def check_current(self, key: bytes | None, trial_id: str) -> None:
        """As `check_agent`, and the key's generation is the trial's. Raises: also NotFound, Gone, StoreUnavailable."""
        shown = self.check_agent(key, trial_id)
        if shown is not None:
            check_generation(shown, await self.generation_of(trial_id))

    def check_admin(self, key: bytes | None) -> None:
        """Raises: Unauthorized, Forbidden."""
        if self.enabled:
            self._check(key, self._admin, "control")

    def check_metrics(self, key: bytes | None) -> None:
        """A metrics key or the admin key. Raises: Unauthorized, Forbidden."""
        if self.enabled:
            self._check(key, [*self._admin, *self._metrics], "control")

    def check_reader(self, key: bytes | None, cookies: Mapping[str, bytes] = NO_COOKIES) -> None:
        """The admin key, a viewer key, or a cookie that was given for one of them: for what reads. Raises: Unauthorized,
        Forbidden, StoreUnavailable."""
        if not self.enabled or (key is None and self.is_reader(None, cookies)):
            return
        self._check(key, [*self._admin, *self._viewers], "control")

    def is_reader(self, key: bytes | None, cookies: Mapping[str, bytes] = NO_COOKIES) -> bool:
        """Whether `check_reader` lets the request in: some routes accept other keys too. If a key is shown, cookies do not count.
        Raises: StoreUnavailable: it is not known yet whether a cookie is good."""
        if not self.enabled:
            return True
        good = [*self._admin, *self._viewers]
        if key is not None:
            return _is_one_of(key, good)
        names = self.cookie_names if cookies else []
        return any(viewer_cookie.holds(cookies[name], self._secrets, good) for name in names if name in cookies)

    @property
    def cookie_names(self) -> list[str]:
        """The names of our cookies, one per trial secret; new cookies get the first. Raises: StoreUnavailable."""
        self.check_settled()
        return [viewer_cookie.name_of(secret) for secret in self._secrets]

    def viewer_cookie(self, key: bytes | None) -> str:
        """The cookie of a browser whose person has shown this key. Raises: Unauthorized, Forbidden, StoreUnavailable."""
        self.check_settled()
        self._check(key, [*self._admin, *self._viewers], "control")
        assert key is not None
        return viewer_cookie.made(key, self._secrets[0])

    def check_harness(self, key: bytes | None, group_id: str | None, run_id: str | None = None) -> None:
        """The admin key, the harness key of this group, or the key of this run; None: there is none that opens it. Raises:
        Unauthorized, Forbidden."""
        if self.enabled:
            self.check_settled()
            good = [_harness(secret, group_id).encode() for secret in self._secrets] if group_id is not None else []
            good += [_run(secret, run_id).encode() for secret in self._secrets] if run_id is not None else []
            self._check(key, [*self._admin, *good], "control")

    @staticmethod
    def may_be_harness(key: bytes | None) -> bool:
        """Whether it looks like a group's or a run's key."""
        return key is not None and key.startswith((_HARNESS_KEY.encode(), RUN_KEY.encode()))

    def is_admin(self, key: bytes | None) -> bool:
        return not self.enabled or (key is not None and _is_one_of(key, self._admin))

    def is_worker(self, key: str) -> bool:
        """Whether a socket that shows this is a worker's; anything is, where no key is asked for."""
        return not self.enabled or _is_one_of(key.encode(), [good.encode() for good in (*self.workers, self.own)])

    @staticmethod
    def _check(key: bytes | None, good: Sequence[bytes], plane: str) -> None:
        if key and _is_one_of(key, good):
            return
        metrics.REFUSED_KEYS.labels(plane).inc()
        if not key:
            raise Unauthorized("no key was given: send it as `Authorization: Bearer …` or `x-api-key`")
        hint = (
            ": it takes the trial's own key, which POST /sessions/TRIAL answers and `steno env` prints"
            if plane == "agents"
            else ""
        )
        raise Forbidden(f"this key has no access to this route{hint}")


async def _first(trial_id: str) -> int:
    return FIRST


def check_generation(shown: int | None, current: int) -> None:
    """Args: shown: by the request, as `check_agent` says. current: of the trial. Raises: Forbidden."""
    if shown is not None and shown != current:
        metrics.REFUSED_KEYS.labels("agents").inc()
        raise Forbidden("this key was replaced by a newer key of the trial")


def listed(text: str | None) -> list[str]:
    """The keys in this text, one a line."""
    return [line.strip() for line in (text or "").splitlines() if line.strip()]


def _is_one_of(key: bytes, good: Sequence[bytes]) -> bool:
    """Takes as long for a wrong key as for a good one, whichever of them it is."""
    found = False
    for candidate in good:
        found |= hmac.compare_digest(key, candidate)
    return found


def _stretched(values: Sequence[str]) -> list[bytes]:
    return [hashlib.blake2b(value.encode(), person=b"steno trials", digest_size=32).digest() for value in values]


def _agent(secret: bytes, trial_id: str, generation: int) -> str:
    if generation == FIRST:
        return f"sk-steno-{_derive(secret, b'agent', trial_id)}"
    return f"sk-steno-{generation}-{_derive(secret, b'agent %d' % generation, trial_id)}"


def _harness(secret: bytes, group_id: str) -> str:
    return f"{_HARNESS_KEY}{_derive(secret, b'harness', group_id)}"


def _run(secret: bytes, run_id: str) -> str:
    return f"{RUN_KEY}{_derive(secret, b'run', run_id)}"


def _derive(secret: bytes, kind: bytes, name: str) -> str:
    digest = hmac.digest(secret, kind + b"\0" + name.encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:24]).decode()


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
