// Numbers, times and untrusted text, as they are shown.

import { h } from "./dom.js";

const whole = new Intl.NumberFormat("en");

export const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));

export function brief(n) {
  if (n === null || n === undefined) return "–";
  if (n < 10000) return whole.format(n);
  if (n < 1e6) return `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k`;
  return `${(n / 1e6).toFixed(n < 1e8 ? 1 : 0)}M`;
}

export const many = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

export function reward(value) {
  if (value === null || value === undefined) return "–";
  return String(Number(value.toFixed(4)));
}

export function seconds(s) {
  if (s === null || s === undefined || Number.isNaN(s)) return "–";
  if (s < 0.001) return `${Math.max(0, s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 59.95) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const whole = Math.round(s); // first, so that nothing is 60 s or 60 min
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(s / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(unix) {
  const s = Date.now() / 1000 - unix;
  if (s < 5) return "now";
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  if (s < 86400 * 14) return `${Math.floor(s / 86400)} d ago`;
  return new Date(unix * 1000).toISOString().slice(0, 10);
}

export const moment = (unix) => new Date(unix * 1000).toISOString().replace("T", " ").replace(/\.\d+Z/, " UTC");

export const time = (unix) =>
  unix === null || unix === undefined ? "–" : h("time", { datetime: new Date(unix * 1000).toISOString(), title: moment(unix) }, ago(unix));

// "2 min ago" grows old while a page stays.
export function renewTimes() {
  for (const node of document.querySelectorAll("time[datetime]")) {
    const words = ago(Date.parse(node.dateTime) / 1000);
    if (node.textContent !== words) node.textContent = words;
  }
}

// Characters that change how others are shown, or that nobody sees: bidi marks, controls (ANSI's among them), zero widths, tags,
// variation selectors. Some write hidden text with them. What holds an emoji together stays as it is.
const IN_EMOJI = String.raw`\p{Extended_Pictographic}[\ufe0e\ufe0f]|[0-9#*]\ufe0f(?=\u20e3)|\p{Extended_Pictographic}[\u{1f3fb}-\u{1f3ff}]?\ufe0f?\u200d(?=\p{Extended_Pictographic})`;
const UNSEEN = new RegExp(String.raw`(?![\t\n\r])[\p{Cc}\p{Default_Ignorable_Code_Point}\u2028\u2029\ufff9-\ufffb\u{13430}-\u{1343f}](?<!${IN_EMOJI})`, "u");
const UNSEEN_ALL = new RegExp(UNSEEN.source, "gu");

export function unseen(char) {
  return `U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

// Untrusted text as nodes: plain text, and a visible sign for each character that would not be seen or would turn others around.
export function nodes(text) {
  if (!UNSEEN.test(text)) return [document.createTextNode(text)];
  const found = [];
  let at = 0;
  for (const match of text.matchAll(UNSEEN_ALL)) {
    if (match.index > at) found.push(document.createTextNode(text.slice(at, match.index)));
    found.push(h("span.ctl", unseen(match[0])));
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push(document.createTextNode(text.slice(at)));
  return found;
}

// The same as one string, for places that take no nodes (titles, names of controls).
export const plain = (text) => String(text).replace(UNSEEN_ALL, (char) => unseen(char));

export function oneLine(text, most = 120) {
  const line = plain(String(text).slice(0, most * 4).replace(/\s+/gu, " ").trim());
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}
