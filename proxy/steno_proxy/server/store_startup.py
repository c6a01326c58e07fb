"""Startup: connects to the store with backoff. Requests get 503 until it is up."""

from __future__ import annotations

import asyncio
import logging

from steno.contracts.errors import StoreUnavailable
from steno_proxy.auth.keys import Keyring
from steno_proxy.store.interface import SessionStore

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.2
MOST_WAIT_S = 5.0
SECRET = "trial_secret"
"""Name under which the store keeps it."""


async def begin(store: SessionStore, keys: Keyring) -> asyncio.Task[None] | None:
    """Open the store and settle the keys. Where the store is away, a task goes on with it; None: it is done."""
    keys.await_store()
    try:
        await _open(store, keys)
    except StoreUnavailable as error:
        log.warning("can't connect to the store: %s; trying again, requests get 503 until it is up", error.message)
        return asyncio.create_task(_again(store, keys))
    return None


async def _again(store: SessionStore, keys: Keyring) -> None:
    wait_s = FIRST_WAIT_S
    while True:
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MOST_WAIT_S)
        try:
            await _open(store, keys)
        except StoreUnavailable as error:
            log.warning("still can't connect to the store: %s", error.message)
        else:
            log.info("connected to the store")
            return


async def _open(store: SessionStore, keys: Keyring) -> None:
    await store.open()
    if keys.pending is not None:
        keys.settle(await store.keep(SECRET, keys.pending))
