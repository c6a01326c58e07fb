"""Runs one trial of Harbor. Started by the interpreter that has Harbor, which need not have Steno: nothing else is imported here.

    PYTHON -I driver.py REQUEST.json

The request says what to do (`executor.py` writes it), and where to write what came of it. SIGTERM, and the end of whoever started
this, end the trial: Harbor then removes its sandboxes.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

OURS = "steno_harbor"
"""Module that Harbor finds our classes in, by their import paths."""
PODS = "steno_pods"
"""Package beside this file that has sandboxes of Kubernetes; imported here by this name."""
VERIFIER = "/logs/verifier"
MOUNTING = {
    "docker": "harbor.environments.docker.docker:DockerEnvironment",
    "podman": "harbor.environments.podman:PodmanEnvironment",
}
"""Environments whose sandboxes have a folder of this machine at `VERIFIER`."""
PROGRAMS = {"mini-swe-agent": "command -v mini-swe-agent"}
"""How an agent in an image is found, where Harbor's own way takes its own installation for granted."""
ROUNDS = 20
"""In which all processes of an agent must have ended."""
ASK = """
url={url}
if command -v curl >/dev/null 2>&1; then curl -sS -m 20 -o /dev/null -w '%{{http_code}}' "$url" 2>&1
elif command -v python3 >/dev/null 2>&1; then python3 -c 'import sys, urllib.request as u
try: print(u.urlopen(sys.argv[1], timeout=20).status, end="")
except Exception as e: print(repr(e), end="")' "$url" 2>&1
elif command -v wget >/dev/null 2>&1; then wget -q -T 20 -O /dev/null "$url" 2>&1 && printf 200
elif command -v node >/dev/null 2>&1; then node -e 'fetch(process.argv[1]).then(r => process.stdout.write(String(r.status)), e => process.stdout.write(String(e.cause || e)))' "$url"
else printf 'unasked'
fi
"""  # noqa: E501  # one line of another language


class NotReached(Exception):
    """The proxy, from inside a sandbox."""


class StillRunning(Exception):
    """Processes of an agent that could not be ended before its verifier was to run."""


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[1]).unlink()  # it has the trial's key
    end_with(request["parent"])
    answer = asyncio.run(answered(request))
    target = Path(request["answer"])
    partial = target.with_name(target.name + ".new")
    partial.write_text(json.dumps(answer))
    partial.replace(target)


def end_with(parent: int) -> None:
    """SIGTERM to this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it has ended already, and nothing was started


async def answered(request: dict[str, Any]) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await {"trial": run_trial, "about": about, "dataset": dataset, "pods": pods}[request["do"]](request)


async def about(request: dict[str, Any]) -> dict[str, Any]:
    """Harbor's release, and the names that it knows."""
    import importlib.metadata

    from harbor.agents.factory import AgentFactory
    from harbor.models.environment_type import EnvironmentType

    return {
        "version": importlib.metadata.version("harbor"),
        "agents": AgentFactory.registered_names(),
        "environments": sorted(kind.value for kind in EnvironmentType),
        "kubernetes": importlib.util.find_spec("kubernetes_asyncio") is not None,
    }


async def pods(request: dict[str, Any]) -> dict[str, Any]:
    """Keeps the sandboxes of all trials, until whoever started this ends."""
    await part_of_pods("keeper").keep(request)
    return {}


def part_of_pods(name: str) -> Any:
    if PODS not in sys.modules:
        folder = Path(__file__).with_name("kubernetes") / "pods"
        load(folder / "__init__.py", PODS, [str(folder)])
    return importlib.import_module(f"{PODS}.{name}")


async def dataset(request: dict[str, Any]) -> dict[str, Any]:
    """Folders of the tasks of a data set, downloaded where they are not there yet."""
    from harbor.models.job.config import DatasetConfig
    from harbor.tasks.client import TaskClient

    name, _, version = request["name"].partition("@")
    given = {"ref" if "/" in name else "version": version} if version else {}
    wanted = DatasetConfig(name=name, registry_path=request["registry"], **given)
    tasks = await wanted.get_task_configs()
    found = await TaskClient().download_tasks(task_ids=[task.get_task_id() for task in tasks])
    return {"folders": [str(each.path) for each in found.results]}


async def run_trial(request: dict[str, Any]) -> dict[str, Any]:
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    config = dict(request["config"])
    derive(Path(request["task"]), Path(config["task"]["path"]), request)
    place_classes(config, request)
    trial = await Trial.create(TrialConfig.model_validate(config))
    watch(trial, request)
    result = await trial.run()
    found = json.loads(result.model_dump_json(include=set(KEPT)))
    return {
        **found,
        "modes": request["modes"],
        "only_host": request["only_host"],
        "unreachable": getattr(trial, "steno_unreachable", None),
        "image": getattr(trial, "steno_image", None),
    }


KEPT = ("exception_info", "verifier_result", "step_results", "agent_execution", "agent_info", "verifier")


def derive(source: Path, target: Path, request: dict[str, Any]) -> None:
    """The task as it is to be run: files are the task's own, by hard links; `task.toml` says where the verifier of each step
    runs, how long the agent may take if nothing else does, and whom it may reach."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, copy_function=linked)
    task = tomllib.loads((source / "task.toml").read_text("utf-8"))
    for part, mode in zip(task.get("steps") or [task], request["modes"], strict=True):
        part["verifier"] = {**part.get("verifier", {}), "environment_mode": mode}
    task["agent"] = {"timeout_sec": request["timeout_s"], **task.get("agent", {})}
    if request["only_host"] is not None:
        for part in [task, *task.get("steps", [])]:
            part["agent"] = {
                **part.get("agent", {}),
                "network_mode": "allowlist",
                "allowed_hosts": [request["only_host"]],
            }
    (target / "task.toml").unlink()
    (target / "task.toml").write_text(
        "".join(f"{quoted(key)} = {toml(value)}\n" for key, value in task.items()), "utf-8"
    )


def toml(value: Any) -> str:
    """A value of TOML as it is written in one line. The library that Harbor writes with loses what stands in lists."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(inner) for inner in value) + "]"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else str(value.isoformat())


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def linked(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def place_classes(config: dict[str, Any], request: dict[str, Any]) -> None:
    """Where a class of Harbor's won't do as it is, one that inherits it stands in the configuration by its import path."""
    from harbor.utils.import_path import import_class

    ours: Any = types.ModuleType(OURS)
    sys.modules[OURS] = ours
    agent, environment = config["agent"], config["environment"]
    if request["agent_file"] is not None:
        agent["import_path"] = f"{load(Path(request['agent_file']), 'steno_harbor_agent')}:{agent.pop('import_path')}"
    if request["in_image"]:
        ours.Agent = in_image(agent)
        agent.pop("name", None)
        agent["import_path"] = f"{OURS}:Agent"
    kind = environment.get("type")
    if kind == "kubernetes":
        base = part_of_pods("environment").KubernetesEnvironment
        ours.Environment = type("Environment", (base,), {"agent_variables": dict(agent["env"]), "__module__": OURS})
        environment.pop("type")
        environment["import_path"] = f"{OURS}:Environment"
    elif kind in MOUNTING:
        overlay = Path(request["answer"]).with_name("compose.json")
        main: dict[str, Any] = {"stop_grace_period": "1s"}
        if (
            request["only_host"] is not None
        ):  # with it, packets can be marked as Harbor's sidecar marks what it lets pass
            main["cap_drop"] = ["NET_RAW"]
        overlay.write_text(json.dumps({"services": {"main": main}}))
        base = import_class(MOUNTING[kind], label="environment")
        ours.Environment = local(base, overlay, hides_verifier=set(request["modes"]) == {"separate"})
        environment["import_path"] = f"{OURS}:Environment"


def load(path: Path, name: str, folders: list[str] | None = None) -> str:
    """folders: it is a package, of these."""
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return spec.name


def in_image(agent: dict[str, Any]) -> type:
    """Harbor's agent, but for its installation: that only looks whether the image has it."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    base: Any = AgentFactory.get_agent_class_from_config(AgentConfig.model_validate(agent))

    async def install(self: Any, environment: Any) -> None:
        command = PROGRAMS.get(self.name()) or self.get_version_command()
        if command is None:
            return
        found = await environment.exec(command=command)
        if found.return_code != 0:
            output = ((found.stdout or "") + (found.stderr or "")).strip()[-300:]
            raise RuntimeError(
                f"{self.name()} is not in the image of this task: `{command}`: {output or found.return_code}"
            )

    return type("Agent", (base,), {"install": install, "__module__": OURS})


def local(base: Any, overlay: Path, *, hides_verifier: bool) -> type:
    """Harbor's sandboxes of this machine, which end without waiting for a `sleep`. hides_verifier: an agent's has no way to where
    its verifier will write; the verifier's own has."""

    def init(self: Any, *args: Any, session_id: str, mounts: Any = None, **more: Any) -> None:
        if hides_verifier and mounts is not None and "__verifier__" not in session_id:
            mounts = [mount for mount in mounts if mount["target"] != VERIFIER]
        more["extra_docker_compose"] = [*(more.get("extra_docker_compose") or []), overlay]
        base.__init__(self, *args, session_id=session_id, mounts=mounts, **more)

    async def compose(self: Any, command: list[str], *args: Any, **more: Any) -> Any:
        if command[:2] == ["exec", "--no-TTY"]:  # to apply an allow-list; podman-compose knows the short name alone
            command = ["exec", "-T", *command[2:]]
        return await base._run_docker_compose_command(self, command, *args, **more)

    members = {"__init__": init, "_run_docker_compose_command": compose, "__module__": OURS}
    return type("Environment", (base,), members)


def watch(trial: Any, request: dict[str, Any]) -> None:
    """Before the agent's turn: check that it reaches the proxy, and note the image of its sandbox. Before the verifier's: end
    what is left of the agent."""
    from harbor.trial.hooks import TrialEvent

    seen: dict[str, str] = {}

    async def before(*_: Any) -> None:
        if not seen:
            seen.update(await processes(trial.agent_environment))
            engine = request["config"]["environment"].get("type")
            trial.steno_image = await image_of(engine, trial.agent_environment.session_id)

    async def after(*_: Any) -> None:
        if trial._is_agent_environment_stopped:  # as it is before a verifier that has a sandbox of its own
            return
        await end_processes(trial.agent_environment, seen)
        if "shared" in request["modes"]:
            await trial.agent_environment.empty_dirs([VERIFIER], chmod=True)

    trial.add_hook(TrialEvent.AGENT_START, before)
    trial.add_hook(TrialEvent.VERIFICATION_START, after)
    if request["steps"] is not None:
        trial.add_hook(TrialEvent.AGENT_START, told(trial, Path(request["steps"])))
    if request["ask"] is None:
        return
    ways = ("setup",) if trial.config.install_only else ("run", "resume")
    for name in ways:
        setattr(trial.agent, name, asking(trial, getattr(trial.agent, name), request["ask"], first=name != "setup"))


def told(trial: Any, folder: Path) -> Any:
    """Before a step's agent: whoever started this tells the proxy which step it is, and the agent waits for that. A file in
    `folder`, named after the step's number, asks for it, and is gone when it is done. Where that fails, this process is ended."""

    async def begins(*_: Any) -> None:
        asked = folder / str(len(trial.result.step_results))
        asked.touch()
        while asked.exists():  # noqa: ASYNC110  # another process removes it
            await asyncio.sleep(0.05)

    return begins


def asking(trial: Any, act: Any, url: str, *, first: bool) -> Any:
    """`act`, with a request to the proxy from inside the sandbox, in the agent's network. first: the request comes before `act`,
    at the agent's first step only (later, the agent may have replaced the programs that ask); else after it."""

    async def asked(*args: Any, **named: Any) -> Any:
        environment = trial.agent_environment
        if first and not hasattr(trial, "steno_asked"):
            trial.steno_asked = True
            await ask(trial, environment, url)
        done = await act(*args, **named)
        if not first:
            await ask(trial, environment, url)
        return done

    return asked


async def ask(trial: Any, environment: Any, url: str) -> None:
    answer = await environment.exec(command=ASK.format(url=json.dumps(url)), timeout_sec=60)
    said = (answer.stdout or answer.stderr or "").strip()
    if said.endswith("200") or said == "unasked":
        return
    trial.steno_unreachable = said[-300:] or f"exit code {answer.return_code}"
    raise NotReached(f"{url}: {trial.steno_unreachable}")


async def image_of(engine: str, project: str) -> str | None:
    """Digest of the image that a sandbox of this machine runs; None: it is elsewhere, or the engine does not say."""
    if engine not in MOUNTING:
        return None
    labels = {"project": project, "service": "main"}
    filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
    (container, *_) = (await printed(engine, "ps", "--quiet", *filters)).split() or [""]
    found = await printed(engine, "inspect", "--type=container", "--format={{.Image}}", container) if container else ""
    return f"sha256:{found.removeprefix('sha256:')}" if found else None


async def printed(*command: str) -> str:
    """What a program printed; "": it failed twice, as Podman may while it removes another container."""
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        out, _ = await process.communicate()
        if process.returncode == 0:
            return out.decode(errors="replace").strip()
    return ""


async def processes(environment: Any) -> dict[str, str]:
    """Numbers of all processes in a sandbox, each with when it began."""
    listed = await environment.exec(command="cat /proc/[0-9]*/stat 2>/dev/null", user="root", timeout_sec=60)
    found = {}
    for line in (listed.stdout or "").splitlines():
        number, _, rest = line.partition(" ")
        fields = rest.rpartition(")")[2].split()
        if len(fields) > 19 and fields[0] != "Z":
            found[number] = fields[19]
    return found


async def end_processes(environment: Any, kept: dict[str, str]) -> None:
    """Raises: StillRunning."""
    before: dict[str, str] = {}
    for _ in range(ROUNDS):
        now = await processes(environment)
        left = {number: began for number, began in now.items() if kept.get(number) != began}
        stays = any(before.get(number) == began for number, began in left.items())  # what lists them is new each time
        if not stays and (before or not left):
            return
        before = left
        await environment.exec(command=f"kill -9 {' '.join(left)} 2>/dev/null", user="root", timeout_sec=60)
    raise StillRunning(f"processes of the agent are left in its sandbox: {', '.join(before)}")


if __name__ == "__main__":
    main()
