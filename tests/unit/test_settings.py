"""Settings: command line > environment > file > default; what is not known or not valid is refused by name and source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field, SecretStr

from steno.config.settings import PREFIXES, ProxyUrl, Settings, SettingsConfigDict, admin_key_here
from steno.contracts.errors import ConfigError
from steno_cli.terminal.connection import ClientSettings
from steno_proxy.config.settings import ProxySettings
from steno_worker.config import WorkerSettings


class Nested(BaseModel):
    depth: int = 1
    width: int = 1
    flat: bool = False


class Example(Settings):
    model_config = SettingsConfigDict(env_prefix="STENO_")

    port: int = Field(8000, ge=0, le=65535)
    admin_key: SecretStr | None = None
    worker_key: SecretStr | None = None
    redis_url: str | None = None
    words: list[str] = Field(default_factory=list)
    nested: Nested = Nested()
    free: dict[str, Any] = Field(default_factory=dict)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("STENO_"):
            monkeypatch.delenv(name)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "steno.yaml", "port: 1\nredis_url: redis://file\nwords: [file]\n")
    monkeypatch.setenv("STENO_PORT", "2")
    monkeypatch.setenv("STENO_REDIS_URL", "redis://environment")
    settings = Example.load({"port": "3", "redis_url": None, "words": []}, file)
    assert (settings.port, settings.redis_url, settings.words) == (3, "redis://environment", ["file"])
    assert [settings.origin(key) for key in ("port", "redis_url", "words", "nested")] == [
        "--port",
        "STENO_REDIS_URL",
        f"words in {file}",
        "default",
    ]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STENO_PROT": "1"}, "STENO_PROT: no such setting; did you mean STENO_PORT?"),
        ({"STENO_PORT": "x"}, "STENO_PORT: Input should be a valid integer"),
        ({"STENO_PORT": "70000"}, "STENO_PORT: Input should be less than or equal to 65535"),
        ({"STENO_WORDS": "[1"}, "STENO_WORDS: not valid JSON"),
        ({"STENO_NESTED__DEPTH": "x"}, "STENO_NESTED__DEPTH: Input should be a valid integer"),
    ],
)
def test_a_bad_variable_is_refused_by_name(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        Example.load({}, None)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "prot: 1", "prot in {file}: no such setting; did you mean port?"),
        ("c.toml", "port = -1", "port in {file}: Input should be greater than or equal to 0"),
        ("c.toml", "port = ", "{file}: not valid TOML"),
        ("c.yaml", "a: [", "{file}: not valid YAML"),
        ("c.yaml", "- port", "{file}: got a list, must be a mapping of settings by name"),
        ("c.yaml", "true: 1", "{file}: got the key True (bool), must be the name of a setting"),
        ("c.yaml", "redis_url: 42", "redis_url in {file}: got a value of type int, must be text: put it in quotes"),
        ("c.yaml", "redis_url: true", "redis_url in {file}: got a value of type bool, must be text: put it in quotes"),
        (
            "c.yaml",
            "words: [a, 1.5]",
            "words in {file} at words.1: got a value of type float, must be text: put it in quotes",
        ),
        (
            "c.toml",
            "redis_url = 2026-11-30",
            "redis_url in {file}: got a value of type date, must be text: put it in quotes",
        ),
        ("c.yaml", "admin_key: 42", "admin_key in {file}: got a value of type int, must be text: put it in quotes"),
        ("c.yaml", "port: 1\n1: x", "{file}: got the key 1 (int), must be the name of a setting"),
        ("c.yaml", "null: x", "{file}: got the key None (NoneType), must be the name of a setting"),
    ],
)
def test_a_bad_file_is_refused_by_key(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = written(tmp_path / name, text)
    with pytest.raises(ConfigError) as caught:
        Example.load({}, file)
    assert caught.value.message.startswith(message.format(file=file))


def test_a_word_of_a_yaml_file_that_yaml_takes_for_a_bool_or_a_date_is_the_word(tmp_path: Path) -> None:
    """`archive: off`, as the documentation has it, was refused."""
    for word in ("off", "on", "yes", "No", "2026-11-30"):
        file = written(tmp_path / "c.yaml", f"redis_url: {word}\nwords: [{word}]\n")
        settings = Example.load({}, file)
        assert (settings.redis_url, settings.words) == (word, [word])
    file = written(tmp_path / "c.yaml", "archive: off\nupstream_images: on\nupstream_tokens: off\n")
    settings = ProxySettings.load({}, file)
    assert (settings.archive, settings.upstream_images, settings.upstream_tokens) == ("off", "on", "off")


@pytest.mark.parametrize(
    ("word", "means"), [("on", True), ("off", False), ("Yes", True), ("no", False), ("true", True)]
)
def test_such_a_word_is_a_bool_where_a_bool_is_wanted_and_in_free_dictionaries(
    word: str, means: bool, tmp_path: Path
) -> None:
    file = written(
        tmp_path / "c.yaml", f"nested: {{flat: {word}}}\nfree: {{a: {word}, more: [{word}], at: 2026-11-30}}"
    )
    settings = Example.load({}, file)
    assert settings.nested.flat is means
    assert settings.free == {"a": means, "more": [means], "at": "2026-11-30"}


@pytest.mark.parametrize("url", ["http://host:80x0", "http://host:65536", "http://[::1", "ftp://host", "http://:80"])
def test_a_proxys_url_that_no_client_could_ask_is_refused_with_what_it_must_be(url: str) -> None:
    class Asking(Settings):
        model_config = SettingsConfigDict(env_prefix="STENO_ASKING_")

        proxy: ProxyUrl

    with pytest.raises(ConfigError) as caught:
        Asking.load({"proxy": url}, None)
    assert caught.value.message.startswith(f"--proxy: got {url!r}, must be http(s)://HOST[:PORT][/PREFIX]")
    for good in ("http://host", "https://host:65535/steno", "http://[::1]:8000"):
        assert Asking.load({"proxy": good}, None).proxy == good


def test_a_missing_file_and_an_unknown_flag_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        Example.load({}, tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"--redis-ulr: no such setting; did you mean redis_url\?"):
        Example.load({"redis_ulr": "x"}, None)


def test_every_wrong_value_is_named_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_PORT", "x")
    with pytest.raises(ConfigError) as caught:
        Example.load({"nested": {"depth": "y"}}, None)
    assert "STENO_PORT: " in caught.value.message and "--nested-depth: " in caught.value.message


def test_other_programs_variables_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in PREFIXES:
        if prefix != "STENO_":
            monkeypatch.setenv(f"{prefix}ANYTHING", "1")
    monkeypatch.setenv("STENO_WORKER_KEY", "shared")
    settings = Example.load({}, None)
    assert settings.worker_key is not None and settings.worker_key.get_secret_value() == "shared"


def test_one_variable_gives_proxy_and_worker_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_WORKER_KEY", "shared")
    keys = [ProxySettings.load({}, None).worker_key, WorkerSettings.load({}, None).key]
    assert [key and key.get_secret_value() for key in keys] == ["shared", "shared"]


def test_lists_take_words_between_commas_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_WORDS", "a, b,")
    assert Example.load({}, None).words == ["a", "b"]
    monkeypatch.setenv("STENO_WORDS", '["a,b"]')
    assert Example.load({}, None).words == ["a,b"]


def test_nested_values_of_several_sources_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "c.toml", "[nested]\ndepth = 2\nwidth = 2\n")
    monkeypatch.setenv("STENO_NESTED__DEPTH", "3")
    assert Example.load({}, file).nested == Nested(depth=3, width=2)


FREE = "free: {temperature: 0.7, more: {a: 1, b: 2}}"


@pytest.mark.parametrize(
    ("given", "variables", "found", "origin"),
    [
        ({"free": {"temperature": 1.0}}, {}, {"temperature": 1.0}, "--free"),
        ({"free": {}}, {"STENO_FREE__TOP_P": "1"}, {}, "--free"),
        ({}, {"STENO_FREE": '{"more": {"a": 3}}'}, {"more": {"a": 3}}, "STENO_FREE"),
        ({}, {"STENO_FREE": '{"a": 1}', "STENO_FREE__TOP_P": "0.9"}, {"a": 1, "top_p": 0.9}, "STENO_FREE"),
        (
            {},
            {"STENO_FREE__MORE__A": "3"},
            {"temperature": 0.7, "more": {"a": 3, "b": 2}},
            "free in {file}, STENO_FREE__MORE, STENO_FREE__MORE__A",
        ),
        ({}, {}, {"temperature": 0.7, "more": {"a": 1, "b": 2}}, "free in {file}"),
    ],
)
def test_a_free_dictionary_is_replaced_by_the_first_that_has_one_and_one_key_of_it_is_set_by_the_environment(
    given: dict[str, Any],
    variables: dict[str, str],
    found: dict[str, Any],
    origin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = written(tmp_path / "c.yaml", FREE)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = Example.load(given, file)
    assert (settings.free, settings.origin("free")) == (found, origin.format(file=file))


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("0.9", 0.9),
        ("null", None),
        ("true", True),
        ('["</s>"]', ["</s>"]),
        ("auto", "auto"),
        ('"0.9"', "0.9"),
        ("1.10", "1.10"),
        ("12e4567", "12e4567"),
        ("8", 8),
        ("", ""),
    ],
)
def test_a_key_of_a_free_dictionary_is_json_or_else_text_in_the_environment(
    said: str, means: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENO_FREE__TEMPERATURE", said)
    monkeypatch.setenv("STENO_FREE__MORE__A", said)
    assert Example.load({}, None).free == {"temperature": means, "more": {"a": means}}


def test_secrets_come_from_files_and_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = written(tmp_path / "key", "hunter2\n")
    monkeypatch.setenv("STENO_ADMIN_KEY_FILE", str(secret))
    settings = Example.load({"redis_url": "redis://user:hunter2@host/0"}, None)
    assert settings.admin_key is not None and settings.admin_key.get_secret_value() == "hunter2"
    assert settings.origin("admin_key") == "STENO_ADMIN_KEY_FILE"
    assert "hunter2" not in repr(settings) + str(settings.resolved())
    assert settings.resolved()["redis_url"] == "redis://***@host/0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:geheim@2024@h:6379/0", "redis://***@h:6379/0"),  # redis-py takes the last @
        ("redis://:gehe/im?#@h:6379/0", "redis://***@h:6379/0"),  # refused later, by the store
        ("redis://h/0?db=1&password=geheim", "redis://h/0?db=1&password=***"),
        ("redis://h:1/0?password=geh@im&db=1", "redis://h:1/0?password=***&db=1"),
        ("redis://h/0?password=geheim&db=1", "redis://h/0?password=***&db=1"),
        (
            "redis+sentinel://:geheim@a,b/main?sentinel_password=geheim",
            "redis+sentinel://***@a,b/main?sentinel_password=***",
        ),
        ("redis://h:6379/0?db=1", "redis://h:6379/0?db=1"),
    ],
)
def test_no_password_of_a_url_is_shown(url: str, shown: str) -> None:
    settings = Example(redis_url=url, free={"a": [url]})
    assert (settings.resolved()["redis_url"], settings.resolved()["free"]) == (shown, {"a": [shown]})
    assert url == shown or url not in repr(settings)


def test_a_bad_secret_file_is_refused_without_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "binary"  # what `openssl rand 32` writes
    binary.write_bytes(b"\xff\xfe")
    none, empty = tmp_path / "none", written(tmp_path / "empty", "\n")
    for path, message in [
        (none, "No such file"),
        (empty, "is empty"),
        (binary, f"^--admin-key-file: {binary}: not text$"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Example.load({"admin_key_file": str(path)}, None)
    monkeypatch.setenv("STENO_ADMIN_KEY", "a")
    monkeypatch.setenv("STENO_ADMIN_KEY_FILE", "b")
    with pytest.raises(ConfigError, match="STENO_ADMIN_KEY and STENO_ADMIN_KEY_FILE are both given"):
        Example.load({}, None)


def test_a_rejected_secret_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ADMIN_KEY", "hunter2")
    with pytest.raises(ConfigError) as caught:
        Example.load({"admin_key": ["hunter2"]}, None)
    assert "hunter2" not in caught.value.message


def test_settings_are_frozen_and_constructing_them_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_PORT", "1")
    settings = Example(port=7)
    assert settings.port == 7
    assert Example().port == 8000
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("program", [ProxySettings, WorkerSettings])
def test_every_setting_says_what_it_is_and_its_unit(program: type[Settings]) -> None:
    for name, field in program.model_fields.items():
        assert field.description, f"{program.__name__}.{name} has no description"
        if name.endswith("_s"):
            assert "second" in field.description, f"{program.__name__}.{name} does not name its unit"


@pytest.mark.parametrize("program", [ProxySettings, WorkerSettings])
def test_what_print_config_shows_is_a_config_file(program: type[Settings], tmp_path: Path) -> None:
    shown = {key: value for key, value in program().resolved().items() if value is not None}
    file = written(tmp_path / "c.yaml", yaml.safe_dump(shown))
    assert program.load({}, file).resolved() == program(**shown).resolved()


@pytest.mark.parametrize(("value", "key"), [("one", "one"), ("new\nold\n", "new"), (" \n", None), (None, None)])
def test_the_admin_key_of_the_shell_is_the_first_of_several(
    value: str | None, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("STENO_ADMIN_KEY", value)
    found = admin_key_here()
    assert (found.get_secret_value() if found else None) == key


@pytest.mark.parametrize("name", ["tombstone_s", "retention_s", "sweep_s", "queue_s", "shutdown_s"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_times_of_the_proxy_are_finite(name: str, value: str) -> None:
    """Each deletion was a 500: Redis takes no infinite time to live."""
    with pytest.raises(ConfigError, match=f"--{name}: .*finite".replace("_", "-")):
        ProxySettings.load({name: value}, None)


@pytest.mark.parametrize("value", ["inf", "1e10"])
def test_the_command_lines_timeout_is_one_that_sockets_take(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_CLIENT_TIMEOUT_S", value)
    with pytest.raises(ConfigError, match=r"^STENO_CLIENT_TIMEOUT_S: .*less than 1000000000$"):
        ClientSettings.load({}, None)


def test_a_tombstone_is_no_longer_than_redis_takes() -> None:
    with pytest.raises(ConfigError, match=r"--tombstone-s: .*3200000000"):
        ProxySettings.load({"tombstone_s": "1e17"}, None)
