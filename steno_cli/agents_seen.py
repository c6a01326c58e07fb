"""Agents and libraries that were run against this proxy as they are, each on a task of a dozen turns with tools: docs/agents.md.

What CI runs has tests of its own (`steno_cli/agents.py` says which); this is the rest, by hand.
"""

from __future__ import annotations

from typing import NamedTuple

DATES = "2026-11-21 and 22"


class Seen(NamedTuple):
    """title, version: of what was run. wire: in which dialects. verdict: what there is to say besides one branch."""

    title: str
    version: str
    wire: str
    verdict: str = ""


SEEN = (
    Seen("Claude Code", "2.1.197", "Messages"),
    Seen("pi", "0.73.1, 0.74.2", "chat, Responses, Messages, Gemini", "a stream that broke is asked again"),
    Seen("Qwen Code", "0.15.10", "chat", "a stream that broke ends its task (0.24.4 goes on)"),
    Seen("GitHub Copilot CLI", "1.0.102", "chat, Responses, Messages", "a stream that broke is asked again"),
    Seen("Cline", "3.0.65", "chat", "`cline auth -p openai -b URL` sets the base URL"),
    Seen("Continue", "1.5.47", "chat", "its file has `provider: openai` and `apiBase`"),
    Seen("Kilo Code", "7.7.7", "chat", "OpenCode's variables, called `KILO_…`; a stream that broke is asked again"),
    Seen("OpenAI Agents SDK", "0.24.0", "chat, Responses; streamed and not"),
    Seen("PydanticAI", "2.68.0", "chat, Responses, Messages, Gemini; streamed and not", "with Gemini it does not repeat a 503"),
    Seen("LangGraph, LangChain", "1.2.22, 1.4.7", "chat, Responses, Messages; streamed and not"),
    Seen("Strands Agents", "1.62.0", "chat, Messages"),
    Seen("Google ADK", "2.13.0", "Gemini; streamed and not"),
    Seen("AutoGen", "0.7.5", "chat; streamed and not"),
    Seen("OpenAI Agents SDK for JavaScript", "0.20.0", "Responses, streamed"),
    Seen("Vercel AI SDK", "6.0.326", "chat, Responses, Messages, Gemini; streamed"),
    Seen("Microsoft Agent Framework", "1.23.0", "Responses, streamed"),
    Seen("LlamaIndex", "0.14.25", "chat, streamed"),
    Seen("Haystack", "3.4.0", "chat"),
    Seen("Agno", "3.1.10", "chat; streamed and not"),
    Seen("Trae Agent", "0.1.0", "Messages", "six turns; text and each call come back as messages of their own"),
    Seen("CrewAI", "1.15.30", "chat", "calls come back without the text beside them: `echoed_as` says `calls`"),
    Seen("Semantic Kernel", "1.45.0", "chat", "as CrewAI; after five rounds it offers no tools any more, which is a root"),
    Seen("instructor", "1.17.0", "chat", "JSON schema, JSON and tools, each a question of its own"),
    Seen(
        "gptme", "0.35.1", "chat, streamed",
        "tools as calls and as text; reasoning comes back in the text: `echoed_as` says `reasoning`; of parallel calls it keeps "
        "the first, which is a fork; a stream that broke ends its task",
    ),
    Seen("DSPy", "3.4.1", "chat", "ReAct tells all that was done in one message: each turn is a root"),
    Seen("smolagents", "1.26.0", "chat; streamed and not", "calls come back as text: each turn is a root"),
)  # fmt: skip
