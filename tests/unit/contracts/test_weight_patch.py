"""Patches are exact for every bit pattern, and one that is damaged is refused, never believed or fatal."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts import weight_patch
from steno.contracts.weight_patch import BLOCK_ELEMENTS, Bits, PackedBlock, PatchDamaged, PatchedTensor, PatchHeader

WIDTHS = st.sampled_from([1, 2, 4, 8])
SPECIAL = {  # NaN with a payload, -0.0, infinity, the smallest subnormal
    2: [0x7FC1, 0x8000, 0xFF80, 0x0001],
    4: [0x7FC00001, 0x80000000, 0xFF800000, 0x00000001],
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Elements before and after: none, few or all of them changed, by little or by any bits."""
    width, count = draw(WIDTHS), draw(st.integers(1, 300))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = weight_patch.bits_of(noise.bytes(count * width), width)
    now = before.copy()
    places = np.flatnonzero(noise.random(count) < draw(st.sampled_from([0.0, 0.02, 0.2, 0.5, 1.0])))
    if draw(st.booleans()):
        now[places] += noise.integers(-2, 3, len(places)).astype(f"<i{width}").view(f"<u{width}")
    else:
        now[places] = weight_patch.bits_of(noise.bytes(len(places) * width), width)
    if width in SPECIAL and draw(st.booleans()):
        now[0] = draw(st.sampled_from(SPECIAL[width]))
    return before, now


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_what_a_patch_makes_is_what_it_was_made_of_bit_for_bit(pair: tuple[Bits, Bits]) -> None:
    before, now = pair
    packed = weight_patch.pack_block(0, before, now)
    onto = before.copy()
    if packed is None:
        assert (before == now).all()
    else:
        assert packed.about.changed == np.count_nonzero(before != now)
        weight_patch.apply_block(onto, packed)
    assert onto.tobytes() == now.tobytes()


def test_a_tensor_of_several_blocks_has_only_those_that_changed() -> None:
    before = np.zeros(2 * BLOCK_ELEMENTS + 3, dtype="<u1")
    now = before.copy()
    now[[BLOCK_ELEMENTS - 1, 2 * BLOCK_ELEMENTS + 2]] = 255
    cut = list(weight_patch.blocks_of(len(now)))
    packed = [weight_patch.pack_block(index, before[start:stop], now[start:stop]) for index, start, stop in cut]
    assert [one is not None for one in packed] == [True, False, True]
    for (_, start, stop), one in zip(cut, packed, strict=True):
        if one is not None:
            weight_patch.apply_block(before[start:stop], one)
    assert (before == now).all()


def test_few_steps_of_rounding_cost_few_bytes() -> None:
    """Of bfloat16, one in fifty moved by one step: below two hundredths of the bytes."""
    noise = np.random.default_rng(0)
    before = weight_patch.bits_of(noise.bytes(2 * 10**6), 2)
    now = before.copy()
    places = np.flatnonzero(noise.random(10**6) < 0.02)
    now[places] += noise.choice(np.array([1, 0xFFFF], dtype="<u2"), len(places))
    packed = weight_patch.pack_block(0, before, now)
    assert packed is not None and packed.about.kind == "sparse"
    assert len(packed.places) + len(packed.differences) < 0.02 * before.nbytes


@settings(max_examples=300, deadline=None)
@given(pairs(), st.data())
def test_a_damaged_block_is_refused_or_makes_something_else_and_never_more_than_its_place(
    pair: tuple[Bits, Bits], data: st.DataObject
) -> None:
    before, now = pair
    packed = weight_patch.pack_block(0, before, now)
    if packed is None:
        return
    part = data.draw(st.sampled_from(["places", "differences"] if packed.places else ["differences"]))
    damaged = bytearray(getattr(packed, part))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    else:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    around = np.concatenate([before, before])
    with contextlib.suppress(PatchDamaged):
        weight_patch.apply_block(around[: len(before)], packed._replace(**{part: bytes(damaged)}))
    assert (around[len(before) :] == before).all()


def some(kind: str = "sparse") -> PackedBlock:
    before, now = np.zeros(100, dtype="<u2"), np.zeros(100, dtype="<u2")
    now[::10] = 1
    packed = weight_patch.pack_block(0, before, now if kind == "sparse" else now + 1)
    assert packed is not None and packed.about.kind == kind
    return packed


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (some()._replace(places=some("dense").differences), "is not of 40 bytes"),
        (some()._replace(places=weight_patch._squeezed(np.full(10, 11, dtype="<u4"))), "places out of order, or beyond"),
        (some()._replace(places=weight_patch._squeezed(np.zeros(10, dtype="<u4"))), "places out of order, or beyond"),
        (some("dense")._replace(differences=b"no frame"), "can't be decompressed"),
        (some("dense")._replace(about=some("dense").about.model_copy(update={"places": 1})), "places in a dense block"),
    ],
)  # fmt: skip
def test_blocks_that_contradict_themselves_are_refused(packed: PackedBlock, says: str) -> None:
    with pytest.raises(PatchDamaged, match=says):
        weight_patch.apply_block(np.zeros(100, dtype="<u2"), packed)


def test_a_header_is_read_as_it_was_written() -> None:
    block = some()
    header = PatchHeader(tensors=[PatchedTensor(name="x", width=2, elements=100, blocks=[block.about])])
    payload = len(block.places) + len(block.differences)
    text = weight_patch.header_bytes(header)
    assert weight_patch.header_size(text[:8], len(text) + payload) == len(text) - 8
    assert weight_patch.read_header(text[8:], payload) == header


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "can't be read"), ({"block_elements": 5}, "can't be read"), ({"more": 1}, "can't be read"),
        ({"tensors": [{"name": "x", "width": 3, "elements": 100, "blocks": []}]}, "can't be read"),
    ],
)  # fmt: skip
def test_a_header_of_another_kind_is_refused(change: dict[str, object], says: str) -> None:
    header = {"format": 1, "block_elements": BLOCK_ELEMENTS, "tensors": []} | change
    with pytest.raises(PatchDamaged, match=says):
        weight_patch.read_header(repr(header).replace("'", '"').encode(), 0)


def test_a_header_that_does_not_add_up_is_refused() -> None:
    about = some().about
    tensor = PatchedTensor(name="x", width=2, elements=100, blocks=[about])
    payload = about.places + about.differences
    for tensors, size, says in (
        ([tensor], payload + 1, "which says"),
        ([tensor, tensor], 2 * payload, "names a tensor twice"),
        ([tensor.model_copy(update={"blocks": [about, about]})], 2 * payload, "out of its place"),
        ([tensor.model_copy(update={"blocks": [about.model_copy(update={"index": 1})]})], payload, "out of its place"),
    ):
        with pytest.raises(PatchDamaged, match=says):
            weight_patch.read_header(PatchHeader(tensors=tensors).model_dump_json().encode(), size)
    for first, size in ((b"\0" * 8, 100), (b"\xff" * 8, 100), (b"\2", 100)):
        with pytest.raises(PatchDamaged, match="is no patch"):
            weight_patch.header_size(first, size)
