"""The interpreter that has Harbor, and what it says of itself."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from steno.contracts.errors import ConfigError

DRIVER = Path(__file__).with_name("driver.py")
LEAST = (3, 12)
"""Harbor runs on no older Python."""
ASK_S = 120.0
DOWNLOAD_S = 3600.0
_DIVERTING = ("OPENAI_", "ANTHROPIC_", "GEMINI_", "CLAUDE_", "CODEX_", "MSWEA_", "LLM_", "LITELLM_", "OPENROUTER_")
_ALSO = {
    "AWS_BEARER_TOKEN_BEDROCK",
    "GOOGLE_API_KEY",
    "GOOGLE_GEMINI_BASE_URL",
    "GOOGLE_GENAI_USE_VERTEXAI",
    "PYTHONPATH",
}
"""Of these rollouts' environment, what would send an agent past the proxy: Harbor's agents look there as well. Keys of sandboxes'
providers stay."""


def environment(inherited: Mapping[str, str], python: Path) -> dict[str, str]:
    """Of Harbor's processes: without Steno's keys and those of models' providers; what is installed beside Harbor is found."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _ALSO and not name.upper().startswith(("STENO_", *_DIVERTING))
    }
    return {**kept, "PATH": f"{python.parent}{os.pathsep}{kept.get('PATH', os.defpath)}", "HARBOR_TELEMETRY": "off"}


@dataclass(frozen=True)
class HarborPython:
    """python: its path. version: Harbor's. agents, environments: names that it knows. kubernetes: it has `kubernetes_asyncio`."""

    python: Path
    version: str
    agents: frozenset[str]
    environments: frozenset[str]
    kubernetes: bool = False

    @classmethod
    def found(cls, given: Path | None) -> Self:
        """Args: given: `--harbor-python`; None: the one that runs this. Raises: ConfigError: it has no Harbor."""
        if given is None and (sys.version_info < LEAST or importlib.util.find_spec("harbor") is None):
            raise ConfigError(
                f"harbor_python: missing, and {sys.executable} has no Harbor: in an environment of Python "
                f"{'.'.join(map(str, LEAST))} or newer, `pip install harbor`, and name its python (--harbor-python)",
                field="harbor_python",
            )
        program = shutil.which(str(given)) if given is not None else sys.executable
        if program is None:
            raise ConfigError(f"harbor_python: {given}: no such program", field="harbor_python")
        python = Path(os.path.abspath(program))  # noqa: PTH100  # not resolved: a link into a virtual environment is the environment
        said = ask(python, {"do": "about"}, ASK_S)
        names = frozenset(said["agents"]), frozenset(said["environments"])
        return cls(python, said["version"], *names, said["kubernetes"])


def ask(python: Path, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Run the driver for an answer that is there at once. Blocking. Raises: ConfigError with what it said."""
    with tempfile.TemporaryDirectory(prefix="steno-harbor-") as folder:
        asked, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps({**request, "parent": os.getpid(), "answer": str(answer)}), encoding="utf-8")
        try:
            done = subprocess.run(
                [python, "-I", DRIVER, asked],
                capture_output=True, text=True, timeout=limit_s, env=environment(os.environ, python), cwd=folder,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"harbor_python: {python}: {error}", field="harbor_python") from None
        if done.returncode or not answer.exists():
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            hint = ": it has no Harbor (pip install harbor)" if "No module named 'harbor'" in said else ""
            raise ConfigError(f"harbor_python: {python}: {said[-300:]}{hint}", field="harbor_python")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
