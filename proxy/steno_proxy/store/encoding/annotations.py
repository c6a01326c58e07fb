"""A turn's annotation at rest: msgpack of [step, version, advantage, float16 differences], two bytes per completion token."""

from __future__ import annotations

import msgspec

from steno.contracts.records import TurnAnnotation


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    step: int
    version: str
    advantage: float | None
    differences: bytes


_decoder = msgspec.msgpack.Decoder(_Kept)


def encode_annotation(annotation: TurnAnnotation) -> bytes:
    return msgspec.msgpack.encode(
        _Kept(annotation.step, annotation.version, annotation.advantage, annotation.differences)
    )


def decode_annotation(raw: bytes | None) -> TurnAnnotation | None:
    if raw is None:
        return None
    kept = _decoder.decode(raw)
    return TurnAnnotation(step=kept.step, version=kept.version, advantage=kept.advantage, differences=kept.differences)
