"""The REST client: one table for both clients, errors as the tree, paging, events, and light to import."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import inspect
import json
import pydoc
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, get_args, get_type_hints

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from steno.client.client import AsyncClient, Client
from steno.client.transport import MSGPACK, call
from steno.contracts.errors import (
    BY_CODE,
    BadRequest,
    BodyTimeout,
    BudgetSpent,
    Gone,
    NotFound,
    NoWorker,
    ProtocolError,
    StenoError,
    Unreachable,
)
from steno.contracts.records import (
    Limits,
    MayDiffer,
    Sample,
    SampledRange,
    Session,
    Timings,
    TokenSpan,
    Turn,
    TurnAnnotation,
    floats_to_bytes,
    ids_to_bytes,
)
from steno.contracts.rest import Completion, GroupSpec, SessionSpec, Trial
from steno.contracts.wire.frames import ModelCard
from steno.contracts.worker_view import WorkerView

pytestmark = pytest.mark.usefixtures("pauses")

Handler = Callable[[httpx.Request], httpx.Response]


def steno(handler: Handler, **options: Any) -> Client:
    return Client("http://proxy/prefix/", transport=httpx.MockTransport(handler), **options)


def msgpack(body: Any) -> httpx.Response:
    return httpx.Response(200, content=msgspec.msgpack.encode(body), headers={"content-type": MSGPACK})


def session(trial_id: str) -> dict[str, Any]:
    return Session(trial_id=trial_id, created_at=1.0, updated_at=2.0).model_dump()


def refusal(status: int, code: str, message: str = "no", **headers: str) -> httpx.Response:
    body = {"error": {"code": code, "message": message, "field": "x.y", "retryable": False}, "request_id": "r1"}
    return httpx.Response(status, json=body, headers={"x-request-id": "r1", **headers})


def test_hello_world_brings_neither_server_nor_store_nor_model_code() -> None:
    """Nor does any other public name."""
    heavy = [
        "fastapi",
        "starlette",
        "uvicorn",
        "redis",
        "torch",
        "transformers",
        "vllm",
        "ray",
        "numpy",
        "typer",
        "asyncio",
    ]
    code = (
        f"import sys; from steno import *; Client, MayDiffer; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_another_is_not() -> None:
    import steno

    for name in steno.__all__:
        found = getattr(steno, name)
        assert found.__name__ == name and vars(found).get("__doc__", found.__doc__), name
    assert sorted(" ".join(steno._WHERE.values()).split()) == sorted(steno.__all__)
    assert set(steno.__all__) <= set(dir(steno))
    with pytest.raises(AttributeError, match="nothing"):
        _ = steno.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_program_needs_no_import_but_of_the_public_names(client: type) -> None:
    """What calls take, return and raise, and what records of theirs hold."""
    import steno

    met: set[type] = set()
    told = client.__doc__ or ""
    for name, method in inspect.getmembers(client, inspect.isfunction):
        if not name.startswith("_"):
            assert method.__doc__, name
            told += method.__doc__
            gather(get_type_hints(method).values(), met)
    met |= {kind for kind in BY_CODE.values() if re.search(rf"\b{kind.__name__}\b", told)}
    assert {Turn, Trial, WorkerView, TurnAnnotation, MayDiffer, NotFound} < met
    assert {kind.__name__ for kind in met} <= set(steno.__all__)


def gather(hints: Iterable[Any], met: set[type]) -> None:
    """Steno's own classes in annotations, and those in the fields and methods of these."""
    for hint in hints:
        gather(get_args(hint), met)
        if inspect.isclass(hint) and hint not in met and hint.__module__.startswith("steno"):
            met.add(hint)
            if not issubclass(hint, tuple):  # of numpy's arrays, which `get_type_hints` does not find
                gather(get_type_hints(hint).values(), met)
            for name, method in inspect.getmembers(hint, inspect.isfunction):
                if name in vars(hint) and name[0] != "_":
                    gather(get_type_hints(method).values(), met)


@pytest.mark.parametrize("package", ["steno", "steno_proxy", "steno_rollouts", "steno_trainer", "steno_worker"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (importlib.resources.files(package) / "py.typed").is_file()


def rows() -> list[str]:
    table = Client.__mro__[1]
    return [name for name, value in vars(table).items() if isinstance(value, call)]


@pytest.mark.parametrize("name", rows())
def test_calls_show_what_they_take_and_give(name: str) -> None:
    """As `inspect.signature`, `help` and notebooks find it."""
    blocking, waiting = getattr(Client, name), getattr(AsyncClient, name)
    shown = inspect.signature(blocking)
    assert next(iter(shown.parameters)) == "self"
    assert not {"args", "kwargs"} & set(shown.parameters)
    assert "Request" not in str(shown.return_annotation)
    assert inspect.signature(waiting) == shown
    assert inspect.iscoroutinefunction(waiting) and not inspect.iscoroutinefunction(blocking)
    assert blocking.__qualname__ == f"Client.{name}" and blocking.__doc__ == waiting.__doc__


def test_a_signature_names_parameters_and_the_class_that_comes_back() -> None:
    shown = inspect.signature(Client.register)
    assert list(shown.parameters) == ["self", "trial_id", "spec"] and shown.return_annotation is Trial
    assert get_type_hints(Client.register)["return"] is Trial
    assert list(inspect.signature(steno(lambda _: msgpack({})).samples).parameters) == ["trial_id"]
    filters = inspect.signature(Client.sessions)
    assert {"status", "group_id", "limit"} < set(filters.parameters) and "cursor" not in filters.parameters
    assert filters.return_annotation == Iterator[Session]
    told = re.sub(
        r"\n \| *", " ", pydoc.render_doc(Client, renderer=pydoc.plaintext)
    )  # Python 3.13 writes a parameter a line
    assert re.search(r"register\( ?self, trial_id: str \| None", told)


def test_a_method_of_ones_own_stays() -> None:
    class Mine(Client):
        def session(self, trial_id: str) -> Session:  # type: ignore[override]
            return Session(trial_id="mine", created_at=0.0, updated_at=0.0)

    assert Mine("http://proxy").session("a").trial_id == "mine"
    assert Mine.group is not None and inspect.isfunction(Mine.group)


def test_a_call_carries_key_prefix_and_escaped_ids() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return msgpack(session("a b"))

    assert steno(handler, key="k").session("a b/c").trial_id == "a b"
    assert seen[0].url.raw_path == b"/prefix/sessions/a%20b%2Fc"
    assert seen[0].headers["authorization"] == "Bearer k"
    assert seen[0].headers["accept"] == MSGPACK


def test_what_a_later_proxy_has_added_is_left_out() -> None:
    """At every level: a trainer that is older than its proxy goes on training."""
    ids, logprobs = ids_to_bytes([5, 6]), floats_to_bytes([float("nan"), -0.5])
    sampled = SampledRange(start=1, end=2, finish_reason="stop")
    known = Sample(
        trial_id="t", leaf_id="l", turn_ids=["l"], token_ids=ids, loss_mask=b"\0\1", sampling_logprobs=logprobs,
        spans=[TokenSpan(version="base/0", start=1, end=2)], completions=[sampled],
    )  # fmt: skip
    body = known.model_dump()
    later = body | {
        "later": 1,
        "completions": [sampled.model_dump() | {"later": [2]}],
        "spans": [body["spans"][0] | {"l": 3}],
    }
    assert steno(lambda request: msgpack({"items": [later], "later": 4})).samples("t") == [known]
    grown = session("t") | {"later": {}, "limits": {"max_turns": 3, "max_later": 5}}
    assert steno(lambda request: msgpack(grown)).session("t").limits == Limits(max_turns=3)


async def test_workers_come_as_records_also_of_a_later_and_of_an_earlier_proxy() -> None:
    card = {"name": "m", "context_tokens": 8, "capabilities": ["tools"], "new": 1}
    load = {"running": 1, "waiting": 0, "kv_used": 0.5, "new": 1}
    early = {
        "id": "w", "models": [card], "load": load, "in_flight": 1, "max_streams": 8, "connected": True, "healthy": True,
        "draining": False, "since": 1, "idle_s": 0.5,
    }  # fmt: skip

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"items": [early, early | {"address": "::1", "new": {}}], "new": 1})

    first, second = steno(handle).workers()
    assert (first.id, first.load.kv_used, first.since, first.address, second.address) == ("w", 0.5, 1.0, None, "::1")
    assert first.models == [ModelCard("m", 8, capabilities=["tools"])]
    async with AsyncClient("http://proxy", transport=httpx.MockTransport(handle)) as client:
        assert await client.workers() == [first, second]
    with pytest.raises(ProtocolError, match="not an answer of a Steno proxy"):
        steno(lambda _: httpx.Response(200, json={"items": [{"id": "w"}]}), retries=0).workers()


def test_turns_come_page_by_page_with_their_arrays_as_raw_bytes() -> None:
    asked: list[str] = []
    turn = Turn(turn_id="0" * 12, completion_ids=ids_to_bytes([1, 2]), timings=Timings(queued=1.0))

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["start"])
        last = asked[-1] == "1"
        items = [turn.model_copy(update={"index": int(asked[-1])}).model_dump()]
        return msgpack({"items": items, "next_start": None if last else 1})

    turns = list(steno(handler).turns("t"))
    assert [turn.index for turn in turns] == [0, 1]
    assert turns[0].completion_ids == ids_to_bytes([1, 2])
    assert asked == ["0", "1"]


def test_sessions_follow_the_cursor_with_the_same_filters() -> None:
    asked: list[dict[str, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        return msgpack({"items": [session(f"s{len(asked)}")], "next_cursor": "c" if len(asked) == 1 else None})

    assert [found.trial_id for found in steno(handler).sessions(status="open")] == ["s1", "s2"]
    assert asked == [{"status": "open"}, {"status": "open", "cursor": "c"}]


async def test_the_asynchronous_client_has_the_same_calls() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/turns"):
            return msgpack({"items": [], "next_start": None})
        if request.url.path.endswith("/sessions"):
            return msgpack({"items": [session("t")], "next_cursor": None})
        return msgpack(session("t"))

    async with AsyncClient("http://proxy", transport=httpx.MockTransport(handler)) as client:
        assert (await client.session("t")).trial_id == "t"
        assert (await client.complete("t", Completion(reward=0.0))).trial_id == "t"
        assert [found.trial_id async for found in client.sessions()] == ["t"]
        assert [turn async for turn in client.turns("t")] == []


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(404, "not_found"), NotFound),
        (refusal(410, "session_closed"), Gone),
        (refusal(403, "budget_spent"), BudgetSpent),
        (refusal(408, "body_timeout"), BodyTimeout),
        (refusal(410, "a word of a newer proxy"), Gone),
        (httpx.Response(404, text="<html>nginx</html>"), Unreachable),
        (httpx.Response(410), Unreachable),
        (httpx.Response(409, json={"detail": "no"}), Unreachable),
        (httpx.Response(404, json={"error": {"code": 404, "message": "of LiteLLM"}}), Unreachable),
        (refusal(500, "internal_error"), StenoError),
        (httpx.Response(200, text="<html>not Steno</html>"), ProtocolError),
        (httpx.Response(200, json={"unexpected": 1}), ProtocolError),
    ],
)
def test_a_refusal_raises_its_class_of_the_error_tree(answer: httpx.Response, kind: type[StenoError]) -> None:
    with pytest.raises(kind) as caught:
        steno(lambda request: answer, retries=0).session("t")
    assert type(caught.value) is kind


def test_an_error_names_field_and_request() -> None:
    with pytest.raises(NotFound, match=r"no \(request r1\)") as caught:
        steno(lambda request: refusal(404, "not_found")).session("t")
    assert caught.value.field == "x.y"


def test_what_may_pass_is_tried_again_after_the_time_the_proxy_names(pauses: list[float]) -> None:
    answers = [refusal(503, "store_unavailable", **{"retry-after": "3"}), msgpack(session("t"))]
    assert steno(lambda request: answers.pop(0)).session("t").trial_id == "t"
    assert pauses == [3.0]


def test_no_answer_is_unreachable_after_the_retries(pauses: list[float]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unreachable, match="http://proxy/prefix: refused"):
        steno(handler, retries=2).session("t")
    assert len(pauses) == 2


def test_what_will_not_pass_is_not_tried_again(pauses: list[float]) -> None:
    with pytest.raises(Gone):
        steno(lambda request: refusal(410, "session_closed")).session("t")
    assert pauses == []


def test_a_repeated_registration_of_a_group_names_the_same_group(pauses: list[float]) -> None:
    names: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        names.append(json.loads(request.content)["group_id"])
        if len(names) == 1:
            raise httpx.ReadError("cut off")
        group = {"group_id": names[-1], "size": 1, "created_at": 1.0}
        return httpx.Response(200, json={"group": group, "trials": [], "harness_key": None})

    steno(handler).create_group(GroupSpec(size=1))
    assert names[0] == names[1]


def test_what_was_changed_in_a_default_of_a_body_is_sent() -> None:
    sent: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return refusal(400, "invalid_request")

    def body(send: Callable[[Client], Any]) -> dict[str, Any]:
        with pytest.raises(BadRequest):
            send(steno(handler))
        return sent[-1]

    plain, changed = SessionSpec(run_id="x"), SessionSpec(run_id="x")
    changed.limits.max_turns = 50
    changed.sampling.force["temperature"] = 1.0
    changed.metadata["agent"] = "a"
    assert body(lambda client: client.register("t", plain)) == {"run_id": "x"}
    assert body(lambda client: client.register("t", changed)) == {
        "run_id": "x",
        "limits": {"max_turns": 50},
        "sampling": {"force": {"temperature": 1.0}},
        "metadata": {"agent": "a"},
    }
    assert changed.model_fields_set == {"run_id"}, "the caller's own stays as it is"
    nothing = SessionSpec(run_id=None)
    nothing.limits.max_turns = None
    assert body(lambda client: client.register("t", nothing)) == {"run_id": None, "limits": {"max_turns": None}}
    outcome = Completion(reward=1.0)
    outcome.metrics["steps"] = 3.0
    assert body(lambda client: client.complete("t", outcome)) == {"reward": 1.0, "metrics": {"steps": 3.0}}
    group = GroupSpec(size=8, group_id="g")
    group.task["id"] = 1
    assert body(lambda client: client.create_group(group)) == {"size": 8, "group_id": "g", "task": {"id": 1}}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([httpx.ReadError("cut off"), "name"], None),
        ([httpx.ReadError("cut off"), "of a load balancer", "name"], None),
        (["name"], NotFound),
        ([httpx.ConnectError("refused"), "name"], NotFound),
        ([503, "name"], NotFound),
        ([502, "name"], None),
    ],
)
def test_a_name_that_is_gone_when_its_retirement_is_repeated_was_retired(
    kind: Callable[..., Any], answers: list[Any], error: type[StenoError] | None
) -> None:
    left = list(answers)

    def handler(request: httpx.Request) -> httpx.Response:
        if isinstance(answer := left.pop(0), Exception):
            raise answer
        if answer == 503:  # the proxy's own: it did nothing
            return httpx.Response(503, json={"error": {"code": "store_unavailable", "message": "no", "field": None}})
        if answer == 502:  # a load balancer's: nobody knows
            return httpx.Response(502)
        body = {"error": {"code": "not_found", "message": "no", "field": "name"}}
        return httpx.Response(404, json=body if answer == "name" else None)

    async def retired() -> None:
        told = kind("http://proxy", transport=httpx.MockTransport(handler)).retire_model("m")
        assert (await told if inspect.isawaitable(told) else told) is None

    with contextlib.nullcontext() if error is None else pytest.raises(error):
        asyncio.run(retired())
    assert left == []


def test_an_error_without_words_of_its_own_is_named_by_its_kind() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    with pytest.raises(Unreachable, match=r"no answer from the proxy at http://proxy: ReadTimeout$"):
        Client("http://proxy", retries=0, transport=httpx.MockTransport(silent)).workers()


def events(*pairs: tuple[str, dict[str, Any]]) -> httpx.Response:
    text = ": keepalive\n\n" + "".join(f"id: {cursor}\ndata: {json.dumps(event)}\n\n" for cursor, event in pairs)
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def test_events_go_on_from_the_last_cursor_after_a_lost_connection_until_the_session_ends() -> None:
    cursors: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        cursors.append(request.headers.get("last-event-id"))
        if len(cursors) == 1:
            return events(("1", {"type": "turn"}))
        return events(("2", {"type": "completed"}))

    assert list(steno(handler).events("t")) == [("1", {"type": "turn"}), ("2", {"type": "completed"})]
    assert cursors == [None, "1"]


async def test_after_the_last_cursor_there_are_no_events_and_nothing_is_asked(pauses: list[float]) -> None:
    asked: list[httpx.Request] = []
    ended = httpx.MockTransport(lambda request: asked.append(request) or events())
    with Client("http://proxy", transport=ended) as client:
        assert list(client.events("t", after="end")) == []
    async with AsyncClient("http://proxy", transport=ended) as waiting:
        assert [event async for event in waiting.events("t", after="end")] == []
    assert asked == pauses == []


async def test_events_behind_a_redirect_are_refused_as_any_call_is() -> None:
    """As of an Ingress that asks for https. The body of a stream has not been read by then."""

    async def moved() -> AsyncIterator[bytes]:
        yield b"moved"

    where = {"location": "https://proxy/sessions/t/events"}
    blocking = httpx.MockTransport(lambda request: httpx.Response(308, headers=where, content=iter([b"moved"])))
    waiting = httpx.MockTransport(lambda request: httpx.Response(308, headers=where, content=moved()))
    with (
        Client("http://proxy", transport=blocking) as client,
        pytest.raises(StenoError, match="308 Permanent Redirect"),
    ):
        list(client.events("t"))
    async with AsyncClient("http://proxy", transport=waiting) as client:
        with pytest.raises(StenoError, match="308 Permanent Redirect"):
            [event async for event in client.events("t")]


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_that_clients_resolve_away_in_addresses_is_refused(name: str) -> None:
    for make in (
        lambda: GroupSpec(group_id=name, size=1),
        lambda: GroupSpec(run_id=name, size=1),
        lambda: SessionSpec(run_id=name),
    ):
        with pytest.raises(ValidationError, match=r"must not be '\.' or '\.\.'"):
            make()
    assert GroupSpec(group_id=f"{name}a", run_id=f"a/{name}", size=1).group_id == f"{name}a"


async def test_asynchronous_events_stop_at_a_refusal() -> None:
    async with AsyncClient(
        "http://proxy", transport=httpx.MockTransport(lambda r: refusal(404, "not_found"))
    ) as client:
        with pytest.raises(NotFound):
            async for _ in client.events("t"):
                pass


def test_both_clients_offer_the_same_public_calls() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert asyncio.iscoroutinefunction(AsyncClient.close)


UPDATE = {"update_id": "u", "version": "run/1", "transport": "stream", "created_at": 1.0}


def test_an_update_is_waited_for_longer_than_other_answers() -> None:
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return msgpack(UPDATE)

    with steno(handle, timeout_s=7.0) as client:
        assert client.update("u", wait_s=20).version == "run/1"
        client.update("u")
    waits, at_once = asked
    assert waits.url.path == "/prefix/policy/updates/u"
    assert (waits.url.query, waits.extensions["timeout"]["read"]) == (b"wait_s=20", 27.0)
    assert (at_once.url.query, at_once.extensions["timeout"]["read"]) == (b"", 7.0)


def test_whole_bytes_of_a_shard_are_sent_again_and_pieces_are_not() -> None:
    bodies: list[bytes] = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        if len(bodies) == 1:
            return refusal(503, "no_worker")
        return msgpack({"received": 7}) if len(bodies) == 2 else refusal(503, "no_worker")

    with steno(handle) as client:
        assert client.upload_shard("u", "a b.safetensors", 4, b"abc") == 7
        with pytest.raises(NoWorker):
            client.upload_shard("u", "a.safetensors", 4, (piece for piece in (b"ab", b"c")))
    assert bodies == [b"abc"] * 3


async def test_shards_go_up_in_pieces_from_either_kind_of_iterable() -> None:
    bodies: list[bytes] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(await request.aread())
        return msgpack({"received": 3})

    async def pieces():
        yield b"x"
        yield b"yz"

    async with AsyncClient("http://proxy", transport=httpx.MockTransport(handle)) as client:
        assert await client.upload_shard("u", "a.safetensors", 0, pieces()) == 3
        assert await client.upload_shard("u", "a.safetensors", 0, iter([b"x", b"yz"])) == 3
    assert bodies == [b"xyz", b"xyz"]
