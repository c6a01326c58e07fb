"""A rescoring scores all trials of a group, or makes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import ArchiveUnreadable
from steno.contracts.records import Group
from steno.contracts.runs.leases import GroupPlace, RunView
from steno_rollouts.rescoring import Rescoring
from tests.support.records.recordings import session

PLACE = GroupPlace(group_id="g", purpose="train", state="acknowledged", size=2, ended=2, grants=1)


async def test_a_trial_that_the_archive_can_not_give_is_not_lost() -> None:
    asked: list[str] = []

    def proxy(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        match request.url.path:
            case "/runs/r":
                return httpx.Response(200, content=RunView(run_id="r").model_dump_json())
            case "/groups":
                mine = [PLACE.model_dump()] if request.url.params["run_id"] == "r" else []
                return httpx.Response(200, json={"items": mine})
            case "/groups/g":
                return httpx.Response(200, content=Group(group_id="g", size=2, created_at=1.0).model_dump_json())
            case "/sessions":
                there = session("g.0", group_id="g", status="aborted").model_dump(mode="json")
                return httpx.Response(200, json={"items": [there], "next_cursor": None, "unreadable": ["g.1"]})
        raise AssertionError(request.url)

    function: Any = SimpleNamespace(
        digest=lambda: "c0de", needs=lambda name: False, takes=pytest.fail, where="reward.py:score"
    )
    async with AsyncClient("http://proxy", transport=httpx.MockTransport(proxy), retries=0) as client:
        with pytest.raises(ArchiveUnreadable, match=r"g\.1"):
            await Rescoring(client, "r", "again", function).run()
    assert set(asked) == {"GET"}
