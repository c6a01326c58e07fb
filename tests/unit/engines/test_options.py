"""Wrong settings are named before anything is loaded."""

from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno.models import TINY
from steno_worker.engines.options import engine_options, model_directory
from steno_worker.engines.transformers.engine import TransformersEngine

DEFAULTS = {"threads": 1, "pace_s": 0.5}


@pytest.mark.parametrize(
    "given", [{"threads": 2}, ["threads=2"], ["--threads", "2"], ["--threads=2"], {"threads": "2"}]
)
def test_arguments_are_read_as_mapping_or_words(given: object) -> None:
    assert engine_options(given, DEFAULTS) == {"threads": 2, "pace_s": 0.5}


@pytest.mark.parametrize(
    ("given", "named"), [(["--threats", "2"], "threats"), (["--threads", "two"], "threads"), (["--threads"], "threads")]
)
def test_a_wrong_argument_is_named(given: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_options(given, DEFAULTS)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99", ""])
def test_a_device_that_is_not_there_is_named_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_args.device: got {device}, must be cpu or one of .* CUDA devices"):
        TransformersEngine(TINY, stop_ids=frozenset(), device=device)


def test_the_shipped_model_is_the_default() -> None:
    assert model_directory(None, weights=True) == TINY


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_directory_without_a_model_is_refused(tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=missing):
        model_directory(tmp_path, weights=True)
    with pytest.raises(ConfigError, match="not a directory"):
        model_directory(tmp_path / "none", weights=False)
