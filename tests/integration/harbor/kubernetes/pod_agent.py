"""An agent of Harbor's for these tests: its instruction is a script, or asks for every way into a sandbox besides. Runs where
Harbor does."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent  # type: ignore[import-not-found, unused-ignore]

LARGE = 3_000_001


class PodAgent(BaseAgent):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def name() -> str:
        return "pod-agent"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None: ...

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        if "EVERY WAY" in instruction:
            await every_way(environment)
        done = await environment.exec(command=instruction)
        (self.logs_dir / "said.txt").write_text(f"{done.stdout}{done.stderr}")
        if done.return_code:
            raise RuntimeError(f"exit code {done.return_code}: {done.stdout}{done.stderr}"[-300:])


async def every_way(sandbox: Any) -> None:
    """Raises: AssertionError: what went in or came out is another."""
    key = os.environ["OPENAI_API_KEY"]
    type(sandbox)._end.__globals__["END_S"] = 120.0  # what is given up is ended, also where that takes long
    odd = "it's \\n 'odd' $HOME `x` \\ %s é\nnext\n\n"
    done = await sandbox.exec('printf %s "$ODD"; printf %s "$KEY" >&2; exit 7', env={"ODD": odd, "KEY": key})
    assert (done.stdout, done.stderr, done.return_code) == (odd, key, 7), done
    done = await sandbox.exec("cat; pwd; id -u", cwd="/tmp", user="root")  # nothing is on stdin
    assert done.stdout.split() == ["/tmp", "0"], done
    done = await sandbox.exec("cat <<'END'\n" + "x" * 100_000 + "\nEND\n")
    assert len(done.stdout) == 100_001, "longer than any URL"
    done = await sandbox.exec("true", cwd="/not/there")
    assert done.return_code == 126 and "/not/there" in done.stderr, done
    began = time.monotonic()
    try:
        await sandbox.exec("sleep 300 & echo $! >/tmp/late; wait", timeout_sec=10)
        raise AssertionError("no limit")
    except RuntimeError as error:
        assert "timed out after 10 seconds" in str(error) and time.monotonic() - began < 180, error
    done = await sandbox.exec("kill -0 $(cat /tmp/late)")
    assert done.return_code != 0, "it runs on"
    with tempfile.TemporaryDirectory() as folder:
        await files(sandbox, Path(folder))


async def files(sandbox: Any, folder: Path) -> None:
    (folder / "in/sub é").mkdir(parents=True)
    large = os.urandom(LARGE)
    (folder / "in/large").write_bytes(large)
    (folder / "in/sub é/script").write_text("#!/bin/sh\n")
    (folder / "in/sub é/script").chmod(0o755)
    (folder / "in/link").symlink_to("sub é/script")
    await sandbox.upload_dir(folder / "in", "/data/there already")
    await sandbox.exec("mkfifo /data/pipe; rm '/data/there already/large'")
    await sandbox.upload_file(folder / "in/large", "/data/there already/large")
    await sandbox.download_dir("/data", folder / "out")
    there = folder / "out/there already"
    assert (there / "large").read_bytes() == large
    assert str((there / "link").readlink()) == "sub é/script" and os.access(there / "link", os.X_OK)
    await sandbox.download_file("/data/there already/large", folder / "new/one")
    assert (folder / "new/one").read_bytes() == large
    empty = folder / "empty"
    empty.touch()
    await sandbox.upload_file(empty, "/data/empty")
    await sandbox.download_file("/data/empty", folder / "one")
    assert (folder / "one").read_bytes() == b""
    for act, what in ((sandbox.download_file, "/no/file"), (sandbox.download_dir, "/no/folder")):
        try:
            await act(what, folder / "none")
            raise AssertionError("it is there")
        except RuntimeError as error:
            assert what in str(error), error
    assert await sandbox.is_dir("/data") and not await sandbox.is_file("/data")
