"""What the first, the second and the third Ctrl-C of `steno rollout` end, and who takes signals afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest

from steno_cli.commands import rollout
from steno_cli.demo.processes import cancelled_by_signals
from steno_rollouts.calls.posts import to_its_end


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[signal.Signals], None]:
    """A signal, told to the handler itself: a real one would be the test's own."""
    handlers: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(
        asyncio.SelectorEventLoop, "add_signal_handler", lambda _, number, call: handlers.update({number: call})
    )
    return lambda number: handlers[number]()


@pytest.mark.parametrize(
    ("numbers", "ended"),
    [
        ([signal.SIGINT], ["post", "work"]),
        ([signal.SIGINT] * 2, ["post"]),
        ([signal.SIGINT] * 3, []),
        ([signal.SIGHUP] * 3, ["post", "work"]),
        ([signal.SIGINT, signal.SIGHUP], ["post"]),
    ],
    ids=["ctrl-c", "twice", "three-times", "hangups", "ctrl-c-and-hangup"],
)
def test_a_second_ctrl_c_leaves_time_for_what_the_proxy_is_told_and_a_third_one_does_not(
    told: Callable[[signal.Signals], None], numbers: list[signal.Signals], ended: list[str]
) -> None:
    """A terminal that is closed may be told of several times, and counts once."""
    done = []

    async def rolled_out() -> None:
        loop, go_on = asyncio.get_running_loop(), asyncio.Event()

        def tell(numbers: list[signal.Signals]) -> None:
            if not numbers:
                go_on.set()
                return
            told(numbers[0])
            loop.call_soon(tell, numbers[1:])

        async def work() -> None:
            """In a task of its own, as an executor's are; it takes its time to end."""
            await go_on.wait()
            done.append("work")

        async def post() -> None:
            loop.call_soon(tell, numbers)
            await go_on.wait()
            done.append("post")

        with rollout._cancelled_by_signals("r"):  # the command itself needs a proxy
            working = asyncio.create_task(work())
            try:
                await to_its_end(post())
            finally:
                await asyncio.wait({working})

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(rolled_out())
    assert sorted(done) == ended


def test_after_the_rollouts_of_an_evaluation_sigterm_cancels_what_ends_its_proxy_and_worker() -> None:
    outside: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: outside.append(number))

    async def evaluation() -> None:
        with cancelled_by_signals():
            with rollout._cancelled_by_signals("r"):
                pass
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end this process"
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)

    try:
        with pytest.raises(SystemExit) as ended:
            asyncio.run(evaluation())
        assert ended.value.code == 128 + signal.SIGTERM
        assert outside == []
        signal.raise_signal(signal.SIGTERM)
        assert outside == [signal.SIGTERM], "whoever took it before takes it again"
    finally:
        signal.signal(signal.SIGTERM, before)
