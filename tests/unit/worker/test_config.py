"""The worker's settings."""

from __future__ import annotations

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


def test_each_worker_without_a_name_gets_its_own() -> None:
    assert WorkerSettings().worker_id != WorkerSettings().worker_id
