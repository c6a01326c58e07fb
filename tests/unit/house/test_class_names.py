"""A class has a name of its own: whoever reads or searches it meets one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.sources import ROOT

PACKAGES = [
    "steno", "steno_cli", "proxy/steno_proxy", "inference_worker/steno_worker", "rollouts/steno_rollouts",
    "trainer_bridge/steno_trainer", "adapters/steno_adapters",
]  # fmt: skip


def test_no_two_classes_of_the_product_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    assert {name: at for name, at in places.items() if len(at) > 1} == {}
