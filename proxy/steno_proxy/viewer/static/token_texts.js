// What tokens stand for: texts of a whole tokenizer, read once, and only where tokens of it are shown.

import { get } from "./api.js";
import { unseen } from "./format.js";

const MOST_CHARS = 64;
const known = new Map();

// The texts of these tokenizers, by key; of those that nobody has said, nothing: ids are shown then.
export async function textsOf(keys) {
  const asked = new Set(keys);
  if ([...asked].some((key) => !known.has(key))) {
    const { items } = await get("workers/tokenizers");
    for (const key of items) if (asked.has(key) && !known.has(key)) known.set(key, read(key).catch(() => forget(key)));
  }
  const found = await Promise.all([...asked].map(async (key) => [key, await known.get(key)]));
  return new Map(found.filter(([, texts]) => texts));
}

async function read(key) {
  const { texts, special } = await get(`workers/tokenizers/${encodeURIComponent(key)}`);
  return { texts, special: new Set(special) };
}

// One that could not be read now is asked for again.
function forget(key) {
  known.delete(key);
  return null;
}

// A token's text; null where none is known.
export function tokenText(texts, id) {
  return texts?.texts[id] || null;
}

// As it is shown in a strip: white space is seen, and nothing turns others around. A line's end also ends the line.
export function shownText(text) {
  const found = [];
  for (const char of text.slice(0, MOST_CHARS)) {
    if (char === "\n") found.push("↵\n");
    else if (char === "\t") found.push("⇥\t");
    else found.push(visible(char));
  }
  return found.join("") + (text.length > MOST_CHARS ? "…" : "");
}

// In quotes, for the line below the strips.
export function quoted(text) {
  const whole = JSON.stringify(text.slice(0, 4 * MOST_CHARS)) + (text.length > 4 * MOST_CHARS ? "…" : "");
  return [...whole].map(visible).join("");
}

const visible = (char) => (/[\p{C}\p{Default_Ignorable_Code_Point}\p{Zl}\p{Zp}]/u.test(char) ? unseen(char) : char);
