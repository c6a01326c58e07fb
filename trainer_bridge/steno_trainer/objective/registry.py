"""Which objectives there are, by the names of the setting `objective`. Light to import: settings read it, without torch."""

from __future__ import annotations

from typing import NamedTuple


class ObjectiveEntry(NamedTuple):
    """module: of this package; its `losses` is the objective. clip: (clip_low, clip_high) where nothing is said; None: by what
    has one ratio (`ratios.CLIP`). rewards: False: it imitates, and reads no rewards, ratios and sampled probabilities."""

    module: str
    clip: tuple[float, float] | None = None
    rewards: bool = True


REGISTRY = {
    "clip": ObjectiveEntry("clip"),
    "dual_clip": ObjectiveEntry("dual_clip"),
    "cispo": ObjectiveEntry("cispo", clip=(1.0, 4.0)),
    "sft": ObjectiveEntry("sft", rewards=False),
}


def imitates(objective: str) -> bool:
    return objective in REGISTRY and not REGISTRY[objective].rewards
