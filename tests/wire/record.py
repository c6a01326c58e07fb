"""`scripts/record-wire AGENT`: run an agent's own integration tests with a recorder before the proxy, and say what has changed.

Writes `tests/wire/<agent>-<version>.jsonl`, the version being that of the program which ran, and compares it with the fixture of
that version, else of the newest one. Nothing is written with `--dry-run`, nor when the tests fail; what changed is said then too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tests.support.wire_recorder import VARIABLE
from tests.wire.changes import changes
from tests.wire.fixture import Recording, of_agent, read, write

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Agent:
    """program: in the npm prefix, or "" for the Python package `package`. tests: which of the agent's file, as pytest's `-k`."""

    file: str
    tests: str
    program: str = ""
    package: str = ""


AGENTS = {
    "claude-code": Agent("test_claude_code.py", "not length", program="claude"),
    "codex": Agent("test_codex.py", "not connection", program="codex"),
    "opencode": Agent("test_opencode.py", "not usage", program="opencode"),
    "gemini-cli": Agent("test_gemini_cli.py", "", program="gemini"),
    "mini-swe-agent": Agent("test_mini_swe_agent.py", "", package="mini_swe_agent"),
    "qwen-code": Agent("test_plain.py", "qwen", program="qwen"),
    "pi": Agent("test_plain.py", "pi", program="pi"),
    "openai-agents": Agent("test_plain.py", "openai-agents", package="openai_agents"),
}


def places() -> dict[str, str]:
    """Where the agents are installed: as the environment says, else where `.ci/run` puts them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steno"
    found = {}
    for name, prefix, pins in (("VENV", "agents", "agents.txt"), ("NPM", "agents-npm", "agents-npm.txt")):
        digest = sha256((ROOT / "requirements" / pins).read_bytes()).hexdigest()[:12]
        given = os.environ.get(f"STENO_AGENTS_{name}") or os.environ.get(f"STENO_TEST_AGENTS_{name}")
        found[f"STENO_AGENTS_{name}"] = given or str(cache / f"{prefix}-{digest}")
    return found


def version_of(agent: Agent, where: dict[str, str]) -> str:
    """Raises: SystemExit: it is not installed there."""
    if agent.package:
        folder = Path(where["STENO_AGENTS_VENV"])
        for found in folder.glob(f"lib/python3*/site-packages/{agent.package}-*.dist-info"):
            return found.name.removesuffix(".dist-info").rpartition("-")[2]
        raise SystemExit(f"{agent.package} is not in {folder}; `.ci/run agents_tests` installs the agents")
    program = Path(where["STENO_AGENTS_NPM"]) / "node_modules/.bin" / agent.program
    for folder in program.resolve().parents:
        manifest = folder / "package.json"
        if program.exists() and manifest.is_file() and "version" in (said := json.loads(manifest.read_text())):
            return str(said["version"])
    raise SystemExit(f"{program} is not there; `.ci/run agents_tests` installs the agents")


def record(name: str, folder: Path) -> tuple[Recording, bool]:
    """Run the tests; with what was sent in them, whether they passed. Raises: SystemExit: nothing was recorded."""
    agent, where = AGENTS[name], places()
    version = version_of(agent, where)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-m", "agents", "-k", agent.tests,
            f"tests/integration/agents/{agent.file}",
        ],
        cwd=ROOT, env=os.environ | where | {VARIABLE: str(folder)}, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    trials = sorted(folder.glob("*.jsonl"))
    exchanges = [exchange for path in trials for exchange in read(path).exchanges]
    if not exchanges:
        raise SystemExit(f"nothing came from {name}")
    return Recording(name, version, exchanges), done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/record-wire", description=__doc__.partition("\n")[0])
    parser.add_argument("agent", choices=sorted(AGENTS))
    parser.add_argument("--dry-run", action="store_true", help="say what changed, and write nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        new, passed = record(given.agent, Path(folder))
    stored = [path for path in of_agent(given.agent) if path != new.file]
    before = new.file if new.file.exists() else stored[-1] if stored else None
    if before is None:
        print(f"{given.agent} {new.version}: the first fixture")
    else:
        old = read(before)
        lines = changes(old, new)
        print(f"{given.agent} {old.version} -> {new.version}: {'what changed' if lines else 'nothing changed'}")
        print("\n".join(lines), end="\n" * bool(lines))
    if not passed:
        raise SystemExit(f"{given.agent}'s tests failed: nothing is written")
    if not given.dry_run:
        write(new, new.file)
        print(f"written: {new.file.relative_to(ROOT)}, {len(new.exchanges)} requests, {new.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
