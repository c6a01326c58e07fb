// What is being said right now: the end of each answer under way, asked for again and again while somebody sees the page.

import { get, trialPath } from "./api.js";
import { h } from "./dom.js";
import { count, nodes, plain } from "./format.js";

const LOOK_MS = 300;

export class UnderWay {
  // ended: is called with the ids of answers that are over, and waited for, before these are taken away: their turns are on record then.
  // changed: is called with the ids of the turns whose answers are under way, where these are others than before.
  constructor(trial, signal, ended, changed) {
    this.trial = trial;
    this.signal = signal;
    this.ended = ended;
    this.changed = changed;
    this.parts = new Map();
    this.now = new Set();
    this.node = h("div.under-way");
  }

  // Until `open` says no. The next look comes LOOK_MS after the last was answered, so that a slow proxy is asked less.
  follow(open) {
    const look = async () => {
      if (this.signal.aborted || this.stopped) return;
      try {
        if (!document.hidden) await this.look();
      } catch (error) {
        if (error.name === "AbortError") return;
      }
      if (open() || this.parts.size) setTimeout(look, LOOK_MS);
    };
    look();
  }

  // Nothing is said any more.
  stop() {
    this.stopped = true;
    this.parts.clear();
    this.node.replaceChildren();
    this.changed(new Set());
  }

  async look() {
    const { items, older } = await get(`ui/${trialPath(this.trial, "/live")}`, {}, this.signal);
    const now = new Set([...older, ...items.map((item) => item.turn_id)]);
    const over = [...this.now].filter((id) => !now.has(id));
    if (over.length) await this.ended(over);
    if (this.stopped) return;
    const bottom = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
    const shown = new Set(items.map((item) => item.turn_id));
    for (const [id, part] of this.parts) {
      if (shown.has(id)) continue;
      part.node.remove();
      this.parts.delete(id);
    }
    const others = over.length || now.size > this.now.size;
    this.now = now;
    for (const item of items) this.show(item);
    if (others) this.changed(now);
    if (bottom && items.length) scrollTo({ top: document.documentElement.scrollHeight });
  }

  show(item) {
    let part = this.parts.get(item.turn_id);
    if (!part) {
      part = made(item);
      this.parts.set(item.turn_id, part);
      this.node.append(part.node);
    }
    part.tokens.textContent = item.tokens ? `${count(item.tokens)} tokens so far` : "waits for its first token";
    const [call] = item.calls;
    fill(part.thinking, item.reasoning, item.cut);
    fill(part.content, item.content, item.cut);
    fill(part.call, call?.arguments ?? "", item.cut);
    part.call.hidden = !call;
    part.call.firstChild.replaceChildren("Call ", h("code", plain(call?.name ?? "")));
  }
}

function made(item) {
  const text = (role, kind) => h("div", { hidden: true }, h("div.role", role), h(`div.said.${kind}`, { dir: "auto" }));
  const tokens = h("span.dim.small");
  const thinking = text("Thinking", "text");
  const content = text("Assistant", "text");
  const call = text("Call", "code");
  const node = h("section.turn", { dataset: { live: item.turn_id } },
    h("header.turn-head", h("h3", "Being said"), h("span.live", "live"), tokens, h("span.space"), h("span.dim.small.mono", item.turn_id)),
    h("article.message.assistant", thinking, content, call));
  return { node, tokens, thinking, content, call };
}

// Only what has changed is drawn again.
function fill(part, text, cut) {
  part.hidden = !text;
  if (part.text === text) return;
  part.text = text;
  part.lastChild.replaceChildren(...(cut ? [h("span.dim", "… ")] : []), ...nodes(text));
}
