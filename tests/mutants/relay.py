"""Mutants of what carries frames over sockets that come and go."""

from __future__ import annotations

from tests.mutants.base import Mutant

_CHANNEL, _PEER = "steno/contracts/wire/channel.py", "steno/contracts/wire/peer.py"
_PEERS = tuple(f"tests/unit/contracts/test_{name}.py" for name in ("peer", "peer_refused", "channel"))

_OUTLET = "inference_worker/steno_worker/relay/outlet.py"
_NEXT = ("tests/integration/relay/test_next_channel.py",)

MUTANTS = (
    Mutant(
        "forgotten-channel-heard", "a worker says on its next channel what belongs to the one before", _OUTLET,
        "if peer.channel is self.channel and peer.state is not PeerState.ENDED:", "if peer.state is not PeerState.ENDED:", _NEXT,
    ),
    Mutant(
        "ended-channel-heard", "a worker says on a channel that is over what its streams still say", _OUTLET,
        "if peer.channel is self.channel and peer.state is not PeerState.ENDED:", "if peer.channel is self.channel:", _NEXT,
    ),
    Mutant(
        "unsent-and-resent", "packets that were not written yet are written twice on the next socket", _CHANNEL,
        "self._unsent = list(self._retained)", "self._unsent += list(self._retained)", _PEERS,
    ),
    Mutant(
        "resends-what-arrived", "packets that have arrived are sent again, since they are forgotten too late", _CHANNEL,
        "        self._forget(received)\n        self._unsent = list(self._retained)\n",
        "        self._unsent = list(self._retained)\n        self._forget(received)\n", _PEERS,
    ),
    Mutant(
        "acknowledged-unsent", "an acknowledgement of a packet that has not left is believed", _CHANNEL,
        "if ack > self._transmitted:", "if ack > self.sent:", _PEERS,
    ),
    Mutant(
        "retained-for-ever", "acknowledged bytes still count as waiting", _CHANNEL,
        "            self.retained_bytes -= len(retained.popleft())\n", "            retained.popleft()\n", _PEERS,
    ),
    Mutant(
        "duplicate-handled", "a packet that came before is handled again", _CHANNEL,
        "        if seq == self.received + 1:\n            self.received = seq\n",
        "        if 0 < seq <= self.received + 1:\n            self.received = seq\n", _PEERS,
    ),
    Mutant(
        "lost-forgotten", "a packet that is closed while another waits takes its place", _CHANNEL,
        "        self._unsent.append(packet)\n", "        self._unsent = [packet]\n", _PEERS,
    ),
    Mutant(
        "grace-for-everybody", "a channel waits for an end that can't resume", _PEER,
        'self._grace_until = now + (self.grace_s if "resume" in self.capabilities else 0.0)',
        "self._grace_until = now + self.grace_s", _PEERS,
    ),
    Mutant(
        "grace-goes-on", "a channel that is up again ends when its grace is over", _PEER,
        "        self._move(PeerState.OPEN)\n        self._grace_until = None\n", "        self._move(PeerState.OPEN)\n", _PEERS,
    ),
    Mutant(
        "welcome-after-packets", "what belongs before the packets is written after them", _PEER,
        "data = self._outbox + channel.packets()", "data = channel.packets() + self._outbox", _PEERS,
    ),
    Mutant(
        "last-words-lost", "what was sent before a goodbye does not go out ahead of it", _PEER,
        "        if self._state is PeerState.OPEN:\n            self._outbox += self.channel.packets()\n", "", _PEERS,
    ),
    Mutant(
        "silence-from-the-start", "an end is silent for as long as since the handshake", _PEER,
        "            return self._greet(packet, now)\n        self.heard_at = now\n",
        "            return self._greet(packet, now)\n", _PEERS,
    ),
)  # fmt: skip
