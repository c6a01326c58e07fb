"""Errors of the trainer: each is a broken invariant and ends the trainer. A retry never helps.

    StenoError
    └── TrainerError
        ├── LedgerImbalance   tokens appeared or vanished (I4)
        ├── BadPlan           a packing plan of other samples, or one that ranks can't run in lockstep
        ├── BadBatch          tensors, rewards or versions that contradict each other
        ├── WeightsUnavailable  tensors of a model that can't be sent as what they are
        ├── CopyFailed        a full copy of the weights that some rank could not write, or a version that has another copy
        ├── PushFailed        an update that the proxy refused, or that did not settle in time
        ├── NotFinite         several steps in a row whose loss or gradient was no number
        └── BadCheckpoint     a checkpoint that is not whole, or not of this run's shape

A sample that can't be trained is none of these: it is counted by reason in the ledger. A bad setting is a ConfigError.
"""

from __future__ import annotations

from steno.contracts.errors import StenoError


class TrainerError(StenoError):
    code = "trainer_error"


class LedgerImbalance(TrainerError):
    code = "ledger_imbalance"


class BadPlan(TrainerError):
    code = "bad_plan"


class BadBatch(TrainerError):
    code = "bad_batch"


class WeightsUnavailable(TrainerError):
    code = "weights_unavailable"


class CopyFailed(TrainerError):
    code = "copy_failed"


class NotFinite(TrainerError):
    code = "not_finite"


class BadCheckpoint(TrainerError):
    code = "bad_checkpoint"


class PushFailed(TrainerError):
    code = "push_failed"
