"""What a keeper still has of pods that are gone, in Harbor's interpreter: `PYTHON forgetting.py PODS`. Says it for each order in
which a cluster tells of a pod's end, as lines of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from probe import part


class Pods:
    """The part of a cluster's API that a keeper clears with."""

    def __init__(self) -> None:
        self.there: list[dict[str, Any]] = []

    async def pods(self, _: str) -> tuple[list[dict[str, Any]], str]:
        return list(self.there), "1"

    async def delete_pod(self, name: str, uid: str) -> None:
        pass


def pod(uid: str, phase: str, *, ends: bool = False) -> dict[str, Any]:
    labels = {"steno.trial": "t-1", "steno.launcher": "here"}
    metadata = {"name": f"steno-{uid}", "uid": uid, "labels": labels}
    return {"metadata": metadata | ({"deletionTimestamp": "now"} if ends else {}), "status": {"phase": phase}}


async def main(folder: Path) -> None:
    for order in ("clear, last words", "last words, clear", "clear, a list with it", "clear, a list without it"):
        with tempfile.TemporaryDirectory() as states:
            request = {"where": {}, "launcher": "here", "lease_s": 60.0, "states": states}
            keeper, api = part(folder, "keeper").Keeper(request), Pods()
            keeper._api = api
            ends, last = pod("1", "Pending", ends=True), pod("1", "Failed", ends=True)
            keeper._note(pod("1", "Pending"))
            keeper._note(ends)
            before = [path.name for path in Path(states).iterdir()]
            for step in order.split(", "):
                api.there = [] if step == "a list without it" or order.endswith("clear") else [ends]
                if step == "clear":
                    await keeper.clear({"trial": "t-1", "wait_s": None})
                elif step == "last words":
                    keeper._note(last)
                    keeper._note(last, deleted=True)
                else:
                    await keeper._listed(api)
                    if step == "a list with it":
                        keeper._note(last, deleted=True)
            kept = [name for name, value in vars(keeper).items() if isinstance(value, dict | set) and value]
            after = [path.name for path in Path(states).iterdir()]
            keeper._note(pod("2", "Pending"))
            new = [path.name for path in Path(states).iterdir()]
            print(json.dumps([order, before, kept, after, new]))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
