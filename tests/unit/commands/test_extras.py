"""What is told to be installed exists, and brings what was missing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from steno.commands.output import EXTRAS
from tests.support.stack import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OFFERED: dict[str, list[str]] = PROJECT["optional-dependencies"]


def brought_by(extra: str) -> set[str]:
    """Names of distributions: what the extra asks for, and what those that are installed here ask for in turn."""
    found: set[str] = set()
    waiting = [*PROJECT["dependencies"], *OFFERED[extra]]
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name == "steno":
            waiting += [text for more in wanted.extras for text in OFFERED[more]]
        elif name not in found:
            found.add(name)
            waiting += required(name, wanted.extras or {""})
    return found


def required(name: str, extras: set[str]) -> Iterator[str]:
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield text


@pytest.mark.parametrize("module", EXTRAS)
def test_an_extra_brings_the_module_that_was_missing(module: str) -> None:
    distributions = metadata.packages_distributions().get(module, [module])
    assert {canonicalize_name(name) for name in distributions} & brought_by(EXTRAS[module])


def test_every_extra_that_is_named_exists() -> None:
    named: dict[str, str] = {}
    for folder in ("proxy", "inference_worker", "trainer_bridge", "steno", "docs", "deploy", "."):
        for file in (ROOT / folder).glob("*" if folder == "." else "**/*"):
            if file.suffix in (".py", ".md"):
                for hint in re.findall(r"pip install ['\"]([\w.]+\[[\w,-]+\])", file.read_text()):
                    named[hint] = str(file)
    assert named
    for hint, where in named.items():
        distribution, _, extras = hint.rstrip("]").partition("[")
        assert distribution == ".", f"{where}: {hint}: it is on no index, the checkout is installed"
        assert set(extras.split(",")) <= OFFERED.keys(), f"{where}: {hint}"


@pytest.mark.parametrize("module", ["websockets", "uvloop", "litellm", "aiohttp"])
def test_a_worker_for_other_upstreams_needs_one_extra_and_no_torch(module: str) -> None:
    brought = brought_by("litellm")
    assert module in brought and not brought & {"torch", "transformers"}
