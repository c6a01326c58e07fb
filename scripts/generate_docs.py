"""The generated pages of docs/, and the chart's schema: what the code itself says of its settings, metrics, commands and routes.

`PAGES` maps each page to the function that writes it; tests/unit/house/test_docs.py asks that none is stale.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from pydantic import SecretStr
from rich.text import Text

from scripts.agents_seen import DATES, SEEN
from scripts.chart_schema import chart_schema
from scripts.fields_table import dialects_page
from scripts.panels import ROWS
from scripts.watching import dashboard, rules
from steno.config.settings import Settings
from steno.contracts.errors import BY_CODE, StenoError
from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands import env as command_env
from steno_cli.main import whole_app
from steno_cli.terminal.connection import ClientSettings
from steno_cli.terminal.flags import default_text, unwrap
from steno_proxy.config.settings import ProxySettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.reporting.metrics import FAMILIES, MEASURES
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings
from steno_worker.metrics import WorkerMetrics

ROOT = Path(__file__).resolve().parents[1]
_NOTE = "<!-- Made by scripts/docs. Change the code it describes, then run that. -->\n"
PROGRAMS: dict[str, type[Settings]] = {
    "steno proxy": ProxySettings,
    "steno worker": WorkerSettings,
    "steno rollout": RolloutSettings,
    "steno train": RunSettings,
    "steno sessions": ClientSettings,
}

_SETTINGS_INTRO = """\
Each program reads its settings from the command line, the environment and a file, in this order; the first that has a
value wins, a dictionary as a whole. A name that a program does not know is refused, with the name it is close to.
`--print-config` prints what is in effect and where each value comes from.

- **Command line**: `redis_url` is `--redis-url`. A list may be repeated; a pair has a comma (`--betas 0.9,0.95`).
- **Environment**: `redis_url` is `STENO_REDIS_URL`; each program has its own prefix, below. Lists take words between commas,
  or JSON. Of a dictionary `STENO_ROLLOUT_SAMPLING__TEMPERATURE=0.9` sets one key: to a number as JSON writes it, to other JSON,
  or to the text itself (`1.10`; `"8"` in quotes).
- **File**: `--config steno.yaml` or `steno.toml` (not for `steno sessions`), with the names below as keys.
- **Secrets** (marked *secret*) may be given as `<name>_file` instead, in all three: a path whose content is the secret. They
  are never printed."""

_API_INTRO = """\
The full document, with every body, is served at `/openapi.json`: keys, examples, operations by short names, so that a client in
another language can be generated from it. In Python `from steno import Client` is typed, sync and (`AsyncClient`) async.
Records come as JSON with token arrays as lists of numbers, or as msgpack with them as raw little-endian bytes where the request
says `Accept: application/msgpack`."""

_AGENTS_INTRO = """\
`steno env AGENT TRIAL` registers the trial and prints how to point a known agent at it: shell lines to `eval`, and the command
that runs one task without a human (`$TASK`). Some agents need a file, or can take one in place of the variables; then the file is
printed too. `--json` prints the same for programs. With `--agent-key`, the proxy is not asked for the key. `--model` is the model
name that the agent asks for. Any name will do: the connected workers serve it, it is recorded, and the trainer can choose by it.

Each section below is what is printed for the trial `my-trial` on a proxy without keys. On a proxy with keys, the agent's own key
takes the place of `none`. An agent that is not listed needs only a base URL and the trial's key in the place of its provider's
key. The base URL is `http://PROXY/TRIAL/v1` for OpenAI's formats, and `http://PROXY/TRIAL` for Anthropic's and Google's."""

_SEEN_INTRO = f"""\
## what else was run

These agents were run unchanged, by hand, on {DATES}. Each had a task of ten turns, with single and parallel calls and reasoning.
Most also called a tool that does not exist, and met an engine that refuses with 503. An empty last column means that the record
is one branch, in which each turn goes on from the one before it token by token, and that the agent waited out the refusal.
Crush, whose npm package fetches its program from GitHub, could not be installed there.

A request is a *root* if it goes on from no recorded turn: its whole prompt is rendered anew. A request is a *fork* if it begins
a new branch. The tokens that were sampled before stay on record, and are trained in their own sample; the new branch has them as
context only ([all reasons](reading.md#why-a-turn-forked)). A turn's `echoed_as` says in which other form a client sent a reply
back."""

_TRAINER_INTRO = """\
The first rank serves them where `metrics_port` is set: all gauges, of the last step. Beside them
`steno_train_step` (of the current weights) and `steno_train_ledger_tokens` by `outcome` (`sampled`, `trained`, or why not). Those
at the end have names of your own: what a trial's reward gave as metrics, and values of the field `report_by`; elsewhere they are
`trial/NAME`, `reward_by/VALUE` and so on, 64 of each at most."""

_PANELS_INTRO = """\
One Grafana panel each, over all replicas, and the condition of its alert rule where there is one (on the panel's own query,
unless it names metrics itself). `deploy/grafana/steno.json` and `deploy/prometheus/rules.yaml` are made from the same; I1 to
I10 are the promises of [architecture](architecture.md)."""

_ERRORS_INTRO = """\
One envelope: `{"error": {"code", "message", "field", "retryable"}, "request_id"}`. Agents' routes answer in the words of
their own dialect instead."""


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        _NOTE,
        *_SETTINGS_INTRO.splitlines(),
        "",
    ]
    for program, settings in PROGRAMS.items():
        prefix = settings.model_config["env_prefix"]
        lines += [f"## {program}", "", f"Environment: `{prefix}<NAME>`.", ""]
        lines += ["| setting | default | what it is |", "|---|---|---|"]
        for name, field in settings.model_fields.items():
            secret = "*secret*: " if SecretStr in (field.annotation, unwrap(field.annotation)) else ""
            default = f"`{default_text(field)}`" if default_text(field) else ""
            lines.append(
                f"| `{name}` | {default} | {secret}{_cell(field.description or '')}{_choices(field.annotation)} |"
            )
        lines.append("")
    return "\n".join(lines)


def metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        _NOTE,
        "Prometheus text. The proxy serves its metrics at `/metrics`, with a metrics key or the admin key where there are keys;",
        "the worker at `http://<metrics_host>:<metrics_port>/metrics` where `metrics_port` is set. Labels are bounded:",
        "never a trial.",
        "",
    ]
    worker = CollectorRegistry()
    WorkerMetrics(worker)
    programs = (("steno proxy", proxy_metrics(), REGISTRY), ("steno worker", list(worker.collect()), worker))
    for program, metrics, registry in programs:
        lines += [f"## {program}", "", "| metric | type | labels | how to read it |", "|---|---|---|---|"]
        for metric in sorted(metrics, key=lambda metric: metric.name):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            lines.append(f"| `{name}` | {metric.type} | {_labels(metric, registry)} | {_cell(metric.documentation)} |")
        lines.append("")
    lines += ["## steno train", "", *_TRAINER_INTRO.splitlines(), "", "| metric | how to read it |", "|---|---|"]
    lines += [f"| `{measure.prometheus}` | {_cell(measure.help)} |" for measure in MEASURES]
    lines += [f"| `{family.prometheus}{{{family.label}}}` | {_cell(family.help)} |" for family in FAMILIES]
    lines += ["", "## What to draw, and when to look", "", *_PANELS_INTRO.splitlines(), ""]
    for row, panels in ROWS:
        lines += [f"### {row}", ""]
        for panel in panels:
            lines += [f"**{panel.title}.** {panel.reading}.", "", "```promql", panel.query, "```", ""]
            if panel.alert:
                promise = f" ({panel.promise})" if panel.promise else ""
                lines += [
                    f"Alert `Steno{panel.name}`{', urgent' if panel.urgent else ''}{promise}: `{panel.alert}`",
                    "",
                ]
    return "\n".join(lines)


def proxy_metrics() -> list[Metric]:
    """What the proxy declares at import; the registry's own process and platform metrics are left out."""
    import_module("steno_proxy.metrics")
    return [metric for metric in REGISTRY.collect() if metric.name.startswith("steno_proxy_")]


def cli_page() -> str:
    lines = ["# Command line", "", _NOTE]
    codes = "0 done, 1 failed, 2 wrong usage or configuration, 3 another trainer has the run, 130 cancelled by Ctrl-C"
    lines += [f"Exit codes: {codes}.", ""]
    for words, command in _commands("steno", whole_app()):
        lines += [f"## {words}", "", _plain(command.help or ""), ""]
        if not hasattr(command, "commands"):
            lines += ["```", f"{words}{_usage(command)}", "```", ""]
        options = [parameter for parameter in command.params if parameter.opts and parameter.opts[0].startswith("-")]
        if options and not hasattr(command, "commands"):
            lines += ["| option | what it does |", "|---|---|"]
            for option in options:
                names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
                default = option.default if option.show_default and option.default not in (None, False) else None
                shown = f" ({getattr(default, 'value', default)})" if default is not None else ""
                lines.append(f"| {names} | {_cell(_plain(option.help or ''))}{shown} |")
            lines.append("")
    return "\n".join(lines)


def api_page() -> str:
    from steno_proxy.server.app import create_app

    document = create_app(ProxySettings()).openapi()
    lines = [
        "# REST",
        "",
        _NOTE,
        *_API_INTRO.splitlines(),
        "",
        "| call | what it does |",
        "|---|---|",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            text = operation.get("description") or operation.get("summary") or ""
            lines.append(f"| `{method.upper()} {path}` | {_cell(text.split(chr(10) * 2)[0])} |")
    lines += [
        "",
        "## Errors",
        "",
        *_ERRORS_INTRO.splitlines(),
        "",
        "| code | status | may pass |",
        "|---|---|---|",
    ]
    for code, kind in BY_CODE.items():
        if kind.status != 500:
            lines.append(f"| `{code}` | {kind.status} | {'yes' if kind.retryable else 'no'} |")
    lines.append(f"| `{StenoError.code}` | {StenoError.status} | no |")
    return "\n".join([*lines, ""])


def _commands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{words} {name}", inner)


def _usage(command: Any) -> str:
    arguments = [
        parameter for parameter in command.params if not (parameter.opts and parameter.opts[0].startswith("-"))
    ]
    words = []
    for argument in arguments:
        name = argument.metavar or argument.name.upper()
        words.append(name if argument.required else f"[{name}]" + "…" * (argument.nargs == -1))
    return " [OPTIONS]" + "".join(f" {word}" for word in words)


def _labels(metric: Metric, registry: CollectorRegistry) -> str:
    declared = getattr(registry, "_names_to_collectors", {}).get(metric.name)
    names = getattr(declared, "_labelnames", ())
    return ", ".join(f"`{name}`" for name in names)


def _choices(annotation: Any) -> str:
    kind = unwrap(annotation)
    if typing.get_origin(kind) is not typing.Literal:
        return ""
    return " (" + ", ".join(f"`{choice}`" for choice in typing.get_args(kind)) + ")"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(markup: str) -> str:
    return Text.from_markup(markup).plain


def agents_page() -> str:
    urls = command_env.urls("http://127.0.0.1:8000", "my-trial")
    lines = ["# Pointing agents at a trial", "", _NOTE, *_AGENTS_INTRO.splitlines(), ""]
    lines += ["| agent | speaks | here |", "|---|---|---|"]
    for name, agent in AGENTS.items():
        lines.append(f"| [{agent.title}](#{name}) | {agent.wire} | {agent.seen or 'not run: from its documentation'} |")
    lines += ["", *_SEEN_INTRO.splitlines(), "", "| run | version | speaks | besides |", "|---|---|---|---|"]
    lines += [f"| {seen.title} | {seen.version} | {seen.wire} | {seen.verdict} |" for seen in SEEN]
    for name, agent in AGENTS.items():
        lines += ["", f"## {name}", "", f"{agent.title}: `{agent.install}`. {agent.notes}".rstrip(), ""]
        lines += ["```text", f"$ steno env {name} my-trial"]
        lines += command_env.shell(agent.setup(AgentTarget("my-trial", urls))).splitlines()
        lines.append("```")
    return "\n".join([*lines, ""])


PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "docs/metrics.md": metrics_page,
    "docs/cli.md": cli_page,
    "docs/api.md": api_page,
    "docs/agents.md": agents_page,
    "docs/dialects.md": dialects_page,
    "helm/steno/values.schema.json": chart_schema,
    "deploy/prometheus/rules.yaml": rules,
    "deploy/grafana/steno.json": dashboard,
    "helm/steno/files/rules.yaml": rules,
    "helm/steno/files/dashboard.json": dashboard,
}


def stale() -> list[str]:
    """Pages that differ from what would be written now."""
    return [page for page, write in PAGES.items() if not (ROOT / page).exists() or (ROOT / page).read_text() != write()]


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        wrong = stale()
        if wrong:
            sys.exit(f"stale: {', '.join(wrong)}; run scripts/docs")
        return
    for page, write in PAGES.items():
        (ROOT / page).write_text(write())


if __name__ == "__main__":
    main()
