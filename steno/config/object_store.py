"""A place in an object store that a setting names, `s3://BUCKET/PREFIX`: what may be in its URL, and the calls that are made.

fsspec does the work (s3fs for `s3`, gcsfs for `gs`), and tries again what may pass, a few times with growing pauses. It is
imported only where such a URL is set. Credentials and endpoint are those of the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
a machine's role): none in a URL, none in a message. All calls block, and may be made by several threads.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from steno.config.extras import how_to_install
from steno.contracts.errors import ConfigError, ObjectMissing, ObjectStoreFailed

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
OPTIONS: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": 4}}
"""Parts of one file under way at a time, of 50 MB each: the package's own ten would take half a GB of memory."""
URL = re.compile(r"(s3|gs)://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9][A-Za-z0-9._=-]*)*")
RANGE_BYTES = 8 << 20
"""Asked for in one request when an object is read: several at a time fill a connection that one does not."""
TALKATIVE = ("aiobotocore", "botocore", "fsspec", "s3fs")
"""At DEBUG they log requests with their headers, a session's token among them."""
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def check_url(url: str, field: str) -> str:
    """Returns: the URL without a last slash. Raises: ConfigError: it is none that several machines can reach."""
    if URL.fullmatch(url.rstrip("/")):
        return url.rstrip("/")
    allowed = "must be s3://BUCKET[/PREFIX] or gs://BUCKET[/PREFIX]"
    if "@" in url:  # not repeated: whoever writes one means credentials
        raise ConfigError(f"{field}: {allowed}, without credentials: they come from the environment", field=field)
    if url.startswith("memory:"):
        raise ConfigError(f"{field}: got {url!r}, which no other process can read; {allowed}", field=field)
    if "://" not in url or url.startswith("file:"):
        raise ConfigError(f"{field}: got {url!r}, {allowed}; weights_dir is for folders", field=field)
    raise ConfigError(f"{field}: got {url!r}, {allowed}", field=field)


class ObjectStore:
    """The objects under one URL. Keys are paths below it.

    Every call raises ObjectStoreFailed (it may pass) or ObjectMissing, with the object's URL and what was refused.
    """

    def __init__(self, url: str, field: str) -> None:
        """Connects to nothing. Raises: ConfigError: a URL that can't be, or a package that is not installed."""
        self.url = check_url(url, field)
        protocol = url.partition(":")[0]
        if importlib.util.find_spec(PACKAGES[protocol]) is None:
            how = how_to_install("s3") if protocol == "s3" else f"pip install {PACKAGES[protocol]}"
            raise ConfigError(f"{field}: {protocol}:// needs {PACKAGES[protocol]}: {how}", field=field)
        import fsspec

        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.INFO)
        self._fs: Any = fsspec.filesystem(
            protocol, use_listings_cache=False, skip_instance_cache=True, **OPTIONS.get(protocol, {})
        )

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object right under the prefix, by its name there. Nothing is there: {}."""
        return {name: size for name, (kind, size) in self._listed(prefix).items() if kind == "file"}

    def folders(self) -> list[str]:
        """Names right under the URL that other keys begin with."""
        return [name for name, (kind, _) in self._listed("").items() if kind == "directory"]

    def put(self, path: Path, key: str) -> None:
        """A file as an object. It is there as a whole or not at all. Raises: also OSError: the file can't be read."""
        path.stat()  # FileNotFoundError is the file's here, and the bucket's below
        self._call(key, lambda at: self._fs.put_file(str(path), at))

    def put_bytes(self, data: bytes, key: str) -> None:
        self._call(key, lambda at: self._fs.pipe_file(at, data))

    def create(self, data: bytes, key: str) -> None:
        """As `put_bytes`, but leaves an object that exists as it is: if two callers create one at once, one succeeds, and neither
        is told which. Stores without conditional writes (`If-None-Match`) replace the object."""

        def created(at: str) -> None:
            try:
                self._fs.pipe_file(at, data, mode="create")
            except FileExistsError:
                return
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                self._fs.pipe_file(at, data)

        self._call(key, created)

    def size(self, key: str) -> int:
        """Bytes of an object."""
        return self._call(key, lambda at: int(self._fs.info(at)["size"]))

    def get_bytes(self, key: str) -> bytes:
        """A small object."""
        return self._call(key, lambda at: bytes(self._fs.cat_file(at)))

    def read(self, key: str, start: int, stop: int) -> bytes:
        """These bytes of an object, by several requests at a time."""
        starts = list(range(start, stop, RANGE_BYTES))
        stops = [min(at + RANGE_BYTES, stop) for at in starts]

        def ranges(at: str) -> bytes:
            pieces: list[bytes | Exception] = self._fs.cat_ranges([at] * len(starts), starts, stops, on_error="return")
            for piece in pieces:
                if isinstance(piece, Exception):
                    raise piece
            data = b"".join(piece for piece in pieces if isinstance(piece, bytes))
            if len(data) != stop - start:
                raise OSError(f"{stop - start} bytes were asked for from byte {start} on, {len(data)} came")
            return data

        return self._call(key, ranges)

    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            self._call("", lambda at: self._fs.rm([f"{at}/{key}" for key in keys]))

    def _listed(self, prefix: str) -> dict[str, tuple[str, int]]:
        try:
            rows = self._call(prefix, lambda at: self._fs.ls(at, detail=True, refresh=True))
        except ObjectMissing:
            return {}
        return {row["name"].rstrip("/").rpartition("/")[2]: (row["type"], int(row["size"] or 0)) for row in rows}

    def _call(self, key: str, work: Callable[[str], T]) -> T:
        at = f"{self.url}/{key}" if key else self.url
        try:
            return work(at)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{at}: no such object or bucket") from error
        except Exception as error:  # whatever a file system raises: who asked is told
            said = str(error) or "no reason was given"
            answer = getattr(error.__cause__, "response", None)  # the store's own, where s3fs has made an OSError of it
            what = (
                str(answer["Error"].get("Code"))
                if isinstance(answer, dict) and "Error" in answer
                else type(error).__name__
            )
            if isinstance(error, PermissionError):
                what = f"access was refused ({what})"
            raise ObjectStoreFailed(f"{at}: {what}: {_without_secrets(said)}") from None


def _without_secrets(said: str) -> str:
    for name in SECRETS:
        if value := os.environ.get(name):
            said = said.replace(value, f"({name})")
    return said
