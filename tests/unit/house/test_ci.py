"""`.ci/run` runs some sections at a time: here its functions run, with sections of their own."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.sources import ROOT


def at_a_time(folder: Path, sections: dict[str, str], count: int, *names: str) -> tuple[int, str]:
    """The exit code, and what was printed."""
    return run(folder, sections, "at_a_time", str(count), *names)


def run(folder: Path, sections: dict[str, str], *words: str) -> tuple[int, str]:
    """The exit code, and what was printed. sections: what each does, in a copy of `.ci/run` that has these too."""
    written = (ROOT / ".ci/run").read_text()
    start = "# `.ci/run NAME` runs one section"
    assert written.count(start) == 1
    functions = "".join(f"{name}() {{\n{body}\n}}\n" for name, body in sections.items())
    for path, text in ((".ci/run", written.replace(start, functions + start)), ("scripts/lib.sh", "")):
        (folder / path).parent.mkdir()
        (folder / path).write_text(text)
    (folder / ".ci/run").chmod(0o755)
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [folder / ".ci/run", *words],
        env=os.environ
        | {"SHARED": str(folder), "TMPDIR": str(folder / "tmp"), "STENO_TEST_SECOND_TRIES": str(folder / "tries")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("count", [2, 3])
def test_so_many_run_at_a_time_and_what_each_said_stands_together(tmp_path: Path, count: int) -> None:
    names = ["one", "two", "three"]
    meet = (
        f'echo {{0}} began | tee -a "$SHARED/log"; until [ "$(grep -c began "$SHARED/log")" -ge {count} ]; do sleep 0.05; done;'
        ' echo {0} ended | tee -a "$SHARED/log"'
    )
    code, said = at_a_time(tmp_path, {name: meet.format(name) for name in names}, count, *names)
    assert code == 0, said
    for name in names:
        assert re.search(
            rf"#### {name}: exit code 0 after \d+ s, with \d+ s of processor time\033\[0m\n{name} began\n{name} ended\n",
            said,
        )
    assert said.count("exit code 0") == 3
    running = itertools.accumulate(
        1 if line.endswith("began") else -1 for line in (tmp_path / "log").read_text().splitlines()
    )
    assert max(running) == count


@pytest.mark.parametrize("failing", ["one", "two"])
def test_once_a_section_has_failed_none_begins_and_its_words_come_last(tmp_path: Path, failing: str) -> None:
    other = {"one": "two", "two": "one"}[failing]
    sections = {
        failing: 'until [ -e "$SHARED/other" ]; do sleep 0.05; done; echo before; sh -c "exit 7"',
        other: 'touch "$SHARED/other"; until ls "$TMPDIR"/*/*/failed; do sleep 0.05; done 2>/dev/null; echo went on',
        "three": "echo three ended",
    }
    code, said = at_a_time(tmp_path, sections, 2, "one", "two", "three")
    assert code == 7, said
    assert re.search(rf"#### {failing}: exit code 7 after \d+ s, with \d+ s of processor time\033\[0m\nbefore\n", said)
    assert said.endswith(f"#### {failing} failed; the end of what it said:\033[0m\nbefore\n")
    assert "went on" in said and "three" not in said


@pytest.mark.parametrize(("passes_from", "code", "counted"), [(1, 0, ""), (2, 0, "soak\n"), (3, 5, "")])
def test_a_program_that_fails_is_tried_once_more_and_counted(
    tmp_path: Path, passes_from: int, code: int, counted: str
) -> None:
    again = f'echo x >>"$SHARED/log"; [ "$(wc -l <"$SHARED/log")" -ge {passes_from} ] || exit 5; echo said'
    ended, said = run(tmp_path, {"soak": f"found=$(again sh -c '{again}'); echo found $found"}, "soak")
    assert (ended, said) == (code, "" if code else "found said\n")
    assert (tmp_path / "log").read_text() == "x\n" * min(passes_from, 2)
    tries = tmp_path / "tries"
    assert (tries.read_text() if tries.exists() else "") == counted


def test_a_section_says_what_its_programs_took_of_the_processors(tmp_path: Path) -> None:
    busy = "timeout 60 python3 -c 'import time\nwhile time.process_time() < 1.5: pass'"
    _, said = at_a_time(tmp_path, {"idle": "sleep 1", "busy": busy}, 1, "idle", "busy")
    took = dict(re.findall(r"#### (\w+): exit code 0 after \d+ s, with (\d+) s of processor time", said))
    assert took["idle"] == "0" and int(took["busy"]) >= 1
