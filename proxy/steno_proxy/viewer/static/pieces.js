// Small parts that several views show.

import { h } from "./dom.js";
import { nodes, plain, reward } from "./format.js";

export function statusPill(session) {
  const words = session.status === "open" ? "open" : session.end_reason && session.end_reason !== session.status ? plain(session.end_reason) : session.status;
  return h(`span.pill.${session.status}`, { title: session.status }, h("i", { "aria-hidden": "true" }), words);
}

export const chips = (marks) => marks.map((mark) => h("span.chip.warn", plain(mark)));

// A reward between 0 and 1 as a bar; others have none.
export function rewardBar(value) {
  if (value === null || value === undefined || value < 0 || value > 1) return null;
  return h("span.bar", { "aria-hidden": "true" }, h("span", { style: { width: `${value * 100}%` } }));
}

// Of a session: a trial that has ended may be scored later, with its group.
export const rewardOf = (session) => (session.awaits_reward ? "awaited" : reward(session.reward));

export const fact = (name, ...value) => h("div.fact", h("dt", name), h("dd", value));

const SHOWN_CHARS = 4000;
const STEP_CHARS = 100000;

// Untrusted text of any length: the rest of a long one is made into nodes only when it is asked for, a piece at a time.
export function longText(text, { most = SHOWN_CHARS, kind = "text" } = {}) {
  const shown = h(`div.said.${kind}`, { dir: "auto" });
  let at = cut(text, most);
  shown.append(...nodes(text.slice(0, at)));
  if (at >= text.length) return shown;
  const rest = h("button.rest", { onclick: () => {
    const end = cut(text, at + STEP_CHARS);
    shown.append(...nodes(text.slice(at, end)));
    at = end;
    label();
  } });
  function label() {
    if (at >= text.length) rest.remove();
    else rest.textContent = `Show ${text.length - at > STEP_CHARS ? "more" : "the rest"} (${(text.length - at).toLocaleString("en")} of ${text.length.toLocaleString("en")} characters)`;
  }
  label();
  return h("div", shown, rest);
}

// Not inside of a surrogate pair.
function cut(text, at) {
  const code = text.charCodeAt(at);
  return Math.min(text.length, code >= 0xdc00 && code <= 0xdfff ? at + 1 : at);
}

// A fold whose inside is made when it is opened first.
export function fold(summary, make, { open = false, kind = "fold" } = {}) {
  const node = h(`details.${kind}`, h("summary", summary));
  const fill = () => {
    if (node.open && node.childElementCount === 1) node.append(make());
  };
  node.addEventListener("toggle", fill);
  if (open) {
    node.open = true;
    fill();
  }
  return node;
}

export function json(value) {
  return longText(JSON.stringify(value, null, 2) ?? "null", { kind: "code" });
}
