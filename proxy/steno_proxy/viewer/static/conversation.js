// One path as the agent saw it: what was new in each request, and what the policy said.

import { h } from "./dom.js";
import { brief, count, many, oneLine, plain, seconds } from "./format.js";
import { forkChip } from "./outline.js";
import { fold, json, longText } from "./pieces.js";
import { contentText, meanLogprob, sameTools, sampled, undelivered } from "./record.js";

const ROLES = { system: "System", developer: "Developer", user: "User", assistant: "Assistant", tool: "Tool" };

export class Conversation {
  constructor(path, recording) {
    this.recording = recording;
    this.node = h("div.conversation");
    this.parts = new Map();
    this.grow(path);
  }

  // Turns that are new are added; one that has changed is drawn again.
  grow(path) {
    const names = callNames(path);
    path.forEach((turn, at) => {
      const known = this.parts.get(turn.turn_id);
      const live = this.recording.isLive(turn);
      if (known && known.live === live && known.finish === turn.finish_reason && known.tokens === sampled(turn) && known.delivered === turn.delivered && known.superseded === turn.superseded_by) return;
      const node = section(turn, path[at - 1], names, this.recording, live);
      if (known) replace(known.node, node);
      else this.node.append(node);
      this.parts.set(turn.turn_id, { node, live, finish: turn.finish_reason, tokens: sampled(turn), delivered: turn.delivered, superseded: turn.superseded_by });
    });
  }

  scrollTo(turnId) {
    const node = this.parts.get(turnId)?.node;
    node?.scrollIntoView({ block: "start" });
    node?.querySelector("h3")?.focus({ preventScroll: true });
  }
}

// What somebody has unfolded stays so in what takes its place, and the keyboard stays on a fold or the head. Folds inside of folds are
// made when those are opened.
function replace(from, to) {
  const [before, after] = [from, to].map((node) => [...node.querySelectorAll("details:not(details details)")]);
  after.forEach((one, n) => { if (before[n]) one.open = before[n].open; });
  const places = (node, folds) => [node.querySelector("h3"), ...folds.map((one) => one.firstChild)];
  const at = places(from, before).indexOf(document.activeElement);
  from.replaceWith(to);
  places(to, after)[at]?.focus({ preventScroll: true });
}

// Tool calls by the id that the client sees.
function callNames(path) {
  const names = new Map();
  for (const turn of path) for (const call of turn.reply.tool_calls ?? []) names.set(call.id, call.function?.name ?? "");
  return names;
}

function section(turn, before, names, recording, live) {
  return h("section.turn", { id: `turn-${turn.turn_id}`, class: turn.superseded_by ? "gone" : null },
    turnHead(turn, recording),
    toolList(turn, before),
    turn.messages.map((message) => said(message, names)),
    reply(turn, live),
    turnFoot(turn, live));
}

function turnHead(turn, recording) {
  const parent = turn.parent_id && recording.get(turn.parent_id);
  return h("header.turn-head",
    h("h3", { tabindex: -1 }, h("span.number", `#${turn.index}`), forkChip(turn.fork_reason)),
    turn.task_step ? h("span.chip", { title: "step of its task" }, plain(turn.task_step)) : null,
    parent && parent.index !== turn.index - 1 ? h("span.dim.small", `goes on from #${parent.index}`) : null,
    turn.retry_of ? h("span.chip", `retry of #${recording.get(turn.retry_of)?.index ?? "?"}`) : null,
    turn.superseded_by ? h("span.chip.warn", `superseded by #${recording.get(turn.superseded_by)?.index ?? "?"}`) : null,
    turn.attempt ? h("span.chip.warn", { title: "workers were lost under it" }, `attempt ${turn.attempt + 1}`) : null,
    turn.choice ? h("span.chip", `choice ${turn.choice}`) : null,
    Number.isInteger(turn.replayed) ? h("span.chip", { title: "nothing was sampled: the answer is the recorded one" }, `told again, ${count(turn.replayed)} tokens`) : null,
    h("span.space"),
    h("span.dim.small.mono", turn.turn_id));
}

function toolList(turn, before) {
  if (!turn.tools.length || (before && sameTools(before, turn))) return null;
  const names = turn.tools.map((tool) => tool.function?.name ?? tool.name ?? "?");
  return fold(h("span", h("b", many(names.length, "tool")), " ", h("span.dim", oneLine(names.join(", "), 140))),
    () => h("div.tools", turn.tools.map((tool) => fold(h("code", plain(tool.function?.name ?? tool.name ?? "?")), () => json(tool)))), { kind: "fold.quiet" });
}

function said(message, names) {
  const role = ROLES[message.role] ?? plain(message.role);
  const text = contentText(message.content);
  if (message.role === "tool") {
    const name = names.get(message.tool_call_id) || message.name || "tool";
    const long = text.length > 700 || text.split("\n", 12).length > 10;
    const summary = h("span", h("span.role", "Result "), h("code", plain(name)), " ", h("span.dim", long ? oneLine(text, 90) : ""), h("span.size", sized(text)));
    return h("article.message.tool", fold(summary, () => body(message.content, "code"), { open: !long }));
  }
  if (message.role === "system" || message.role === "developer") {
    const summary = h("span", h("span.role", `${role} `), h("span.dim", oneLine(text, 110)), h("span.size", sized(text)));
    return h("article.message.system", fold(summary, () => body(message.content)));
  }
  return h(`article.message.${message.role === "assistant" ? "echo" : "user"}`, h("div.role", role), thinking(message), body(message.content), calls(message));
}

const sized = (text) => (text.length > 200 ? ` ${brief(text.length)} characters` : "");

function body(content, kind = "text") {
  if (content === null || content === undefined || content === "") return null;
  if (typeof content === "string") return longText(content, { kind });
  return h("div.parts", content.map((part) => (typeof part.text === "string" ? longText(part.text, { kind })
    : fold(h("span.dim", plain(part.type ?? "part")), () => json(part)))));
}

const thought = (message) => message.reasoning_content;

function thinking(message) {
  const text = thought(message);
  if (!text) return null;
  return fold(h("span", h("span.role", "Thinking "), h("span.dim", oneLine(text, 90)), h("span.size", sized(text))),
    () => longText(String(text)), { kind: "fold.thinking" });
}

function calls(message) {
  return (message.tool_calls ?? []).map((call) => {
    const raw = call.function?.arguments ?? "";
    return fold(h("span", h("span.role", "Call "), h("code", plain(call.function?.name ?? "?")), " ", h("span.dim.mono", oneLine(raw, 100))),
      () => callArguments(raw), { kind: "fold.call", open: raw.length < 400 && raw.includes("\\n") });
  });
}

// Whether these values say all that this JSON does: no name is given twice, and each number has the digits that it has there.
function sayAll(values, raw) {
  const withoutTexts = (json) => json.replace(/\\./g, "").replace(/"[^"]*"/g, "").replace(/\s+/g, "");
  return withoutTexts(JSON.stringify(values)) === withoutTexts(raw);
}

// Arguments one by one, so that a script in one of them reads as the lines it has.
function callArguments(raw) {
  let values = null;
  try {
    values = JSON.parse(raw);
  } catch {
    return longText(raw, { kind: "code" });
  }
  if (typeof values !== "object" || values === null || Array.isArray(values) || !sayAll(values, raw)) return longText(raw, { kind: "code" });
  return h("dl.arguments", Object.entries(values).map(([name, value]) => [h("dt", plain(name)),
    h("dd", longText(typeof value === "string" ? value : JSON.stringify(value, null, 2), { kind: "code" }))]));
}

function reply(turn, live) {
  const { reply: message } = turn;
  const empty = !contentText(message.content) && !(message.tool_calls ?? []).length && !thought(message);
  return h("article.message.assistant",
    h("div.role", "Assistant", live ? h("span.live", "live") : null),
    thinking(message), body(message.content), calls(message),
    empty ? h("p.dim", turn.error ? "" : "Nothing that is shown.") : null,
    turn.error ? h("p.bad", { role: "note" }, plain(turn.error)) : null,
    turn.unreadable ? h("p.bad", `Nobody can train on this turn: ${plain(turn.unreadable)}`) : null);
}

function turnFoot(turn, live) {
  const tokens = sampled(turn);
  const mean = meanLogprob(turn);
  const versions = [...new Set(turn.versions.map((span) => span.version))];
  const workers = turn.workers.length ? [...new Set(turn.workers.map((span) => span.worker_id))] : [turn.worker_id];
  return h("footer.turn-foot", timingBar(turn),
    h("span", h("b", count(turn.new_prompt_ids.length)), " in"), h("span", h("b", count(tokens)), " out"),
    turn.cached_tokens ? h("span", `${brief(turn.cached_tokens)} cached`) : null,
    turn.reasoning_tokens ? h("span", `${brief(turn.reasoning_tokens)} thinking`) : null,
    mean === null ? null : h("span", { title: "mean log-probability" }, `logprob ${mean.toFixed(3)}`),
    h("span", { class: live || ["stop", "tool_calls"].includes(turn.finish_reason) ? null : "warn" }, plain(turn.finish_reason)),
    turn.partial && !live ? h("span.warn", "partial") : null,
    turn.constrained.length ? h("span.warn", `${turn.constrained.reduce((sum, [a, b]) => sum + b - a, 0)} constrained`) : null,
    turn.mixed_kv ? h("span.warn", "mixed KV") : null,
    undelivered(turn) ? h("span.warn", `${count(turn.delivered)} of ${count(turn.completion_ids.length)} delivered`) : null,
    h("span.dim", plain(versions.join(", "))), h("span.dim", plain(workers.filter(Boolean).join(" → "))),
    h("span.dim", plain(turn.dialect)));
}

// How long it waited, until its first token, until its last.
export function timingBar(turn) {
  const { queued, started, first_token: first, last_token: last } = turn.timings;
  const end = last ?? first ?? started ?? queued;
  const total = Math.max(end - queued, 1e-6);
  const part = (from, to, kind, words) => (from === null || to === null || to <= from ? null
    : h(`span.${kind}`, { style: { width: `${(100 * (to - from)) / total}%` }, title: `${words}: ${seconds(to - from)}` }));
  const words = `queued ${seconds((started ?? end) - queued)}, first token after ${seconds((first ?? end) - queued)}, last after ${seconds(end - queued)}`;
  return h("span.timing", { title: words },
    h("span.timing-bar", { "aria-hidden": "true" }, part(queued, started ?? end, "wait", "queued"), part(started, first ?? end, "prefill", "to the first token"), part(first, end, "decode", "to the last token")),
    h("span.mono", seconds(end - queued)), h("span.unseen", words));
}
