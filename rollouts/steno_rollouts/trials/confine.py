"""Keeps the operator's processes and keys out of a trial's reach, with bubblewrap (`bwrap`).

Without it a trial runs as the operator: it can read the environment of `steno rollout` in /proc, and any key file. Confined, a
trial

- sees its own processes only, and can signal and trace no other;
- finds the usual places of keys empty (`hidden_paths`), other trials' folders, and what scores trials (`scoring.py`);
- has no capabilities, and gains none from a program with the setuid bit.

The rest of the file system, the network and the user id stay as they are, so that agents find their programs. That keeps keys
from a model that looks around. It is no sandbox for code that attacks the kernel or talks to services of this machine: use a
container there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from steno_rollouts.trials.executor import TrialJob
from steno_rollouts.trials.scoring import MOST_KEPT, TaskSource

PROBE_S = 20.0
_BASE = ("--die-with-parent", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL",
         "--dev-bind", "/", "/", "--proc", "/proc")  # fmt: skip
_IN_HOME = (
    ".bash_history .zsh_history .local/share/fish/fish_history .python_history .bashrc .bash_profile .bash_login .profile "
    ".bash_aliases .zshrc .zshenv .zprofile .zlogin .config/fish .netrc .git-credentials .ssh .gnupg .aws .azure .kube .docker "
    ".config/gcloud .config/gh .config/containers .huggingface .cache/huggingface/token .config/wandb .pypirc .steno"
).split()
"""Where shells, and the tools that labs use, keep keys."""
_SOCKETS = ("/var/run/docker.sock", "/run/podman")
"""Who can write to these starts processes outside."""


class CannotConfine(Exception):
    """`bwrap` is missing, or can't make namespaces here; the text says which."""


@dataclass(frozen=True)
class Confinement:
    """How trials are confined. program: of bubblewrap. hidden: files and folders that trials find empty. work_dir: holds the
    folders of all trials, of which each sees its own. source: of the tasks, hidden but for what else is there."""

    program: str
    hidden: tuple[Path, ...]
    work_dir: Path
    source: TaskSource | None = None

    @classmethod
    def of(cls, hidden: Iterable[Path], work_dir: Path, source: TaskSource | None = None) -> Confinement:
        """Raises: CannotConfine: tried by running nothing in it."""
        if source is not None and len(source.kept) + len(source.elsewhere) > MOST_KEPT:
            raise CannotConfine(
                f"{source.root} holds {len(source.kept)} entries beside its tasks and {len(source.elsewhere)} links to tasks, "
                f"more than {MOST_KEPT}: move the tasks to a folder of their own"
            )
        program = shutil.which("bwrap")
        if program is None:
            raise CannotConfine("bubblewrap is not installed (Debian and Ubuntu: apt install bubblewrap)")
        try:
            tried = subprocess.run([program, *_BASE, "--", "true"], capture_output=True, text=True, timeout=PROBE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotConfine(f"{program}: {error}") from None
        if tried.returncode:
            raise CannotConfine(f"{program}: {tried.stderr.strip()[-300:] or f'exit code {tried.returncode}'}")
        return cls(program, tuple(hidden), work_dir.resolve(), source)

    def command(self, job: TrialJob) -> list[str]:
        """The words that run the job's command confined. Its exit code is the command's, 128 + N if that ended by signal N."""
        words = [self.program, *_BASE, *self._without_tasks()]
        tasks = self.source.elsewhere if self.source is not None else ()
        for hidden in dict.fromkeys(os.path.realpath(path) for path in (*self.hidden, *tasks)):
            if os.path.isdir(hidden):  # noqa: PTH112  # False, too, for what we may not look at: nor may a trial
                words += ["--tmpfs", hidden]
            elif os.path.exists(hidden):  # noqa: PTH110
                words += ["--ro-bind", "/dev/null", hidden]
        if self.work_dir.is_dir():
            words += ["--tmpfs", str(self.work_dir)]
        workdir = job.workdir.resolve()  # bwrap follows no absolute link to what it mounts on
        for path in (job.folder.resolve() / "task.json", workdir):
            if path.exists():
                words += ["--bind", str(path), str(path)]
        return [*words, "--chdir", str(workdir), "--", *job.command]

    def _without_tasks(self) -> list[str]:
        if self.source is None:
            return []
        root = str(self.source.root)
        if not self.source.root.is_dir():
            return ["--ro-bind", "/dev/null", root]
        words = ["--tmpfs", root]
        for path in self.source.kept:
            if path.is_symlink():  # a mount of what it leads to would show that, also where it is hidden
                words += ["--symlink", os.readlink(path), str(path)]  # noqa: PTH115
            else:
                words += ["--dev-bind-try", str(path), str(path)]
        return words


def hidden_paths(environment: Mapping[str, str], given: Iterable[Path]) -> list[Path]:
    """Where keys lie as a rule: in files that Steno's variables name and among a user's files; and the sockets of services that
    start processes. Args: given: more of them."""
    home = Path(environment.get("HOME") or Path.home())
    named = [
        Path(value)
        for name, value in environment.items()
        if name.startswith("STENO_") and name.endswith(("_FILE", "_KEYS_DIR")) and value
    ]
    user = os.getuid()
    sockets = [Path(environment.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"), Path(f"/tmp/tmux-{user}")]
    if agent := environment.get("SSH_AUTH_SOCK"):
        sockets.append(Path(agent))
    return [*given, *named, *(home / name for name in _IN_HOME), *sockets, *map(Path, _SOCKETS)]
