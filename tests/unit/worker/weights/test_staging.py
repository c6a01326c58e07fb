"""What is staged is what was sent, goes on after a cut, and leaves nothing behind."""

from __future__ import annotations

import shutil
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from steno.contracts.errors import WeightsRefused
from steno_worker.weights.staged_files import SPARE_BYTES, StreamStaging, UpdateAbandoned, check_folder, check_room
from tests.support.weights.shards import manifest_of, shard_bytes, two_shards, write

SHARDS = two_shards()
MANIFEST = manifest_of(SHARDS)
DATA = {name: shard_bytes(tensors) for name, tensors in SHARDS.items()}
GOES_ON = threading.Event()


def staging(root: Path) -> StreamStaging:
    one = StreamStaging(root, "update-1", MANIFEST)
    one.open(GOES_ON)
    return one


def feed(one: StreamStaging, *, step: int = 1000, most: int = 10**9) -> None:
    """What a proxy would send from the position on, `most` bytes of it."""
    while most > 0 and (position := one.position) is not None:
        shard, offset = position
        data = DATA[shard.name][offset : offset + min(step, most)]
        one.write(shard.name, offset, data, zlib.crc32(data))
        most -= len(data)


def test_shards_arrive_whole_in_the_manifests_order(tmp_path: Path) -> None:
    one = staging(tmp_path)
    assert one.position == (MANIFEST.shards[0], 0)
    feed(one)
    assert one.position is None
    assert one.received == MANIFEST.size
    assert {path.name: path.read_bytes() for path in one.folder.iterdir()} == DATA
    one.remove()
    one.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 1500, len(DATA["a.safetensors"]), MANIFEST.size - 1])
def test_a_restarted_worker_goes_on_where_it_was(tmp_path: Path, cut: int) -> None:
    feed(staging(tmp_path), most=cut)
    again = staging(tmp_path)
    assert again.received == cut
    feed(again)
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == DATA


def test_what_was_damaged_meanwhile_is_asked_for_again(tmp_path: Path) -> None:
    first = staging(tmp_path)
    feed(first)
    path = first.folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    again = staging(tmp_path)
    assert again.position == (MANIFEST.shards[0], 0)
    feed(again)
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == DATA


def test_one_update_is_kept_at_a_time(tmp_path: Path) -> None:
    old = staging(tmp_path)
    feed(old, most=100)
    (tmp_path / "of somebody else").mkdir()
    new = StreamStaging(tmp_path, "update-2", MANIFEST)
    new.open(GOES_ON)
    assert set(tmp_path.iterdir()) == {new.folder, tmp_path / "of somebody else"}


def test_damaged_bytes_are_refused_before_they_are_written(tmp_path: Path) -> None:
    one = staging(tmp_path)
    with pytest.raises(WeightsRefused, match="crc32"):
        one.write("a.safetensors", 0, b"abc", zlib.crc32(b"abd"))
    assert list(one.folder.iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    manifest = MANIFEST.model_copy(deep=True)
    manifest.shards[0].size = 10**18
    with pytest.raises(WeightsRefused, match=r"staging_dir: \d+ bytes are free, \d+ are needed"):
        StreamStaging(tmp_path, "u", manifest).open(GOES_ON)


def test_a_folder_is_read_where_it_lies(tmp_path: Path) -> None:
    counts: list[int] = []
    assert check_folder(str(tmp_path), write(tmp_path, SHARDS), GOES_ON, counts.append) == tmp_path
    assert sum(counts) == MANIFEST.size


@pytest.mark.parametrize("location", ["relative/path", "/no/such/folder", ""])
def test_a_folder_that_is_not_there_is_named(location: str) -> None:
    with pytest.raises(WeightsRefused, match="location") as refused:
        check_folder(location, MANIFEST, GOES_ON, lambda count: None)
    assert refused.value.field == "location"


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, SHARDS)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsRefused, match=r"shard b\.safetensors can't be read: No such file"):
        check_folder(str(tmp_path), MANIFEST, GOES_ON, lambda count: None)


def test_reading_ends_when_nobody_wants_it(tmp_path: Path) -> None:
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(UpdateAbandoned):
        check_folder(str(tmp_path), write(tmp_path, SHARDS), abandoned, lambda count: None)


@pytest.mark.parametrize(("other_bytes", "stays"), [(0, False), (6000, True)])
def test_the_copy_to_go_back_to_goes_only_where_that_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_bytes: int, stays: bool
) -> None:
    """Of a disk of 10,000 bytes, 6,000 are the copy's and 5,000 are needed; others may have some."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a.safetensors").write_bytes(bytes(6000))
    total = 10_000 - other_bytes

    def usage(folder: Path) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        return SimpleNamespace(free=SPARE_BYTES + total - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    if stays:
        with pytest.raises(WeightsRefused, match="are needed"):
            check_room(tmp_path, 5000, kept)
    else:
        check_room(tmp_path, 5000, kept)
    assert kept.exists() is stays
