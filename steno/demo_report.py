"""What the demo prints: one recorded session down to its tokens, and where to look next.

Reads everything back through the REST client, as a trainer would; knows nothing of processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from proxy.client import AsyncSteno
from proxy.contracts.errors import StenoError
from proxy.contracts.records import Turn, bytes_to_floats, bytes_to_ids

SHOWN_TOKENS = 24


async def show_record(
    console: Console, client: AsyncSteno, trial_id: str, agent_lines: Sequence[str], tokenizer_file: Path
) -> None:
    """The session as the agent saw it, then as it is on record: turns, tokens with log-probabilities, the sample."""
    session = await client.session(trial_id)
    turns = [turn async for turn in client.turns(trial_id)]
    console.print()
    console.print(Text.assemble("What the agent of ", (trial_id, "bold"), " saw"))
    for line in agent_lines:
        console.print(f"  {line}", markup=False, style="dim")
    console.print()
    console.print(Text.assemble("What was recorded: ", (f"{len(turns)} turns, reward {session.reward}", "bold")))
    console.print(_turns(turns))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    console.print(f"The first tokens of turn 1, as sampled (new prompt ids: {len(turns[1].new_prompt_ids) // 4})")
    console.print(_tokens(turns[1], tokenizer))
    for sample in await client.samples(trial_id):
        length, trained = len(sample.token_ids) // 4, sum(sample.loss_mask)
        console.print(
            f"As a training sample: {length} tokens, {trained} of them sampled by the policy and trained, "
            f"versions {', '.join(sorted({span.version for span in sample.spans}))}, reward {sample.reward}"
        )


def _turns(turns: Sequence[Turn]) -> Table:
    table = Table(box=None, header_style="dim")
    for name in ("turn", "parent", "new prompt", "sampled", "mean logprob", "policy version", "finish", "says"):
        table.add_column(name, justify="right" if name in ("new prompt", "sampled", "mean logprob") else "left")
    numbers = {turn.turn_id: str(turn.index) for turn in turns}
    for turn in turns:
        logprobs = bytes_to_floats(turn.sampling_logprobs)
        mean = f"{sum(logprobs) / len(logprobs):.4f}" if logprobs else "-"
        calls = [call["function"] for call in turn.reply.get("tool_calls") or []]
        said = turn.reply.get("content") or ", ".join(f"{call['name']}({call['arguments']})" for call in calls)
        table.add_row(
            str(turn.index),
            numbers.get(turn.parent_id or "", "-"),
            str(len(turn.new_prompt_ids) // 4),
            str(turn.completion_tokens),
            mean,
            ", ".join(span.version for span in turn.versions),
            turn.finish_reason,
            Text(str(said).strip()),
        )
    return table


def _tokens(turn: Turn, tokenizer: Tokenizer) -> Table:
    """Three columns of (id, text, log-probability), read downwards."""
    ids, logprobs = bytes_to_ids(turn.completion_ids), bytes_to_floats(turn.sampling_logprobs)
    rows = [
        (str(token), repr(tokenizer.decode([token], skip_special_tokens=False)), f"{logprob:.5f}")
        for token, logprob in list(zip(ids, logprobs, strict=True))[:SHOWN_TOKENS]
    ]
    height = -(-len(rows) // 3)
    table = Table(box=None, header_style="dim")
    for _ in range(3):
        table.add_column("id", justify="right")
        table.add_column("token")
        table.add_column("logprob", justify="right", style="cyan")
    for line in range(height):
        cells = [cell for row in rows[line::height] for cell in row]
        table.add_row(*map(Text, cells))
    return table


async def show_where_to_look(console: Console, url: str, trial_ids: Sequence[str], keep: bool) -> None:
    """Lines to copy, each of which has just been tried. Raises: StenoError if one did not work."""
    paths = [f"/sessions/{trial_ids[0]}{tail}" for tail in ("", "/turns", "/samples")] + ["/sessions?status=completed"]
    console.print()
    console.print("Where to look next" if keep else "Where to look next, with `steno demo --keep` serving them")
    async with httpx.AsyncClient(base_url=url) as http:
        for path in paths:
            answer = await http.get(path)
            if not answer.is_success:
                raise StenoError(f"GET {path} answered {answer.status_code}")
            console.print(f"  curl -s {shlex.quote(url + path)}", markup=False, soft_wrap=True)
    console.print(f"  steno sessions show {trial_ids[0]} --url {url}", markup=False, soft_wrap=True)
