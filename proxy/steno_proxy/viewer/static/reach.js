// Whether a page that looks again and again still gets answers. Where it does not, a bar says how old the shown state is.

import { put } from "./dom.js";
import { plain } from "./format.js";

const MISSED = 2;
const LATE_MS = 15000;
let missed = 0;
let seenAt = new Date();

// Looks, and fails as the look does. One that takes very long is missed too: a network may be gone without a word.
export async function watched(look) {
  const late = setTimeout(() => tell("The proxy does not answer"), LATE_MS);
  try {
    await look();
    answered();
  } catch (error) {
    if (error.name !== "AbortError" && error.status !== 401) {
      missed += 1;
      if (missed >= MISSED) tell(error.status ? `The proxy answers: ${plain(error.message)}` : "The proxy is not reachable");
    }
    throw error;
  } finally {
    clearTimeout(late);
  }
}

// What is shown is what there is now.
export function answered() {
  missed = 0;
  seenAt = new Date();
  put(bar());
}

function tell(trouble) {
  const words = `${trouble}. Shown as of ${seenAt.toTimeString().slice(0, 8)}.`;
  if (bar().textContent !== words) put(bar(), words);
}

const bar = () => document.getElementById("away");
