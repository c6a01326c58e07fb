"""The worker's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_worker.config import WorkerSettings, dial_url


def test_the_environment_gives_several_proxies_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_WORKER_PROXY", "http://a:1,https://b/prefix,wss://c")
    settings = WorkerSettings.load({"model": "m"}, None)
    dialled = ["ws://a:1/workers/connect", "wss://b/prefix/workers/connect", "wss://c/workers/connect"]
    assert [dial_url(url) for url in settings.proxy] == dialled, "ws is taken as it was"


@pytest.mark.parametrize("url", ["ftp://a:1", "a:1", "http://", "http://a?x=1"])
def test_what_is_no_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="proxy"):
        WorkerSettings.load({"proxy": [url]}, None)


def test_one_proxy_is_not_dialled_twice() -> None:
    with pytest.raises(ConfigError, match="the same proxy is given twice"):
        WorkerSettings.load({"proxy": ["http://a:1", "ws://a:1"]}, None)


def test_engine_arguments_may_be_words_or_a_mapping() -> None:
    assert WorkerSettings(engine_args=["--max-num-seqs", "4"]).engine_args == ["--max-num-seqs", "4"]
    mapping = {"max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False}
    words = ["--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching"]
    assert WorkerSettings(engine_args=mapping).engine_args == words  # type: ignore[arg-type]


def test_lists_objects_and_null_in_a_mapping_are_what_a_command_line_says_of_them(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(
        "engine_args:\n"
        "  hf_overrides: {rope_parameters: {rope_type: yarn, factor: 4.0}, use_cache: true}\n"
        "  lora_target_modules: [q_proj, v_proj]\n"
        "  limits: [{image: 2}, 1, null]\n"
        "  gpu_memory_utilization: 0.9\n"
        "  quantization: null\n"
    )
    assert WorkerSettings.load({}, file).engine_args == [
        "--hf-overrides", '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "use_cache": true}',
        "--lora-target-modules", "q_proj", "v_proj", "--limits", '{"image": 2}', "1", "null", "--gpu-memory-utilization", "0.9",
    ]  # fmt: skip


def test_each_worker_without_a_name_gets_its_own() -> None:
    assert WorkerSettings().worker_id != WorkerSettings().worker_id
