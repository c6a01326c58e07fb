"""The calls of a cluster's API as they are, with short patience: in Harbor's interpreter, `PYTHON probe.py PODS [KUBECONFIG]`.
Says what came of each, as lines of JSON; without a kubeconfig, what comes in a pod."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def part(folder: Path, name: str) -> Any:
    if "steno_pods" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "steno_pods", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["steno_pods"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"steno_pods.{name}")


async def main(folder: Path, kubeconfig: str) -> None:
    api_part = part(folder, "api")
    for name in ("forbidden", "busy", "slow", "lost", "quota"):
        refused = name in ("busy", "slow")  # until its patience is over; the others are answered at last
        api_part.REQUEST_S = 1.0 if name == "slow" else 30.0
        api_part.PATIENCE_S = 1.5 if refused else 60.0
        api = await api_part.Api.connected({"kubeconfig": kubeconfig, "namespace": None, "context": None})
        try:
            await api.pod(f"{name}-pod")
            said = "found"
        except part(folder, "errors").PodError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            await api.close()
        print(json.dumps([name, said]))
    wrong = {"kubeconfig": kubeconfig, "namespace": None, "context": "elsewhere"}
    for where in (wrong, {**wrong, "context": None, "namespace": "not-mine"}):
        try:
            await (await api_part.Api.connected(where)).pods("steno.launcher")
        except part(folder, "errors").PodError as error:
            print(json.dumps([where["namespace"] or where["context"], f"{type(error).__name__}: {error}"]))


async def inside(folder: Path) -> None:
    api = await part(folder, "api").Api.connected({"kubeconfig": None, "namespace": None, "context": None})
    try:
        found, _version = await api.pods("steno.launcher")
        print(json.dumps(["inside", f"{len(found)} pods in {api.namespace}"]))
    finally:
        await api.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 2 else inside(Path(sys.argv[1])))
