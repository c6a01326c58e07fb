"""Which workers can take an order: by name, tokenizer, policy, version, and what has failed already."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from proxy.contracts.canonical import Job
from proxy.contracts.errors import NoWorker, TooManyRequests
from proxy.contracts.frames import TAKEOVER, ModelCard
from proxy.contracts.records import tokenizer_key
from proxy.placing import Away, Order, is_older, place
from proxy.routing import NoTokenizer

CARD = ModelCard("m", 100, policy_version="run-a/5", tokenizer_digest="t", capabilities=[TAKEOVER])
FIRST = Order("trial", "0" * 12, Job())


@dataclass(eq=False)
class Worker:
    id: str
    models: list[ModelCard] = field(default_factory=lambda: [CARD])
    eligible: bool = True
    draining: bool = False
    load: int = 0
    max_streams: int = 8
    behind: bool = False
    suspect: bool = False

    number: int = 1

    @property
    def process(self) -> str:
        return f"{self.id}/boot"

    @property
    def channel(self) -> str:
        return f"{self.process}/{self.number}"

    def serves(self, card: ModelCard) -> bool:
        return not self.behind


def card(**changes: object) -> ModelCard:
    fields = {name: getattr(CARD, name) for name in CARD.__struct_fields__}
    return ModelCard(**fields | changes)


def begun(**changes: object) -> Order:
    """A completion that somebody has begun: ten tokens of prompt, two of its own, the last one by run-a/5."""
    order = Order("trial", "0" * 12, Job(), attempt=1, prefix_ids=b"\0" * 40, sampled_ids=b"\0" * 8)
    order.tokenizer, order.begun_by, order.version = tokenizer_key("t"), CARD, "run-a/5"
    return dataclasses.replace(order, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (CARD, True),
        (card(policy_version="run-a/6"), True),
        (card(policy_version="run-a/4"), False),
        (card(policy_version="run-b/0"), True),
        (card(policy_version="base/0"), False),
        (card(policy="judge"), False),
        (card(tokenizer_digest="u"), False),
        (card(capabilities=[]), False),
        (card(synthetic=True), False),
        (card(context_tokens=12), False),
        (card(context_tokens=13), True),
    ],
)
def test_who_can_go_on_with_what_was_begun(other: ModelCard, fits: bool) -> None:
    worker = Worker("a", [other])
    if fits:
        assert place(begun(), [worker]) == (worker, other)
    else:
        with pytest.raises(Away):
            place(begun(), [worker])


def test_a_channel_that_was_lost_gets_no_other_attempt_but_its_process_on_the_next_one_does() -> None:
    one, two = Worker("one"), Worker("two")
    lost = begun(avoid=frozenset({one.channel}))
    assert place(lost, [one, two])[0] is two
    with pytest.raises(Away):
        place(lost, [one])
    back = Worker("one", number=2)
    assert place(lost, [back])[0] is back


def test_a_process_whose_engine_failed_gets_no_other_attempt_on_any_channel() -> None:
    one, back, two = Worker("one"), Worker("one", number=2), Worker("two")
    failed = begun(avoid=frozenset({one.process}))
    assert place(failed, [one, back, two])[0] is two
    with pytest.raises(Away):
        place(failed, [one, back])


def test_a_draining_worker_gets_nothing_new_and_one_that_is_behind_neither() -> None:
    for gone in (Worker("a", draining=True), Worker("a", behind=True)):
        other = Worker("b")
        assert {place(Order(f"trial-{n}", "0" * 12, Job()), [gone, other])[0].id for n in range(30)} == {"b"}
        with pytest.raises(NoWorker):
            place(FIRST, [gone])


def test_ids_wait_for_their_tokenizer_while_it_may_come_back_and_are_let_go_when_it_may_not() -> None:
    other = Worker("b", [card(tokenizer_digest="u")])
    order = dataclasses.replace(FIRST, tokenizer=tokenizer_key("t"), prefix_ids=b"\0" * 4)
    with pytest.raises(Away):
        place(order, [Worker("a", eligible=False), other])
    with pytest.raises(NoTokenizer):
        place(order, [Worker("a", draining=True), other])
    with pytest.raises(NoTokenizer):
        place(order, [other])
    with pytest.raises(NoWorker) as nobody:
        place(order, [])
    assert not isinstance(nobody.value, Away | NoTokenizer)


def test_versions_are_ordered_within_a_lineage_and_after_the_first_one() -> None:
    assert is_older("r/9", "r/10") and not is_older("r/10", "r/9") and not is_older("r/9", "r/9")
    assert is_older("base/0", "r/1") and not is_older("r/1", "base/0")
    assert not is_older("s/1", "r/9") and not is_older("r/1", "")


def test_a_suspect_worker_gets_turns_only_where_no_other_can_take_them() -> None:
    bad, good = Worker("bad", suspect=True), Worker("good")
    trials = [dataclasses.replace(FIRST, trial_id=f"trial-{number}") for number in range(16)]
    assert {place(order, [bad, good])[0].id for order in trials} == {"good"}
    good.load = 9
    with pytest.raises(TooManyRequests):  # it is waited for
        place(FIRST, [bad, good])
    for never in (Worker("good", eligible=False), Worker("good", [card(tokenizer_digest="u")]), bad):
        order = dataclasses.replace(FIRST, tokenizer=tokenizer_key("t"))
        assert place(order, [bad, never])[0] is bad


def test_a_model_that_was_served_is_waited_for_and_any_other_name_means_the_default_policy() -> None:
    default = Worker("default")
    order = dataclasses.replace(FIRST, model="judge")
    assert place(order, [default])[0] is default
    for workers in ([], [default], [default, Worker("leaving", [card(name="judge")], draining=True)]):
        with pytest.raises(Away, match="the model 'judge' now"):
            place(order, workers, is_model=True)
    judge = Worker("judge", [card(name="judge", policy="frozen"), card(name="other")])
    assert place(order, [default, judge], is_model=True) == (judge, judge.models[0])
    again = dataclasses.replace(order, attempt=1)
    with pytest.raises(Away):
        place(again, [default], is_model=True)
