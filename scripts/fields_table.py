"""The table of vLLM's fields in docs/dialects.md, of `steno_proxy/dialects/openai/vllm_fields.py`; the rest of the page is
written by hand."""

from __future__ import annotations

from pathlib import Path

from steno_proxy.dialects.openai.vllm_fields import ALL, FIELDS, Field

PAGE = Path(__file__).resolve().parents[1] / "docs/dialects.md"
_BEGIN = "<!-- Made by scripts/docs from proxy/steno_proxy/dialects/openai/vllm_fields.py -->\n"
_END = "<!-- To here -->\n"


def dialects_page() -> str:
    """The page with its table written anew. Raises: ValueError: it has no place for the table."""
    page = PAGE.read_text()
    before, begins, rest = page.partition(_BEGIN)
    _, ends, after = rest.partition(_END)
    if not begins or not ends:
        raise ValueError(f"{PAGE.name}: {_BEGIN.strip()} and {_END.strip()} must stand where the table is")
    return before + begins + _tables() + ends + after


def _tables() -> str:
    lines = [
        "",
        "| honoured | in | the law | resumable | another value is another request | |",
        "|---|---|---|---|---|---|",
    ]
    for row in FIELDS:
        if row.does == "honoured":
            resumable = "" if not row.law else "yes" if row.resumable else "no"
            if row.law == "constrained or neutralised":
                resumable = "without a grammar"
            lines.append(
                f"| {_named(row)} | {_where(row)} | {row.law} | {resumable} | {'yes' if row.retry else 'no'} | {row.note} |"
            )
    for does in ("refused", "ignored"):
        lines += ["", f"| {does} | in | |", "|---|---|---|"]
        for row in FIELDS:
            if row.does == does:
                plain = ", ".join(f"`{_json(value)}`" for value in row.harmless)
                lines.append(
                    f"| {_named(row)} | {_where(row)} | {row.note}{f'; {plain} is not refused' if plain else ''} |"
                )
    return "\n".join([*lines, "", ""])


def _named(row: Field) -> str:
    return f"`{row.name}`{' (older vLLM)' if row.older else ''}"


def _where(row: Field) -> str:
    return "all" if row.on == ALL else ", ".join(row.on)


def _json(value: object) -> str:
    return (
        {True: "true", False: "false", "": '""'}.get(value, str(value)) if isinstance(value, bool | str) else str(value)
    )
