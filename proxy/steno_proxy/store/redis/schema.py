"""The Redis schema: every key, its type, how long it lives, who writes it. The fields inside are docs/recording-format.md.

    key                          type    ttl                  written by
    steno:{T}:session            hash    none; tombstone_s    register, commit, complete, add_marks, rotate_key, claim,
                                         once deleted         begin_task_step; delete leaves a tombstone
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
    steno:{T}:again              hash    3600 s after the     refused, asked_again; commit pairs what runs at several
                                         last                 replicas
    steno:{T}:notes              string  30 days after the    note: what was refused, and the like (contracts/notes.py)
                                         last
    steno:{T}:annotations        hash    none                 annotate: turn_id -> what a trainer saw in its tokens
    steno:group:{G}              string  none                 create_group; goes with the last of its sessions
    steno:{:index}:pending       zset    none                 every write that changes what lists show, before it does
    steno:{:index}:all           zset    none                 publish: trial -> created_at
    steno:{:index}:<status>      zset    none                 publish: open, completed, aborted; trial -> created_at
    steno:{:index}:ended         zset    none                 publish: trial -> ended_at, for retention
    steno:{:index}:timed         zset    none                 publish: open trial -> when the sweep looks at it next; due
    steno:{:index}:facets        hash    none                 publish: trial -> what it is found by (facets.py); goes with `all`
    steno:{:index}:archived      hash    none                 archive.lua: trial that has left Redis -> its place in the archive
    steno:{:index}:blanks        set     none                 archive.lua, publish: places of deleted sessions, until they are
                                                              overwritten
    steno:{:index}:copies        hash    none                 archive.lua, publish: trial that was archived again -> places of
                                                              its older copies; they move to `blanks` when it is deleted
    steno:{:index}:archiver      string  120 s                archive.lua: which replica archives
    steno:{:index}:archiving     string  none                 archive.lua: the object that it writes, until its sessions are known
    steno:{:index}:dead          zset    none                 publish: trial -> when its tombstone expires; trimmed by sweep
    steno:{:index}:group:<G>     zset    none                 publish: trial -> created_at
    steno:{:index}:runs          zset    none                 create_group: runs that have groups -> when the last was made; a
                                                              sweep moves those that have none any more to `past`
    steno:{:index}:past          zset    none                 rest: runs that had groups -> as it was in `runs`
    steno:{:index}:ready         stream  none; 1000 entries   the writer of a run: a group of this run got ready; wakes who waits
    steno:{R}:groups             hash    none                 run: group -> where it is, until the last of its sessions goes; it
                                                              stays where it waits or is leased then
    steno:{R}:docs               hash    none                 run: group -> its record, as long as `groups`; of a group that
                                                              stays, until it is acknowledged
    steno:{R}:trials             hash    none                 run: trial that has ended -> its outcome and tokens; as `docs`
    steno:{R}:due                zset    none                 run: running group -> its deadline
    steno:{R}:ready              stream  none                 run: groups that wait or are leased, one entry each, oldest
                                                              first; consumer group `trainers`: a lease is a pending entry
    steno:{R}:leased             zset    none                 run: group -> when its lease ends; 0: it was released,
                                                              or one behind it was leased first
    steno:{R}:totals             hash    none                 run: groups by purpose and state
    steno:{R}:ledger             hash    none                 run: s:VERSION and n:REASON:VERSION -> tokens
    steno:{R}:taken              zset    none                 run: what is counted, so that it counts once; entries an hour
    steno:{R}:past               hash    none                 run: group whose trials are all in the archive -> where it was;
                                                              a sweep keeps the newest 100,000
    steno:{R}:trainer            hash    none                 run: who has the run: name, epoch, at (its last heartbeat; 0: it
                                                              has left)
    steno:{R}:steps              zset    none                 step: a training step's numbers, JSON -> its number
    steno:{R}:request:N          string  300 s                run: what a request for leases was granted
    steno:{:policy}:heads        hash    none                 post, serve: per policy P posted:P (update id, since),
                                                              served:P (update id), number:P (updates so far)
    steno:{:policy}:versions:P   hash    none                 post: version -> digest of its weights, for good (I10)
    steno:{:policy}:update:U     hash    none; 3600 s once    post, end: what was posted (spec), and how it went
                                         nobody needs it
    steno:{:policy}:names        set     none                 keep, retire: names of models that workers have served
    steno:{:policy}:policies     hash    none                 keep, retire: name of those -> its policy
    steno:kept:N                 string  none                 keep: what replicas agreed on by who came first; N is
                                                              `trial_secret`, which agents' keys derive from, `store` (this
                                                              Redis's id), or `archive` (the same, once all of it is listed)
    steno:{:tokens}:texts        hash    none                 token_texts: tokenizer -> texts of its tokens, gzip of JSON
    steno:{:tokens}:seen         zset    none                 token_texts: those -> when a worker last had it; the newest 64 stay
    steno:{:waited}              string  1 s                  every write, where replicas are waited for: what WAIT counts
                                                              from. In a cluster steno:{X}:waited, on the slot X of each write

T is a trial id, G a group id, U an update id, R is `:run:` and a run id, percent-encoded (`:run`: groups
without a run). All keys of a trial share one hash tag, hence one cluster slot, so that one script
can write them. Index, policies and texts of tokens have slots of their own; `:` cannot occur in a trial id, so no trial can name
their tags.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

PREFIX = "steno:"
INDEX = PREFIX + "{:index}:"
PENDING = INDEX + "pending"
ALL = INDEX + "all"
ENDED = INDEX + "ended"
DEAD = INDEX + "dead"
TIMED = INDEX + "timed"
FACETS = INDEX + "facets"
ARCHIVED = INDEX + "archived"
BLANKS = INDEX + "blanks"
COPIES = INDEX + "copies"
ARCHIVER = INDEX + "archiver"
ARCHIVING = INDEX + "archiving"
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
    again: str


def trial_keys(trial_id: str) -> TrialKeys:
    tag = f"{PREFIX}{{{trial_id}}}:"
    return TrialKeys._make(tag + name for name in TrialKeys._fields)


def notes_key(trial_id: str) -> str:
    """Not among `trial_keys`, which every commit takes."""
    return f"{PREFIX}{{{trial_id}}}:notes"


def annotations_key(trial_id: str) -> str:
    """As `notes_key`."""
    return f"{PREFIX}{{{trial_id}}}:annotations"


def side_keys(trial_id: str) -> list[str]:
    """What goes with a trial and is not among `trial_keys`, in the order in which delete.lua and leave.lua take it."""
    return [notes_key(trial_id), annotations_key(trial_id)]


def index_keys(group_id: str | None) -> list[str]:
    """The keys of publish.lua, in its order."""
    group = PENDING if group_id is None else group_index_key(group_id)
    return [PENDING, ALL, *map(status_key, STATUSES), ENDED, DEAD, group, TIMED, ARCHIVED, FACETS, BLANKS, COPIES]


def status_key(status: str) -> str:
    return INDEX + status


def group_key(group_id: str) -> str:
    return f"{PREFIX}group:{{{group_id}}}"


def kept_key(name: str) -> str:
    return f"{PREFIX}kept:{name}"


def group_index_key(group_id: str) -> str:
    return f"{INDEX}group:{group_id}"


RUNS = INDEX + "runs"
PAST_RUNS = INDEX + "past"
GROUPS_READY = INDEX + "ready"


class RunKeys(NamedTuple):
    """The keys of one run, in the order in which run_read.lua and run_write.lua take them."""

    groups: str
    docs: str
    trials: str
    due: str
    ready: str
    leased: str
    totals: str
    ledger: str
    taken: str
    trainer: str
    past: str


def run_tag(run_id: str | None) -> str:
    """Percent-encoded: a run id may be any text, and a brace in it would end the hash tag."""
    return ":run" if run_id is None else ":run:" + quote(run_id, safe="")


def run_id_of(tag: str) -> str | None:
    return None if tag == ":run" else unquote(tag.removeprefix(":run:"))


def run_keys(run_id: str | None) -> RunKeys:
    tag = f"{PREFIX}{{{run_tag(run_id)}}}:"
    return RunKeys._make(tag + name for name in RunKeys._fields)


def steps_key(run_id: str | None) -> str:
    return f"{PREFIX}{{{run_tag(run_id)}}}:steps"


def request_key(run_id: str | None, request_id: str) -> str:
    return f"{PREFIX}{{{run_tag(run_id)}}}:request:{request_id}"


TOKEN_TEXTS = PREFIX + "{:tokens}:texts"
TOKEN_TEXTS_SEEN = PREFIX + "{:tokens}:seen"
WAITED = PREFIX + "{:waited}"


def waited_key(key: str) -> str:
    """A key on the slot of another one."""
    tag = key.partition("{")[2].partition("}")[0] or key
    return f"{PREFIX}{{{tag}}}:waited"


POLICY = PREFIX + "{:policy}:"
POLICY_HEADS = POLICY + "heads"
UPDATE_PREFIX = POLICY + "update:"
MODEL_NAMES = POLICY + "names"
MODEL_POLICIES = POLICY + "policies"


def policy_versions_key(policy: str) -> str:
    return f"{POLICY}versions:{policy}"


def update_key(update_id: str) -> str:
    return UPDATE_PREFIX + update_id
