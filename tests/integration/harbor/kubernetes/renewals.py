"""Credentials by a program, in Harbor's interpreter: `PYTHON renewals.py PODS KUBECONFIG GIVEN`. Says what came of each call."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from probe import part


async def main(folder: Path, kubeconfig: str, given: Path) -> None:
    errors, kind = part(folder, "errors"), part(folder, "api").Api
    where = {"kubeconfig": kubeconfig, "namespace": None, "context": None}

    async def found(api: Any) -> str:
        return f"{len((await api.pods('steno.launcher'))[0])} pods"

    (given / "away").touch()
    try:
        await kind.connected(where)
    except errors.PodError as error:
        print(f"{type(error).__name__}: {error}")
    (given / "away").unlink()
    api = await kind.connected(where)
    try:
        print(*[await found(api) for _ in range(5)], sep=", ")
        (given / "away").touch()
        (given / "refused").unlink()
        asked = [asyncio.ensure_future(found(api)) for _ in range(5)]  # with a token that is used up
        while not (given / "refused").exists():
            await asyncio.sleep(0.02)
        (given / "away").unlink()
        print(*await asyncio.gather(*asked), sep=", ")
    finally:
        await api.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
