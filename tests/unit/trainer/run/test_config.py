"""Settings of the trainer, and the DeepSpeed configuration that is made of them: what can't be is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from steno.contracts.errors import ConfigError
from steno_trainer.config import Decay, TrainerSettings
from steno_trainer.data.overlong import Overlong
from steno_trainer.model.deepspeed_config import OWNED, deepspeed_config, reference_config
from steno_trainer.model.zero_engine import learning_rate
from steno_trainer.objective.loss import Objective
from steno_trainer.objective.mismatch import Correction, CorrectionLevel
from steno_trainer.objective.ratios import RatioLevel
from steno_trainer.run.main import check_beforehand
from steno_trainer.run_config import RunSettings
from steno_trainer.step.step import objective_of
from tests.unit.trainer.launched import launched


def settings(**fields: Any) -> TrainerSettings:
    return TrainerSettings(**{"model": "m", **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"aggregation": "constant"}, "constant_tokens"),
        ({"constant_tokens": 5}, "constant_tokens"),
        ({"mismatch_low": 2.0}, "mismatch_low"),
        ({"mismatch": "masked", "mismatch_high": 0.5}, "mismatch_low"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"overlong_max_tokens": 5}, "overlong_buffer_tokens"),
        ({"overlong_buffer_tokens": 5}, "overlong_buffer_tokens"),
        ({"overlong_max_tokens": 5, "overlong_buffer_tokens": 6}, "overlong_buffer_tokens"),
        ({"schedule": "cosine"}, "total_steps"),
        ({"warmup_steps": 5, "total_steps": 4}, "warmup_steps"),
        ({"offload_parameters": True}, "offload_parameters"),
        ({"reference": "r"}, "reference"),
        ({"distillation": 1.0}, "distillation"),
        ({"distillation": 1.0, "reference": "r", "objective": "sft"}, "distillation"),
        ({"distillation": 1.0, "reference": "r", "count_silent_groups": False}, "count_silent_groups"),
        ({"precision": "float32", "reduce_precision": "bfloat16"}, "reduce_precision"),
        ({"lora_alpha": 5}, "lora_alpha"),
        ({"lora_targets": ["q_proj"]}, "lora_targets"),
        ({"dual_clip": 5.0}, "dual_clip"),
        ({"dual_clip": 5.0, "objective": "cispo"}, "dual_clip"),
        ({"overlong_penalty_factor": 9.0}, "overlong_penalty_factor"),
        ({"mismatch": "masked", "proximal": "sampler"}, "mismatch"),
        ({"mismatch_low": 0.25}, "mismatch_low"),
        ({"mismatch_high": 4.0, "mismatch": "off"}, "mismatch_high"),
        ({"mismatch_level": "sequence", "mismatch": "off"}, "mismatch_level"),
        ({"mismatch_level": "geometric", "proximal": "sampler"}, "mismatch_level"),
        ({"mismatch_high": 4.0, "proximal": "sampler"}, "mismatch_high"),
    ],
)
def test_combinations_that_can_not_be_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**fields).check()
    assert refused.value.field == named


def test_what_truncates_has_no_lowest_ratio_to_be_above() -> None:
    given = settings(mismatch="truncated", mismatch_high=0.5)
    given.check()
    assert objective_of(given).mismatch.high == 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_alpha": 5}, "lora_alpha: got 5, needs lora_rank; lora_rank is unset"),
        ({"dual_clip": 5.0}, "dual_clip: got 5.0, needs objective: dual_clip or FILE.py:function; objective is clip"),
        (
            {"mismatch_high": 4.0, "proximal": "sampler"},
            "mismatch_high: got 4.0, needs mismatch: truncated or masked, and proximal: trainer; mismatch is truncated, "
            "proximal is sampler",
        ),
        (
            {"offload_parameters": True},
            "offload_parameters: got true, needs offload_optimizer; offload_optimizer is false",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_told_what_it_needs(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**fields).check()
    assert str(refused.value) == words


@pytest.mark.parametrize(
    "fields",
    [
        {"dual_clip": 5.0, "objective": "dual_clip"},
        {"dual_clip": 5.0, "clip_high": 0.5, "objective": "my.py:loss"},
        {"overlong_penalty_factor": 9.0, "overlong_max_tokens": 5, "overlong_buffer_tokens": 2},
        {"mismatch": "masked", "mismatch_low": 0.25, "mismatch_high": 4.0},
        {"mismatch": "off", "proximal": "sampler"},  # says what holds
    ],
)
def test_a_setting_that_does_something_is_taken(fields: dict[str, Any]) -> None:
    settings(**fields).check()


RATIO_1 = (
    "has no effect without a ratio other than 1: mini_batches or epochs above 1, or proximal: sampler; mini_batches is 1, "
    "epochs is 1, proximal is trainer"
)


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"clip_low": 0.1, "clip_high": 0.5}, ["clip_low: got 0.1", "clip_high: got 0.5"]),
        ({"objective": "dual_clip", "dual_clip": 5.0}, ["dual_clip: got 5.0"]),
        ({"objective": "cispo", "clip_high": 2.0}, ["clip_high: got 2.0"]),
        ({"clip_high": 0.5, "mini_batches": 2}, []),
        ({"clip_high": 0.5, "epochs": 2}, []),
        ({"clip_high": 0.5, "proximal": "sampler"}, []),
        ({"clip_high": 0.5, "objective": "my.py:loss"}, []),
        ({}, []),
    ],
)
def test_bounds_of_clipping_where_no_ratio_differs_from_1_are_taken_with_a_warning(
    fields: dict[str, Any], warned: list[str]
) -> None:
    (given := settings(**fields)).check()
    assert given.idle() == [f"{setting}, {RATIO_1}" for setting in warned]


def test_the_first_rank_warns_of_them_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in ("0", "1"):
        launched(monkeypatch, rank)
        check_beforehand(RunSettings(model="m", clip_high=0.5))
    assert caplog.messages == [f"clip_high: got 0.5, {RATIO_1}"]


def test_a_default_that_is_written_down_is_never_in_the_way() -> None:
    """A file with every setting, as somebody keeps it, of which some do nothing."""
    for given in ({}, {"objective": "sft", "records": "r.jsonl"}):
        plain = RunSettings(model="m", **given)
        fields = {name: getattr(plain, name) for name in RunSettings.model_fields}
        RunSettings(**fields).check()


FLOATS = [
    name
    for name, field in RunSettings.model_fields.items()
    if {float, Decay} & {field.annotation, *get_args(field.annotation)}
]


@pytest.mark.parametrize("name", FLOATS)
def test_a_number_is_finite(name: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        given = (0.9, value) if name == "betas" else value
        with pytest.raises(ValidationError, match=name):
            RunSettings(**{"model": "m", name: given})
    with pytest.raises(ConfigError, match=rf"{name.replace('_', '-')}.*finite"):
        RunSettings.load({"model": "m", name: [0.9, "nan"] if name == "betas" else "nan"}, None)


@pytest.mark.parametrize("betas", [(1.5, 0.9), (0.9, 1.0), (-0.1, 0.95), (0.9, -0.1)])
def test_decays_of_adamw_are_at_least_0_and_below_1(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        settings(betas=betas)
    assert settings(betas=(0.0, 0.999)).betas == (0.0, 0.999)


def test_all_numbers_are_among_those() -> None:
    assert {"learning_rate", "entropy_bonus", "betas", "take_s", "probe_tolerance"} <= set(FLOATS)


def test_the_defaults_can_be() -> None:
    settings().check()
    assert settings().overlong == Overlong()
    settings(importance_sampling_level="sequence", proximal="sampler").check()
    assert objective_of(settings(proximal="sampler")).around_sampler
    for name, words in (("mismatch", Correction), ("importance_sampling_level", RatioLevel)):
        assert [word.value for word in words] == list(TrainerSettings.model_fields[name].annotation.__args__)
    levels, _unset = TrainerSettings.model_fields["mismatch_level"].annotation.__args__
    assert list(levels.__args__) == [word.value for word in CorrectionLevel]
    assert objective_of(settings(mismatch_level="sequence")).mismatch.level is CorrectionLevel.SEQUENCE


def test_tokens_that_share_a_ratio_have_one_weight() -> None:
    for level in ("sequence", "completion"):
        given = {"importance_sampling_level": level, "mini_batches": 4}
        with pytest.raises(
            ConfigError, match=f"mismatch_level: got token, must be .* importance_sampling_level is {level}"
        ):
            settings(**given, mismatch_level="token").check()
        settings(**given, mismatch_level="geometric").check()
    settings(mismatch_level="token").check()


def test_bounds_that_nobody_set_are_those_of_the_level() -> None:
    assert objective_of(settings()) == Objective(0.2, 0.28)
    by_sequence = {"importance_sampling_level": "sequence", "mini_batches": 4}
    assert objective_of(settings(**by_sequence)) == Objective(3e-4, 4e-4)
    assert objective_of(settings(**by_sequence, clip_high=0.01)) == Objective(3e-4, 0.01)
    settings(**by_sequence).check()


def test_the_rate_warms_up_and_ends_at_nothing() -> None:
    cosine = settings(learning_rate=1.0, warmup_steps=2, total_steps=10, schedule="cosine")
    rates = [learning_rate(cosine, step) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5) and rates[10:] == pytest.approx([0.0, 0.0])
    linear = settings(learning_rate=1.0, total_steps=4, schedule="linear")
    assert [learning_rate(linear, step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert learning_rate(settings(learning_rate=1.0), 10**6) == 1.0


def test_the_made_configuration_says_what_deepspeed_would_guess() -> None:
    made = deepspeed_config(settings(max_grad_norm=0.0), cuda=False)
    assert made["gradient_clipping"] == 0.0
    assert made["zero_optimization"]["stage"] == 3
    assert made["bf16"]["enabled"] and made["data_types"]["grad_accum_dtype"] == "fp32"
    assert made["communication_data_type"] == "fp32"
    halved = deepspeed_config(settings(reduce_precision="bfloat16"), cuda=False)
    assert halved["communication_data_type"] == "bf16"
    assert made["managed_gradient_accumulation"] is False
    assert made["optimizer"]["params"]["torch_adam"]
    assert "optimizer" not in reference_config(made)


def test_adam_of_offloaded_state_is_deepspeeds_own_on_gpus_only() -> None:
    offloaded = settings(offload_optimizer=True, offload_parameters=True)
    gpu, cpu = (deepspeed_config(offloaded, cuda=cuda) for cuda in (True, False))
    assert "torch_adam" not in gpu["optimizer"]["params"] and "zero_force_ds_cpu_optimizer" not in gpu
    assert cpu["optimizer"]["params"]["torch_adam"] and cpu["zero_force_ds_cpu_optimizer"] is False
    assert gpu["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in reference_config(gpu)["zero_optimization"]


def test_a_file_is_laid_over_and_keeps_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 5}, "aio": {"block_size": 1}}))
    made = deepspeed_config(settings(deepspeed=file), cuda=False)
    assert made["zero_optimization"]["reduce_bucket_size"] == 5 and made["zero_optimization"]["stage"] == 3
    assert made["aio"] == {"block_size": 1}


@pytest.mark.parametrize("key", OWNED)
def test_a_file_may_not_set_what_a_setting_does(key: str, tmp_path: Path) -> None:
    value: Any = 1
    for word in reversed(key.split(".")):
        value = {word: value}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=key) as refused:
        deepspeed_config(settings(deepspeed=file), cuda=False)
    assert refused.value.field == "deepspeed"
    assert not OWNED[key] or (OWNED[key] in TrainerSettings.model_fields and OWNED[key] in str(refused.value))


def test_a_file_may_not_leave_a_part_of_the_optimizer_on_the_gpu(tmp_path: Path) -> None:
    """Twin-Flow: that part would keep the peak rate, whatever `schedule` says, and be in no checkpoint."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"ratio": 0.3, "buffer_count": 8}}}))
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer\.ratio can't be set here"):
        deepspeed_config(settings(deepspeed=file, offload_optimizer=True), cuda=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero_optimization": None}, "zero_optimization: got null"),
        ({"zero_optimization": {"offload_optimizer": None}}, r"zero_optimization\.offload_optimizer: got null"),
        ({"zero_optimization": {"offload_param": None}}, r"zero_optimization\.offload_param: got null"),
        ({"bf16": None}, "bf16: got null"),
        ({"optimizer": []}, r"optimizer: got \[\]"),
        ({"optimizer": {"params": 3}}, r"optimizer\.params: got 3"),
        ({"data_types": "fp32"}, 'data_types: got "fp32"'),
    ],
)
def test_a_file_may_not_take_away_a_whole_part_of_what_settings_made(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Without it DeepSpeed would take defaults of its own: another stage, another rate."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=rf"^deepspeed: {file}: {words}, must be an object$") as refused:
        deepspeed_config(settings(deepspeed=file, offload_optimizer=True, offload_parameters=True), cuda=True)
    assert refused.value.field == "deepspeed"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_none_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        deepspeed_config(settings(deepspeed=file), cuda=False)
