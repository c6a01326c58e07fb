"""What a Redis URL names, and which are refused."""

from __future__ import annotations

import pytest

from proxy.contracts.errors import ConfigError
from proxy.store.redis_url import RedisUrl, read_redis_url


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


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h", "'http'"),
        ("redis://h:6379/zero", "'zero'"),
        ("redis://h:port/0", "[Pp]ort"),
        ("redis+ring://h", "'redis\\+ring'"),
        ("unix+cluster:///run/x", "'unix\\+cluster'"),
        ("redis+cluster://a:1,,b", "no HOST:PORT"),
        ("redis+cluster://", "no HOST:PORT"),
        ("redis+cluster://a:port", "[Pp]ort"),
        ("redis+cluster://a:1/2", "'2'"),
        ("redis+sentinel://a:1", "SERVICE"),
        ("redis+sentinel:///main", "SERVICE"),
        ("redis+sentinel://a,,b/main", "no HOST:PORT"),
        ("redis+sentinel://a:port/main", "[Pp]ort"),
        ("redis+sentinel://a/main/zero", "'zero'"),
        ("redis+sentinel://a/main?sentinel_db=1", "sentinel_db"),
    ],
)
def test_what_is_refused_names_the_setting(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_redis_url(url)
    assert refused.value.field == "redis_url"
