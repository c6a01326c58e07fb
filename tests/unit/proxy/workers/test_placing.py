"""Which workers can take an order: by name, tokenizer, policy, version, and what has failed already."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest, NoWorker, TooManyRequests
from steno.contracts.records import tokenizer_key
from steno.contracts.wire.frames import TAKEOVER, TOKENIZES, ModelCard
from steno_proxy.workers.placement import Order, PromptPrefix, WorkersAway, is_older, place, to_tokenize
from steno_proxy.workers.routing import NoTokenizer

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
    prefix = PromptPrefix(b"\0" * 40, tokenizer=tokenizer_key("t"))
    order = Order("trial", "0" * 12, Job(), attempt=1, prefix=prefix, sampled_ids=b"\0" * 8)
    order.begun_by, order.last_version = CARD, "run-a/5"
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
        with pytest.raises(WorkersAway):
            place(begun(), [worker])


def test_a_channel_that_was_lost_gets_no_other_attempt_but_its_process_on_the_next_one_does() -> None:
    one, two = Worker("one"), Worker("two")
    lost = begun(avoid=frozenset({one.channel}))
    assert place(lost, [one, two])[0] is two
    with pytest.raises(WorkersAway):
        place(lost, [one])
    back = Worker("one", number=2)
    assert place(lost, [back])[0] is back


def test_a_process_whose_engine_failed_gets_no_other_attempt_on_any_channel() -> None:
    one, back, two = Worker("one"), Worker("one", number=2), Worker("two")
    failed = begun(avoid=frozenset({one.process}))
    assert place(failed, [one, back, two])[0] is two
    with pytest.raises(WorkersAway):
        place(failed, [one, back])


def test_that_no_worker_is_connected_yet_is_told_from_workers_that_can_not_serve_it() -> None:
    for workers, said in (
        ([], "no worker is connected: start one"),
        ([Worker("a", draining=True)], "no worker is connected"),
        ([Worker("a", behind=True)], "is connected now"),
    ):
        with pytest.raises((NoWorker, WorkersAway), match=said):
            place(FIRST, workers)


def test_a_draining_worker_gets_nothing_new_and_one_that_is_behind_neither() -> None:
    for gone in (Worker("a", draining=True), Worker("a", behind=True)):
        other = Worker("b")
        assert {place(Order(f"trial-{n}", "0" * 12, Job()), [gone, other])[0].id for n in range(30)} == {"b"}
        with pytest.raises(NoWorker):
            place(FIRST, [gone])


def test_ids_wait_for_their_tokenizer_while_it_may_come_back_and_are_let_go_when_it_may_not() -> None:
    other = Worker("b", [card(tokenizer_digest="u")])
    order = dataclasses.replace(FIRST, prefix=PromptPrefix(b"\0" * 4, tokenizer=tokenizer_key("t")))
    with pytest.raises(WorkersAway):
        place(order, [Worker("a", eligible=False), other])
    with pytest.raises(NoTokenizer):
        place(order, [Worker("a", draining=True), other])
    with pytest.raises(NoTokenizer):
        place(order, [other])
    with pytest.raises(NoWorker) as nobody:
        place(order, [])
    assert not isinstance(nobody.value, WorkersAway | NoTokenizer)


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
        order = dataclasses.replace(FIRST, prefix=PromptPrefix(tokenizer=tokenizer_key("t")))
        assert place(order, [bad, never])[0] is bad


def test_a_model_that_was_served_is_waited_for_and_any_other_name_means_the_default_policy() -> None:
    default = Worker("default")
    order = dataclasses.replace(FIRST, model="judge")
    assert place(order, [default])[0] is default
    for workers in ([], [default], [default, Worker("leaving", [card(name="judge")], draining=True)]):
        with pytest.raises(WorkersAway, match="the model 'judge' now"):
            place(order, workers, is_model=True)
    judge = Worker("judge", [card(name="judge", policy="frozen"), card(name="other")])
    assert place(order, [default, judge], is_model=True) == (judge, judge.models[0])
    again = dataclasses.replace(order, attempt=1)
    with pytest.raises(WorkersAway):
        place(again, [default], is_model=True)


def test_a_name_that_is_no_models_waits_for_the_default_policy_and_is_never_another_ones() -> None:
    default, judge = Worker("default"), Worker("judge", [card(name="judge", policy="frozen", tokenizer_digest="u")])
    for model in ("gpt-5", ""):
        order = dataclasses.replace(FIRST, model=model)
        assert place(order, [judge])[0] is judge, "nobody has served the default policy"
        assert place(order, [judge, default], has_default=True)[0] is default
        for workers in ([], [judge], [judge, Worker("leaving", draining=True)]):
            with pytest.raises(WorkersAway, match=f"the policy 'default' now, which the model name {model!r} means"):
                place(order, workers, has_default=True)
            recorded = dataclasses.replace(order, prefix=PromptPrefix(b"\0" * 4, tokenizer=tokenizer_key("t")))
            with pytest.raises(WorkersAway):  # and does not begin anew in another tokenizer
                place(recorded, workers, has_default=True)
    named = dataclasses.replace(FIRST, model="judge")
    assert place(named, [judge], is_model=True, has_default=True)[0] is judge


NEEDY = {
    "allowed_token_ids": Job(sampling=Sampling(allowed_token_ids=[1])),
    "bad_words": Job(sampling=Sampling(bad_words=["no"])),
    "include_stop_str_in_output": Job(shows_stop=True),
    "skip_special_tokens": Job(shows_special=True),
    "structured_outputs.regex": Job(response_format=ResponseFormat("regex", regex="a")),
    "structured_outputs.choice": Job(response_format=ResponseFormat("choice", choice=["a"])),
    "structured_outputs.grammar": Job(response_format=ResponseFormat("grammar", grammar="a")),
    "add_generation_prompt": Job(template_kwargs={"add_generation_prompt": False}),
    "continue_final_message": Job(template_kwargs={"continue_final_message": True}),
}


@pytest.mark.parametrize("field", NEEDY)
def test_a_field_goes_only_to_who_honours_it(field: str) -> None:
    """An older worker, whose card has no `fields`, would leave it out in silence."""
    order = Order("trial", "0" * 12, NEEDY[field])
    old, new = Worker("old"), Worker("new", [card(fields=[field])])
    for trial in range(8):
        assert place(dataclasses.replace(order, trial_id=str(trial)), [old, new])[0] is new
    with pytest.raises(BadRequest, match="by the served model") as refused:
        place(order, [old])
    assert refused.value.field == field


def test_what_every_worker_knows_goes_to_any() -> None:
    plain = Job(template_kwargs={"enable_thinking": False}, response_format=ResponseFormat("json_object"))
    assert place(Order("trial", "0" * 12, plain), [Worker("old")])[0].id == "old"


def test_ids_can_be_given_of_every_model_that_has_some() -> None:
    order = Order("trial", "0" * 12, Job(), returns_ids=True)
    assert place(order, [Worker("old")])[0].id == "old"
    with pytest.raises(BadRequest) as refused:
        place(order, [Worker("text", [card(text_only=True)])])
    assert refused.value.field == "return_token_ids"


def test_tokens_are_said_of_the_model_that_is_meant_by_a_worker_that_can() -> None:
    able = [card(capabilities=[TOKENIZES]), card(name="other", capabilities=[TOKENIZES])]
    workers = [Worker("old"), Worker("a", able[:1]), Worker("b", able[1:]), Worker("away", able[:1], eligible=False)]

    def asked(model: str, some: list[Worker], job: Job | None = None, is_model: bool = False) -> str:
        return to_tokenize("trial", job or Job(), some, model, is_model=is_model)[0].id

    assert (asked("m", workers), asked("other", workers)) == ("a", "b")
    assert asked("gpt", workers[:2]) == "a"
    with pytest.raises(BadRequest, match="older release"):
        asked("m", [Worker("old"), Worker("text", [card(text_only=True)])])
    with pytest.raises(NoWorker):
        asked("gone", workers, is_model=True)
    with pytest.raises(NoWorker):
        asked("m", workers[3:])
    judge = Worker("judge", [card(name="judge", policy="frozen", capabilities=[TOKENIZES])])
    assert asked("gpt", [judge]) == "judge"
    with pytest.raises(NoWorker, match="the policy 'default' now"):
        to_tokenize("trial", Job(), [judge], "gpt", is_model=False, has_default=True)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
    with pytest.raises(BadRequest, match="not process image"):
        asked("m", workers, Job(messages=[{"role": "user", "content": [picture]}]))
