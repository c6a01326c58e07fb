"""helm/steno/values.schema.json: the settings of the programs are made from the programs' own, the rest is kept as it is.

So the chart knows a setting as soon as a program has it, and a name or a value out of range is refused before it is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steno.config.settings import Settings
from steno_proxy.config.settings import ProxySettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings

PATH = Path(__file__).resolve().parents[1] / "helm/steno/values.schema.json"
_WIDTH = 120

PROGRAMS: dict[str, type[Settings]] = {
    "proxy": ProxySettings, "worker": WorkerSettings, "trainer": RunSettings, "rollout": RolloutSettings,
}  # fmt: skip
LEFT_OUT = {
    # Settings that the chart gives; the upstream's, since the image has no LiteLLM; otel_headers, a secret, not for values.
    "proxy": set(
        "host port control_host control_port admin_key worker_key metrics_key viewer_key trial_secret keys_dir redis_url upstream"
        " api_base api_key upstream_images upstream_tokens otel_headers".split()
    ),
    # What the chart gives; api_key, as a secret is no value.
    "worker": set("proxy key metrics_host metrics_port worker_id staging_dir api_key".split()),
    "trainer": set("proxy key metrics_host metrics_port checkpoint_dir deepspeed".split()),
    # What the chart gives; what is not for Harbor's tasks, or not for pods of a cluster.
    "rollout": set(
        "proxy key work_dir environment environment_options tasks split verifiers verifiers_options command reward"
        " reward_timeout_s executor image cpus memory_mb forwarder_image confine private harbor_python allow_only_proxy"
        " ray_address ray_runner ray_cpus ray_resources ray_runtime_env ray_return_kb".split()
    ),
}


def chart_schema() -> str:
    schema: dict[str, Any] = json.loads(PATH.read_text())
    for program, settings in PROGRAMS.items():
        made = settings.model_json_schema()
        schema["properties"][program]["properties"]["settings"]["properties"] = {
            name: _field(field, made.get("$defs", {}))
            for name, field in made["properties"].items()
            if name not in LEFT_OUT[program]
        }
    return _text(schema, 0, 0) + "\n"


def _field(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The field without its title and default; what it refers to (an enumeration) is written out."""
    merged = {"description": "", **_written_out(field, definitions)}
    return {name: value for name, value in merged.items() if name not in ("title", "default")}


def _written_out(node: Any, definitions: dict[str, Any]) -> Any:
    """Without `$ref`, at any depth."""
    if isinstance(node, list):
        return [_written_out(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    referred = definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else {}
    return {name: _written_out(value, definitions) for name, value in {**referred, **node}.items() if name != "$ref"}


def _text(value: Any, indent: int, lead: int) -> str:
    """JSON with each object on one line where it fits. lead: characters before it on its first line, beside the indent."""
    flat = json.dumps(value, ensure_ascii=False)
    if indent + lead + len(flat) <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_text(inner, indent + 2, len(key) + 5)}" for key, inner in value.items()]
    else:
        items = [_text(inner, indent + 2, 1) for inner in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n" + ",\n".join(pad + item for item in items) + f"\n{' ' * indent}{closing}"
