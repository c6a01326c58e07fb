"""What the operator of a run sees."""

from __future__ import annotations

import io

from rich.console import Console

from steno_trainer.data.ledger import Account, Reason
from steno_trainer.reporting.console import ConsoleView, curve, ledger_line, step_line

LEDGER = Account(1200, 800, {Reason.CONSTRAINED: 100, Reason.ZERO_VARIANCE: 300})
VALUES = {"reward/mean": 0.5, "batch/trained_tokens": 800.0, "loss": 0.25}


def test_the_ledger_in_one_line_names_reasons_by_size() -> None:
    assert ledger_line(LEDGER) == "1,200 sampled = 800 trained + 400 not trained (zero_variance 300, constrained 100)"
    assert ledger_line(Account(2, 2)) == "2 sampled = 2 trained + 0 not trained"


def test_a_step_says_only_what_was_measured() -> None:
    assert step_line("a/3", VALUES) == "a/3  reward 0.500  800 tokens  loss +0.2500"


def test_the_curve_spans_its_values() -> None:
    assert curve([]) == ""
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([0.3, 0.3]) == "▁▁"


def test_a_log_gets_a_line_a_step_and_the_ledger() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with ConsoleView(console, run="r", steps=2) as view:
        view.phase("waiting")
        view.stepped("a/1", VALUES, LEDGER, {"a/0": Account(8, 8)})
        view.evaluated(1, 0.75)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a/1  reward 0.500" in text
    assert "ledger: 1,200 sampled" in text
    assert "a/0: 8 sampled = 8 trained + 0 not trained" in text
    assert "evaluation at step 1: reward 0.750" in text
    assert "waiting" not in text


def test_a_terminal_gets_a_picture_of_the_loop() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    view = ConsoleView(console, run="r", steps=9)
    view.phase("training on 800 tokens")
    view.push("pushing a/1")
    view.queue(running=3, ready=1)
    view.stepped("a/1", VALUES, LEDGER)
    with console.capture() as shown:
        console.print(view.picture())
    text = shown.get()
    for words in (
        "version a/1, step 1 of 9",
        "training on 800 tokens",
        "pushing a/1",
        "3 running, 1 ready",
        "1,200 sampled",
    ):
        assert words in text
