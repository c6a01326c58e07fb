// When each turn of the session waited, was read and was said: a bar per turn over the session's time.

import { h, update } from "./dom.js";
import { brief, seconds } from "./format.js";
import { forkChip } from "./outline.js";
import { lastMoment, sampled } from "./record.js";

const TICKS = 6;

export class Timeline {
  constructor(recording, choose) {
    this.recording = recording;
    this.node = h("div.timeline", { onclick: (event) => {
      const turn = event.target.closest("button")?.dataset.turn;
      if (turn) choose(turn);
    } });
    this.grow();
  }

  // Every bar is another one when the session is longer. Rows stay, and a row that somebody is on.
  grow() {
    const { recording } = this;
    const began = recording.began;
    const whole = Math.max(recording.ended - began, 1e-3);
    const share = (from, to) => ({ left: `${(100 * (from - began)) / whole}%`, width: `max(2px, ${(100 * (to - from)) / whole}%)` });
    const bar = (kind, from, to) => (from === null || to === null || to < from ? null : h(`span.${kind}`, { style: share(from, to) }));
    const row = ({ turn, depth }) => {
      const { queued, started, first_token: first } = turn.timings;
      const end = lastMoment(turn);
      const words = `Turn ${turn.index}: queued ${seconds((started ?? end) - queued)}, first token after ${seconds((first ?? end) - queued)}, done after ${seconds(end - queued)}, ${sampled(turn)} tokens`;
      return h("li", h("button.gantt-row", { dataset: { turn: turn.turn_id }, title: words },
        h("span.number", { style: { "--depth": Math.min(depth, 8) } }, `#${turn.index}`, forkChip(turn.fork_reason)),
        h("span.lane", bar("wait", queued, started ?? end), bar("prefill", started, first ?? end), bar("decode", first, end)),
        h("span.mono.dim", seconds(end - queued)), h("span.mono.dim", brief(sampled(turn)))));
    };
    const ticks = Array.from({ length: TICKS + 1 }, (_, n) => h("span", { style: { left: `${(100 * n) / TICKS}%` } }, n ? seconds((whole * n) / TICKS) : "0"));
    const focused = this.node.contains(document.activeElement) ? document.activeElement.dataset.turn : null;
    update(this.node,
      h("div.legend", key("wait", "queued"), key("prefill", "to the first token"), key("decode", "to the last token"),
        h("span.dim", `${seconds(whole)} in all`)),
      h("div.axis", { "aria-hidden": "true" }, h("span"), h("span.lane", ticks)),
      h("ol.gantt", recording.rows().map(row)));
    if (focused) this.node.querySelector(`[data-turn="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }
}

const key = (kind, words) => h("span.key", h(`i.${kind}`, { "aria-hidden": "true" }), words);
