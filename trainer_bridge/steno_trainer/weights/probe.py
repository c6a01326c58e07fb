"""The probe: log-probabilities of a few tokens under the trainer's weights. Workers compare theirs before they announce a version
(I10).

It sees weights in the wrong place (a layer left out, a tied head that kept its old values). It can't tell one step from the next
in bfloat16, where two correct engines differ by as much; the digests of the manifest can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steno.contracts.policy import Probe
from steno_trainer.errors import WeightsUnavailable

LARGEST = {"float32": 0.02, "bfloat16": 1.0}
"""Nats, by the least precision that is computed in or sent in. Measured: docs/adr/0015-what-a-probe-lets-pass.md."""
P90, MEAN = 0.15, 0.05
"""As fractions of the largest difference."""


@dataclass(frozen=True, slots=True)
class ProbeTolerance:
    """What two correct engines may differ by, in nats: at one token, at nine tenths of them, on average."""

    largest: float
    p90: float
    mean: float

    @classmethod
    def of(cls, precision: str, tolerance: float | None = None) -> ProbeTolerance:
        """Args: precision: "bfloat16" or "float32". tolerance: the largest that is asked for. One above the default raises the
        other two with it; one below leaves them, since it says nothing of them."""
        default = LARGEST[precision]
        widest = max(default, tolerance or default)
        return cls(tolerance or default, P90 * widest, MEAN * widest)


def as_probe(token_ids: Sequence[int], logprobs: Sequence[float], tolerance: ProbeTolerance) -> Probe:
    """Args: logprobs: of token_ids[1:]. Raises: WeightsUnavailable: log-probabilities that are no numbers."""
    if not all(map(math.isfinite, logprobs)):
        raise WeightsUnavailable(
            "the model's log-probabilities of the probe are NaN or infinite: the weights are not sent"
        )
    return Probe(
        token_ids=list(token_ids), logprobs=list(logprobs), tolerance=tolerance.largest, p90_tolerance=tolerance.p90,
        mean_tolerance=tolerance.mean,
    )  # fmt: skip
