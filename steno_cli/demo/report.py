"""What the demo prints: one recorded session down to its tokens, and where to look next.

Reads everything back through the REST client, as a trainer would; knows nothing of processes.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from steno.client.client import AsyncClient
from steno.contracts.errors import StenoError
from steno.contracts.records import Turn, bytes_to_floats, bytes_to_ids
from steno_cli.demo.processes import READY_S

SHOWN_TOKENS = 16
TOKEN_COLUMNS = 2


async def show_record(
    console: Console, client: AsyncClient, trial_id: str, agent_lines: Sequence[str], tokenizer_file: Path
) -> None:
    """The session as the agent saw it, then as it is on record: turns, tokens with log-probabilities, the sample."""
    session = await client.session(trial_id)
    turns = [turn async for turn in client.turns(trial_id)]
    console.print()
    console.print(Text.assemble("What the agent of ", (trial_id, "bold"), " saw"))
    for line in agent_lines:
        console.print(f"  {line}", markup=False, style="dim", soft_wrap=True)
    console.print()
    counts = session.counts
    summary = f"{counts.turns} turns, {counts.completion_tokens} sampled tokens, reward {session.reward}"
    console.print(Text.assemble("What was recorded: ", (summary, "bold")))
    console.print(_turns(turns))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    console.print()
    console.print(f"The first tokens that the policy sampled in turn {turns[-1].index}")
    console.print(_tokens(turns[-1], tokenizer))
    console.print()
    for sample in await client.samples(trial_id):
        length, trained = len(sample.token_ids) // 4, sum(sample.loss_mask)
        console.print(
            f"As a training sample: {length} tokens, {trained} of them sampled by the policy, reward {sample.reward}"
        )


def _turns(turns: Sequence[Turn]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("turn", "new prompt", "sampled", "mean logprob", "version", "says"):
        right = name in ("new prompt", "sampled", "mean logprob")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for turn in turns:
        logprobs = bytes_to_floats(turn.sampling_logprobs)
        table.add_row(
            str(turn.index),
            str(len(turn.new_prompt_ids) // 4),
            str(turn.completion_tokens),
            f"{sum(logprobs) / len(logprobs):.4f}" if logprobs else "-",
            ", ".join(span.version for span in turn.versions),
            Text(_reply_text(turn)),
        )
    return table


def _reply_text(turn: Turn) -> str:
    calls = [call["function"] for call in turn.reply.get("tool_calls") or []]
    return str(turn.reply.get("content") or "").strip() or ", ".join(
        f"{call['name']}({', '.join(map(str, json.loads(call['arguments']).values()))})" for call in calls
    )


def _tokens(turn: Turn, tokenizer: Tokenizer) -> Table:
    """Columns of (id, text, log-probability), read downwards."""
    ids, logprobs = bytes_to_ids(turn.completion_ids), bytes_to_floats(turn.sampling_logprobs)
    rows = [
        (str(token), repr(tokenizer.decode([token], skip_special_tokens=False)), f"{logprob:.4f}")
        for token, logprob in list(zip(ids, logprobs, strict=True))[:SHOWN_TOKENS]
    ]
    height = -(-len(rows) // TOKEN_COLUMNS)
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for _ in range(TOKEN_COLUMNS):
        table.add_column("id", justify="right", no_wrap=True)
        table.add_column("token", no_wrap=True, min_width=13)
        table.add_column("logprob", justify="right", style="cyan", no_wrap=True)
    for line in range(height):
        table.add_row(*(Text(cell) for row in rows[line::height] for cell in row))
    return table


async def show_where_to_look(console: Console, url: str, trial_id: str, keep: bool) -> None:
    """Lines to copy, each of which has just been tried. Raises: StenoError if one did not work."""
    paths = [f"/sessions/{trial_id}{tail}" for tail in ("", "/turns", "/samples")] + ["/sessions?status=completed"]
    console.print()
    console.print(
        "Where to look next" if keep else "Where to look next (`./scripts/demo --keep` goes on serving these)"
    )
    async with httpx.AsyncClient(base_url=url, timeout=READY_S) as http:
        for path in paths:
            answer = await http.get(path)
            if not answer.is_success:
                raise StenoError(f"GET {path} answered {answer.status_code}")
            console.print(f"  curl -s {shlex.quote(url + path)}", markup=False, soft_wrap=True)
        page = f"{url}/ui/"
        if not (await http.get(page)).is_success:
            raise StenoError(f"GET {page} was refused")
    console.print(f"  {_command()} sessions show {trial_id} --proxy {url}", markup=False, soft_wrap=True)
    console.print(f"  {page}#/sessions/{trial_id}   in a browser", markup=False, soft_wrap=True)


def _command() -> str:
    """How to say `steno` here: the demo's script runs it from an environment that is not on PATH."""
    here = Path(sys.executable).with_name("steno")
    if shutil.which("steno") or not here.exists():
        return "steno"
    return shlex.quote(str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here))
