// What is read of the proxy. All paths are relative to the page, so that it works under any prefix.

import { watched } from "./reach.js";

export const ROOT = new URL("../", document.baseURI);

export class Refused extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }

  // It was there, and is not on record any more. By the proxy's own word: what stands before it has its 404 too.
  get gone() {
    return ["not_found", "session_closed"].includes(this.code);
  }
}

let onUnauthorized = () => {};
export const whenLoggedOut = (does) => { onUnauthorized = does; };

export function address(path, query = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

export async function get(path, query = {}, signal = undefined) {
  const answer = await fetch(address(path, query), { headers: { accept: "application/json" }, signal, credentials: "same-origin" });
  return told(answer);
}

export async function post(path, body) {
  const answer = await fetch(address(path), {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), credentials: "same-origin",
  });
  return told(answer);
}

async function told(answer) {
  if (answer.status === 204) return null;
  let body = null;
  try {
    body = read(await answer.text());
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error; // the page was left, or the connection broke
    throw new Refused(answer.status, `the proxy answered ${answer.status}, without JSON`);
  }
  if (!answer.ok) {
    const words = body?.error?.message ?? `the proxy answered ${answer.status}`;
    if (answer.status === 401) onUnauthorized();
    throw new Refused(answer.status, words, body?.error?.code);
  }
  return body;
}

// An integer whose digits no float keeps (a seed, an id in a task) is read as a BigInt, which JSON.stringify writes with these digits.
// Old browsers don't tell the digits. Reading so takes ten times as long, so only a text that has such a long number is read so.
const LONG_NUMBER = /[-:,[\s]\d{16}/;

function read(text) {
  return JSON.rawJSON && LONG_NUMBER.test(text) ? JSON.parse(text, exact) : JSON.parse(text);
}

function exact(_, value, { source }) {
  const large = typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER;
  return large && /^-?\d+$/.test(source) && String(value) !== source ? BigInt(source) : value;
}

if (JSON.rawJSON) BigInt.prototype.toJSON = function toJSON() { return JSON.rawJSON(String(this)); };

export const trialPath = (trial, rest = "") => `sessions/${encodeURIComponent(trial)}${rest}`;

// All turns from `start` on, a page at a time: `each` gets every page as it comes.
export async function turnsFrom(trial, start, each, signal) {
  let next = start;
  while (next !== null) {
    const page = await get(trialPath(trial, "/turns"), { start: next, limit: 100 }, signal);
    if (page.items.length) each(page.items);
    next = page.next_start;
  }
}

// One turn, as it is on record now; none where it is not on record any more.
export async function turnAt(trial, index, signal) {
  return (await get(trialPath(trial, "/turns"), { start: index, limit: 1 }, signal)).items;
}

// Looks now, and again every so often while the page can be seen, until it is left. Fails only if the first look does; of
// later ones that fail `watched` tells.
export async function lookAgain(look, everyMs, signal) {
  await look();
  const again = async () => {
    if (signal.aborted) return;
    try { if (!document.hidden) await watched(look); } catch { /* the next look may succeed */ }
    if (!signal.aborted) setTimeout(again, everyMs);
  };
  setTimeout(again, everyMs);
}
