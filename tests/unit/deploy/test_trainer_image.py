"""The trainer's image has what its settings may ask for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_trainers_image_installs_the_trackers_that_the_chart_takes_settings_for() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trackers"]
    stage = (ROOT / "Dockerfile").read_text().split("AS trainer-build")[1].split("\nFROM ")[0]
    files = re.findall(r"-r (requirements/\S+\.txt)", stage)
    copied = {name for line in re.findall(r"^COPY (.*) requirements/$", stage, re.MULTILINE) for name in line.split()}
    assert files and set(files) <= copied
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    pins = {pin.split("==")[0].lower() for name in files for pin in (ROOT / name).read_text().splitlines()}
    assert {f"!{name}" for name in copied} <= set(kept)
    assert {re.split("[><=]", name)[0].lower() for name in wanted} <= pins
