"""Where a run's numbers go: Prometheus, TensorBoard, Weights & Biases. Any of them, none of them; each imported only when asked
for.

A tracker must not end a run: one that fails is logged, and asked again at the next step.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from steno.contracts.errors import CannotListen, ConfigError
from steno_trainer.data.ledger import Account
from steno_trainer.reporting.metrics import FAMILIES, MEASURES, Values, family_of
from steno_trainer.run_config import RunSettings

logger = logging.getLogger(__name__)

STEP = "train/step"
"""The number of the step among the values that Weights & Biases gets."""


class Tracker(Protocol):
    def log(self, step: int, values: Values, ledger: Account, *, stepped: bool = True) -> None:
        """Log the numbers of one step, by names of `metrics`, and the run's ledger over all versions. `step` is that of the
        weights afterwards. The same step comes again if there was nothing to train (stepped: False), and if a trainer takes
        steps again that an earlier one lost."""
        ...

    def close(self) -> None: ...


class Prometheus:
    """Gauges on `http://<host>:<port>/metrics`."""

    def __init__(self, port: int, host: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> None:
        """Raises: CannotListen: the port is taken."""
        self.registry = registry or CollectorRegistry()
        self._gauges = {m.name: Gauge(m.prometheus, m.help, registry=self.registry) for m in MEASURES}
        self._families = {f: Gauge(f.prometheus, f.help, [f.label], registry=self.registry) for f in FAMILIES}
        self._step = Gauge("steno_train_step", "Step of the current weights", registry=self.registry)
        self._tokens = Gauge(
            "steno_train_ledger_tokens", "Tokens by what became of them: `sampled`, `trained`, or a reason of the ledger",
            ["outcome"], registry=self.registry,
        )  # fmt: skip
        try:
            self._server, self._thread = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise CannotListen("metrics_port", host, port, error) from error
        self.port: int = self._server.server_port

    def log(self, step: int, values: Values, ledger: Account, *, stepped: bool = True) -> None:
        self._step.set(step)
        own = [(*family_of(name), value) for name, value in values.items() if name not in self._gauges]
        for family in {family for family, _, _ in own}:
            self._families[family].clear()  # names come and go with the trials
        for family, word, value in own:
            self._families[family].labels(word).set(value)
        for name in values.keys() & self._gauges.keys():
            self._gauges[name].set(values[name])
        for outcome, tokens in outcomes(ledger).items():
            self._tokens.labels(outcome).set(tokens)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class TensorBoard:
    """Event files in `folder`, for `tensorboard --logdir`: one point of a step. Steps that are taken again take the place of
    those that an earlier trainer has left there."""

    def __init__(self, folder: Path) -> None:
        self._make = _imported("tensorboardX", "tensorboard_dir").SummaryWriter
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # said now, and not at each step
            pass
        self._folder = folder
        self._writer: Any = None  # from the first line on, which says where this trainer begins

    def log(self, step: int, values: Values, ledger: Account, *, stepped: bool = True) -> None:
        if self._writer is None:
            first = step if stepped else step + 1
            self._writer = self._make(logdir=str(self._folder), flush_secs=10, purge_step=first)
        for name, value in _of_step(values, ledger, stepped).items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. A resumed trainer goes on with the same one, since its id is the run's.

    Charts are drawn over `train/step`, and each line is a row of its own. W&B's own step is no axis for it: what is sent for the
    same one is merged into one row, and what is sent for an earlier one is dropped.

    mode: `online`, or `offline` (files that `wandb sync` sends later).
    """

    def __init__(self, project: str, *, run_id: str, mode: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Where the server can't be had, nothing is sent. Raises: ConfigError: nobody is logged in, or what is set is refused."""
        wandb = _imported("wandb", "wandb_project")
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = None
        try:
            self._run = wandb.init(
                project=project, id=wandb_id(run_id), name=run_id, mode=mode, dir=str(folder), config=dict(config),
                resume="allow", settings=wandb.Settings(console="off", silent=True),
            )  # fmt: skip
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(f"wandb_project: {error}", field="wandb_project") from error
        except wandb.errors.Error as error:
            logger.warning("wandb_project: Weights & Biases gets nothing of this start: %s", error)
            return
        self._run.define_metric("*", step_metric=STEP)
        # Of a run that it resumes W&B knows how many rows there are. Offline it does not: there rows are counted from the first
        # step on, so that those of a later start do not all stand where those of an earlier one do.
        self._counts = bool(self._run.resumed)

    def log(self, step: int, values: Values, ledger: Account, *, stepped: bool = True) -> None:
        if self._run is not None and (row := _of_step(values, ledger, stepped)):
            self._run.log({STEP: step, **row}, step=None if self._counts else step, commit=True)
            self._counts = True

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Trackers:
    """All of a run's trackers as one. Owns that none of them can end it."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, values: Values, ledger: Account, *, stepped: bool = True) -> None:
        self._each(lambda tracker: tracker.log(step, values, ledger, stepped=stepped))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                act(tracker)
            except Exception:  # recorded: numbers that were not shown are no reason to lose a step
                logger.exception("%s failed", type(tracker).__name__)


def check_installed(settings: RunSettings) -> None:
    """Raises: ConfigError: the settings want a tracker that is not installed. Imports none: that takes seconds."""
    for name, setting in (("tensorboardX", "tensorboard_dir"), ("wandb", "wandb_project")):
        if getattr(settings, setting) is not None and importlib.util.find_spec(name) is None:
            raise _missing(name, setting)


def wandb_id(run: str) -> str:
    """What Weights & Biases has a run by: its own name, unless that has characters which W&B refuses there. These are replaced,
    and a digest tells such runs apart."""
    plain = re.sub(r"[:;,#?/']|^\s+|\s+$", "-", run)
    return plain if plain == run else f"{plain}-{blake2b(run.encode(), digest_size=4).hexdigest()}"


def outcomes(ledger: Account) -> dict[str, int]:
    """Tokens by what became of them: `sampled`, `trained`, or a reason of the ledger."""
    untrained = {reason.value: tokens for reason, tokens in ledger.untrained.items()}
    return {"sampled": ledger.sampled, "trained": ledger.trained, **untrained}


def added(values: Values, stepped: bool) -> Values:
    """Which of these values to keep for their step. If no weight changed (stepped: False), the numbers that are already kept for
    this step stay, and only those of an evaluation are added."""
    return values if stepped else {name: value for name, value in values.items() if name.startswith("eval/")}


def _of_step(values: Values, ledger: Account, stepped: bool) -> dict[str, float]:
    books = {f"ledger/{outcome}_tokens": tokens for outcome, tokens in outcomes(ledger).items()} if stepped else {}
    return {**added(values, stepped), **books}


def _imported(name: str, setting: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise _missing(name, setting) from error


def _missing(name: str, setting: str) -> ConfigError:
    return ConfigError(f"{setting}: {name} is not installed: pip install '.[trackers]' in the checkout", field=setting)
