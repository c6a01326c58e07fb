// The session's tree: a line per turn, branches indented, with what made each of them a branch.

import { h, put } from "./dom.js";
import { brief, oneLine, seconds } from "./format.js";
import { contentText, lastMoment, sampled } from "./record.js";

export const FORKS = {
  sibling: "asked again what a recorded turn was asked",
  diverged: "other new messages after the same turn",
  new_conversation: "shares nothing with what is on record: a sub-agent, a title, a compaction",
  tools_changed: "another list of tools",
  options_changed: "other template options",
  system_changed: "another system message",
  history_rewritten: "a recorded message was replaced",
  history_dropped: "a recorded message is missing",
  assistant_rewritten: "a recorded reply came back as something else",
  render_differs: "the template renders the history differently",
  render_refused: "the template can't take the new messages alone",
  tokenizer_changed: "no worker has the tokenizer of its ids",
};
const HARMLESS = new Set(["sibling", "diverged", "new_conversation"]);

export const forkChip = (reason) =>
  reason && h(HARMLESS.has(reason) ? "span.chip.fork" : "span.chip.warn", { title: FORKS[reason] ?? "" }, reason.replaceAll("_", " "));

export function preview(turn) {
  const calls = (turn.reply.tool_calls ?? []).map((call) => `${call.function?.name ?? "?"}(${call.function?.arguments ?? ""})`);
  const text = contentText(turn.reply.content);
  return oneLine([text, ...calls].filter(Boolean).join("  ") || turn.error || "no text", 90);
}

export class Outline {
  constructor(recording, choose) {
    this.recording = recording;
    this.list = h("ol.turns");
    this.head = h("h2.outline-head");
    this.node = h("nav.outline", { "aria-label": "Turns" }, this.head, this.list);
    this.list.addEventListener("click", (event) => {
      const turn = event.target.closest("button")?.dataset.turn;
      if (turn) choose(turn);
    });
    this.list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
      if (!step) return;
      const all = [...this.list.querySelectorAll("button")];
      const next = all[all.indexOf(document.activeElement) + step];
      if (next) { event.preventDefault(); next.focus(); }
    });
  }

  draw(path, current) {
    const on = new Set(path);
    const rows = this.recording.rows();
    const longest = Math.max(0.001, ...rows.map(({ turn }) => lastMoment(turn) - turn.timings.queued));
    put(this.head, "Turns ", h("span.dim", String(rows.length)),
      this.recording.leaves.length > 1 ? h("span.dim", ` · ${this.recording.leaves.length} branches`) : null);
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.turn : null;
    put(this.list, rows.map((row) => this.line(row, on, current, longest)));
    if (focused) this.list.querySelector(`[data-turn="${CSS.escape(focused)}"]`)?.focus();
  }

  line({ turn, depth }, on, current, longest) {
    const took = lastMoment(turn) - turn.timings.queued;
    const live = this.recording.isLive(turn);
    const bad = turn.error || turn.unreadable || (turn.partial && !live);
    const state = [on.has(turn.turn_id) ? "on" : "off", bad ? "bad" : "", turn.superseded_by ? "gone" : ""].filter(Boolean).join(" ");
    return h("li", { style: { "--depth": Math.min(depth, 12) } },
      h("button.turn-line", { class: state, dataset: { turn: turn.turn_id }, "aria-current": turn.turn_id === current ? "true" : null },
        h("span.number", `${turn.index}`),
        h("span.what", turn.fork_reason && h("span.fork-row", forkChip(turn.fork_reason)), h("span.preview", preview(turn))),
        h("span.weight", live ? h("span.live", "live") : brief(sampled(turn)), h("span.spark", { "aria-hidden": "true" },
          h("span", { style: { width: `${Math.max(3, (100 * took) / longest)}%` } })), h("span.unseen", ` tokens, ${seconds(took)}`))));
  }
}
