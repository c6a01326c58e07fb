"""A session's conversation tree, drawn for a terminal.

Turns that simply follow each other stand below each other; only a branch indents, so that a hundred turns stay readable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from steno.contracts.notes import Note, short
from steno.contracts.records import Session, Turn, bytes_to_floats

_PREVIEW_CHARS = 60
SHOWN_NOTES = 8
"""Of a session's notes: the newest. `--json` has all that are kept."""


def headline(session: Session) -> Group:
    """What is known of the session, without its turns."""
    counts = session.counts
    state = session.status + (f" ({session.end_reason})" if session.end_reason else "")
    none = "awaits its reward" if session.awaits_reward else "no reward"
    reward = none if session.reward is None else f"reward {session.reward:g}"
    tokens = f"{counts.turns} turns, {counts.prompt_tokens} prompt + {counts.completion_tokens} sampled tokens"
    lines = [
        Text.assemble((session.trial_id, "bold"), f"  {state}, {reward}"),
        Text(f"{tokens}, {counts.forks} forks, {counts.constrained_tokens} constrained tokens", style="dim"),
    ]
    if session.group_id:
        lines.append(Text(f"group {session.group_id}", style="dim"))
    if session.marks:
        lines.append(Text(f"marks: {', '.join(session.marks)}", style="yellow"))
    if session.notes:
        seen = ", ".join(f"{kind} {times}" for kind, times in sorted(session.notes.counts.items()))
        lines.append(Text(f"notes: {seen}", style="yellow"))
        lines += [Text(f"  {_noted(note)}", style="dim") for note in session.notes.newest[-SHOWN_NOTES:]]
    return Group(*lines)


def _noted(note: Note) -> str:
    when = datetime.fromtimestamp(note.at).isoformat(" ", "seconds")
    return f"{when}  {note.kind}" + (f" ({note.times} times)" if note.times > 1 else "") + f": {note.text}"


def conversation_tree(session: Session, turns: Sequence[Turn]) -> Tree:
    """One node per turn, children below their parent, siblings in commit order."""
    known = {turn.turn_id for turn in turns}
    children: dict[str | None, list[Turn]] = defaultdict(list)
    for turn in turns:
        children[turn.parent_id if turn.parent_id in known else None].append(turn)
    tree = Tree(Text("conversation", style="dim"), guide_style="dim")
    # A stack, not recursion: a session may be some thousand turns long.
    waiting = [(tree, turn) for turn in reversed(children[None])]
    while waiting:
        level, turn = waiting.pop()
        node = level.add(turn_line(turn))
        following = children[turn.turn_id]
        inside = level if len(following) == 1 else node
        waiting.extend((inside, child) for child in reversed(following))
    return tree


def turn_line(turn: Turn) -> Text:
    """`#3 1f0c… +120 → 34 tokens  tool_calls  mean logprob -0.12  ls(…)`."""
    line = Text.assemble(
        (f"#{turn.index} ", "bold"),
        (f"{turn.turn_id} ", "dim"),
        f"+{len(turn.new_prompt_ids) // 4} → ",
        (f"{turn.completion_tokens}", "bold"),
        " tokens  ",
        (turn.finish_reason, "" if turn.finish_reason in ("stop", "tool_calls") else "yellow"),
    )
    logprobs = bytes_to_floats(turn.sampling_logprobs)
    if logprobs:
        line.append(f"  mean logprob {sum(logprobs) / len(logprobs):.3f}", style="cyan")
    if turn.fork_reason is not None:
        line.append(f"  fork: {turn.fork_reason.value}", style="magenta")
    if turn.task_step is not None:
        line.append(f"  step: {turn.task_step}", style="blue")
    if turn.partial:
        line.append("  partial", style="red")
    if turn.unreadable:
        line.append(f"  unreadable: {turn.unreadable}", style="red")
    if turn.constrained:
        line.append(f"  {sum(end - start for start, end in turn.constrained)} constrained", style="yellow")
    line.append(f"  {_preview(turn)}", style="italic dim")
    return line


def _preview(turn: Turn) -> str:
    calls = [call["function"] for call in turn.reply.get("tool_calls") or []]
    said = turn.reply.get("content") or ""
    if not isinstance(said, str):
        said = "".join(part.get("text", "") for part in said)
    words = " ".join(said.split())
    named = ", ".join(f"{call.get('name', '')}({call.get('arguments', '')})" for call in calls)
    text = short(" ".join(part for part in (words, named) if part))  # nothing that a terminal obeys
    return text if len(text) <= _PREVIEW_CHARS else text[: _PREVIEW_CHARS - 1] + "…"
