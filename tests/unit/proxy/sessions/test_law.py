"""What a trial does to its agent's sampling."""

from __future__ import annotations

import pytest

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest
from steno.contracts.records import SamplingPolicy
from steno_proxy.sessions.law import MIN_TEMPERATURE, apply, check
from tests.unit.proxy.sessions.agent import TOOLS

STRICT = {"type": "function", "function": {"name": "edit", "strict": True}}
BENT = Job(
    tools=[*TOOLS, STRICT],
    tool_choice="function:edit",
    parallel_tool_calls=False,
    response_format=ResponseFormat(type="json_object"),
    sampling=Sampling(
        temperature=0.0, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1,
        logit_bias={5: -100.0}, min_tokens=3, max_tokens=50, seed=1, stop=["END"], ignore_eos=True,
    ),
)  # fmt: skip


def test_an_open_policy_changes_nothing_for_a_trial_that_does_not_train():
    job, changed = apply(SamplingPolicy(), BENT)
    assert job is BENT
    assert changed == {}


def test_a_training_trial_is_neutralised_by_default():
    job, changed = apply(SamplingPolicy(neutralise=True), BENT)
    assert job.sampling.is_plain()
    assert job.sampling == Sampling(max_tokens=50, seed=1, stop=["END"])
    assert (job.tool_choice, job.parallel_tool_calls) == ("auto", True)
    assert job.tools == [*TOOLS, {"type": "function", "function": {"name": "edit", "strict": False}}]
    assert job.response_format == BENT.response_format
    assert changed["top_p"] == {"asked": 0.9, "served": 1.0}
    assert changed["temperature"] == {"asked": 0.0, "served": 1.0}
    assert changed["tool_choice"] == {"asked": "function:edit", "served": "auto"}
    assert changed["parallel_tool_calls"] == {"asked": False, "served": True}
    assert changed["tools.1.function.strict"] == {"asked": True, "served": False}
    assert BENT.tools[1] is STRICT
    assert STRICT["function"]["strict"] is True


def test_the_policy_says_whether_to_neutralise_whatever_the_purpose():
    assert apply(SamplingPolicy(neutralise=False), BENT) == (BENT, {})
    assert apply(SamplingPolicy(neutralise=True), BENT)[0].sampling.is_plain()


@pytest.mark.parametrize("plain", [Job(), Job(tool_choice="none", sampling=Sampling(temperature=0.7, max_tokens=5))])
def test_a_plain_request_is_left_as_it_is(plain):
    job, changed = apply(SamplingPolicy(neutralise=True), plain)
    assert job is plain
    assert changed == {}


@pytest.mark.parametrize(("asked", "served"), [(0.001, 1.0), (0.0099, 1.0), (MIN_TEMPERATURE, MIN_TEMPERATURE)])
def test_a_temperature_that_means_greedy_is_neutralised_as_greedy_is(asked, served):
    """Engines refuse it: it would be a 400 on every turn."""
    job, _ = apply(SamplingPolicy(neutralise=True), Job(sampling=Sampling(temperature=asked)))
    assert job.sampling.temperature == served


def test_forced_values_win_over_the_agents_and_both_are_known():
    policy = SamplingPolicy(force={"temperature": 1, "max_tokens": 10, "logit_bias": {"7": 1.5}})
    job, changed = apply(policy, BENT)
    assert (job.sampling.temperature, job.sampling.max_tokens, job.sampling.logit_bias) == (1.0, 10, {7: 1.5})
    assert job.sampling.top_p == 0.9
    assert changed["temperature"] == {"asked": 0.0, "served": 1.0}
    assert set(changed) == {"temperature", "max_tokens", "logit_bias"}


def test_forcing_comes_after_neutralising():
    job, changed = apply(SamplingPolicy(force={"top_p": 0.95}, neutralise=True), BENT)
    assert job.sampling.top_p == 0.95
    assert changed["top_p"] == {"asked": 0.9, "served": 0.95}
    assert not job.sampling.is_plain(), "and the record says so: such tokens are not trained"


@pytest.mark.parametrize(
    ("force", "field"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": "END"}, "stop"),
    ],
)
def test_a_policy_that_can_not_be_applied_is_refused_by_field(force, field):
    for refuse in (check, lambda policy: apply(policy, Job())):
        with pytest.raises(BadRequest) as refused:
            refuse(SamplingPolicy(force=force))
        assert refused.value.field == f"sampling.force.{field}"


def test_forcing_a_bent_law_contradicts_neutralise_true():
    check(SamplingPolicy(neutralise=True, force={"temperature": 0.7, "seed": None}))
    check(SamplingPolicy(force={"top_p": 0.9}))
    with pytest.raises(BadRequest) as refused:
        check(SamplingPolicy(neutralise=True, force={"temperature": 1.0, "top_p": 0.9}))
    assert refused.value.field == "sampling.force.top_p"


@pytest.mark.parametrize(
    "force",
    [
        {"temperature": 0.001},
        {"logit_bias": {"5": 1e300}},
        {"logit_bias": {"-5": 1.0}},
        {"stop_token_ids": [-5]},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop": ["\ud800"]},
    ],
)
def test_what_every_engine_would_refuse_is_refused_at_registration(force):
    with pytest.raises(BadRequest) as refused:
        check(SamplingPolicy(force=force))
    assert refused.value.field == f"sampling.force.{next(iter(force))}"
