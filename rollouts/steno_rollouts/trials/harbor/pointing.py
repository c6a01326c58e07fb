"""How each of Harbor's agents is pointed at a trial: the facts, one row per agent, read off Harbor 0.24.0.

Variables go into the agent's environment (`agent.env`) and, since some of Harbor's agents look only there, into that of Harbor's
own process, which runs one trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RELEASE = "0.24.0"
"""Of Harbor, that the table was read off."""


@dataclass(frozen=True)
class Addresses:
    """Of a trial. urls: by kind of client, as in `rest.Trial`."""

    urls: Mapping[str, str]
    key: str


@dataclass(frozen=True)
class Pointing:
    """dialect: what it speaks. model: Harbor's name of the model. variables, kwargs: `{openai}`, `{anthropic}`, `{gemini}`,
    `{key}` and `{model}` stand for the trial's. where: what asks the model runs in the sandbox, or beside these rollouts.
    refused: why it can't be pointed."""

    dialect: str = ""
    model: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    where: Literal["sandbox", "launcher"] = "sandbox"
    refused: str | None = None

    def agent(self, addresses: Addresses, model: str) -> dict[str, Any]:
        """Of Harbor's `AgentConfig`: `model_name`, `env` and `kwargs`."""
        values = {**addresses.urls, "key": addresses.key, "model": model}
        return {
            "model_name": _filled(self.model, values),
            "env": _filled(self.variables, values),
            "kwargs": _filled(self.kwargs, values),
        }


CHAT, RESPONSES, MESSAGES, GEMINI = "OpenAI chat", "OpenAI Responses", "Anthropic Messages", "Gemini"
_OPENAI = {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{key}"}
_OPENAI_BASE = {**_OPENAI, "OPENAI_API_BASE": "{openai}"}
_ANTHROPIC = {"ANTHROPIC_BASE_URL": "{anthropic}", "ANTHROPIC_API_KEY": "{key}"}
_GEMINI = {"GOOGLE_GEMINI_BASE_URL": "{gemini}", "GEMINI_API_KEY": "{key}"}
_LLM = {"LLM_BASE_URL": "{openai}", "LLM_API_KEY": "{key}"}
_ANY = {**_OPENAI_BASE, **_ANTHROPIC, **_GEMINI}
_PLAIN_HTTP = {"HARBOR_ALLOW_INSECURE_MODEL_BASE_URL": "true"}
_CLAUDE = {
    **_ANTHROPIC, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "ENABLE_TOOL_SEARCH": "false",
    "IS_SANDBOX": "1",
}  # fmt: skip
_KIMI = {"KIMI_MODEL_BASE_URL": "{openai}", "KIMI_MODEL_API_KEY": "{key}"}
_VIBE = {"VIBE_BACKEND": "generic", "VIBE_API_BASE": "{openai}", "OPENAI_API_KEY": "{key}"}
_COPILOT = {
    "COPILOT_PROVIDER_BASE_URL": "{openai}", "COPILOT_PROVIDER_API_KEY": "{key}", "COPILOT_PROVIDER_TYPE": "openai",
    "COPILOT_MODEL": "{model}",
}  # fmt: skip
_GROK = {"grok_config": {"model": {"{model}": {"base_url": "{openai}"}}}}
_OWN_SERVICE = "it works with its maker's service only and takes no other base URL"
_NO_TURN = "it asks no model"

OWN = Pointing("as it was written", "openai/{model}", _ANY)
"""An agent of the user's own, by `FILE.py:Class`, or one whose program is in its options: it finds every client's variables."""

POINTINGS: Mapping[str, Pointing] = {
    "acp": Pointing(
        refused="which agent it runs stands in its options: name that one, or give a class of your own (FILE.py:Class)"
    ),
    "aider": Pointing(CHAT, "openai/openai/{model}", _OPENAI_BASE),
    "antigravity-cli": Pointing(GEMINI, "google/{model}", {**_GEMINI, **_PLAIN_HTTP}),
    "antigravity-sdk": Pointing(GEMINI, "google/{model}", {**_GEMINI, **_PLAIN_HTTP}),
    "claude-code": Pointing(MESSAGES, "{model}", _CLAUDE),
    "cline-cli": Pointing(refused="Harbor gives it a provider's name and key, and no address"),
    "code-puppy": Pointing(CHAT, "openai/{model}", _OPENAI, {"base_url": "{openai}"}),
    "codex": Pointing(RESPONSES, "openai/{model}", _OPENAI),
    "computer-1": Pointing(CHAT, "openai/{model}", _OPENAI_BASE, {"api_base": "{openai}"}, "launcher"),
    "copilot-cli": Pointing(CHAT, "{model}", _COPILOT),
    "cortex-code": Pointing(refused=_OWN_SERVICE),
    "cursor-cli": Pointing(refused=_OWN_SERVICE),
    "deerflow": Pointing(
        CHAT, "openrouter/{model}", {"OPENROUTER_API_KEY": "{key}"}, {"openrouter_base_url": "{openai}"}
    ),
    "devin": Pointing(refused=_OWN_SERVICE),
    "dspy-rlm": Pointing(CHAT, "openai/{model}", _OPENAI_BASE, where="launcher"),
    "eve": OWN,
    "fx": Pointing(refused=_OWN_SERVICE),
    "fx-dev": Pointing(refused=_OWN_SERVICE),
    "gemini-cli": Pointing(GEMINI, "google/{model}", _GEMINI),
    "goose": Pointing(MESSAGES, "anthropic/{model}", _ANTHROPIC),
    "grok-build": Pointing(RESPONSES, "openai/{model}", _OPENAI, _GROK),
    "hermes": Pointing(CHAT, "openai/{model}", _OPENAI),
    "junie": Pointing(refused="Harbor gives it a provider's name and key, and no address"),
    "kimi-cli": Pointing(CHAT, "openai/{model}", _OPENAI, {"base_url": "{openai}"}),
    "kimi-code": Pointing(CHAT, "{model}", _KIMI),
    "langgraph": OWN,
    "mcode": Pointing(CHAT, "openai/{model}", _OPENAI, {"api_format": "openai-completions"}),
    "mimo": Pointing(RESPONSES, "openai/{model}", _OPENAI),
    "mini-swe-agent": Pointing(CHAT, "openai/{model}", _OPENAI_BASE),
    "muse-code": Pointing(refused="it speaks its maker's own API"),
    "nemo-agent": Pointing(CHAT, "openai/{model}", _OPENAI, {"llm_type": "openai"}),
    "nop": Pointing(refused=_NO_TURN),
    "openclaw": Pointing(CHAT, "openai/{model}", _OPENAI),
    "opencode": Pointing(RESPONSES, "openai/{model}", _OPENAI),
    "openhands": Pointing(CHAT, "openai/{model}", _LLM),
    "openhands-sdk": Pointing(CHAT, "openai/{model}", _LLM),
    "oracle": Pointing(refused=_NO_TURN),
    "pi": Pointing(CHAT, "openai/{model}", _OPENAI, {"model_api": "openai-completions"}),
    "qwen-coder": Pointing(CHAT, "{model}", _OPENAI),
    "rovodev-cli": Pointing(refused=_OWN_SERVICE),
    "strands": OWN,
    "swe-agent": Pointing(CHAT, "openai/{model}", _OPENAI_BASE),
    "terminus-2": Pointing(CHAT, "openai/{model}", _OPENAI_BASE, {"api_base": "{openai}"}, "launcher"),
    "trae-agent": Pointing(RESPONSES, "openai/{model}", _OPENAI),
    "vibe": Pointing(CHAT, "openai/{model}", _VIBE),
}


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for name, text in values.items():
            value = value.replace(f"{{{name}}}", text)
        return value
    return {_filled(key, values): _filled(inner, values) for key, inner in value.items()}
