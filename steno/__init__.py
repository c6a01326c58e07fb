"""The public API for notebooks, harnesses and trainers: the client of a proxy, the records that its calls take and return, and
the errors that they raise.

    from steno import Client, Completion

    with Client("http://127.0.0.1:8000") as client:
        trial = client.register("my-trial")
        ...
        client.complete("my-trial", Completion(reward=1.0))
        for sample in client.samples("my-trial"):
            ids, mask, logprobs = sample.to_numpy()

Light: neither torch nor a server comes along. The names are imported when they are first asked for: the proxy and the worker need
the contracts alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steno.client.client import AsyncClient, Client
    from steno.contracts.arrays import bytes_to_floats, bytes_to_halves, bytes_to_ids, halves_to_bytes
    from steno.contracts.errors import (
        ArchiveUnreadable,
        BadRequest,
        BodyTimeout,
        BodyTooLarge,
        ConfigError,
        Conflict,
        Forbidden,
        Gone,
        NotFound,
        ProtocolError,
        StenoError,
        StoreFull,
        StoreUnavailable,
        Superseded,
        TooManyRequests,
        TrainerAlive,
        Unauthorized,
        Unreachable,
    )
    from steno.contracts.notes import Note, Notes
    from steno.contracts.policy import (
        AdapterEntry,
        Manifest,
        ModelName,
        PatchEntry,
        PolicyView,
        Probe,
        ShardEntry,
        TensorEntry,
        Update,
        UpdateSpec,
        Want,
        WorkerUpdate,
    )
    from steno.contracts.records import (
        Counts,
        ForkOf,
        ForkReason,
        Group,
        Limits,
        MayDiffer,
        Sample,
        SampleArrays,
        SampledRange,
        SamplingPolicy,
        Session,
        Timings,
        TokenSpan,
        Turn,
        TurnAnnotation,
        TurnArrays,
        WorkerSpan,
    )
    from steno.contracts.rest import (
        Completion,
        GroupSpec,
        GroupTrials,
        SampleList,
        SessionPage,
        SessionSpec,
        TokenTexts,
        Trial,
        TurnPage,
        UnreadableTurn,
    )
    from steno.contracts.runs.claims import Claim, ClaimRequest
    from steno.contracts.runs.leases import (
        EvalGroups,
        GroupPlace,
        Lease,
        LeaseRequest,
        LeaseTerm,
        RolloutsOver,
        RunGroups,
        RunSummary,
        RunTrainer,
        RunView,
        Tenure,
    )
    from steno.contracts.runs.training_steps import AnnotationsKept, PostedAnnotation, TrainingStep, TrainingStepPage
    from steno.contracts.wire.frames import ModelCard
    from steno.contracts.worker_view import Load, WorkerView

_WHERE = {
    "steno.client.client": "AsyncClient Client",
    "steno.contracts.arrays": "bytes_to_floats bytes_to_halves bytes_to_ids halves_to_bytes",
    "steno.contracts.errors": (
        "ArchiveUnreadable BadRequest BodyTimeout BodyTooLarge ConfigError Conflict Forbidden Gone NotFound ProtocolError "
        "StenoError StoreFull StoreUnavailable Superseded TooManyRequests TrainerAlive Unauthorized Unreachable"
    ),
    "steno.contracts.notes": "Note Notes",
    "steno.contracts.policy": (
        "AdapterEntry Manifest ModelName PatchEntry PolicyView Probe ShardEntry TensorEntry Update UpdateSpec Want "
        "WorkerUpdate"
    ),
    "steno.contracts.records": (
        "Counts ForkOf ForkReason Group Limits MayDiffer Sample SampleArrays SampledRange SamplingPolicy Session Timings "
        "TokenSpan Turn TurnAnnotation TurnArrays WorkerSpan"
    ),
    "steno.contracts.rest": (
        "Completion GroupSpec GroupTrials SampleList SessionPage SessionSpec TokenTexts Trial TurnPage UnreadableTurn"
    ),
    "steno.contracts.runs.claims": "Claim ClaimRequest",
    "steno.contracts.runs.leases": (
        "EvalGroups GroupPlace Lease LeaseRequest LeaseTerm RolloutsOver RunGroups RunSummary RunTrainer RunView Tenure"
    ),
    "steno.contracts.runs.training_steps": "AnnotationsKept PostedAnnotation TrainingStep TrainingStepPage",
    "steno.contracts.wire.frames": "ModelCard",
    "steno.contracts.worker_view": "Load WorkerView",
}
__all__ = [
    "AdapterEntry",
    "AnnotationsKept",
    "ArchiveUnreadable",
    "AsyncClient",
    "BadRequest",
    "BodyTimeout",
    "BodyTooLarge",
    "Claim",
    "ClaimRequest",
    "Client",
    "Completion",
    "ConfigError",
    "Conflict",
    "Counts",
    "EvalGroups",
    "Forbidden",
    "ForkOf",
    "ForkReason",
    "Gone",
    "Group",
    "GroupPlace",
    "GroupSpec",
    "GroupTrials",
    "Lease",
    "LeaseRequest",
    "LeaseTerm",
    "Limits",
    "Load",
    "Manifest",
    "MayDiffer",
    "ModelCard",
    "ModelName",
    "NotFound",
    "Note",
    "Notes",
    "PatchEntry",
    "PolicyView",
    "PostedAnnotation",
    "Probe",
    "ProtocolError",
    "RolloutsOver",
    "RunGroups",
    "RunSummary",
    "RunTrainer",
    "RunView",
    "Sample",
    "SampleArrays",
    "SampleList",
    "SampledRange",
    "SamplingPolicy",
    "Session",
    "SessionPage",
    "SessionSpec",
    "ShardEntry",
    "StenoError",
    "StoreFull",
    "StoreUnavailable",
    "Superseded",
    "TensorEntry",
    "Tenure",
    "Timings",
    "TokenSpan",
    "TokenTexts",
    "TooManyRequests",
    "TrainerAlive",
    "TrainingStep",
    "TrainingStepPage",
    "Trial",
    "Turn",
    "TurnAnnotation",
    "TurnArrays",
    "TurnPage",
    "Unauthorized",
    "Unreachable",
    "UnreadableTurn",
    "Update",
    "UpdateSpec",
    "Want",
    "WorkerSpan",
    "WorkerUpdate",
    "WorkerView",
    "bytes_to_floats",
    "bytes_to_halves",
    "bytes_to_ids",
    "halves_to_bytes",
]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names.split():
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'steno' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
