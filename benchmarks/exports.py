"""What an export of many sessions costs: seconds, and the largest memory of `steno sessions export`.

    python -m benchmarks.exports --sessions 1000,10000

A proxy with its store in memory has that many recorded sessions of two turns (about 800 prompt and 240 sampled tokens each);
each format is exported by the command, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from steno_cli.exports.export import ExportFormat
from steno_proxy.config import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.store.memory.store import MemoryStore
from tests.support.recordings import conversation, session
from tests.support.server import serve

TURNS = 2


async def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    made = conversation(TURNS, seed=1)
    for i in range(count):
        name = f"trial-{i}"
        await store.register(session(name))
        for n, (turn, row) in enumerate(made):
            await store.commit(name, turn, row, now=10.0 + n)
    return store


def measured(url: str, file_format: ExportFormat, folder: Path) -> dict[str, object]:
    out = folder / f"out.{file_format.value}"
    words = ["sessions", "export", "--format", file_format.value, "-o", str(out), "--proxy", url]
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "steno", *words], stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, words
    return {
        "format": file_format.value,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": round(used.ru_maxrss / 1024),
        "file_mib": round(out.stat().st_size / 2**20, 1),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1000,10000", help="how many, between commas")
    args = parser.parse_args()
    for count in map(int, args.sessions.split(",")):
        async with serve(create_app(ProxySettings(), await filled(count))) as port:
            with tempfile.TemporaryDirectory() as folder:
                for file_format in ExportFormat:
                    found = await asyncio.to_thread(measured, f"http://127.0.0.1:{port}", file_format, Path(folder))
                    print(json.dumps({"sessions": count} | found), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
