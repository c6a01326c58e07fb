"""What is counted by names that clients make up stays bounded."""

from __future__ import annotations

from prometheus_client import REGISTRY

from steno_proxy import metrics


def counted(dialect: str, kind: str) -> float:
    return REGISTRY.get_sample_value("steno_proxy_dropped_items_total", {"dialect": dialect, "type": kind}) or 0.0


def test_dropped_items_are_counted_by_type() -> None:
    metrics.dropped("one", ["web_search", "web_search", "tool_search"])
    assert (counted("one", "web_search"), counted("one", "tool_search")) == (2, 1)


def test_types_that_clients_make_up_do_not_grow_the_labels() -> None:
    metrics.dropped("two", [f"kind_{i}" for i in range(metrics.MOST_TYPES + 10)] + ["Not a type!", "x" * 200])
    assert counted("two", "other") == 12 and counted("two", "kind_0") == 1
    metrics.dropped("two", ["kind_0"])
    assert counted("two", "kind_0") == 2
