"""What is installed: seven packages, none of them called `proxy`, whole, and not confused by a user's own folder of that name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import ROOT, SOURCES

PACKAGES = {"steno", "steno_adapters", "steno_cli", "steno_proxy", "steno_rollouts", "steno_trainer", "steno_worker"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Built from a copy of what git knows, as the images build it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("steno", "steno_cli", "adapters", "proxy", "inference_worker", "trainer_bridge", "rollouts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "made", "."],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [made] = (copy / "made").glob("*.whl")
    yield made


def test_the_wheel_holds_seven_packages_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        [entry_points] = [opened.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {name.partition("/")[0] for name in names if not name.partition("/")[0].endswith(".dist-info")} == PACKAGES
    here = set()
    for folder in map(Path, SOURCES.split(os.pathsep)):
        for package in PACKAGES:
            files = [
                path for path in (folder / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts
            ]
            here |= {path.relative_to(folder).as_posix() for path in files}
    assert {name.partition("/")[0] for name in here} == PACKAGES
    assert here - names == set(), "in the checkout and not in the wheel"
    assert (
        "steno_cli.main:main" in entry_points and "steno_worker.engines.vllm.weight_receiver:register" in entry_points
    )


def test_the_wheel_runs_in_a_folder_that_has_a_proxy_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """`python -m` and torchrun put the folder that they are started in first."""
    installed, work = tmp_path / "installed", tmp_path / "work"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(installed)
    for name in ("adapters", "proxy", "rollouts", "trainer_bridge"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise SystemExit('this is not ours')")
    script = (
        "import steno, steno_cli.main, steno_proxy.server.app, steno_worker.main, steno_rollouts.build, steno_trainer.run.main\n"
        "import steno_adapters, steno_cli.commands.serve\n"
        "from steno import AsyncClient, Client\n"
        "print(steno.__file__)"
    )
    for words in (["-c", script], ["-m", "steno", "--version"], ["-m", "steno_cli.torchrun", "--help"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=work,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        if words[0] == "-c":
            assert Path(done.stdout.strip()).is_relative_to(installed)


def test_what_users_import_is_light() -> None:
    script = "import sys, steno; steno.Client, steno.Completion, steno.Turn; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"torch", "fastapi", "redis", "transformers", "numpy", "typer", "steno_cli", "steno_proxy"}
    assert not heavy & set(done.stdout.split())
