"""What it costs to read many sessions out of a proxy: seconds and largest memory of `steno sessions export` and `steno rescore`.

    python -m benchmarks.exports --sessions 1000,10000

A proxy with its store in memory has that many recorded sessions of two turns (about 800 prompt and 240 sampled tokens each), in
groups of eight; each format is exported by the command, in a process of its own. Last, all are scored anew by a function that
reads each reply. `proxy_more_mib` is what the largest memory of the proxy's process grew by meanwhile (`rescore` records every
turn once more).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

from steno.contracts.records import Group, IndexRow, Turn
from steno_cli.exports.export import ExportFormat
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.store.memory.store import MemoryStore
from tests.support.contracts.recording import END
from tests.support.programs.server import serve
from tests.support.records.recordings import conversation, session

TURNS = 2
GROUP = 8
RUN = "recorded"
REWARD = """
def f(transcript):
    return float(len(transcript.last_reply) % 7)
"""


def sound(made: list[tuple[Turn, IndexRow]]) -> list[tuple[Turn, IndexRow]]:
    """With the digests of the prompts that they had, so that they are in samples."""
    path = b""
    for turn, _ in made:
        path += turn.new_prompt_ids
        turn.prompt_digest = blake2b(path, digest_size=16).digest()
        path += turn.completion_ids
    return made


async def filled(count: int) -> MemoryStore:
    store = MemoryStore()
    made = sound(conversation(TURNS, seed=1))
    for first in range(0, count, GROUP):
        names = [f"group-{first}.{number}" for number in range(min(GROUP, count - first))]
        group = Group(group_id=f"group-{first}", run_id=RUN, size=len(names), trial_ids=names, created_at=first + 1.0)
        await store.create_group(group, [session(name, group_id=group.group_id, run_id=RUN) for name in names])
        for name in names:
            for n, (turn, row) in enumerate(made):
                await store.commit(name, turn, row, now=10.0 + n)
            await store.complete(name, status="completed", **END)
            await store.settle(name, now=END["now"])
    return store


MEASURE = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, used = os.wait4(process.pid, 0)
print(json.dumps([status, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""
"""Starts a command from a small process: Linux counts the memory of the starting process as the program's own peak, too."""


def measured(words: list[str]) -> dict[str, object]:
    """What a command of `steno` took, and the proxy, which is in this process."""
    proxy_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "steno", *words]
    status, cpu_s, most_kib = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert status == 0, words
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s, 1),
        "peak_mib": round(most_kib / 1024),
        "proxy_more_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - proxy_before) / 1024),
    }


def size_mib(out: Path) -> float:
    files = [out] if out.is_file() else list(out.iterdir())
    return round(sum(file.stat().st_size for file in files) / 2**20, 1)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1000,10000", help="how many, between commas")
    args = parser.parse_args()
    for count in map(int, args.sessions.split(",")):
        async with serve(create_app(ProxySettings(), await filled(count))) as port:
            url = f"http://127.0.0.1:{port}"
            with tempfile.TemporaryDirectory() as folder:
                for file_format in ExportFormat:
                    out = Path(folder) / f"out.{file_format.value}"
                    words = ["sessions", "export", "--format", file_format.value, "-o", str(out), "--proxy", url]
                    found = await asyncio.to_thread(measured, words)
                    row = {"sessions": count, "format": file_format.value} | found | {"file_mib": size_mib(out)}
                    print(json.dumps(row), flush=True)
                score = Path(folder) / "score.py"
                score.write_text(REWARD)
                words = ["rescore", "--run", RUN, "--reward", f"{score}:f", "--as", "scored", "--proxy", url]
                found = await asyncio.to_thread(measured, words)
                print(json.dumps({"sessions": count, "command": "rescore"} | found), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
