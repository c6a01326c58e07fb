"""The Redis schema: every key, its type, how long it lives, who writes it. The fields inside are docs/recording-format.md.

    key                          type    ttl                  written by
    steno:{T}:session            hash    none; tombstone_s    register, commit, complete, add_marks; delete leaves a tombstone
                                         once deleted
    steno:{T}:doc                string  none                 register: what never changes of a session
    steno:{T}:turns              list    none                 commit: one element per turn, index row first
    steno:{T}:ids                list    none                 commit: the turn's new prompt ids and completion ids
    steno:{T}:logprobs           list    none                 commit: one float32 per completion id
    steno:{T}:texts              list    none                 commit: messages, tools, settings, each stored once
    steno:{T}:digests            hash    none                 commit: digest of a text -> its position in texts
    steno:{T}:numbers            hash    none                 commit: turn_id -> number, and what an open turn
                                         weighs; mark_delivered adds the count, hide a mark
    steno:{T}:events             stream  60 s after the last  events: exists only while somebody watches; commit, complete and
                                         watcher              delete add to it then, so an unwatched session pays nothing
    steno:group:{G}              string  none                 create_group; goes with the last of its sessions
    steno:{:index}:pending       zset    none                 every write that changes what lists show, before it does
    steno:{:index}:all           zset    none                 publish: trial -> created_at
    steno:{:index}:<status>      zset    none                 publish: open, completed, aborted; trial -> created_at
    steno:{:index}:ended         zset    none                 publish: trial -> ended_at, for retention
    steno:{:index}:dead          zset    none                 publish: trial -> when its tombstone expires; trimmed by sweep
    steno:{:index}:group:<G>     zset    none                 publish: trial -> created_at
    steno:{:policy}:heads        hash    none                 post, serve: per policy P posted:P (update id, since),
                                                              served:P (update id), number:P (updates so far)
    steno:{:policy}:versions:P   hash    none                 post: version -> digest of its weights, for good (I10)
    steno:{:policy}:update:U     hash    none; 3600 s once    post, end: what was posted (spec), and how it went
                                         nobody needs it

T is a trial id, G a group id, U an update id. All keys of a trial share one hash tag, hence one cluster slot, so that one script
can write them. The index has a slot of its own, policies have one; `:` cannot occur in a trial id, so no trial can name their tags.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "steno:"
INDEX = PREFIX + "{:index}:"
PENDING = INDEX + "pending"
ALL = INDEX + "all"
ENDED = INDEX + "ended"
DEAD = INDEX + "dead"
STATUSES = ("open", "completed", "aborted")
"""Statuses that lists can show, in the order of their index keys."""


class TrialKeys(NamedTuple):
    """The keys of one trial, in the order in which scripts take them."""

    session: str
    doc: str
    turns: str
    ids: str
    logprobs: str
    texts: str
    digests: str
    numbers: str
    events: str


def trial_keys(trial_id: str) -> TrialKeys:
    tag = f"{PREFIX}{{{trial_id}}}:"
    return TrialKeys._make(tag + name for name in TrialKeys._fields)


def index_keys(group_id: str | None) -> list[str]:
    """The keys of publish.lua, in its order."""
    group = PENDING if group_id is None else group_index_key(group_id)
    return [PENDING, ALL, *map(status_key, STATUSES), ENDED, DEAD, group]


def status_key(status: str) -> str:
    return INDEX + status


def group_key(group_id: str) -> str:
    return f"{PREFIX}group:{{{group_id}}}"


def group_index_key(group_id: str) -> str:
    return f"{INDEX}group:{group_id}"


POLICY = PREFIX + "{:policy}:"
POLICY_HEADS = POLICY + "heads"
UPDATE_PREFIX = POLICY + "update:"


def policy_versions_key(policy: str) -> str:
    return f"{POLICY}versions:{policy}"


def update_key(update_id: str) -> str:
    return UPDATE_PREFIX + update_id
