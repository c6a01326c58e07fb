"""What is installed is what was pinned: by version and by the hash of its file."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
PINNED = ("lock", "proxy", "runtime", "trackers", "trainer", "vllm-cpu")


@pytest.mark.parametrize("name", PINNED)
def test_every_pin_has_the_hashes_of_its_files(name: str) -> None:
    text = (ROOT / f"requirements/{name}.txt").read_text().replace("\\\n", "")
    pins = [line for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    assert pins
    for pin in pins:
        assert re.fullmatch(r"[\w.-]+==\S+(\s+--hash=sha256:[0-9a-f]{64})+", pin), f"run ./scripts/lock: {pin}"


def test_what_users_install_is_bounded_above() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: texts for name, texts in project["optional-dependencies"].items() if name != "dev"}
    for text in [*project["dependencies"], *(text for texts in extras.values() for text in texts)]:
        requirement = Requirement(text)
        bounds = {specifier.operator for specifier in requirement.specifier}
        assert requirement.name == "steno" or bounds == {">=", "<"}, text


def test_the_images_ask_for_hashes_wherever_they_install_pins() -> None:
    installs = re.findall(r"pip install (.* -r (?:requirements/|pins)\S+)", (ROOT / "Dockerfile").read_text())
    assert len(installs) >= 5
    assert [line for line in installs if "--require-hashes" not in line] == []


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command with scripts/lib.sh, beside a `venv` whose packages go to `site` and which finds only the wheels of `folder`."""
    python = folder / "venv/bin/python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        (folder / "pyproject.toml").touch()
        (folder / "requirements").mkdir()
        (folder / "requirements/runtime.txt").write_text("torch==9.9\n")
    isolated = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_TARGET": str(folder / "site"),
    }
    # torch is installed apart and without a hash.
    script = f'set -euo pipefail; . "{ROOT}/scripts/lib.sh"; install_torch() {{ :; }}; {command}'
    return subprocess.run(["bash", "-c", script], cwd=folder, env=isolated, capture_output=True, text=True, check=False)


def wheel(folder: Path, name: str) -> str:
    """A wheel with one empty module; its sha256."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    right, wrong = wheel(tmp_path, "stenotiny"), "0" * 64
    pins, stamp, site = tmp_path / "tiny.txt", tmp_path / "venv/.installed-tiny", tmp_path / "site/stenotiny.py"
    for refused, said in (
        (f"stenotiny==1.0 \\\n    --hash=sha256:{wrong}\n", "DO NOT MATCH THE HASHES"),
        ("stenotiny==1.0\n", "Hashes are required"),
    ):
        pins.write_text(refused)
        failed = shell(tmp_path, "install_pins venv tiny.txt")
        assert failed.returncode != 0 and said in failed.stderr, failed.stderr
        assert "hashes" in failed.stderr.splitlines()[-1]
        assert not stamp.exists() and not site.exists()
    pins.write_text(f"stenotiny==1.0 \\\n    --hash=sha256:{wrong} \\\n    --hash=sha256:{right}\n")
    installed = shell(tmp_path, "install_pins venv tiny.txt")
    assert installed.returncode == 0, installed.stderr
    assert stamp.exists() and site.exists()


def test_merged_files_keep_each_pin_with_its_own_hashes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "# first\n-r b.txt\nSome_Name==1 \\\n    --hash=sha256:a1 \\\n    --hash=sha256:a2\n"
    )
    (tmp_path / "b.txt").write_text(
        "torch==9.9 \\\n    --hash=sha256:b1 \\\n    --hash=sha256:b2\n# second\n"
        "some-name==2 \\\n    --hash=sha256:b3\nother==3 \\\n    --hash=sha256:b4\n"
    )
    merged = shell(tmp_path, "merged_pins a.txt b.txt")
    assert merged.stdout == (
        "Some_Name==1 \\\n    --hash=sha256:a1 \\\n    --hash=sha256:a2\nother==3 \\\n    --hash=sha256:b4\n"
    )


@pytest.mark.parametrize("step", ["make_venv", "pip_install", "install_torch"])
def test_what_fails_leaves_no_mark_that_all_is_installed(tmp_path: Path, step: str) -> None:
    """`.ci/run` makes its environments inside `$(…)`, where bash goes on after a failure unless it is told otherwise."""
    (tmp_path / "tiny.txt").touch()
    made = 'made() { make_venv "$PWD/venv"; install_pins venv tiny.txt; printf "%s\\n" venv; }; made_in=$(made)'
    stubs = "".join(f"{name}() {{ :; }}; " for name in ("make_venv", "pip_install"))
    failed = shell(tmp_path, f"{stubs} {step}() {{ return 7; }}; {made}; echo went on with $made_in")
    assert (failed.returncode, failed.stdout) == (7, ""), failed.stderr
    assert not (tmp_path / "venv/.installed-tiny").exists()
    done = shell(tmp_path, f"{stubs} {made}; echo went on with $made_in")
    assert (done.returncode, done.stdout) == (0, "went on with venv\n"), done.stderr
    assert (tmp_path / "venv/.installed-tiny").exists()


def test_the_checkout_is_installed_once_for_all_that_ask_for_pins(tmp_path: Path) -> None:
    """While pip installs it anew, programs beside it find no `steno`."""
    python, ran = tmp_path / ".venv/bin/python", tmp_path / "ran"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *"-e ."*) echo x >>{ran} ;; esac\n')
    python.chmod(0o755)
    for name, times in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / f"{name}.txt").write_text("stenotiny==1.0\n")
        if name == "c":
            (tmp_path / "pyproject.toml").write_text("# changed\n")
        done = shell(tmp_path, f'install_pins "$PWD/.venv" {name}.txt')
        assert done.returncode == 0, done.stderr
        assert ran.read_text() == "x\n" * times
