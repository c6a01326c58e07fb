"""Texts of the tokens of every tokenizer that workers bring: asked of a worker once, and kept in the store.

With them, records can be read as text when no worker is up. The proxy itself reads no ids (I6): it asks for all ids of a
vocabulary in slices, one at a time, in the background, and keeps the answers as one compressed piece. No request of an agent
waits for this. A worker that does not answer, or gives an impossible answer, is asked again after longer and longer waits; until
then, ids are shown.
"""

from __future__ import annotations

import asyncio
import codecs
import gzip
import logging
import time
from array import array
from collections.abc import Callable, Iterable

import msgspec

from steno.contracts.chat import Job
from steno.contracts.errors import EngineFailed, StenoError
from steno.contracts.records import bytes_to_ids, ids_to_bytes, tokenizer_key
from steno.contracts.wire.frames import TEXTS, Count, Counted, ModelCard
from steno_proxy.store.token_texts import TokenTextsStore
from steno_proxy.workers.worker_channel import WorkerChannel

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two searches for tokenizers that are due."""
AGAIN_S = 3600.0
"""Seconds until the store is asked again whether it still has a tokenizer's texts; also the longest wait after a failure."""
ANSWER_S = 60.0
"""How long a worker may take for one slice. Its renderer also renders the prompts of turns meanwhile."""
SLICE_IDS = 2048
"""Ids in one question: some milliseconds of the worker's renderer, and 50 kB."""
MOST_IDS = 1 << 20
MOST_BYTES = 16 << 20
"""The most ids of a vocabulary, and bytes of all its texts. Today's have 150,000 to 260,000 ids and 1 to 2 MB."""
MOST_TEXT_BYTES = 4096
"""The most bytes of one token's text. The longest of today are runs of spaces, of some hundred bytes."""
MOST_LOOKED_AT = 256
"""How many tokenizers one process looks at within AGAIN_S."""


class TokenTextsKeeper:
    """Asks workers for the texts of their tokenizers, and keeps them in the store.

    Args: workers: gives those that are connected. clock: seconds, monotonic."""

    def __init__(
        self,
        store: TokenTextsStore,
        workers: Callable[[], Iterable[WorkerChannel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._workers, self._clock = store, workers, clock
        self._next: dict[str, float] = {}  # digest -> when it is looked at again
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Look for new tokenizers again and again, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("looking for new tokenizers failed")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask about each tokenizer that is due. Cancel-safe: what was not kept is asked for again."""
        for worker, card in self._due():
            digest, key = card.tokenizer_digest, tokenizer_key(card.tokenizer_digest).hex()
            wait = AGAIN_S
            try:
                if not await self._store.touch(key):
                    piece = await asyncio.to_thread(_packed, key, await _asked(worker, card))
                    await self._store.keep(key, piece)
                    log.info(
                        "the texts of tokenizer %s are kept: %d ids, %d bytes", key, card.vocabulary_size, len(piece)
                    )
                self._failures.pop(digest, None)
            except StenoError as error:
                failures = self._failures[digest] = self._failures.get(digest, 0) + 1
                wait = min(AGAIN_S, LOOK_S * 4**failures)
                words = "texts of tokenizer %s (%s) are not known: ids are shown instead; the worker is asked again in %.0f s: %s"
                log.warning(words, key, card.name, wait, error.message)
            self._next[digest] = self._clock() + wait

    def _due(self) -> list[tuple[WorkerChannel, ModelCard]]:
        """For each tokenizer that is due, a worker that can say its texts, and the worker's card with that tokenizer."""
        now = self._clock()
        self._next = {digest: at for digest, at in self._next.items() if at > now}
        found: dict[str, tuple[WorkerChannel, ModelCard]] = {}
        for worker in self._workers():
            for card in worker.models if worker.eligible else ():
                digest = card.tokenizer_digest
                if digest and digest not in self._next and TEXTS in card.capabilities and card.vocabulary_size:
                    found.setdefault(digest, (worker, card))
        self._failures = {digest: n for digest, n in self._failures.items() if digest in found or digest in self._next}
        return list(found.values())[: max(0, MOST_LOOKED_AT - len(self._next))]


class _Texts(msgspec.Struct):
    """As `steno.contracts.rest.TokenTexts`."""

    tokenizer: str
    texts: list[str]
    special: list[int]


async def _asked(worker: WorkerChannel, card: ModelCard) -> _Texts:
    """Ask a worker for all texts of a tokenizer. Raises: EngineFailed: no answer, or an impossible one. WorkerLost,
    TooManyRequests, BadRequest."""
    size = card.vocabulary_size
    if size > MOST_IDS:
        raise EngineFailed(f"the vocabulary has {size} ids; texts of at most {MOST_IDS} are kept")
    found, total = _Texts("", [], []), 0
    for first in range(0, size, SLICE_IDS):
        ids = array("i", range(first, min(first + SLICE_IDS, size)))
        try:
            async with asyncio.timeout(ANSWER_S):
                said = await worker.count(Count(0, Job(messages=[], prompt_ids=ids_to_bytes(ids)), TEXTS))
        except TimeoutError:
            raise EngineFailed(f"the worker did not say within {ANSWER_S:.0f} s what its tokens are") from None
        special = _special(said, ids)
        total += sum(map(len, said.texts))
        if len(said.texts) != len(ids):
            raise EngineFailed(f"the worker said {len(said.texts)} texts for {len(ids)} ids")
        if total > MOST_BYTES:
            raise EngineFailed(f"the worker's texts have {total} bytes and more; at most {MOST_BYTES} are kept")
        if (longest := max(map(len, said.texts), default=0)) > MOST_TEXT_BYTES:
            raise EngineFailed(f"the worker said a text of {longest} bytes; at most {MOST_TEXT_BYTES} are kept")
        found.texts += await asyncio.to_thread(_decoded, said.texts)  # each byte that is no UTF-8 costs a call
        found.special += special
    return found


def _decoded(texts: list[bytes]) -> list[str]:
    return [text.decode(errors=_NAMED) for text in texts]


def _name_bytes(error: UnicodeError) -> tuple[str, int]:
    """Bytes that are no UTF-8, as sentencepiece's vocabularies name them."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"<0x{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


_NAMED = "steno.named_bytes"
codecs.register_error(_NAMED, _name_bytes)


def _special(said: Counted, ids: array[int]) -> list[int]:
    if len(said.ids) % ids.itemsize:
        raise EngineFailed(f"the worker said {len(said.ids)} bytes of special ids, which have {ids.itemsize} each")
    special = sorted(set(bytes_to_ids(said.ids)))
    if special and not ids[0] <= special[0] <= special[-1] <= ids[-1]:
        raise EngineFailed("the worker said special ids that it was not asked about")
    return special


def _packed(key: str, texts: _Texts) -> bytes:
    texts.tokenizer = key
    return gzip.compress(msgspec.json.encode(texts), 6, mtime=0)
