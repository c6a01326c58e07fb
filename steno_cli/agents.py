"""How known agents are pointed at a trial: the facts behind `steno env` and docs/agents.md, one entry per agent.

An entry says what the agent reads (variables, a file) and how it is run without a human. `seen` is the version that was
run against this proxy; "" says that nobody did here, and the entry is what the agent's own documentation says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from shlex import quote

NO_KEY = "none"
"""For a proxy that asks for no key: clients insist on having one."""


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """A trial, as an agent needs to know it. urls: by kind of client, as in `rest.Trial`. model: any name; it is recorded.

    context_tokens: of the model that serves it, for agents that can't find out; None: not known.
    """

    trial_id: str
    urls: dict[str, str]
    key: str = NO_KEY
    model: str = "policy"
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """What points an agent at a target.

    command: a shell line that runs one task; `$TASK` stands for it. files: name -> content, for agents that need files.
    instead: name -> content, of a file that the agent can read in place of variables and flags.
    """

    variables: dict[str, str] = field(default_factory=dict)
    command: str = ""
    files: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    """title, wire: for readers. install: a shell line. seen: how and in which version it was run against this proxy; "": not."""

    title: str
    wire: str
    install: str
    seen: str
    setup: Callable[[AgentTarget], AgentSetup]
    notes: str = ""


_BY_TESTS = "run by the tests, version {}"
_BY_HAND = "run by hand on {}, version {}"


_CLAUDE_LEAST_CONTEXT = 64_000
"""Claude Code keeps 33,000 tokens of a context free and begins with some 20,000: told of less, it would compact all the time."""


def _claude_code(target: AgentTarget) -> AgentSetup:
    context = target.context_tokens or 0
    roles = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_OPUS_MODEL")
    return AgentSetup(
        {
            "ANTHROPIC_BASE_URL": target.urls["anthropic"],
            "ANTHROPIC_API_KEY": target.key,
            **{f"ANTHROPIC_{role}": target.model for role in roles},
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "IS_SANDBOX": "1",
            **({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context)} if context >= _CLAUDE_LEAST_CONTEXT else {}),
        },
        'claude -p "$TASK" --disallowedTools WebSearch --dangerously-skip-permissions --output-format json',
    )


def _codex(target: AgentTarget) -> AgentSetup:
    provider = "model_providers.steno"
    options = {
        "model_provider": "steno",
        f"{provider}.name": "Steno",
        f"{provider}.base_url": target.urls["openai"],
        f"{provider}.env_key": "STENO_AGENT_KEY",
        f"{provider}.wire_api": "responses",
    }
    words = " ".join(f"-c {name}={value}" for name, value in options.items())
    config = (
        f"model = {json.dumps(target.model)}\n"
        f'model_provider = "steno"\n\n[{provider}]\nname = "Steno"\n'
        f'base_url = "{target.urls["openai"]}"\nenv_key = "STENO_AGENT_KEY"\nwire_api = "responses"\n'
    )
    run = "codex exec --disable plugins --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check --json"
    return AgentSetup(
        {"STENO_AGENT_KEY": target.key},
        f'{run} -m {quote(target.model)} {words} "$TASK" </dev/null',
        instead={"~/.codex/config.toml": config},
    )


def _opencode(target: AgentTarget) -> AgentSetup:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Steno",
        "options": {"baseURL": target.urls["openai"], "apiKey": target.key},
        "models": {target.model: {"name": target.model, **_opencode_limit(target.context_tokens)}},
    }
    config = {
        "provider": {"steno": provider},
        "model": f"steno/{target.model}",
        "autoupdate": False,
        "share": "disabled",
    }
    return AgentSetup(
        {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        f'opencode run -m {quote("steno/" + target.model)} --title steno --format json "$TASK" </dev/null',
        instead={"opencode.json": json.dumps(config, indent=2) + "\n"},
    )


def _opencode_limit(context_tokens: int | None) -> dict[str, object]:
    """What it compacts by: it reads no model list. A quarter is for the answer, up to what it asks for by itself."""
    if context_tokens is None:
        return {}
    return {"limit": {"context": context_tokens, "output": min(32_000, max(1, context_tokens // 4))}}


def _mini_swe_agent(target: AgentTarget) -> AgentSetup:
    base = f"-c mini.yaml -c model.model_kwargs.api_base={target.urls['openai']}"
    return AgentSetup(
        {"OPENAI_API_KEY": target.key, "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        f'mini -y --exit-immediately -l 0 -m {quote("openai/" + target.model)} --model-class litellm {base} -t "$TASK"',
    )


def _swe_agent(target: AgentTarget) -> AgentSetup:
    config = (
        f"agent:\n  model:\n    name: {json.dumps('openai/' + target.model)}\n    api_base: {target.urls['openai']}\n"
        "    api_key: $OPENAI_API_KEY\n    per_instance_cost_limit: 0\n    total_cost_limit: 0\n    max_input_tokens: 0\n"
        "    temperature: 1.0\n"
    )
    return AgentSetup(
        {"OPENAI_API_KEY": target.key},
        'sweagent run --config config/default.yaml --config steno.yaml --problem_statement.text="$TASK"',
        {"steno.yaml": config},
    )


def _openhands(target: AgentTarget) -> AgentSetup:
    return AgentSetup(
        {"LLM_MODEL": f"openai/{target.model}", "LLM_BASE_URL": target.urls["openai"], "LLM_API_KEY": target.key},
        'openhands --headless --override-with-envs -t "$TASK"',
    )


def _aider(target: AgentTarget) -> AgentSetup:
    quiet = "--no-show-model-warnings --no-check-update --analytics-disable"
    return AgentSetup(
        {"OPENAI_API_BASE": target.urls["openai"], "OPENAI_API_KEY": target.key},
        f'aider --model {quote("openai/" + target.model)} --yes-always {quiet} --message "$TASK"',
    )


def _qwen_code(target: AgentTarget) -> AgentSetup:
    return AgentSetup(
        {"OPENAI_BASE_URL": target.urls["openai"], "OPENAI_API_KEY": target.key, "OPENAI_MODEL": target.model},
        'qwen --auth-type openai --yolo -p "$TASK"',
    )


def _pi(target: AgentTarget) -> AgentSetup:
    model = {
        "id": target.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": target.context_tokens or 128_000,
        "maxTokens": 32_000,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": target.urls["openai"],
        "api": "openai-completions",
        "apiKey": "STENO_AGENT_KEY",
        "models": [model],
    }
    return AgentSetup(
        {"PI_OFFLINE": "1", "STENO_AGENT_KEY": target.key},
        f'pi --provider steno --model {quote(target.model)} --no-session -p "$TASK"',
        {"~/.pi/agent/models.json": json.dumps({"providers": {"steno": provider}}, indent=2) + "\n"},
    )


def _copilot(target: AgentTarget) -> AgentSetup:
    return AgentSetup(
        {
            "COPILOT_PROVIDER_BASE_URL": target.urls["openai"],
            "COPILOT_PROVIDER_API_KEY": target.key,
            "COPILOT_MODEL": target.model,
        },
        'copilot --allow-all-tools --no-auto-update -p "$TASK"',
    )


def _kimi_code(target: AgentTarget) -> AgentSetup:
    context = {"KIMI_MODEL_MAX_CONTEXT_SIZE": str(target.context_tokens)} if target.context_tokens else {}
    return AgentSetup(
        {
            "KIMI_MODEL_PROVIDER_TYPE": "kimi",
            "KIMI_MODEL_BASE_URL": target.urls["openai"],
            "KIMI_MODEL_API_KEY": target.key,
            "KIMI_MODEL_NAME": target.model,
            "KIMI_MODEL_CAPABILITIES": "thinking,tool_use",
            **context,
        },
        'kimi -p "$TASK" --output-format stream-json </dev/null',
    )


def _gemini_cli(target: AgentTarget) -> AgentSetup:
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    return AgentSetup(
        {
            "GOOGLE_GEMINI_BASE_URL": target.urls["gemini"],
            "GEMINI_API_KEY": target.key,
            "GEMINI_MODEL": target.model,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        'gemini --yolo -p "$TASK"',
        {"~/.gemini/settings.json": json.dumps(settings) + "\n"},
    )


def _openai(target: AgentTarget) -> AgentSetup:
    return AgentSetup({"OPENAI_BASE_URL": target.urls["openai"], "OPENAI_API_KEY": target.key})


def _anthropic(target: AgentTarget) -> AgentSetup:
    return AgentSetup({"ANTHROPIC_BASE_URL": target.urls["anthropic"], "ANTHROPIC_API_KEY": target.key})


def _google_genai(target: AgentTarget) -> AgentSetup:
    return AgentSetup({"GOOGLE_GEMINI_BASE_URL": target.urls["gemini"], "GEMINI_API_KEY": target.key})


AGENTS: dict[str, Agent] = {
    "claude-code": Agent(
        "Claude Code",
        "Anthropic Messages, streamed",
        "npm install -g @anthropic-ai/claude-code",
        _BY_TESTS.format("2.1.328"),
        _claude_code,
        "Claude Code appends `/v1/messages` to the base URL. `IS_SANDBOX` lets it skip permissions as root. With "
        "`ENABLE_TOOL_SEARCH=false` each request has all of its tools. Without this variable it searches for tools as it goes; "
        "each tool that it finds changes the beginning of the prompt, so that the next turn is a root. WebSearch is left out: "
        "Anthropic's own servers run it. If the served model (or `--context-tokens`) has 64,000 tokens or more, "
        "`CLAUDE_CODE_MAX_CONTEXT_TOKENS` is set too. Without this variable Claude Code assumes a million tokens, and compacts "
        "only when it is told that a prompt is too long.",
    ),
    "codex": Agent(
        "Codex",
        "OpenAI Responses, streamed",
        "npm install -g @openai/codex",
        _BY_TESTS.format("0.169.0"),
        _codex,
        "The flags, or the same as a file. Codex waits for its standard input; `</dev/null` ends that wait.",
    ),
    "opencode": Agent(
        "OpenCode",
        "OpenAI chat, streamed",
        "npm install -g opencode-ai",
        _BY_TESTS.format("1.18.33"),
        _opencode,
        "The variable holds the configuration; the same can be a file. `@ai-sdk/openai-compatible` is part of OpenCode's binary. "
        "If a model is served, or `--context-tokens` is given, the model's `limit` is set too; without a limit OpenCode never "
        "compacts. Without `--title` it asks the model for a title, which is a conversation of its own. After a stream that "
        "broke, OpenCode sends the request again. The part of the broken answer that it had read stays in its history, with "
        "tool calls marked as aborted. So the next request is a fork (`assistant_rewritten`).",
    ),
    "mini-swe-agent": Agent(
        "mini-swe-agent", "OpenAI chat", "pip install mini-swe-agent mcp", _BY_TESTS.format("2.4.6"), _mini_swe_agent
    ),
    "swe-agent": Agent(
        "SWE-agent", "OpenAI chat", "git clone https://github.com/SWE-agent/SWE-agent && pip install -e ./SWE-agent",
        _BY_HAND.format("2026-11-29", "1.1.0"), _swe_agent,
        "Run it in its checkout: without the `config` and `tools` there it does not start. The package of its name on "
        "PyPI is a preview of 2024 that can't be installed. SWE-agent's cost limits must be off, since it knows no price "
        "of this model. Its default temperature is 0. It starts containers by itself: under `steno rollout` it needs "
        "`--confine off`. If SWE-agent can't use a reply (no call or several, a tool that does not exist, arguments that "
        "are no JSON, a command that is blocked or that bash can't read), it shows the reply once more, without its calls "
        "and with a complaint, and then forgets it. The requery is a fork (`assistant_rewritten`, if the reply had "
        "calls), and the request after the requery is a fork, too (`history_dropped`). With `max_requeries: 1` under "
        "`agent` it does not ask again: the first such reply ends the task (`exit_format`), and SWE-agent submits what is "
        "done by then; with 0 it asks nothing at all. With `parse_function: {type: action_only}` under `agent.tools` it "
        "sends no tools, and takes each reply as a whole as a command. Then no reply lacks a call or has broken "
        "arguments, and the system template must name the commands (`{{command_docs}}`). The other types of "
        "`parse_function` that read text ask again if a reply holds no action.",
    ),
    "openhands": Agent(
        "OpenHands", "OpenAI chat", "uv tool install openhands", _BY_HAND.format("2026-11-22", "1.16.0"), _openhands,
        "OpenHands needs Python 3.12, and ignores the variables without `--override-with-envs`. If a prompt is too long, it "
        "condenses its history: the summary is a root, and the turn that goes on with the summary is a fork.",
    ),
    "aider": Agent(
        "aider", "OpenAI chat, streamed", "pip install aider-chat", _BY_HAND.format("2026-11-22", "0.86.2"), _aider,
        "aider's conversations call no tools: aider edits files from the model's text. Its prompts hold the files and a map of "
        "them as they are now, before the conversation about them. So a turn after an edit is a root.",
    ),
    "qwen-code": Agent(
        "Qwen Code", "OpenAI chat, streamed", "npm install -g @qwen-code/qwen-code", _BY_TESTS.format("0.24.4"), _qwen_code
    ),
    "gemini-cli": Agent(
        "Gemini CLI", "Gemini, streamed", "npm install -g @google/gemini-cli", _BY_TESTS.format("0.61.0"), _gemini_cli,
        "Without the file, Gemini CLI refuses a base URL when it runs headless. A base URL without TLS must be on the same "
        "machine.",
    ),
    "pi": Agent(
        "pi", "OpenAI chat, streamed", "npm install -g @mariozechner/pi-coding-agent", _BY_TESTS.format("0.73.1"), _pi,
        "pi needs the file. With the `api` `openai-responses`, `anthropic-messages` or `google-generative-ai` it speaks that "
        "format, each with its own base URL.",
    ),
    "copilot": Agent(
        "GitHub Copilot CLI", "OpenAI chat, streamed", "npm install -g @github/copilot",
        _BY_HAND.format("2026-11-21", "1.0.102"), _copilot,
        "No account is needed. `COPILOT_PROVIDER_WIRE_API=responses` and `COPILOT_PROVIDER_TYPE=anthropic` (with the base URL of "
        "Anthropic's clients) work as well.",
    ),
    "kimi-code": Agent(
        "Kimi Code", "OpenAI chat, streamed", "npm install -g @moonshot-ai/kimi-code", _BY_HAND.format("2026-11-29", "2.1.0"),
        _kimi_code,
        "It needs Node.js 22.19. If a stream breaks, it goes on from the part that it has. With the provider type `openai` it "
        "adds `reasoning_effort` from its second turn on, which then is a root. With `anthropic`, the next turn is "
        "a fork if the stream broke in text that follows a thought.",
    ),
    "openai": Agent(
        "OpenAI SDK, and what is built on it", "chat, completions, Responses", "pip install openai", "run by the tests", _openai
    ),
    "anthropic": Agent("Anthropic SDK", "Anthropic Messages", "pip install anthropic", "run by the tests", _anthropic),
    "google-genai": Agent("Google Gen AI SDK", "Gemini", "pip install google-genai", "run by the tests", _google_genai),
}  # fmt: skip
