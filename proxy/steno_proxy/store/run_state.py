"""One run: its groups from registration to acknowledgement, and the proxy's side of the ledger (I4). In memory, without I/O.

    running --all ended, or due--> ready <--released, or not acknowledged in time--> leased --acknowledged--> acknowledged
       \\--nothing to train--> empty          evaluation: running --> over

What a group leaves out is booked when it leaves `running`, and with what is deleted until its first grant. From then on
what it brings does not change, whatever is deleted. `lua/run.lua` does the same in Redis; one suite of tests holds both to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.leases import (
    ALIVE_S,
    EvalGroups,
    GroupPlace,
    LeaseName,
    NotTrained,
    RunGroups,
    RunView,
    run_trainer,
)
from steno.contracts.records import Group
from steno_proxy.store.run_interface import alive, superseded
from steno_proxy.store.settlement import TRAIN, Ended, Tokens

REQUEST_TTL_S = 300.0
"""How long a request for leases is remembered, for the caller whose answer was lost: longer than any client goes on asking."""


class State(StrEnum):
    RUNNING = "running"
    READY = "ready"
    LEASED = "leased"
    ACKNOWLEDGED = "acknowledged"
    EMPTY = "empty"
    OVER = "over"


@dataclass
class Kept:
    """A trial that has ended, as its group keeps it."""

    life: str
    outcome: str
    final: bool
    tokens: Tokens


@dataclass
class Trainer:
    """Who has the run, if a trainer has ever registered. epoch: 0: none has. heard_at: 0.0: it has left."""

    name: str = ""
    epoch: int = 0
    heard_at: float = 0.0


@dataclass
class Place:
    """A group of a run. trials: those that have ended. order: of getting ready. granted, let_go, settled: grants, the current
    one, the last that was released, the one that was acknowledged. used: by a step that is not durable yet. forsaken: its
    sessions are gone."""

    group: Group
    state: State = State.RUNNING
    trials: dict[str, Kept] = field(default_factory=dict)
    order: int = 0
    ready_at: float = 0.0
    granted_at: float = 0.0
    grants: int = 0
    consumer: str = ""
    expires_at: float = 0.0
    granted: str = ""
    let_go: str = ""
    settled: str = ""
    used: bool = False
    forsaken: bool = False

    @property
    def due_at(self) -> float | None:
        return None if self.group.deadline_s is None else self.group.created_at + self.group.deadline_s

    def left_out(self) -> dict[str, str]:
        """Trial id -> why. A trial that was never heard of is late."""
        found = {
            trial: self.trials[trial].outcome if trial in self.trials else "late" for trial in self.group.trial_ids
        }
        return {trial: outcome for trial, outcome in found.items() if outcome != TRAIN}

    def brings(self) -> dict[str, Tokens]:
        return {
            trial: dict(self.trials[trial].tokens)
            for trial in self.group.trial_ids
            if trial in self.trials and self.trials[trial].outcome == TRAIN
        }


class Run:
    """Args of all methods: now: Unix seconds."""

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self.places: dict[str, Place] = {}
        self._sampled: Counter[str] = Counter()
        self._not_trained: dict[str, Counter[str]] = {}
        self._acknowledged = self._empty = self._evaluated = self._order = 0
        self._requests: dict[str, tuple[float, list[tuple[str, str]]]] = {}
        self._late: dict[str, set[str]] = {}
        self.trainer = Trainer()
        self.newest_at: float | None = None
        self.rollouts_over = False

    # -- what becomes of trials

    def open_group(self, group: Group) -> None:
        """Idempotent. A new one to be trained says that its run's rollouts are not over."""
        self.newest_at = max(self.newest_at or 0.0, group.created_at)
        if group.group_id not in self.places and group.purpose == "train":
            self.rollouts_over = False
        self.places.setdefault(group.group_id, Place(group))

    def ended(self, trial: Ended, now: float) -> None:
        """A trial has ended, or more is known of its end. What was known earlier never undoes what was known later."""
        if not trial.booked:
            self._sampled.update(trial.tokens)
        if trial.group_id is None:
            self._book(trial, NotTrained.UNGROUPED)
            return
        place = self.places.get(trial.group_id)
        if place is None:
            self._book(trial, NotTrained.LATE)
            return
        if place.group.purpose == "eval":
            self._book(trial, NotTrained.EVALUATION)
        before = place.trials.get(trial.trial_id)
        if before is not None and before.life != trial.life:
            if place.group.purpose != "eval":
                self._book(trial, NotTrained.LATE)
        elif place.state is State.RUNNING:
            self._keep(place, trial, before, now)
        elif place.state is not State.OVER:
            self._after(place, trial, before)

    def _keep(self, place: Place, trial: Ended, before: Kept | None, now: float) -> None:
        if before is None:
            place.trials[trial.trial_id] = Kept(trial.life, trial.outcome, trial.final, dict(trial.tokens))
        elif trial.outcome == NotTrained.DELETED or before.outcome == NotTrained.UNSCORED:
            before.outcome, before.final = trial.outcome, before.final or trial.final
        known = place.trials.values()
        if len(known) == len(place.group.trial_ids) and all(kept.final for kept in known):
            self.close(place.group.group_id, now)

    def _after(self, place: Place, trial: Ended, before: Kept | None) -> None:
        """The group does not run any more."""
        if before is None:
            place.trials[trial.trial_id] = Kept(trial.life, NotTrained.LATE, True, {})
            self._book(trial, NotTrained.LATE)
        elif trial.outcome == NotTrained.DELETED and before.outcome == TRAIN and not place.grants:
            before.outcome = trial.outcome
            self._book_tokens(before.tokens, NotTrained.DELETED)
            if place.state is State.READY and not _trainable(place):
                place.state = State.EMPTY
                self._empty += 1

    def close(self, group_id: str, now: float) -> None:
        """Serve a running group as it is. Nothing, if it does not run."""
        place = self.places[group_id]
        if place.state is not State.RUNNING:
            return
        if place.group.purpose == "eval":
            place.state = State.OVER
            self._evaluated += 1
            return
        for kept in place.trials.values():
            if kept.outcome != TRAIN:
                self._book_tokens(kept.tokens, kept.outcome)
        if _trainable(place):
            self._order += 1
            place.state, place.order, place.ready_at = State.READY, self._order, now
        else:
            place.state = State.EMPTY
            self._empty += 1

    def close_due(self, now: float) -> None:
        for group_id, place in list(self.places.items()):
            if place.state is State.RUNNING and place.due_at is not None and place.due_at <= now:
                self.close(group_id, now)

    def came_late(self, trial_id: str, turn_id: str, tokens: Tokens, reason: str) -> None:
        """Tokens of a turn that its trial's record does not take any more. Once per turn."""
        turns = self._late.setdefault(trial_id, set())
        if turn_id not in turns:
            turns.add(turn_id)
            self._sampled.update(tokens)
            self._book_tokens(tokens, reason)

    def lets_go(self, group_id: str, now: float) -> bool:
        """Whether a trial of this group that is past its retention may be dropped. One that runs for so long is served as it is
        first; what waits for a lease, or is leased, is kept."""
        place = self.places.get(group_id)
        if place is None or place.group.purpose == "eval":
            return True
        self.close(group_id, now)
        return place.state not in (State.READY, State.LEASED)

    def forget(self, group_id: str, now: float) -> None:
        """The last session of a group is gone. What is leased or was is kept until it is acknowledged."""
        place = self.places.get(group_id)
        if place is None:
            return
        self.close(group_id, now)
        if place.state in (State.READY, State.LEASED):
            place.forsaken = True
        else:
            del self.places[group_id]

    # -- leases

    def waiting(self, now: float) -> list[Place]:
        """Groups that can be leased, oldest ready first."""
        found = [place for place in self.places.values() if place.state is State.READY or _expired(place, now)]
        return sorted(found, key=lambda place: place.order)

    def lease(
        self, consumer: str, most: int, at_least: int, ttl_s: float, request_id: str | None, grant: str, now: float
    ) -> list[Place]:
        """Grant up to `most` groups; none, if fewer than `at_least` can be. grant: new, for fencing tokens."""
        self.close_due(now)
        self._requests = {name: found for name, found in self._requests.items() if found[0] > now}
        if request_id is not None and request_id in self._requests:
            held = [(self.places.get(group_id), token) for group_id, token in self._requests[request_id][1]]
            return [place for place, token in held if place is not None and _holds(place, token)]
        found = self.waiting(now)
        if len(found) < max(1, at_least):
            return []
        for number, place in enumerate(found[:most]):
            place.state, place.consumer, place.expires_at = State.LEASED, consumer, now + ttl_s
            place.granted_at, place.used = now, False
            place.granted, place.grants = f"{grant}{number}", place.grants + 1
        if request_id is not None:
            granted = [(place.group.group_id, place.granted) for place in found[:most]]
            self._requests[request_id] = (now + REQUEST_TTL_S, granted)
        return found[:most]

    def next_in_s(self, now: float) -> float | None:
        """Until something may become ready by itself: a deadline, or the end of a lease. None: nothing is known to."""
        due = [p.due_at for p in self.places.values() if p.state is State.RUNNING and p.due_at is not None]
        held = [p.expires_at for p in self.places.values() if p.state is State.LEASED]
        return min([*due, *held]) - now if due or held else None

    # -- whose the run is

    def check_epoch(self, epoch: int | None) -> None:
        if epoch is not None and epoch < self.trainer.epoch:
            raise superseded(self.run_id, self.trainer.epoch)

    def take_over(self, trainer: str, force: bool, now: float) -> int:
        before = self.trainer
        if before.epoch and before.name == trainer:
            return before.epoch
        left_s = before.heard_at + ALIVE_S - now
        if not force and left_s > 0:
            raise alive(self.run_id, before.name, left_s)
        self.trainer = Trainer(trainer, before.epoch + 1, now)
        for group_id, place in self.places.items():
            if place.state is State.LEASED and LeaseName(self.run_id, group_id, place.granted).epoch is not None:
                place.state, place.granted = State.READY, ""
        return self.trainer.epoch

    def heartbeat(self, trainer: str, epoch: int, leaving: bool, now: float) -> None:
        before = self.trainer
        if epoch < before.epoch or (epoch == before.epoch and trainer != before.name):
            raise superseded(self.run_id, before.epoch)
        self.trainer = Trainer(trainer, epoch, 0.0 if leaving else now)

    # -- what becomes of leases

    def acknowledge(self, name: LeaseName, now: float) -> float | None:
        place = self._place(name)
        if place.settled == name.grant:
            return None
        self._check_held(place, name)
        place.state, place.settled, place.granted = State.ACKNOWLEDGED, name.grant, ""
        self._acknowledged += 1
        if place.forsaken:
            place.trials = {}
        return max(0.0, now - place.granted_at)

    def release(self, name: LeaseName) -> None:
        place = self._place(name)
        if place.let_go == name.grant:
            return
        self._check_held(place, name)
        place.state, place.let_go, place.granted = State.READY, name.grant, ""

    def extend(self, name: LeaseName, ttl_s: float, used: bool, now: float) -> float:
        place = self._place(name)
        self._check_held(place, name)
        place.expires_at = now + ttl_s
        place.used = place.used or used
        return place.expires_at

    def _place(self, name: LeaseName) -> Place:
        self.check_epoch(name.epoch)
        place = self.places.get(name.group_id)
        if place is None:
            raise NotFound(f"no group {name.group_id} is leased")
        return place

    def _check_held(self, place: Place, name: LeaseName) -> None:
        if not _holds(place, name.grant):
            raise Conflict(f"group {name.group_id} is not held under this lease any more")

    # -- what operators see

    def view(self, now: float) -> RunView:
        states = Counter((place.group.purpose, place.state) for place in self.places.values())
        expired = sum(_expired(place, now) for place in self.places.values())
        used = sum(
            place.used and place.state is State.LEASED and not _expired(place, now) for place in self.places.values()
        )
        return RunView(
            run_id=self.run_id,
            groups=RunGroups(
                running=states["train", State.RUNNING],
                ready=states["train", State.READY] + expired,
                leased=states["train", State.LEASED] - expired - used,
                used=used,
                acknowledged=self._acknowledged,
                empty=self._empty,
            ),
            eval_groups=EvalGroups(running=states["eval", State.RUNNING], ended=self._evaluated),
            rollouts_over=self.rollouts_over,
            sampled=dict(self._sampled),
            not_trained={reason: dict(tokens) for reason, tokens in self._not_trained.items()},
            trainer=run_trainer(self.trainer.name, self.trainer.epoch, self.trainer.heard_at, now),
        )

    def listed(self, now: float) -> Iterator[GroupPlace]:
        for place in self.places.values():
            state = State.READY if _expired(place, now) else place.state
            yield GroupPlace(
                group_id=place.group.group_id, purpose=place.group.purpose, state=state, size=len(place.group.trial_ids),
                ended=sum(kept.final for kept in place.trials.values()), grants=place.grants,
                trainer=place.consumer if state is State.LEASED else None, created_at=place.group.created_at,
            )  # fmt: skip

    def _book(self, trial: Ended, reason: str) -> None:
        if not trial.booked:
            self._book_tokens(trial.tokens, reason)

    def _book_tokens(self, tokens: Tokens, reason: str) -> None:
        if tokens:
            self._not_trained.setdefault(str(reason), Counter()).update(tokens)


def _trainable(place: Place) -> bool:
    return any(sum(tokens.values()) for tokens in place.brings().values())


def _expired(place: Place, now: float) -> bool:
    return place.state is State.LEASED and place.expires_at <= now


def _holds(place: Place, grant: str) -> bool:
    return place.state is State.LEASED and place.granted == grant
