"""Small routes of an agent's that look something up: nothing comes in but the path, nothing is generated."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from starlette.types import Scope, Send

from proxy import logs
from proxy.api.agent_http import HttpClient, check_trial_id, refusal_headers
from proxy.contracts.errors import StenoError
from proxy.keys import Keyring, key_of


async def look_up(
    scope: Scope,
    send: Send,
    keys: Keyring,
    find: Callable[[str], Awaitable[bytes]],
    error_body: Callable[[StenoError], bytes],
) -> None:
    """Answer with what `find` says for the trial in the path, if the request has its key (I8).

    Args: error_body: a refusal in the words of the client's dialect, be it a key's or one that `find` raises.
    """
    trial_id = scope["path_params"]["trial_id"]
    request_id = os.urandom(8).hex()
    logs.bind(trial_id, request_id)
    client = HttpClient(send, request_id.encode())
    try:
        check_trial_id(trial_id)
        await keys.check_current(key_of(scope["headers"]), trial_id)
        body = await find(trial_id)
    except StenoError as error:
        await client.respond(error.status, error_body(error), refusal_headers(error))
        return
    await client.respond(200, body, [])
