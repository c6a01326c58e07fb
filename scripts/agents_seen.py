"""Agents and libraries that were run against this proxy as they are, each on a task of a dozen turns with tools: docs/agents.md.

What CI runs has tests of its own (`steno_cli/agents.py` says which); this is the rest, by hand.
"""

from __future__ import annotations

from typing import NamedTuple

DATES = "2026-11-21, 22 and 29"


class AgentReport(NamedTuple):
    """title, version: of what was run. wire: in which dialects. verdict: what there is to say besides one branch."""

    title: str
    version: str
    wire: str
    verdict: str = ""


SEEN = (
    AgentReport("Claude Code", "2.1.197", "Messages"),
    AgentReport("pi", "0.73.1, 0.74.2", "chat, Responses, Messages, Gemini", "a stream that broke is asked again"),
    AgentReport("Qwen Code", "0.15.10", "chat", "a stream that broke ends its task (0.24.4 goes on)"),
    AgentReport("GitHub Copilot CLI", "1.0.102", "chat, Responses, Messages", "a stream that broke is asked again"),
    AgentReport("Cline", "3.0.65", "chat", "`cline auth -p openai -b URL` sets the base URL"),
    AgentReport("Continue", "1.5.47", "chat", "its file has `provider: openai` and `apiBase`"),
    AgentReport("Kilo Code", "7.7.7", "chat", "OpenCode's variables, called `KILO_…`; a stream that broke is asked again"),
    AgentReport("OpenAI Agents SDK", "0.24.0", "chat, Responses; streamed and not"),
    AgentReport(
        "PydanticAI",
        "2.68.0",
        "chat, Responses, Messages, Gemini; streamed and not",
        "with Gemini it does not repeat a 503",
    ),
    AgentReport("LangGraph, LangChain", "1.2.22, 1.4.7", "chat, Responses, Messages; streamed and not"),
    AgentReport("Strands Agents", "1.62.0", "chat, Messages"),
    AgentReport("Google ADK", "2.13.0", "Gemini; streamed and not"),
    AgentReport("AutoGen", "0.7.5", "chat; streamed and not"),
    AgentReport("OpenAI Agents SDK for JavaScript", "0.20.0", "Responses, streamed"),
    AgentReport("Vercel AI SDK", "6.0.326", "chat, Responses, Messages, Gemini; streamed"),
    AgentReport("Microsoft Agent Framework", "1.23.0", "Responses, streamed"),
    AgentReport("LlamaIndex", "0.14.25", "chat, streamed"),
    AgentReport("Haystack", "3.4.0", "chat"),
    AgentReport("Agno", "3.1.10", "chat; streamed and not"),
    AgentReport("Claude Agent SDK", "0.2.189", "Messages", "a sub-agent is a root of its own"),
    AgentReport(
        "deepagents", "0.7.32", "chat, Responses, Messages",
        "a stream that broke ends its task; in chat and Responses so do arguments that are no JSON",
    ),
    AgentReport(
        "Hermes", "0.19.0", "chat, Messages; streamed",
        "`echoed_as` says `space`; in chat, arguments that are no JSON end its task",
    ),
    AgentReport(
        "OpenClaw", "2026.9.2", "chat, Responses, Messages; streamed",
        "once its first tool has run, a 503 or a stream that broke ends its task; in chat so do arguments that are no JSON",
    ),
    AgentReport("nanobot", "0.3.5", "chat, Messages; streamed", "a stream that broke ends its task, with exit code 0"),
    AgentReport(
        "CAMEL", "0.2.90", "chat, Messages",
        "its second `step()` has the history in another order, which is a fork; arguments that are no JSON end its task",
    ),
    AgentReport(
        "Open Interpreter", "0.4.3", "chat, streamed",
        "tools as calls: `echoed_as` says `split`, and of parallel calls it keeps the first, which is a fork. As text: each "
        "turn is a root",
    ),
    AgentReport(
        "browser-use", "0.13.14", "chat, Messages, Gemini",
        "its history is one message: each turn is a root. It asks for a JSON schema, and tokens under a grammar are not trained",
    ),
    AgentReport("Trae Agent", "0.1.0", "Messages", "six turns; text and each call come back as messages of their own"),
    AgentReport("CrewAI", "1.15.30", "chat", "calls come back without the text beside them: `echoed_as` says `calls`"),
    AgentReport("Semantic Kernel", "1.45.0", "chat", "as CrewAI; after five rounds it offers no tools any more, which is a root"),
    AgentReport("instructor", "1.17.0", "chat", "JSON schema, JSON and tools, each a question of its own"),
    AgentReport(
        "gptme", "0.35.1", "chat, streamed",
        "tools as calls and as text; reasoning comes back in the text: `echoed_as` says `reasoning`; of parallel calls it keeps "
        "the first, which is a fork; a stream that broke ends its task",
    ),
    AgentReport("DSPy", "3.4.1", "chat", "ReAct tells all that was done in one message: each turn is a root"),
    AgentReport("smolagents", "1.26.0", "chat; streamed and not", "calls come back as text: each turn is a root"),
)  # fmt: skip
