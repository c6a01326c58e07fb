// Groups of a run, and one group: its trials side by side, and where they part.

import { get, turnsFrom } from "./api.js";
import { add, h, put, say } from "./dom.js";
import { brief, count, many, oneLine, plain, reward, seconds, time } from "./format.js";
import { chips, fact, fold, json, rewardBar, rewardOf, statusPill } from "./pieces.js";
import { contentText, Recording, sampled } from "./record.js";

const PAGE = 200;
const MOST_TRIALS = 16;
const MOST_ROWS = 200;
const MOST_NAMES = 20;

export async function groupsView(main, _, query, signal) {
  let run = query.get("run_id");
  const runs = (await get("runs", { limit: 1000 }, signal)).items.map((one) => one.run_id);
  if (run === null && runs.length && !query.has("none")) run = runs[0];
  const { items } = await get("groups", { run_id: run }, signal); // a line each, the newest first; there may be very many
  const choose = h("select", { onchange: (event) => { location.hash = event.target.value === "" ? "#/groups?none=1" : `#/groups?run_id=${encodeURIComponent(event.target.value)}`; } },
    [...new Set([...runs, run])].map((name) => h("option", { value: name ?? "", selected: name === run }, name === null ? "without a run" : plain(name))));
  const heads = [["Group"], ["State"], ["Purpose"], ["Trials", "num"], ["Leased", "num"], ["Trainer"], ["Made", "num"]];
  const body = h("tbody");
  const found = h("span.dim.small", { role: "status" });
  const more = h("button.more", { onclick: () => { next(); say(found.textContent); } }, "Show older ones");
  let shown = 0;
  const next = () => {
    const page = items.slice(shown, shown + PAGE);
    add(body, page.map(line));
    shown += page.length;
    more.hidden = shown === items.length;
    found.textContent = more.hidden ? count(shown) : `${count(shown)} of ${count(items.length)}, the newest`;
  };
  next();
  if (!items.length) body.append(h("tr", h("td.none", { colspan: heads.length }, "No group here.")));
  put(main, h("div.page", h("div.headline", h("h1", "Groups"), found),
    h("div.filters", h("label.field", h("span", "Run"), choose)),
    h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Groups" }, h("table.rows", h("thead", h("tr", heads.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), body)), more));
}

function line(group) {
  const kind = { running: "open", ready: "completed", over: "completed", acknowledged: "completed" }[group.state] ?? "";
  return h("tr", h("td.trial", h("a", { href: `#/groups/${encodeURIComponent(group.group_id)}` }, group.group_id)),
    h("td", h("span.pill", { class: kind }, h("i", { "aria-hidden": "true" }), group.state)), h("td", group.purpose),
    h("td.num.mono", `${group.ended} / ${group.size}`), h("td.num.mono", group.grants ? `${group.grants}×` : "–"),
    h("td.dim", plain(group.trainer ?? "")), h("td.num.dim", group.created_at ? time(group.created_at) : "–"));
}

export async function groupView(main, [groupId], _, signal) {
  const [group, { trials, unreadable }] = await Promise.all([get(`groups/${encodeURIComponent(groupId)}`, {}, signal), trialsOf(groupId, signal)]);
  const ofThese = trials.length < group.size ? () => h("small", ` of ${count(trials.length)}`) : () => null;
  const scored = trials.map((trial) => trial.reward).filter((value) => value !== null);
  const compared = h("div", h("p.dim.loading", "Reading the turns…"));
  put(main, h("div.page.group",
    h("div.crumbs", h("a", { href: "#/groups" }, "Groups"), group.run_id ? [" / ", h("a", { href: `#/runs/${encodeURIComponent(group.run_id)}` }, plain(group.run_id))] : null),
    h("div.headline", h("h1.mono", group.group_id), h("span.chip", group.purpose)),
    h("dl.facts", fact("Trials", count(group.size)), fact("Ended", count(trials.filter((trial) => trial.status !== "open").length), ofThese()),
      fact("Mean reward", reward(scored.length ? scored.reduce((a, b) => a + b, 0) / scored.length : null), ofThese()),
      fact("Lowest to highest", scored.length ? `${reward(Math.min(...scored))} to ${reward(Math.max(...scored))}` : "–", ofThese()),
      fact("Made", time(group.created_at)), group.deadline_s ? fact("Deadline", seconds(group.deadline_s)) : null),
    without(group, trials, unreadable),
    Object.keys(group.task).length ? h("div.task", fold(h("span", h("b", "Task "), h("span.dim", oneLine(JSON.stringify(group.task), 140))), () => json(group.task))) : null,
    h("h2.section", "Trials side by side"), compared));
  const shown = trials.slice(0, MOST_TRIALS);
  const recordings = await Promise.all(shown.map((trial) => read(trial, signal)));
  put(compared, trials.length > shown.length ? h("p.dim", `The first ${shown.length} of ${trials.length}.`) : null, sideBySide(shown, recordings));
}

async function trialsOf(groupId, signal) {
  const trials = [], unreadable = [];
  let cursor = null;
  do {
    const page = await get("sessions", { group_id: groupId, limit: 1000, cursor }, signal);
    trials.push(...page.items);
    unreadable.push(...page.unreadable);
    cursor = page.next_cursor;
  } while (cursor !== null);
  return { trials, unreadable };
}

// The turns of a trial, or why there are none: the others are shown all the same.
async function read(trial, signal) {
  const recording = new Recording();
  try {
    await turnsFrom(trial.trial_id, 0, (items) => recording.take(items), signal);
  } catch (error) {
    if (error.name === "AbortError" || error.status === 401) throw error;
    return { recording: new Recording(), trouble: error.message };
  }
  return { recording, trouble: null };
}

// Which trials of the group are not among those that are shown, and why.
function without(group, trials, unreadable) {
  const known = new Set([...trials.map((trial) => trial.trial_id), ...unreadable]);
  const gone = group.trial_ids.filter((trial) => !known.has(trial));
  const named = (names, why) => (names.length ? `Without ${many(names.length, "trial")} that ${why}: ${names.slice(0, MOST_NAMES).map(plain).join(", ")}${names.length > MOST_NAMES ? ", …" : ""}. ` : "");
  const words = named(unreadable, "can't be read in the archive now") + named(gone, `${gone.length === 1 ? "is" : "are"} not on record any more`);
  return words ? h("p.bad", { role: "note" }, words.trim()) : null;
}

// A column a trial, a row a turn of its main path. Equal answers have the same mark, so that one sees where the trials part.
function sideBySide(trials, recordings) {
  const paths = recordings.map(({ recording }) => (recording.mainLeaf ? recording.path(recording.mainLeaf.turn_id) : []));
  const longest = Math.max(1, ...paths.map((path) => path.reduce((sum, turn) => sum + sampled(turn), 0)));
  const rows = Math.min(MOST_ROWS, Math.max(0, ...paths.map((path) => path.length)));
  const heads = trials.map((trial, n) => h("th", { scope: "col" },
    h("a.mono", { href: `#/sessions/${encodeURIComponent(trial.trial_id)}` }, trial.trial_id.startsWith(`${trial.group_id}.`) ? trial.trial_id.slice(trial.group_id.length) : trial.trial_id), " ", statusPill(trial), chips(trial.marks),
    h("div.column-reward", rewardBar(trial.reward), h("b.mono", rewardOf(trial))),
    recordings[n].trouble === null ? null : h("div.bad", `Its turns can't be read: ${plain(recordings[n].trouble)}`),
    h("div.dim", `${many(paths[n].length, "turn")}, ${brief(trial.counts.completion_tokens)} tokens`),
    h("span.length", { "aria-hidden": "true" }, h("span", { style: { width: `${(100 * paths[n].reduce((sum, turn) => sum + sampled(turn), 0)) / longest}%` } }))));
  const body = [];
  let parted = false;
  for (let row = 0; row < rows; row += 1) {
    const turns = paths.map((path) => path[row]);
    const ways = new Map();
    for (const turn of turns) if (turn) ways.set(said(turn), ways.get(said(turn)) ?? ways.size);
    if (!parted && ways.size > 1) {
      parted = true;
      body.push(h("tr.parting", h("td", { colspan: trials.length + 1 }, `They part at turn ${row + 1}: ${many(ways.size, "way")}, after ${many(commonTokens(turns.filter(Boolean)), "common token")} of this answer`)));
    }
    body.push(h("tr", h("th.row-head", { scope: "row" }, `${row + 1}`), turns.map((turn) => (turn ? cell(turn, ways.size > 1 ? ways.get(said(turn)) : null) : h("td.absent")))));
  }
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Trials side by side" },
    h("table.beside", h("thead", h("tr", h("th", h("span.unseen", "Turn")), heads)), h("tbody", body)));
}

const said = (turn) => JSON.stringify([contentText(turn.reply.content), (turn.reply.tool_calls ?? []).map((call) => [call.function?.name, call.function?.arguments])]);

function cell(turn, way) {
  const names = (turn.reply.tool_calls ?? []).map((call) => call.function?.name ?? "?");
  return h("td", { class: way === null ? "same" : `way v${way % 8}-edge` }, way === null ? null : h("span.way-mark", { title: "trials with the same letter said the same" }, String.fromCharCode(65 + (way % 26))),
    h("span.cell-text", oneLine(contentText(turn.reply.content) || (turn.reply.tool_calls?.[0]?.function?.arguments ?? ""), 160)),
    names.map((name) => h("code.chip", plain(name))), h("span.dim.small", ` ${brief(sampled(turn))}`));
}

function commonTokens(turns) {
  const [first, ...others] = turns.map((turn) => turn.completion_ids);
  let at = 0;
  while (at < first.length && others.every((ids) => ids[at] === first[at])) at += 1;
  return at;
}
