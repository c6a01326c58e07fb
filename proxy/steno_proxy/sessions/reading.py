"""How a request's messages are read: which neighbours of one role stand for one message (docs/adr/0017).

A *run* is two or more neighbours of one role. It is read as its messages, each for itself (apart), or as one that says what they
say together (joined), whichever is on record; never in part. Of several readings the one counts that goes on from the longest
recorded conversation, then the one of which most is on record, then the one in the format's own manner: joined where its
provider takes neighbours for one message (Messages), else apart. What is not on record is read in that manner.

Where an echo stands (`echoes.py`), the recorded reply stands in its place. Pure; linear in the request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from steno.contracts.chat import MERGED, Message, Tool, joined, runs_of_one_role
from steno_proxy.sessions.messages.call_ids import echoed_ids
from steno_proxy.sessions.messages.echoes import Echo, EchoedAs, named_turn
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.sessions.tree import Tree
from steno_proxy.sessions.trie import ROOT

MOST_READINGS = 4
"""Followed at the same time. Where replicas of two versions write one session there are two or three; each ends soon."""
_REPLIES = frozenset({"assistant"})
"""Roles whose runs are looked at where a format's manner is apart: only replies can be on record as one message then."""

Known = Mapping[tuple[int, bytes, str], Echo]
"""Echoes by the node after which a message stood, its digest, and the turn which its call ids name (`RequestMessages.named`):
those of siblings may differ in nothing else, since digests leave out ids."""


class MessageUnit(NamedTuple):
    """Messages [start, end) of a request that stand for one message. digest: of that message. echo: the recorded reply that they
    stand for, if they say it in another way."""

    start: int
    end: int
    digest: bytes
    echo: Echo | None = None


@dataclass(slots=True)
class RequestMessages:
    """The messages of a request, as its client wrote them.

    merges: the format's manner is joined. tools, options: digests of its tools and template options. digests: of each message.
    runs: each run as one message, by the place where it begins; starts: these places, in order.
    offered: the tools themselves. gathered: places of replies whose calls came back apart and are one message here
        (`gathered.py`).
    """

    messages: Sequence[Message]
    merges: bool
    tools: bytes
    options: bytes
    digests: list[bytes] = field(default_factory=list)
    runs: dict[int, MessageUnit] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    offered: Sequence[Tool] = ()
    gathered: frozenset[int] = frozenset()

    def digest(self) -> Iterator[None]:
        """Fill `digests` and `runs`, in steps."""
        for message in self.messages:
            self.digests.append(message_digest(message))
            yield
        for start, end in runs_of_one_role(self.messages, MERGED if self.merges else _REPLIES):
            self.starts.append(start)
            self.runs[start] = MessageUnit(start, end, message_digest(joined(self.messages[start:end])))
            yield

    def digest_of(self, unit: MessageUnit) -> bytes:
        """The digest of what a unit's messages say, also if they are an echo."""
        return self.digests[unit.start] if unit.end - unit.start == 1 else self.runs[unit.start].digest

    def named(self, place: int, tree: Tree) -> str:
        """The turn of this trial that call ids name, in the message at this place or in the run that begins there; "": none. Ids
        of other trials are ignored."""
        run = self.runs.get(place)
        said = self.messages[place : run.end if run is not None else place + 1]
        turn_id = next((named_turn(message) for message in said if message.get("tool_calls")), "")
        return turn_id if tree.number(turn_id) >= 0 else ""

    def forms(self, place: int) -> list[tuple[int, Message]]:
        """What may be a reply there, each with the place after it: the run that begins there as one message, if one does, and the
        message itself."""
        forms = [(place + 1, self.messages[place])]
        if place in self.runs:
            end = self.runs[place].end
            forms.insert(0, (end, joined(self.messages[place:end])))
        return forms


Taken = tuple[MessageUnit, "Taken | None"]
"""A unit and those before it, newest first: readings that part share what they have in common."""


class ReadPosition(NamedTuple):
    """How far a request has been read.

    place: how many of its messages are read. node: the tree's node after them. covered: how many of them are a recorded
    conversation that can be gone on from. odd: how many runs were not read in the format's manner. units: those that are not one
    message as its client wrote it.
    """

    place: int = 0
    node: int = ROOT
    covered: int = 0
    odd: int = 0
    units: Taken | None = None


class RecognisedMessages(NamedTuple):
    """A request's messages as they were read. units: those that are not one message as its client wrote it, by place."""

    messages: list[Message]
    digests: list[bytes]
    units: dict[int, MessageUnit]

    def call_ids(self) -> list[list[str]]:
        """As `Tree.recognise` wants them."""
        return [echoed_ids(message) for message in self.messages]

    def messages_in(self, places: int) -> int:
        """How many of the client's messages stand in the first `places`."""
        return places + sum(unit.end - unit.start - 1 for place, unit in self.units.items() if place < places)


def best(readings: Iterable[ReadPosition]) -> ReadPosition:
    """The reading that counts, of several (see the module's docstring)."""
    return max(readings, key=lambda reading: (reading.covered, reading.place, -reading.odd))


def furthest(readings: Iterable[ReadPosition]) -> list[ReadPosition]:
    """The MOST_READINGS readings of which most is on record, in that order."""
    found = sorted(readings, key=lambda reading: (-reading.place, -reading.covered, reading.odd))
    return found[:MOST_READINGS]


def follow(tree: Tree, said: RequestMessages, known: Known, at: ReadPosition | None = None) -> list[ReadPosition]:
    """All readings, each as far as it is on record. at: the reading that they go on from; None: start at the first message."""
    readings, ends, last = [at or ReadPosition()], list[ReadPosition](), len(said.digests)
    while readings:
        at = readings.pop(min(range(len(readings)), key=lambda i: readings[i].place))
        later = bisect_right(said.starts, at.place)
        stop = said.starts[later] if later < len(said.starts) else last
        apart = _apart(tree, said, known, at, stop)
        ways = [(apart, apart.place == stop)]
        unit = said.runs.get(at.place)
        if unit is not None and (one := _joined(tree, said, known, at, unit)) is not None:
            ways.insert(0 if said.merges else 1, (one, True))
        for way, goes_on in ways:
            more = goes_on and way.place < last and len(readings) < MOST_READINGS
            (readings if more else ends).append(way)
    return ends


def take(tree: Tree, said: RequestMessages, at: ReadPosition, unit: MessageUnit) -> ReadPosition | None:
    """The reading with one unit more; None: it is not on record there."""
    child = tree.child(at.node, unit.digest)
    if child < 0:
        return None
    covered = unit.end if tree.goes_on(child, said.tools, said.options) else at.covered
    odd = at.odd + (unit.end - unit.start > 1 and not said.merges)
    return ReadPosition(unit.end, child, covered, odd, (unit, at.units))


def read(said: RequestMessages, at: ReadPosition) -> RecognisedMessages:
    """Return the whole request: read as in `at`, and after that in the format's own manner."""
    units, link = list[MessageUnit](), at.units
    while link is not None:
        unit, link = link
        units.append(unit)
    return _form(said, [*reversed(units), *_own(said, at.place)])


def settled(said: RequestMessages, form: RecognisedMessages, places: int) -> RecognisedMessages:
    """How the request is read if only the first `places` of `form` are gone on from: these stay as in `form`, all others are as
    the client wrote them, in the format's manner."""
    at = form.messages_in(places)
    kept = [unit for unit in form.units.values() if unit.end <= at]
    units = [*kept, *_own(said, at)]
    return form if units == list(form.units.values()) else _form(said, units)


def echoed_as(said: RequestMessages, form: RecognisedMessages, place: int) -> EchoedAs | None:
    """How the message at a place was recognised as a reply, if its client wrote it in another way; None: it did not."""
    unit, start = form.units.get(place), form.messages_in(place)
    if not said.gathered.isdisjoint(range(start, unit.end if unit is not None else start + 1)):
        return EchoedAs.SPLIT
    if unit is None:
        return None
    if unit.end - unit.start > 1 and not said.merges:
        return EchoedAs.SPLIT
    return unit.echo.how if unit.echo is not None else None


def _apart(tree: Tree, said: RequestMessages, known: Known, at: ReadPosition, stop: int) -> ReadPosition:
    """The reading that goes on message by message, up to `stop` or to where the record ends."""
    odd = at.odd + (said.merges and at.place in said.runs)
    while True:
        place = at.place
        shared, node, ends = tree.along(said.digests, place, stop, at.node, said.tools, said.options)
        at = ReadPosition(place + shared, node, place + ends if ends else at.covered, odd, at.units)
        if at.place == stop or not known:
            return at
        if (echo := known.get((node, said.digests[at.place], said.named(at.place, tree)))) is None:
            return at
        after = take(tree, said, at, MessageUnit(at.place, at.place + 1, echo.digest, echo))
        if after is None:
            return at
        at = after


def _joined(
    tree: Tree, said: RequestMessages, known: Known, at: ReadPosition, unit: MessageUnit
) -> ReadPosition | None:
    """The reading with the run that begins there as one message; None: that is not on record."""
    if (after := take(tree, said, at, unit)) is not None:
        return after
    echo = known.get((at.node, unit.digest, said.named(at.place, tree))) if known else None
    return take(tree, said, at, unit._replace(digest=echo.digest, echo=echo)) if echo is not None else None


def _own(said: RequestMessages, place: int) -> list[MessageUnit]:
    """The runs from there on as one message each, if that is the format's manner."""
    return [unit for unit in said.runs.values() if unit.start >= place] if said.merges else []


def _form(said: RequestMessages, units: Sequence[MessageUnit]) -> RecognisedMessages:
    messages: list[Message] = []
    digests: list[bytes] = []
    places: dict[int, MessageUnit] = {}
    at = 0
    for unit in units:
        messages += said.messages[at : unit.start]
        digests += said.digests[at : unit.start]
        places[len(messages)] = unit
        several = unit.end - unit.start > 1
        messages.append(joined(said.messages[unit.start : unit.end]) if several else said.messages[unit.start])
        digests.append(unit.digest)
        at = unit.end
    return RecognisedMessages([*messages, *said.messages[at:]], [*digests, *said.digests[at:]], places)
