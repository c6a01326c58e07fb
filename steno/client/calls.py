"""The calls of the control plane's REST API, one table for both clients (`client.py`).

Each row is written once, as a method of `RestCalls` that builds a `ClientRequest` (`transport.py`). Every call may be repeated:
ids that the proxy would make are made here, and after a lost answer, `NotFound` of a model name counts as retired.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict
from urllib.parse import quote

from pydantic import SecretStr

from steno.client.transport import MSGPACK, Body, ClientRequest, call, usable_timeout, usable_url
from steno.config.keys import first_key
from steno.contracts.errors import ConfigError
from steno.contracts.lenient import read, read_struct
from steno.contracts.policy import ModelName, ModelNames, PolicyList, PolicyView, Received, Update, UpdateSpec
from steno.contracts.records import Group, Sample, Session
from steno.contracts.rest import (
    Completion,
    GroupSpec,
    GroupTrials,
    RunKey,
    SampleList,
    SessionPage,
    SessionSpec,
    TaskStep,
    TokenTexts,
    Trial,
    TurnPage,
)
from steno.contracts.runs.claims import Claim, ClaimList, ClaimRequest
from steno.contracts.runs.leases import (
    EPOCH_HEADER,
    GroupList,
    GroupPlace,
    Lease,
    LeaseExtension,
    LeaseList,
    LeaseRequest,
    LeaseTerm,
    RolloutsOver,
    RunList,
    RunSummary,
    RunView,
    TakeOver,
    Tenure,
    TrainerHeartbeat,
)
from steno.contracts.runs.training_steps import (
    AnnotationPost,
    AnnotationsKept,
    PostedAnnotation,
    TrainingStep,
    TrainingStepPage,
)
from steno.contracts.worker_view import WorkerPage, WorkerView


class SessionFilters(TypedDict, total=False):
    """What `session_page` takes, but for the cursor, which `Client.sessions` keeps itself."""

    status: str | None
    group_id: str | None
    since: float | None
    until: float | None
    limit: int | None
    run_id: str | None
    newest_first: bool


class RestCalls:
    """The REST table of docs/api.md, row by row. A client adds `_open` and `_send`."""

    def __init__(
        self,
        base_url: str,
        key: str | SecretStr | None = None,
        *,
        timeout_s: float = 30.0,
        retries: int = 2,
        transport: Any = None,
        epoch: int | None = None,
    ) -> None:
        """
        Args:
            base_url: of the proxy, path prefix included; what its `--public-url` says.
            key: the admin key, a run's key or a group's harness key; None where the proxy asks for none. Of several, one a line
                (a file that is being rotated), the first.
            timeout_s: for each attempt to connect and for each silence while an answer is read.
            retries: further attempts after `Unreachable` or an error that is `retryable`.
            transport: an httpx transport instead of sockets (a Unix socket, a test's fake).
            epoch: of a trainer that registered (`take_over`): once another one has the run, leases and updates are refused.
        Raises:
            ConfigError: names what can't be used: `base_url`, `timeout_s`, a `key` that is not printable ASCII, or a variable
                that httpx reads (SSL_CERT_FILE, HTTPS_PROXY, …).
        """
        try:
            secret = first_key((key.get_secret_value() if isinstance(key, SecretStr) else key) or "")
        except ValueError as error:
            raise ConfigError(f"key: {error}", field="key") from None
        headers = {"accept": MSGPACK} | ({"authorization": f"Bearer {secret}"} if secret else {})
        headers |= {EPOCH_HEADER: str(epoch)} if epoch is not None else {}
        self._retries = retries
        timeout = usable_timeout(timeout_s)
        self._open(base_url=usable_url(base_url), headers=headers, timeout=timeout, transport=transport)

    def _open(self, **options: Any) -> None:
        raise NotImplementedError

    @call
    def create_group(self, spec: GroupSpec) -> ClientRequest[GroupTrials]:
        """Make a group and its trials. The same again returns what is on record.

        Returns: the group, and its trials, each with URLs and key.
        Raises: Conflict: that group_id has other values, a trial id is taken, or what it forks or scores anew can't be. NotFound,
            Gone: what it forks or scores anew is not there; Gone: the group was deleted. StoreFull: no room for new trials.
        """
        named = spec.model_copy(update={"group_id": spec.group_id or uuid.uuid4().hex})
        return ClientRequest("POST", "/groups", partial(read, GroupTrials), body=named)

    @call
    def claim(self, group_id: str, asked: ClaimRequest) -> ClientRequest[list[Claim]]:
        """Claim trials of a group for a launcher, or renew its claims.

        Returns: one answer for each, in their order. Raises: NotFound: no such group. BadRequest: not a trial of it.
        """
        path = f"/groups/{quote(group_id, safe='')}/claims"
        return ClientRequest("POST", path, lambda body: read(ClaimList, body).items, body=asked)

    @call
    def group(self, group_id: str) -> ClientRequest[Group]:
        """Returns: a group's record, with the ids of its trials. Raises: NotFound."""
        return ClientRequest("GET", f"/groups/{quote(group_id, safe='')}", partial(read, Group))

    @call
    def register(self, trial_id: str | None = None, spec: SessionSpec | None = None) -> ClientRequest[Trial]:
        """One trial; registering it again returns what is on record.

        Returns: its session, URLs and key.
        Raises: Conflict: that is on record with other limits, sampling, run or origin, or what it forks can't be forked there.
            NotFound: what it forks is not there. Gone: it was deleted. StoreFull: no room for new trials.
        """
        path = session_path(trial_id or (spec and spec.trial_id) or uuid.uuid4().hex)
        return ClientRequest("POST", path, partial(read, Trial), body=spec or SessionSpec())

    @call
    def session_page(
        self,
        *,
        status: str | None = None,
        group_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
        cursor: str | None = None,
        limit: int | None = None,
        run_id: str | None = None,
        newest_first: bool = False,
    ) -> ClientRequest[SessionPage]:
        """Returns: one page of sessions by creation time, oldest first unless `newest_first`. Its `unreadable`: those that the
        archive can't give now.

        Args: since, until: Unix seconds. cursor: `next_cursor` of the page before.
        """
        query = {
            "status": status,
            "group_id": group_id,
            "since": since,
            "until": until,
            "cursor": cursor,
            "limit": limit,
            "run_id": run_id,
            "order": "newest" if newest_first else None,
        }
        return ClientRequest("GET", "/sessions", partial(read, SessionPage), query=query)

    @call
    def session(self, trial_id: str) -> ClientRequest[Session]:
        """Returns: the record of a trial, without its turns. Raises: NotFound. Gone: it was deleted. ArchiveUnreadable: the
        archive can't give it now."""
        return ClientRequest("GET", session_path(trial_id), partial(read, Session))

    @call
    def turn_page(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> ClientRequest[TurnPage]:
        """Returns: one page of a trial's turns in commit order, from number `start` on. Raises: as `session`."""
        query = {"start": start, "limit": limit}
        return ClientRequest("GET", session_path(trial_id, "turns"), partial(read, TurnPage), query=query)

    @call
    def samples(self, trial_id: str) -> ClientRequest[list[Sample]]:
        """Returns: one sample per leaf of the conversation tree, of the turns that can be read.

        Raises: as `session`; Conflict: the trial is text_only, without token ids.
        """
        return ClientRequest("GET", session_path(trial_id, "samples"), lambda body: read(SampleList, body).items)

    @call
    def sample_list(self, trial_id: str) -> ClientRequest[SampleList]:
        """Returns: as `samples`, with the turns that can't be read, and why. Raises: as `samples`."""
        return ClientRequest("GET", session_path(trial_id, "samples"), partial(read, SampleList))

    @call
    def complete(self, trial_id: str, outcome: Completion) -> ClientRequest[Session]:
        """Freeze the session and post its reward. The same again changes nothing.

        Returns: its record. Raises: as `session`; Conflict: it has ended with another status or reward, or another launcher has
            claimed the trial.
        """
        return ClientRequest("POST", session_path(trial_id, "complete"), partial(read, Session), body=outcome)

    @call
    def begin_task_step(self, trial_id: str, name: str | None) -> ClientRequest[Session]:
        """Turns that are asked from now on belong to this step of the trial's task; None: to none.

        Returns: the session's record. Raises: NotFound. Gone: it has ended.
        """
        path = session_path(trial_id, "task-step")
        return ClientRequest("POST", path, partial(read, Session), body=TaskStep(name=name))

    @call
    def delete(self, trial_id: str) -> ClientRequest[None]:
        """Remove everything of a trial and leave a tombstone. The same again changes nothing.

        Raises: NotFound: there never was one. ArchiveUnreadable: it is in the archive, which can't be written now.
        """
        return ClientRequest("DELETE", session_path(trial_id), lambda body: None)

    @call
    def policies(self) -> ClientRequest[list[PolicyView]]:
        """Returns: every policy: its version in force, and who serves which version."""
        return ClientRequest("GET", "/policy", lambda body: read(PolicyList, body).items)

    @call
    def models(self) -> ClientRequest[list[ModelName]]:
        """Returns: model names that workers have served, and who serves them now."""
        return ClientRequest("GET", "/policy/models", lambda body: read(ModelNames, body).items)

    @call
    def retire_model(self, name: str) -> ClientRequest[None]:
        """Requests for this name go to the default policy from now on. Raises: Conflict: a worker serves it. NotFound: no worker
        has served it, or it was retired before this call."""
        return ClientRequest("DELETE", f"/policy/models/{quote(name, safe='')}", lambda body: None, removes="name")

    @call
    def post_update(self, spec: UpdateSpec) -> ClientRequest[Update]:
        """Bring new weights to the workers. The same again: the recorded update.

        Returns: at once; `update` says how far it is.
        Raises: BadRequest: fields that contradict each other. Conflict: the version is known with other weights, or a newer one
            was posted. Superseded: another trainer has the run.
        """
        return ClientRequest("POST", "/policy/updates", partial(read, Update), body=spec)

    @call
    def update(self, update_id: str, *, wait_s: float = 0.0) -> ClientRequest[Update]:
        """An update as it stands; with `wait_s` (60 at most) once it has ended or wants bytes, or so many seconds later.

        Raises: NotFound: also from a proxy that was started again and keeps nothing: post the same spec again.
        """
        path = f"/policy/updates/{quote(update_id, safe='')}"
        return ClientRequest("GET", path, partial(read, Update), query={"wait_s": wait_s or None}, patience_s=wait_s)

    @call
    def upload_shard(self, update_id: str, name: str, offset: int, data: Body) -> ClientRequest[int]:
        """Upload bytes of a shard from `offset` on, as `Update.wants` asks. Returns: the byte of the shard up to which workers
        took them.

        Give tens of megabytes a call, in pieces that are made as they are sent: a call takes as long as the slowest worker, and
        bytes that no worker wants any more are sent for nothing. Only whole `bytes` are repeated after a failure.

        Raises: NotFound: no such update or shard. Conflict: a newer version was posted. BadRequest: the update takes no uploads,
            or none from there.
        """
        path = f"/policy/updates/{quote(update_id, safe='')}/shards/{quote(name, safe='')}"
        return ClientRequest(
            "PUT", path, lambda body: read(Received, body).received, query={"offset": offset}, content=data,
            patience_s=60.0,
        )  # fmt: skip

    @call
    def lease(self, request: LeaseRequest) -> ClientRequest[list[Lease]]:
        """Lease completed groups, oldest ready first.

        Returns: `max_groups` of them, or those that are ready after `wait_s`. Raises: Superseded: another trainer has the run.
        """
        named = request.model_copy(update={"request_id": request.request_id or uuid.uuid4().hex})
        return ClientRequest(
            "POST",
            "/leases",
            lambda body: read(LeaseList, body).items,
            body=named,
            patience_s=request.wait_s,
        )

    @call
    def acknowledge(self, lease_id: str) -> ClientRequest[LeaseTerm]:
        """The step that used the group is durable.

        Returns: the lease, without an end.
        Raises: Conflict: the lease was lost to another trainer; Superseded: that has taken over the run. NotFound: no such lease.
        """
        return ClientRequest("POST", f"/leases/{lease_id}/ack", partial(read, LeaseTerm))

    @call
    def release(self, lease_id: str) -> ClientRequest[LeaseTerm]:
        """Give the group back, to be served again at once. Returns, raises: as `acknowledge`."""
        return ClientRequest("POST", f"/leases/{lease_id}/release", partial(read, LeaseTerm))

    @call
    def extend(self, lease_id: str, ttl_s: float = 600.0, *, used: bool = False) -> ClientRequest[LeaseTerm]:
        """Hold the group for `ttl_s` from now; `used`: a step has used it, and only waits to be durable.

        Returns: when the lease ends now. Raises: as `acknowledge`.
        """
        path = f"/leases/{lease_id}/extend"
        return ClientRequest("POST", path, partial(read, LeaseTerm), body=LeaseExtension(ttl_s=ttl_s, used=used))

    @call
    def take_over(self, run_id: str, trainer: str, *, force: bool = False) -> ClientRequest[Tenure]:
        """Register as a run's trainer; `trainer` names this start of it. Leases and updates of the one before are refused from
        then on, and what it had leased is served again at once. `force`: also from one that was heard of a moment ago.

        Returns: the epoch, to make the trainer's clients with (`epoch`).
        Raises: TrainerAlive: the one before was heard of a moment ago; `retry_after_s` says when to try again.
        """
        body = TakeOver(trainer=trainer, take_over=force)
        return ClientRequest("POST", f"/runs/{quote(run_id, safe='')}/trainer", partial(read, Tenure), body=body)

    @call
    def heartbeat(self, run_id: str, trainer: str, epoch: int, *, leaving: bool = False) -> ClientRequest[Tenure]:
        """A registered trainer lives, or is `leaving`; to be called every 5 s.

        Returns: that it has the run. Raises: Superseded: another one has taken over.
        """
        body = TrainerHeartbeat(trainer=trainer, epoch=epoch, leaving=leaving)
        return ClientRequest(
            "POST", f"/runs/{quote(run_id, safe='')}/trainer/heartbeat", partial(read, Tenure), body=body
        )

    @call
    def rollouts_over(self, run_id: str, over: bool = True) -> ClientRequest[RolloutsOver]:
        """No more training groups come in this run: its trainer takes what is left, and ends. over: False: more come after all.

        Returns: what is on record now.
        """
        path = f"/runs/{quote(run_id, safe='')}/rollouts"
        return ClientRequest("POST", path, partial(read, RolloutsOver), body=RolloutsOver(over=over))

    @call
    def run(self, run_id: str, *, ledger: bool = True) -> ClientRequest[RunView]:
        """Returns: where a run's groups are, and the proxy's side of its ledger. An unknown run is no error: its view is empty.

        ledger: False: without the token counts, which grow with each policy version, for callers that ask often. An older proxy
            gives them anyway.
        """
        path, query = f"/runs/{quote(run_id, safe='')}", {"ledger": None if ledger else False}
        return ClientRequest("GET", path, partial(read, RunView), query=query, newer="ledger")

    @call
    def post_step(self, run_id: str, step: TrainingStep) -> ClientRequest[TrainingStep]:
        """The numbers of a training step, for whoever looks at the run. The same step again: values of the same name are
        replaced.

        Returns: what is on record of it now. Raises: Superseded: another trainer has the run.
        """
        path = f"/runs/{quote(run_id, safe='')}/steps"
        return ClientRequest("POST", path, partial(read, TrainingStep), body=step)

    @call
    def step_page(self, run_id: str, *, start: int = 0, limit: int | None = None) -> ClientRequest[TrainingStepPage]:
        """Returns: one page of a run's training steps, from step `start` on."""
        path = f"/runs/{quote(run_id, safe='')}/steps"
        query = {"start": start, "limit": limit}
        return ClientRequest("GET", path, partial(read, TrainingStepPage), query=query)

    @call
    def annotate(self, run_id: str, items: Sequence[PostedAnnotation]) -> ClientRequest[AnnotationsKept]:
        """What a trainer saw in the tokens of turns of this run's trials; `Turn.annotation` has it afterwards.

        Give some 100,000 tokens a call.

        Returns: how many turns it is kept of, and trials that were deleted or are in the archive.
        Raises: BadRequest: there is no such turn, or it has another number of tokens. Superseded: another trainer has the run.
        """
        path = f"/runs/{quote(run_id, safe='')}/annotations"
        return ClientRequest("POST", path, partial(read, AnnotationsKept), body=AnnotationPost(items=list(items)))

    @call
    def runs(self, *, limit: int | None = None) -> ClientRequest[list[RunSummary]]:
        """Returns: runs that have groups, the one with the newest group first."""
        return ClientRequest("GET", "/runs", lambda body: read(RunList, body).items, query={"limit": limit})

    @call
    def run_key(self, run_id: str) -> ClientRequest[str | None]:
        """Returns: the key that rollouts of this run need: it makes the run's groups, reads and completes its trials, and nothing
        else. None where the proxy asks for no key."""
        return ClientRequest("POST", f"/runs/{quote(run_id, safe='')}/key", lambda body: read(RunKey, body).key)

    @call
    def groups(self, run_id: str | None) -> ClientRequest[list[GroupPlace]]:
        """Returns: a run's groups and where they are, newest first. run_id: None: groups without a run."""
        return ClientRequest("GET", "/groups", lambda body: read(GroupList, body).items, query={"run_id": run_id})

    @call
    def token_texts(self, tokenizer: str) -> ClientRequest[TokenTexts]:
        """Returns: the texts of a tokenizer's tokens, by id; `tokenizer` is what a turn says. Raises: NotFound: no worker of it
        has said them."""
        path = f"/workers/tokenizers/{quote(tokenizer, safe='')}"
        return ClientRequest("GET", path, partial(read, TokenTexts))

    @call
    def workers(self) -> ClientRequest[list[WorkerView]]:
        """Returns: the fleet, by id: what each worker serves, its load, whether it is connected."""
        return ClientRequest("GET", "/workers", lambda body: read_struct(WorkerPage, body).items)


def session_path(trial_id: str, tail: str = "") -> str:
    """The path of a session, or of what is below it."""
    return f"/sessions/{quote(trial_id, safe='')}" + (f"/{tail}" if tail else "")
