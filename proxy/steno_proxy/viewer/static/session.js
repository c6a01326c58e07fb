// One session: what is known of it, its tree, and what was said on one path of it. A running one grows.

import { get, trialPath, turnAt, turnsFrom } from "./api.js";
import { Conversation } from "./conversation.js";
import { h, put, say, update } from "./dom.js";
import { brief, count, many, nodes, plain, reward, seconds, time } from "./format.js";
import { Outline } from "./outline.js";
import { chips, fact, fold, rewardOf, statusPill } from "./pieces.js";
import { watched } from "./reach.js";
import { Raw } from "./raw.js";
import { OPEN, Recording, undelivered } from "./record.js";
import { Timeline } from "./timeline.js";
import { TokenView } from "./tokens.js";
import { UnderWay } from "./under_way.js";

const LOOK_MS = 1000;
const LATER_MS = 5000;
// After the end of a session: for as long a reward is waited for, and what else was still on its way.
const REWARD_S = 600;
const SETTLED_S = 30;
// After so many open turns that are as they were, an older one is read again only where its answer has just ended: those of a dead
// proxy stay open for good.
const STILL_OPEN = 8;
const DELETED = "This session has been deleted. What is shown here is not on record any more.";
const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["timeline", "Timeline"], ["record", "Record"]];

export async function sessionView(main, [trial], query, signal, state) {
  const session = await get(trialPath(trial), {}, signal);
  const page = new SessionPage(main, session, query, signal, state.live);
  await page.load();
}

class SessionPage {
  constructor(main, session, query, signal, live) {
    this.session = session;
    this.signal = signal;
    this.live = live;
    this.purpose = null; // of its group; null: it has none, or it is not known
    this.recording = new Recording();
    this.leaf = null;
    this.chosen = null; // the turn that somebody has chosen to see
    this.tab = TABS.some(([name]) => name === query.get("tab")) ? query.get("tab") : "conversation";
    this.head = h("div.session-head");
    this.tabs = h("div.tabs", { role: "tablist", "aria-label": "What is shown" });
    this.panel = h("section.panel", { role: "tabpanel", tabindex: -1, id: "panel" });
    this.underWay = new UnderWay(session.trial_id, signal, (over) => this.look(over), (turnIds) => this.saying(turnIds));
    this.outline = new Outline(this.recording, (turnId) => this.choose(turnId, true));
    put(main, h("div.page.session", this.head, h("div.columns", this.outline.node, h("div.right", this.tabs, this.panel, this.underWay.node))));
    this.drawHead();
    this.drawTabs();
  }

  async load() {
    put(this.panel, h("p.dim.loading", "Reading the turns…"));
    const asked = new URLSearchParams(location.hash.split("?")[1] ?? "").get("turn");
    [this.purpose] = await Promise.all([this.readPurpose(), turnsFrom(this.session.trial_id, 0, (items) => this.recording.take(items), this.signal)]);
    const wanted = this.recording.get(asked)?.turn_id;
    this.choose(wanted ?? this.recording.mainLeaf?.turn_id ?? null, Boolean(wanted));
    if (this.live && this.goesOn()) this.follow();
  }

  // Evaluations are never trained. A group that can't be read is no reason to show nothing of the session.
  async readPurpose() {
    if (!this.live || this.session.group_id === null) return null;
    try {
      return (await get(`groups/${encodeURIComponent(this.session.group_id)}`, {}, this.signal)).purpose;
    } catch (error) {
      if (error.name === "AbortError" || error.status === 401) throw error;
      return null;
    }
  }

  // A turn: its path is shown, down to the newest leaf below it. chosen: by somebody, who is led to it.
  choose(turnId, chosen) {
    if (chosen) this.chosen = turnId;
    const onPath = turnId && this.shown?.includes(turnId);
    if (!onPath) {
      this.leaf = turnId === null ? null : this.recording.newestLeaf(turnId)?.turn_id ?? null;
      this.draw();
    }
    this.outline.draw(this.shown ?? [], turnId);
    if (chosen && turnId) this.view?.scrollTo?.(turnId);
  }

  draw() {
    this.underWay.node.hidden = this.tab !== "conversation";
    const path = this.leaf === null ? [] : this.recording.path(this.leaf);
    this.shown = path.map((turn) => turn.turn_id);
    this.view?.close?.();
    this.view = null;
    if (!this.recording.turns.length) {
      put(this.panel, h("div.empty", h("h2", "No turns yet"), h("p.dim", this.session.status === "open" ? "They appear here as they are recorded." : "This session ended without any.")));
      return;
    }
    const made = {
      conversation: () => new Conversation(path, this.recording),
      tokens: () => new TokenView(path, this.session, this.purpose),
      timeline: () => new Timeline(this.recording, (turnId) => { this.go("conversation"); this.choose(turnId, true); }),
      record: () => new Raw(path, this.session),
    }[this.tab]();
    this.view = made;
    put(this.panel, made.node);
  }

  drawTabs() {
    update(this.tabs, TABS.map(([name, words]) => h("button.tab", {
      role: "tab", id: `tab-${name}`, "aria-selected": String(name === this.tab), "aria-controls": "panel", tabindex: name === this.tab ? 0 : -1,
      onclick: () => this.go(name),
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const at = TABS.findIndex(([one]) => one === this.tab);
        this.go(TABS[(at + step + TABS.length) % TABS.length][0]);
        document.getElementById(`tab-${this.tab}`).focus();
      },
    }, words)));
    this.panel.setAttribute("aria-labelledby", `tab-${this.tab}`);
  }

  go(tab) {
    if (tab === this.tab) return;
    this.tab = tab;
    history.replaceState(null, "", `#/sessions/${encodeURIComponent(this.session.trial_id)}${tab === "conversation" ? "" : `?tab=${tab}`}`);
    this.drawTabs();
    this.draw();
  }

  drawHead() {
    const { session } = this;
    const { counts } = session;
    const unfolded = this.head.querySelector(".notes-fold")?.open;
    const took = session.first_turn_at === null ? null : (session.ended_at ?? session.updated_at) - session.first_turn_at;
    update(this.head,
      h("div.crumbs", h("a", { href: "#/sessions" }, "Sessions"),
        session.run_id ? [" / ", h("a", { href: `#/runs/${encodeURIComponent(session.run_id)}` }, plain(session.run_id))] : null,
        session.group_id ? [" / ", h("a", { href: `#/groups/${encodeURIComponent(session.group_id)}` }, plain(session.group_id))] : null),
      h("div.headline", h("h1.mono", session.trial_id), statusPill(session), chips(session.marks)),
      session.status === "deleted" ? h("p.bad", { role: "note" }, DELETED) : null,
      h("dl.facts",
        fact("Reward", h("b.big", rewardOf(session))),
        fact("Turns", count(counts.turns)),
        fact("Sampled", brief(counts.completion_tokens), h("small", " tokens")),
        fact("Prompt", brief(counts.prompt_tokens), h("small", " tokens")),
        fact("Forks", count(counts.forks)),
        counts.constrained_tokens ? fact("Constrained", brief(counts.constrained_tokens)) : null,
        fact("Took", seconds(took)),
        fact("Made", time(session.created_at)),
        session.metadata.agent ? fact("Agent", plain(session.metadata.agent)) : null,
        session.fork_of ? fact("Forked from", origin(session.fork_of.trial_id)) : null,
        session.rescore_of ? fact("Scores anew", origin(session.rescore_of)) : null,
        Object.entries(session.metrics).slice(0, 6).map(([name, value]) => fact(plain(name), reward(value)))),
      notes(session.notes, () => this.session.notes, unfolded));
  }

  // Whether something may come yet: turns, the reward of a trial that has ended, the turn of an answer that its end cut off.
  goesOn() {
    const { status, reward: given, ended_at: ended, awaits_reward: awaits } = this.session;
    if (status === "deleted") return false;
    return status === "open" || awaits || Date.now() / 1000 - ended < (given === null ? REWARD_S : SETTLED_S);
  }

  // Looks while somebody sees the page: often while the session is open, and now and then after its end.
  follow() {
    this.underWay.follow(() => this.session.status === "open");
    const look = async () => {
      if (this.signal.aborted) return;
      let over = false; // what was seen last is the last there is
      try {
        if (!document.hidden) {
          await watched(() => this.look());
          over = !this.goesOn();
        }
      } catch (error) {
        if (error.name === "AbortError") return;
      }
      if (!over && !this.signal.aborted) setTimeout(look, this.session.status === "open" ? LOOK_MS : LATER_MS);
    };
    setTimeout(look, LOOK_MS);
  }

  // over: ids of turns whose answers have just ended.
  async look(over = []) {
    try {
      await this.lookOnce(over);
    } catch (error) {
      if (!error.gone) throw error;
      this.deleted();
    }
  }

  // Somebody has deleted it: what is shown stays, and is said to be all that there is.
  deleted() {
    if (this.session.status === "deleted") return;
    this.session = { ...this.session, status: "deleted", end_reason: null };
    this.underWay.stop();
    this.drawHead();
    this.grow();
    say(DELETED);
  }

  async lookOnce(over) {
    const now = await get(trialPath(this.session.trial_id), {}, this.signal);
    const known = this.recording.turns.length;
    const same = now.updated_at === this.session.updated_at && now.status === this.session.status && now.counts.turns === known;
    if (same && !over.length) {
      if (told(now) === told(this.session)) return;
      this.session = now;
      this.drawHead();
      return;
    }
    const bottom = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
    const before = this.recording.get(this.leaf);
    await this.readNews(known, over);
    this.session = now;
    this.followRetry(before);
    this.drawHead();
    if (this.recording.turns.length > known) say(`${many(this.recording.turns.length - known, "new turn")}`);
    this.grow();
    if (bottom) scrollTo({ top: document.documentElement.scrollHeight });
  }

  // The turns from this number on, and what has become of the open ones before it. The answer at the end of what is shown may have
  // reached its client since: it is told again from the record.
  async readNews(known, over) {
    const { recording, session, signal } = this;
    const { waiting } = recording;
    const last = recording.get(this.leaf);
    await turnsFrom(session.trial_id, known, (items) => recording.take(items), signal);
    let same = 0;
    for (const turn of waiting) {
      if (same >= STILL_OPEN && !over.includes(turn.turn_id)) continue;
      recording.take(await turnAt(session.trial_id, turn.index, signal));
      same = recording.get(turn.turn_id) === turn ? same + 1 : 0;
    }
    if (last && undelivered(last) && !waiting.includes(last)) recording.take(await turnAt(session.trial_id, last.index, signal));
  }

  // These turns' answers are under way: of an open turn, that says whether it goes on.
  saying(turnIds) {
    const { recording } = this;
    recording.underWay = turnIds;
    if (recording.turns.some((turn) => turn.finish_reason === OPEN)) this.grow();
  }

  // The answer at the end of what is shown did not reach the client, who asked again: the conversation goes on there.
  followRetry(before) {
    if (!before || before.superseded_by) return; // nothing is shown, or somebody has chosen what was superseded
    const next = (turn) => this.recording.get(turn.superseded_by);
    for (let turn = next(this.recording.get(before.turn_id)); turn; turn = next(turn)) this.leaf = turn.turn_id;
  }

  // What is shown goes on with what is new, where it goes on from it. Where nobody has chosen it, a path that is longer takes its place.
  grow() {
    const { recording } = this;
    const follows = this.leaf === null ? null : recording.newestLeaf(this.leaf);
    const longest = this.chosen && follows ? null : recording.mainLeaf;
    let path = follows ? recording.path(follows.turn_id) : [];
    if (longest && recording.path(longest.turn_id).length > path.length) path = recording.path(longest.turn_id);
    this.leaf = path.at(-1)?.turn_id ?? null;
    const same = (this.shown ?? []).every((id, n) => path[n]?.turn_id === id);
    if (this.view?.grow && same) {
      this.shown = path.map((turn) => turn.turn_id);
      this.view.grow(path, this.session);
    } else this.draw();
    this.outline.draw(this.shown, this.shown.includes(this.chosen) ? this.chosen : this.leaf);
  }
}

const origin = (trial) => h("a.mono", { href: `#/sessions/${encodeURIComponent(trial)}` }, plain(trial));

// What a session may be told of without a new turn.
const told = ({ notes: found, marks }) => JSON.stringify([found, marks]);

// now: gives what is known when the fold is opened. It stays while more becomes known.
function notes(found, now, open) {
  if (!found) return null;
  const counts = Object.entries(found.counts).map(([kind, times]) => `${plain(kind)} ${times}`).join(", ");
  return fold(h("span", h("b.warn", "Refused or left out: "), counts), () =>
    h("ul.notes", now().newest.slice().reverse().map((note) => h("li", h("span.chip.warn", plain(note.kind)), " ", nodes(note.text), " ",
      h("span.dim", note.times > 1 ? `${note.times} times, ` : "", time(note.at))))), { open, kind: "notes-fold" });
}
