"""What a Redis URL names, and which are refused."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest

from steno.contracts.errors import ConfigError
from steno_proxy.config import redis_url
from steno_proxy.config.redis_url import RedisUrl, address_of, home_of, read_redis_url
from steno_proxy.config.settings import ProxySettings


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://h:1/2", RedisUrl("redis://h:1/2")),
        ("rediss://u:p@h/0?ssl_cert_reqs=none", RedisUrl("rediss://u:p@h/0?ssl_cert_reqs=none")),
        ("unix:///run/redis.sock?db=1", RedisUrl("unix:///run/redis.sock?db=1")),
        ("redis+cluster://h:1/0", RedisUrl("", nodes=(("h", 1),))),
        (
            "rediss+cluster://u:p%40@a:1,[::1]:2,c?ssl_cert_reqs=none",
            RedisUrl(
                "",
                nodes=(("a", 1), ("::1", 2), ("c", 6379)),
                options={"username": "u", "password": "p@", "ssl": True, "ssl_cert_reqs": "none"},
            ),
        ),
        ("redis+sentinel://a/main", RedisUrl("", sentinels=(("a", 26379),), service="main")),
        (
            "redis+sentinel://u:p%40@a:1,[::1]:2,c/my%20main/3?sentinel_password=s&sentinel_username=t",
            RedisUrl(
                "",
                sentinels=(("a", 1), ("::1", 2), ("c", 26379)),
                service="my main",
                options={"username": "u", "password": "p@", "db": 3},
                sentinel_options={"username": "t", "password": "s"},
            ),
        ),
        (
            "rediss+sentinel://a/main?ssl_ca_certs=/ca.pem",
            RedisUrl(
                "",
                sentinels=(("a", 26379),),
                service="main",
                options={"ssl": True, "ssl_ca_certs": "/ca.pem"},
                sentinel_options={"ssl": True, "ssl_ca_certs": "/ca.pem"},
            ),
        ),
    ],
)
def test_what_is_named(url: str, named: RedisUrl) -> None:
    assert read_redis_url(url) == named


def test_a_pythons_urlsplit_that_refuses_brackets_after_a_host_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's does since the mend of CVE-2025-0938; this one may be older."""

    def strict(url: str) -> SplitResult:
        if re.search(r"//[^/?#]*[^@/\]]\[", url):
            raise ValueError("Invalid IPv6 URL")
        return urlsplit(url)

    monkeypatch.setattr(redis_url, "urlsplit", strict)
    assert read_redis_url("redis+cluster://u:p@[::1]:2,a,[::2]").nodes == (("::1", 2), ("a", 6379), ("::2", 6379))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "'http'"),
        ("redis://h:6379/zero", "'zero'"),
        ("redis://h:port/0", "[Pp]ort"),
        ("redis+ring://h", "'redis\\+ring'"),
        ("unix+cluster:///run/x", "'unix\\+cluster'"),
        ("redis+cluster://a:1,,b", "got '', must be HOST or HOST:PORT"),
        ("redis+cluster://", "got '', must be HOST or HOST:PORT"),
        ("redis+cluster://a:port", "[Pp]ort"),
        ("redis+cluster://a:1/2", "'2'"),
        ("redis+sentinel://a:1", "SERVICE"),
        ("redis+sentinel:///main", "SERVICE"),
        ("redis+sentinel://a,,b/main", "got '', must be HOST or HOST:PORT"),
        ("redis+sentinel://a:port/main", "[Pp]ort"),
        ("redis+sentinel://a/main/zero", "'zero'"),
        ("redis+sentinel://a/main?sentinel_db=1", "got sentinel_db, must be sentinel_username or sentinel_password"),
    ],
)
def test_what_is_refused_names_the_setting(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_redis_url(url)
    assert refused.value.field == "redis_url"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:se/cret@h:6379/0",
        "redis://u:se?cret@h",
        "rediss://u:1/cret@h/0",
        "redis+cluster://u:se/cret@a:1,b",
        "redis+cluster://u:se#cret@a:1",
        "redis+sentinel://u:se/cret@a/main",
        "redis+sentinel://u:1?cret@a/main",
        "secret@h:6379",
        "redis:secret@h:6379/0",
        "redis:/:secret@h:6379",
    ],
)
def test_a_password_that_is_not_percent_encoded_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_redis_url(url)
    assert not re.search("cret|'se|'1", str(refused.value)) and refused.value.field == "redis_url"


@pytest.mark.parametrize(
    ("address", "urls"),
    [
        ("h:6379/0", ["redis://h", "redis://u:pw@H:6379/0", "rediss://:other@h?ssl_cert_reqs=none", "redis://h?db=0"]),
        ("h:1/2", ["redis://h:1/2", "redis://h:1?db=2"]),
        ("localhost:6379/0", ["redis://localhost", "redis://127.0.0.1:6379", "redis://[::1]/0"]),
        ("/run/redis.sock/1", ["unix:///run/redis.sock?db=1", "unix://u:pw@/run/redis.sock?db=1"]),
        ("a:1,b:6379/0", ["redis+cluster://a:1,b", "redis+cluster://u:pw@b:6379,a:1/0"]),
        (
            "a:26379,b:26379/main/3",
            ["redis+sentinel://b,a/main/3", "redis+sentinel://:pw@a,b/main/3?sentinel_password=s"],
        ),
    ],
)
def test_urls_of_one_redis_have_one_address_and_one_archive(address: str, urls: list[str], tmp_path: Path) -> None:
    assert {address_of(url) for url in urls} == {address}
    folders = {ProxySettings(redis_url=url, keys_dir=tmp_path).archive_url for url in urls}
    assert len(folders) == 1 and Path(str(folders.pop())).parent == tmp_path / "archive"


def test_each_redis_has_an_archive_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    urls = [
        "redis://h",
        "redis://h/1",
        "redis://h:1",
        "redis://i",
        "redis+sentinel://h/a",
        "redis+sentinel://h/b",
        "unix:///h",
    ]
    urls += [f"redis+cluster://{'h' * 300}{number}" for number in range(2)]
    folders = [Path(str(ProxySettings(redis_url=url).archive_url)) for url in urls]
    assert len(set(folders)) == len(urls)
    assert {folder.parent for folder in folders} == {tmp_path / "steno" / "archive"}
    assert all(len(folder.name) < 100 for folder in folders)
    assert ProxySettings(redis_url="redis://h", archive="s3://b").archive_url == "s3://b"


def test_localhost_is_another_redis_on_another_machine() -> None:
    assert home_of("redis://h") == "h:6379/0"
    assert home_of("redis://127.0.0.1") == f"localhost:6379/0 on {socket.gethostname()}"
    assert home_of("unix:///run/redis.sock") == f"/run/redis.sock/0 on {socket.gethostname()}"


def test_no_test_has_its_archive_in_the_users_home() -> None:
    """`data_home` of tests/conftest.py."""
    folder = Path(str(ProxySettings(redis_url="redis://h").archive_url))
    assert not folder.is_relative_to(Path.home() / ".local")
