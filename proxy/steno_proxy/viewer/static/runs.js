// Runs: which there are, and one of them: rewards, where its groups are, what becomes of its tokens, its trainer's steps.

import { get, lookAgain } from "./api.js";
import { lineChart, shareBar } from "./charts.js";
import { h, put, say, update } from "./dom.js";
import { brief, count, many, plain, reward, seconds, time } from "./format.js";
import { fact } from "./pieces.js";

const LOOK_MS = 3000;
const PAGE = 100;
const MOST_RUNS = 1000;
const SESSIONS = 400;
// By how much the clocks of replicas may differ.
const CLOCKS_S = 60;
// Of steps that a resumed trainer may take again, while it was heard of within LIVES_S.
const LOOKS_FOR_ALL = 5;
// Evaluations are added later (`steno evaluate --follow`), most of them to one of so many last steps: these are read again at every
// fifth look, of the others STEPS_AT_ONCE a minute.
const LATE = 50;
const LOOKS_FOR_OLDEST = 20;
const STEPS_AT_ONCE = 1000;
const LIVES_S = 60;

export async function runsView(main, _, __, signal) {
  const page = h("div");
  const found = h("span.dim.small");
  const more = h("button.more", { hidden: true, onclick: older }, "Show older ones");
  let most = PAGE;
  let seen = "";
  put(main, h("div.page", h("div.headline", h("h1", "Runs"), found), page, more));

  async function look() {
    const asked = most;
    const { items } = await get("runs", { limit: asked }, signal);
    if (asked !== most) return; // more of them are on their way
    const now = JSON.stringify(items);
    if (now !== seen) put(page, table(items)); // only then: whoever is on a link with the keyboard stays there
    seen = now;
    found.textContent = items.length < most ? "" : `the newest ${count(most)}`;
    more.hidden = items.length < most || most === MOST_RUNS;
  }

  function older() {
    most = Math.min(most + PAGE, MOST_RUNS);
    look().then(() => say(found.textContent || "all runs shown"), () => { /* the next look may succeed */ });
  }
  await lookAgain(look, LOOK_MS, signal);
}

function table(items) {
  if (!items.length) return h("div.empty", h("h2", "No run yet"), h("p.dim", "A run appears with its first group. Sessions without a group are under Sessions."));
  const heads = [["Run"], ["Groups in hand", "num"], ["Used", "num"], ["Acknowledged", "num"], ["Without a trial to train", "num"], ["Evaluations", "num"], ["Newest group", "num"]];
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Runs" }, h("table.rows",
    h("thead", h("tr", heads.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
    h("tbody", items.map(line))));
}

function line({ run_id: run, groups, eval_groups: evals, last_group_at: at }) {
  const where = run === null ? "#/groups?none=1" : `#/runs/${encodeURIComponent(run)}`;
  const inHand = groups.running + groups.ready + groups.leased;
  return h("tr", h("td.trial", h("a", { href: where }, run === null ? "groups without a run" : plain(run))),
    h("td.num.mono", count(inHand), h("span.dim", ` ${groups.running} running, ${groups.ready} ready, ${groups.leased} leased`)),
    h("td.num.mono", count(groups.used)), h("td.num.mono", count(groups.acknowledged)), h("td.num.mono", count(groups.empty)),
    h("td.num.mono", count(evals.running + evals.ended)), h("td.num.dim", time(at)));
}

export async function runView(main, [run], _, signal) {
  const parts = { head: h("dl.facts"), charts: h("div.charts"), ledger: h("div"), stepped: h("div.charts"), steps: new Steps(run, signal) };
  put(main, h("div.page.run", h("div.crumbs", h("a", { href: "#/runs" }, "Runs")), h("div.headline", h("h1.mono", plain(run)),
    h("a.chip", { href: `#/groups?run_id=${encodeURIComponent(run)}` }, "groups"), h("a.chip", { href: `#/sessions?run_id=${encodeURIComponent(run)}` }, "sessions")),
  parts.head, h("h2.section", "Rewards"), parts.charts, h("h2.section", "Tokens"), parts.ledger, parts.stepped));
  await lookAgain(() => draw(run, parts, signal), LOOK_MS, signal);
}

async function draw(run, parts, signal) {
  const path = `runs/${encodeURIComponent(run)}`;
  const [view, policies] = await Promise.all([get(path, {}, signal), get("policy", {}, signal)]);
  const now = JSON.stringify([view.groups, view.eval_groups, view.sampled, view.borrowed]);
  if (now !== parts.seen) parts.sessions = await get("sessions", { run_id: run, order: "newest", limit: SESSIONS, since: parts.since }, signal);
  parts.seen = now;
  // Where these are all of the run, the store is not searched again for others before them: later sessions of a run are newer.
  const { items, next_cursor: further, unreadable } = parts.sessions;
  if (items.length && further === null && !unreadable.length) parts.since = items.at(-1).created_at - CLOCKS_S;
  await knowEvaluations(run, view, parts, signal);
  await parts.steps.look(view.trainer);
  const { sessions } = parts;
  const ended = sessions.items.filter((session) => session.reward !== null && !parts.evals.has(session.group_id)).reverse();
  const lost = sessions.unreadable.length;
  const part = [sessions.next_cursor === null ? "" : `of the newest ${SESSIONS}`, lost ? `without ${count(lost)} that can't be read now` : ""].filter(Boolean).join(", ");
  const ofNewest = part ? h("small", ` ${part}`) : null;
  const { groups } = view;
  update(parts.head,
    fact("Groups running", count(groups.running)), fact("Ready", count(groups.ready)), fact("Leased", count(groups.leased)),
    fact("Used", h("span", { title: "the trainer is done with them, and has not saved that yet" }, count(groups.used))), fact("Acknowledged", count(groups.acknowledged)), groups.empty ? fact("Empty", count(groups.empty)) : null,
    fact("Evaluations", count(view.eval_groups.running + view.eval_groups.ended)),
    fact("Mean reward", reward(mean(ended.map((session) => session.reward))), ofNewest?.cloneNode(true)),
    fact("Solved", h("span", { title: "trials whose reward is the highest there is" }, share(ended)), ofNewest),
    view.trainer ? fact("Trainer", plain(view.trainer.name), h("small", view.trainer.heard_s === null ? " has left" : ` heard ${seconds(view.trainer.heard_s)} ago`)) : null,
    policies.items.map((policy) => fact(`Version of ${plain(policy.policy)}`, h("span.mono", plain(policy.version ?? Object.keys(policy.workers).join(", ")) || "–"))));
  update(parts.charts, rewardCharts(ended), part ? h("p.dim", `Trials: ${part}.`) : null);
  update(parts.ledger, ledger(view, newestLineages(policies.items, parts.steps.items)));
  if (parts.steps.changes !== parts.drawn) put(parts.stepped, stepCharts(parts.steps.items));
  parts.drawn = parts.steps.changes;
}

// The groups whose trials are not averaged with the others: held-out evaluations, unless the run has nothing else. The list may
// be long, and purposes do not change, so it is read only where there are more evaluations than last time.
async function knowEvaluations(run, view, parts, signal) {
  const { running, ended } = view.eval_groups;
  const made = Object.values(view.groups).some((number) => number > 0) ? running + ended : 0;
  if (parts.evals && made === parts.evalsMade) return;
  const { items } = made ? await get("groups", { run_id: run }, signal) : { items: [] };
  parts.evals = new Set(items.filter((group) => group.purpose === "eval").map((group) => group.group_id));
  parts.evalsMade = made;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function share(ended) {
  if (!ended.length) return "–";
  const best = Math.max(...ended.map((session) => session.reward));
  return best <= 0 ? "0 %" : `${((100 * ended.filter((session) => session.reward === best).length) / ended.length).toFixed(0)} %`;
}

// By group, in the order in which they were made: the mean of each group's rewards, and how far apart they are.
function rewardCharts(ended) {
  const groups = new Map();
  for (const session of ended) {
    const name = session.group_id ?? session.trial_id;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(session);
  }
  const points = (value) => [...groups].map(([label, sessions], x) => ({ x, label, y: value(sessions) }));
  return [
    lineChart("Mean reward by group", points((sessions) => mean(sessions.map((session) => session.reward)))),
    lineChart("Sampled tokens a trial", points((sessions) => mean(sessions.map((session) => session.counts.completion_tokens))), { from: 0 }),
    lineChart("Turns a trial", points((sessions) => mean(sessions.map((session) => session.counts.turns))), { from: 0 }),
    ended.length ? null : h("p.dim", "No trial has a reward yet."),
  ];
}

const NEWEST_VERSIONS = 12;

const lineageOf = (version) => version.split("/")[0];

// A version is `lineage/step`. The lineages that policies serve now, and that of the trainer's newest step, are newer than any other, also
// while steps are taken again that a crash has lost. A policy has no version of its own where somebody else brings the weights (verl).
function newestLineages(policies, steps) {
  const versions = policies.flatMap(({ version, workers }) => (version ? [version] : Object.keys(workers)));
  return new Set([...versions, ...steps.slice(-1).flatMap((step) => step.version ?? [])].map(lineageOf));
}

// Tokens by version, the newest version last; all earlier ones are one part.
function versionParts(byVersion, newest) {
  const parts = Object.entries(byVersion).map(([name, value]) => {
    const [lineage, step] = name.split("/");
    return { name, value, newer: newest.has(lineage), step: Number.parseInt(step, 10) || 0 };
  }).sort((a, b) => a.newer - b.newer || a.step - b.step).map(({ name, value }, n) => ({ name, value, kind: `v${n % 8}` }));
  const earlier = parts.splice(0, Math.max(0, parts.length - NEWEST_VERSIONS));
  if (!earlier.length) return parts;
  const tokens = earlier.reduce((total, part) => total + part.value, 0);
  return [{ name: many(earlier.length, "earlier version"), value: tokens, kind: "r4" }, ...parts];
}

const KINDS = ["r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8"];

function ledger(view, newest) {
  const sum = (byVersion) => Object.values(byVersion).reduce((total, tokens) => total + tokens, 0);
  const sampled = sum(view.sampled), borrowed = sum(view.borrowed ?? {}), all = sampled + borrowed;
  if (!all) return h("p.dim", "No trial has ended yet.");
  const lost = Object.entries(view.not_trained).map(([reason, byVersion], n) => ({ name: reason.replaceAll("_", " "), value: sum(byVersion), kind: KINDS[n % KINDS.length] }));
  const rest = all - lost.reduce((total, part) => total + part.value, 0);
  const byVersion = { ...view.sampled };
  for (const [name, value] of Object.entries(view.borrowed ?? {})) byVersion[name] = (byVersion[name] ?? 0) + value;
  return h("div.card", h("p", sampled || !borrowed ? [h("b", brief(sampled)), " tokens sampled by trials that have ended. "] : null,
      borrowed ? [h("b", brief(borrowed)), " tokens borrowed from the trials that this run scores anew. "] : null, h("span.dim", "By what becomes of them:")),
    shareBar("Tokens by the ledger", [{ name: "for the trainer", value: rest, kind: "r0" }, ...lost]),
    h("p.dim", "By the version that sampled them:"), shareBar("Tokens by version", versionParts(byVersion, newest)));
}

// All of a run's steps: there are hundreds, at most 100,000, and each is a few kilobytes. Mostly only the last one changes, so it is read
// again. A trainer that resumes (another epoch) takes again some that are on record, nobody says from which on: until it is beyond them,
// older ones are read more often.
export class Steps {
  constructor(run, signal) {
    this.path = `runs/${encodeURIComponent(run)}/steps`;
    this.signal = signal;
    this.items = [];
    this.changes = 0;
    this.looks = 0;
    this.older = 0; // the place from which on older ones are read next
    this.before = null; // how many steps there were when this trainer came; null: it is past them
  }

  // trainer: who has the run now, if anybody registered.
  async look(trainer) {
    const epoch = trainer?.epoch ?? 0;
    const newcomer = epoch !== this.epoch;
    const takesAgain = epoch > 1 && trainer.heard_s !== null && trainer.heard_s < LIVES_S && this.items.length === this.before;
    this.looks += 1;
    const further = this.looks % LOOKS_FOR_ALL === 0;
    await this.read(newcomer ? 0 : Math.max(0, this.items.length - (further ? LATE : 1)));
    if (!newcomer && ((takesAgain && further) || this.looks % LOOKS_FOR_OLDEST === 0)) await this.readOlder();
    if (newcomer) {
      this.before = this.items.length;
    } else if (this.before !== null && this.items.length !== this.before) {
      this.before = null;
      await this.read(0); // what was taken again before the newest step, since the last look at all
    }
    this.epoch = epoch;
  }

  // Some that are on record for longer: each time the next ones, from the last on those at the beginning.
  async readOlder() {
    const place = this.older < this.items.length ? this.older : 0;
    this.older = place + STEPS_AT_ONCE;
    await this.read(place, 1);
  }

  // From the step that is in this place, so many pages.
  async read(place, pages = Infinity) {
    const found = [];
    let start = place ? this.items[place].step : 0;
    for (let n = 0; n < pages && start !== null; n += 1) {
      const page = await get(this.path, { start, limit: STEPS_AT_ONCE }, this.signal);
      found.push(...page.items);
      start = page.next_start;
    }
    const after = start === null ? [] : this.items.filter(({ step }) => step >= start);
    const known = this.items.slice(place, this.items.length - after.length);
    if (JSON.stringify(found) !== JSON.stringify(known)) this.changes += 1;
    this.items = [...this.items.slice(0, place), ...found, ...after];
  }
}

const STEP_LINES = [["reward/mean", "Reward of a step's trials"], ["eval/reward", "Reward of the evaluation"], ["staleness/mean", "Staleness", " steps"], ["policy/entropy", "Entropy"], ["mismatch/kl_k3", "Trainer against sampler (KL)"], ["optimizer/grad_norm", "Gradient norm"], ["length/sample_mean", "Tokens of a sample"]];
// Names of the user's own: metrics of trials, rewards by a field of the tasks (docs/metrics.md).
const OWN = ["reward_by/", "trial/", "eval/reward_by/", "eval/trial/"];
const MOST_OWN = 24;
const TIMES = [["time/wait_s", "waiting for rollouts", "wait"], ["time/train_s", "training", "decode"], ["time/push_s", "new weights", "prefill"]];

function stepCharts(steps) {
  if (!steps.length) return null;
  const line = (name, words, unit) =>
    lineChart(words, steps.map((step) => ({ x: step.step, label: `step ${step.step}`, y: step.values?.[name] ?? null })), { unit: unit ?? "" });
  const lines = STEP_LINES.map(([name, words, unit]) => line(name, words, unit));
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.values ?? {})))];
  const own = OWN.flatMap((prefix) => names.filter((name) => name.startsWith(prefix)).sort());
  const more = own.length > MOST_OWN ? h("p.dim", `${own.length - MOST_OWN} more names of trials' metrics and tasks are in the steps' values.`) : null;
  const last = steps.at(-1);
  const times = TIMES.map(([name, words, kind]) => ({ name: words, value: last.values?.[name] ?? 0, kind }));
  return [h("h2.section.wide", `Steps: ${count(steps.length)}, the last is ${last.step}`), lines, own.slice(0, MOST_OWN).map((name) => line(name, plain(name))), more,
    h("div.card", h("p", h("b", "Time of the last step")), shareBar("Time of the last step", times, seconds))];
}
