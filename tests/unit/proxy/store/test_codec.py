"""Turns at rest: nothing is lost, nothing is said twice, and what was written in format 1 can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts.records import IndexRow, Timings, TokenSpan, Turn
from steno_proxy.store.encoding.codec import decode_entry, decode_row, decode_turn, encode_turn, join_entry, path_ids
from steno_proxy.store.encoding.head import Head, head_from_hash, head_to_hash, session_of
from steno_proxy.store.encoding.texts import pack, text, to_json, unpack
from tests.support.records.recordings import conversation, row, turn

GOLDEN = Path(__file__).parents[3] / "fixtures" / "recording-v1.json"
LATER = {"upstream_tokens": None, "reasoning_tokens": 0, "stop": "", "workers": [], "mixed_kv": False}
LATER |= {"unreadable": None, "answer_id": None, "choice": 0, "retry_of": None, "superseded_by": None}
LATER |= {"annotation": None}
LATER |= {"replayed": None, "tokenizer": "", "task_step": None}

words = st.text(st.characters(codec="utf-8"), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(words, json_values, max_size=4)
moments = st.none() | st.floats(0, 4e9)
turn_ids = st.from_regex(r"[0-9a-f]{12}", fullmatch=True)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    completion = draw(st.integers(0, 9))
    turn_id = draw(turn_ids)
    ids = draw(st.lists(words, max_size=3))
    calls = (
        {f"call_{turn_id}_{i}": own for i, own in enumerate(ids)} if draw(st.booleans()) else dict.fromkeys(ids, "x")
    )
    volatile = st.fixed_dictionaries(
        {}, optional={"max_tokens": st.none() | st.integers(0, 9), "seed": st.integers(0, 9)}
    )
    return Turn(
        turn_id=turn_id, parent_id=draw(st.none() | turn_ids | words), answer_id=draw(turn_ids), choice=draw(st.integers(0, 9)),
        retry_of=draw(st.none() | turn_ids | words), model=draw(words), prompt_tokens=draw(st.integers(0, 99)),
        new_prompt_ids=draw(st.binary(max_size=24)), prompt_digest=draw(st.binary(max_size=16)),
        completion_ids=bytes(4 * completion), sampling_logprobs=draw(st.binary(max_size=36)),
        versions=[TokenSpan(version=draw(words), start=draw(st.integers(0, 1)), end=completion)],
        constrained=draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2)),
        stop=draw(words), finish_reason=draw(st.sampled_from(["stop", "length", "error"])), partial=draw(st.booleans()),
        error=draw(st.none() | words), delivered=draw(st.none() | st.integers(0, 9)), asked=draw(objects) | draw(volatile),
        law=draw(objects) | draw(volatile), messages=draw(st.lists(objects, max_size=3)), reply=draw(objects),
        call_ids=calls, tools=draw(st.lists(objects, max_size=2)), options=draw(objects), thinking_kept=draw(st.booleans()),
        mixed_kv=draw(st.booleans()), replayed=draw(st.none() | st.integers(0, 9)),
        tokenizer=draw(st.sampled_from(["", "00ff" * 4])), task_step=draw(st.none() | words),
        timings=Timings(queued=draw(st.floats(0, 4e9)), started=draw(moments), last_token=draw(moments)),
    )  # fmt: skip


def there_and_back(one: Turn, its_row: IndexRow) -> tuple[Turn, IndexRow]:
    encoded = encode_turn(one, its_row)
    texts = [pack(written.raw) for written in encoded.texts]
    raw = join_entry(encoded, range(len(texts)))
    entry = decode_entry(raw)
    assert entry.row == decode_row(raw)
    return decode_turn(one.index, entry, encoded.ids, encoded.logprobs, lambda at: unpack(texts[at]), None), entry.row


@settings(max_examples=40)  # each is a few hundred draws
@given(turns())
def test_any_turn_survives(one: Turn) -> None:
    its_row = row(one)
    assert there_and_back(one, its_row) == (one, its_row)


@settings(max_examples=25)
@given(turns(), st.integers(-1, 3))
def test_any_disagreement_with_the_row_survives(one: Turn, off: int) -> None:
    """A row may word the finish in its own way, or not know the counts."""
    base = row(one)
    its_row = IndexRow(
        one.turn_id,
        3,
        base.digests,
        base.tools,
        base.options,
        "stop",
        one.partial,
        max(0, base.path_tokens + off),
        ["y"],
        None,
        base.tokenizer,
    )
    assert there_and_back(one, its_row) == (one, its_row)


def test_a_row_of_another_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="index row"):
        encode_turn(turn(0), row(turn(1)))


def test_what_turns_share_is_one_text() -> None:
    encoded = [encode_turn(one, its_row) for one, its_row in conversation(8)]
    assert len({one.texts[0].digest for one in encoded}) == 1
    assert len({one.texts[1].digest for one in encoded}) == 1


def test_a_turn_is_small_beside_its_tokens_and_text() -> None:
    for one, its_row in conversation(12):
        encoded = encode_turn(one, its_row)
        assert len(join_entry(encoded, range(5))) < 230
        assert (
            len(encoded.ids) + len(encoded.logprobs) < 4 * len(one.new_prompt_ids) // 4 + 8 * one.completion_tokens + 12
        )


@given(st.lists(json_values, max_size=4) | objects)
def test_any_text_survives(value: Any) -> None:
    assert unpack(pack(text(value).raw)) == value
    assert len(pack(text(value).raw)) <= len(text(value).raw)


def test_a_lone_surrogate_survives() -> None:
    value = {"content": "half of a pair: \ud83d" * 20}
    assert unpack(pack(to_json(value))) == value


def test_a_digest_is_of_the_exact_bytes() -> None:
    assert text({"a": 1, "b": 2}).digest != text({"b": 2, "a": 1}).digest
    assert len(text({}).digest) == 16


@given(
    st.builds(
        Head,
        status=st.sampled_from(["open", "completed", "aborted"]),
        group=st.none() | st.text("ab-", min_size=1),
        created=st.floats(0, 4e9),
        updated=st.floats(0, 4e9),
        first_turn=moments,
        ended=moments,
        reward=st.none() | st.floats(allow_nan=False),
        metrics=st.dictionaries(words, st.floats(0, 1), max_size=2),
        marks=st.lists(words, max_size=2),
        turns=st.integers(0, 9),
        forks=st.integers(0, 9),
    )
)
def test_any_session_survives_as_a_hash(head: Head) -> None:
    flat = [item if isinstance(item, bytes) else item.encode() for item in head_to_hash(head)]
    assert head_from_hash(dict(zip(flat[::2], flat[1::2], strict=True))) == head


def test_format_1_is_read_as_it_was_written() -> None:
    """The fixture was written once, by the first version of the format, and is never written again: what records have gained
    since is at its default."""
    golden = json.loads(GOLDEN.read_text())
    assert read_back(golden["stored"]) == (
        [LATER | turn for turn in golden["turns"]],
        {"key_generation": 1, "notes": None, "fork_of": None, "rescore_of": None, "task_step": None}
        | {"awaits_reward": False}
        | golden["session"],
    )
    assert path_ids([bytes.fromhex(raw) for raw in golden["stored"]["ids"]]).hex() == golden["path_ids"]


def test_what_a_later_replica_added_to_a_turn_is_left_out() -> None:
    """A rolling upgrade: older replicas go on with sessions that newer ones have written in."""
    encoded = encode_turn(*conversation(1)[0])
    raw = join_entry(encoded, range(len(encoded.texts)))
    said, refs, meta = msgspec.msgpack.decode(raw)
    later = msgspec.msgpack.encode([[*said, "later"], refs, [*meta, {"later": 1}], "later"])
    assert decode_entry(later) == decode_entry(raw)
    assert decode_row(later) == decode_row(raw)


def test_what_a_later_replica_added_to_a_session_is_left_out() -> None:
    stored = json.loads(GOLDEN.read_text())["stored"]
    doc = unpack(bytes.fromhex(stored["doc"]))
    doc |= {"later": 1, "limits": doc.get("limits", {}) | {"max_later": 2}}
    later = stored | {"session": stored["session"] | {"later": "4"}, "doc": pack(to_json(doc)).hex()}
    assert read_back(later) == read_back(stored)


def read_back(stored: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Turns and session of a recording at rest, its bytes given as hex."""
    ids, logprobs, texts = ([bytes.fromhex(raw) for raw in stored[name]] for name in ("ids", "logprobs", "texts"))
    turns = [
        decode_turn(
            number, decode_entry(bytes.fromhex(raw)), ids[number], logprobs[number], lambda at: unpack(texts[at]), None
        )
        for number, raw in enumerate(stored["turns"])
    ]
    head = head_from_hash({name.encode(): value.encode() for name, value in stored["session"].items()})
    session = session_of("golden", head, bytes.fromhex(stored["doc"]))
    return [plain(one) for one in turns], session.model_dump(mode="json")


def plain(one: Turn) -> dict[str, Any]:
    """For JSON: bytes as hex, tuples as lists."""
    values = {name: value.hex() if isinstance(value, bytes) else value for name, value in one.model_dump().items()}
    plain_values: dict[str, Any] = json.loads(json.dumps(values))
    return plain_values
