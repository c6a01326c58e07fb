"""Beat a small deployment by a schedule, and see that nothing was lost.

    python -m tests.chaos --seed 7              one seed, on a fresh deployment
    python -m tests.chaos --seeds 1..50         many, one after the other on one deployment
    python -m tests.chaos --seeds 1..50 --jobs 2    on two deployments side by side
    python -m tests.chaos --seed 7 --only 0,2   the same with some of its faults left out
    python -m tests.chaos --seed 7 --shrink     which of its faults it takes
    python -m tests.chaos --mutant NAME --seeds 100     does it find a proxy that was made wrong? (`mutants.py`)

A seed that fails prints its schedule, what is wrong and the command that replays it, and keeps the logs. The schedule
is the same each time; how processes run against each other is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from traceback import format_exception
from typing import Any, TypeVar

from tests.chaos.mutants import MUTANTS, WORKER_MUTANTS
from tests.chaos.schedule import Schedule, draw
from tests.chaos.story import Story, Verdict, first_versions
from tests.chaos.system import packets
from tests.chaos.system.deployment import Deployment
from tests.support.plugins import second_tries

T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int)
    which.add_argument("--seeds", type=_seeds, help="A..B, or N for 1..N, or some between commas")
    parser.add_argument("--only", type=_numbers, help="faults by number, between commas")
    parser.add_argument(
        "--long", action="store_true", help="each seed stops a worker or a replica for up to a minute, too"
    )
    parser.add_argument("--shrink", action="store_true", help="with --seed: leave out faults as long as it fails")
    parser.add_argument("--jobs", type=int, default=1, help="deployments side by side; a seed mostly waits")
    parser.add_argument(
        "--again", action="store_true", help="play seeds that failed once more; both outcomes are shown"
    )
    parser.add_argument("--print", action="store_true", help="print the schedules and do nothing")
    parser.add_argument("--within-s", type=float, help="begin no other seed after so many seconds")
    parser.add_argument(
        "--mutant",
        choices=[*MUTANTS, *WORKER_MUTANTS],
        help="play until a seed fails, as it must; exit code 1: none did",
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for the logs; default: a temporary one, kept when a seed fails"
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    packets.enter()
    schedules = [draw(seed, only=args.only, long=args.long) for seed in (args.seeds or [args.seed])]
    if args.print:
        print("\n".join(map(str, schedules)))
        return 0
    folder = args.logs or Path(tempfile.mkdtemp(prefix="steno-chaos-"))
    if args.shrink:
        return asyncio.run(_in_order(_shrink(args.seed, folder)))
    if args.mutant is not None:
        return asyncio.run(_in_order(_hunt(schedules, folder, args.mutant)))
    verdicts = asyncio.run(_in_order(_play_beside(schedules, folder, args.jobs, within_s=args.within_s)))
    failed = [verdict.seed for verdict in verdicts if verdict.wrong]
    if args.again and failed:
        print(f"RERUN of {failed}")
        replayed = asyncio.run(_in_order(_play([one for one in schedules if one.seed in failed], folder / "again")))
        if noted := os.environ.get("STENO_TEST_SECOND_TRIES"):
            second_tries.note(noted, [f"chaos, seed {one.seed}" for one in replayed if not one.wrong])
        verdicts = [one for one in verdicts if not one.wrong] + replayed
    return _report(verdicts, len(schedules), folder, args)


async def _in_order(playing: Coroutine[Any, Any, T]) -> T:
    """SIGTERM ends it as Ctrl-C does: what was started is ended."""
    task = asyncio.ensure_future(playing)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def _play_beside(
    schedules: list[Schedule], folder: Path, jobs: int, *, within_s: float | None = None
) -> list[Verdict]:
    dealt = [schedules[number::jobs] for number in range(jobs)]
    played = await asyncio.gather(*(_play(hand, folder, within_s=within_s) for hand in dealt if hand))
    return [verdict for verdicts in played for verdict in verdicts]


async def _hunt(schedules: list[Schedule], folder: Path, mutant: str) -> int:
    began = time.monotonic()
    for played, schedule in enumerate(schedules):
        where = folder / f"{mutant}-{schedule.seed}"
        async with Deployment(where, watched=schedule.watched, mutant=mutant) as deployment:
            verdict = await _one(deployment, schedule, first_versions())
        if verdict.wrong:
            print(
                f"{mutant}: found by seed {schedule.seed}, after {played} that did not, and {time.monotonic() - began:.0f} s"
            )
            return 0
    print(f"{mutant}: {len(schedules)} seeds did not find it")
    return 1


async def _play(schedules: list[Schedule], folder: Path, *, within_s: float | None = None) -> list[Verdict]:
    """Play the schedules: those with the same kind of Redis on one deployment; after a seed has failed, on a new one."""
    verdicts: list[Verdict] = []
    began = time.monotonic()
    left = sorted(schedules, key=lambda schedule: schedule.watched)
    while left:
        watched = left[0].watched
        folder.mkdir(parents=True, exist_ok=True)
        where = Path(tempfile.mkdtemp(prefix=f"from-{left[0].seed}-", dir=folder))
        async with Deployment(where, watched=watched) as deployment:
            versions = first_versions()
            while left and left[0].watched == watched:
                if within_s is not None and time.monotonic() - began > within_s:
                    return verdicts
                schedule = left.pop(0)
                verdicts.append(await _one(deployment, schedule, versions))
                if verdicts[-1].wrong:
                    break
        if not verdicts[-1].wrong:
            shutil.rmtree(where, ignore_errors=True)
    return verdicts


async def _one(deployment: Deployment, schedule: Schedule, versions: list[str]) -> Verdict:
    name = f"chaos-{schedule.seed}-{uuid.uuid4().hex[:6]}"
    story = Story(deployment, schedule, versions, name=name)
    verdict = story.verdict
    try:
        await story.play()
    except Exception as error:  # recorded: the seed has failed
        verdict.wrong += [f"it could not be played to its end: {error!r}", *format_exception(error)]
    if verdict.wrong:
        print(f"\nFAILED {schedule}\n  as run {name}:", flush=True)
        for sentence in verdict.wrong:
            print(f"    {sentence}")
        print(
            f"  logs: {deployment.folder}\n  again: {sys.executable} -m tests.chaos --seed {schedule.seed}\n",
            flush=True,
        )
    else:
        strikes = ", ".join(sorted(fault.kind for fault in schedule.faults))
        print(
            f"seed {schedule.seed}: {verdict.took_s:.1f} s, {_counted(verdict.counts)}, "
            f"+{verdict.kept[0]} fds +{verdict.kept[1] >> 20} MiB ({strikes})",
            flush=True,
        )
    return verdict


def _counted(counts: Counter[str]) -> str:
    shown = ("requests", "answers", "turns", "partial", "taken over", "across updates", "answered twice", "leases")
    return ", ".join(f"{counts[name]} {name}" for name in shown if counts[name])


def _report(verdicts: list[Verdict], wanted: int, folder: Path, args: argparse.Namespace) -> int:
    failed = [verdict.seed for verdict in verdicts if verdict.wrong]
    total: Counter[str] = Counter()
    for verdict in verdicts:
        total.update(verdict.counts)
    print(f"{len(verdicts)} of {wanted} seeds played, {len(failed)} failed{': ' + str(failed) if failed else ''}")
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    kept = [max((verdict.kept[which] for verdict in verdicts), default=0) for which in (0, 1)]
    print(f"at most {kept[0]} descriptors and {kept[1] >> 20} MiB kept by a process")
    print(f"packets: {'real' if packets.inside() else 'relays'}")
    if args.json is not None:
        result: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(), "wanted": wanted,
            "packets": packets.inside(),
            "played": len(verdicts), "seconds": round(sum(verdict.took_s for verdict in verdicts)), "failed": failed,
            "counts": dict(sorted(total.items())), "most_descriptors_kept": kept[0], "most_bytes_kept": kept[1],
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if not failed and args.logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed or not verdicts else 0


async def _shrink(seed: int, folder: Path) -> int:
    """Leave out one fault after the other for as long as what is left still fails."""
    kept = tuple(range(len(draw(seed).faults)))
    if not (await _play([draw(seed)], folder / "all"))[0].wrong:
        print("it does not fail this time")
        return 0
    for number in kept:
        fewer = tuple(one for one in kept if one != number)
        if (await _play([draw(seed, only=fewer)], folder / f"without-{number}"))[0].wrong:
            kept = fewer
    print(f"it takes: python -m tests.chaos --seed {seed} --only {','.join(map(str, kept))}\n{draw(seed, only=kept)}")
    return 1


def _seeds(text: str) -> list[int]:
    if "," in text:
        return list(_numbers(text))
    first, dots, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if dots else list(range(1, int(first) + 1))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


if __name__ == "__main__":
    sys.exit(main())
