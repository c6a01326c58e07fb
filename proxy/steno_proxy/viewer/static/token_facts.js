// What is known of each token: colours for the strips, words for the one that is pointed at.

import { count } from "./format.js";
import { quoted, tokenText } from "./token_texts.js";

export const MODES = {
  logprob: { words: "by log-probability" },
  version: { words: "by policy version" },
  mask: { words: "by mask: trained or not" },
  reason: { words: "by the ledger's reason" },
  difference: { words: "by trainer minus sampler" },
};

const DIFFERENCES = [-0.3, -0.1, -0.02, 0.02, 0.1, 0.3];
const PROBABILITIES = [0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.02];
const REASONS = ["trained", "constrained", "superseded", "unreadable", "unscored", "aborted", "synthetic", "text_only", "open", "ungrouped", "evaluation", "deleted"];
// Of a trial in a group whose purpose nobody has said: a file of turns does not have it.
export const UNKNOWN = "unknown";

// Why no lease brings any of a session's tokens to a trainer, in the order of `NotTrained`; null: one does, or may.
// purpose: of its group; null: not known.
export function sessionReason(session, purpose) {
  if (session.status === "open") return "open";
  if (session.group_id === null) return "ungrouped";
  if (purpose === null) return UNKNOWN;
  if (purpose === "eval") return "evaluation";
  if (session.status === "deleted" || session.status === "aborted") return session.status;
  for (const mark of ["text_only", "synthetic"]) if (session.marks.includes(mark)) return mark;
  return session.reward === null && !session.awaits_reward ? "unscored" : null;
}

export class TokenFacts {
  constructor(path, session, purpose, mode) {
    this.path = path;
    this.mode = mode;
    this.session = sessionReason(session, purpose);
    this.synthetic = session.marks.includes("synthetic");
    this.byTurn = new Map(path.map((turn) => [turn.turn_id, turn]));
    this.versions = [...new Set(path.flatMap((turn) => turn.versions.map((span) => span.version)))];
  }

  // Ids of the whole prompt before what is new in this turn.
  before(turn) {
    const at = this.path.indexOf(turn);
    return this.path.slice(0, at).flatMap((one) => [...one.new_prompt_ids, ...one.completion_ids]);
  }

  version(turn, at) {
    return turn.versions.find((span) => span.start <= at && at < span.end)?.version ?? "";
  }

  // Of the mask alone: what holds whatever becomes of the session.
  masked(turn, at) {
    if (turn.unreadable) return "unreadable";
    if (this.synthetic) return "synthetic";
    if (turn.superseded_by) return "superseded";
    return turn.constrained.some(([start, end]) => start <= at && at < end) ? "constrained" : null;
  }

  // The trainer's log-probability minus the sampler's, in the step that trained this turn; NaN: not in one.
  difference(turn, at) {
    const noted = turn.annotation;
    if (!noted) return NaN;
    if (!numbers.has(noted)) numbers.set(noted, halves(noted.differences));
    return numbers.get(noted)[at] ?? NaN;
  }

  reason(turn, at) {
    return this.session ?? this.masked(turn, at) ?? "trained";
  }

  kind(turn, at) {
    switch (this.mode) {
      case "version": return `v${this.versions.indexOf(this.version(turn, at)) % 8}`;
      case "mask": return this.masked(turn, at) === null ? "m1" : "m0";
      case "difference": return differenceKind(this.difference(turn, at));
      case "reason": return `r${REASONS.indexOf(this.reason(turn, at))}`;
      default: return probabilityKind(turn.sampling_logprobs[at]);
    }
  }

  legend() {
    const context = ["context", "prompt"];
    switch (this.mode) {
      case "difference": return [["d0", `≤ ${DIFFERENCES[0]}`], ...DIFFERENCES.slice(1).map((bound, n) => [`d${n + 1}`, `≤ ${bound}`]), ["d6", `> ${DIFFERENCES.at(-1)}`], ["unknown", "not trained"], context];
      case "version": return [...this.versions.map((name, n) => [`v${n % 8}`, name]), context];
      case "mask": return [["m1", "mask 1: may be trained"], ["m0", "mask 0"], context];
      case "reason": {
        const seen = new Set(this.path.flatMap((turn) => (turn.completion_ids.length ? reasonsOf(this, turn) : [])));
        return [...REASONS.flatMap((name, n) => (seen.has(name) ? [[`r${n}`, name === "trained" ? "for training" : name.replaceAll("_", " ")]] : [])), context];
      }
      default: return [...PROBABILITIES.map((bound, n) => [`p${n}`, `≥ ${bound}`]), ["p7", `< ${PROBABILITIES.at(-1)}`], context];
    }
  }

  about(turn, part, at, ids, texts) {
    const found = [["turn", `#${turn.index}`], [part === "done" ? "sampled" : "prompt", `${count(at)} of ${count(ids.length)}`], ["id", String(ids[at])]];
    const text = tokenText(texts, ids[at]);
    if (text !== null) found.push([texts.special.has(ids[at]) ? "special" : "text", quoted(text)]);
    if (part !== "done") return found;
    const logprob = turn.sampling_logprobs[at];
    if (logprob !== null && logprob !== undefined) found.push(["logprob", logprob.toFixed(4)], ["probability", `${(100 * Math.exp(logprob)).toFixed(2)} %`]);
    const difference = this.difference(turn, at);
    if (!Number.isNaN(difference)) found.push(["trainer minus sampler", difference.toFixed(4)], ["step", String(turn.annotation.step)]);
    found.push(["version", this.version(turn, at) || "–"]);
    const worker = turn.workers.find((span) => span.start <= at && at < span.end)?.worker_id ?? turn.worker_id;
    if (worker) found.push(["worker", worker]);
    if (this.session === UNKNOWN) return found;
    const why = this.reason(turn, at);
    found.push(["ledger", why === "trained" ? "for training" : why.replaceAll("_", " "), why === "trained" ? "" : "warn"]);
    return found;
  }
}

function reasonsOf(facts, turn) {
  const edges = [0, ...turn.constrained.flat()].filter((at) => at < turn.completion_ids.length);
  return edges.map((at) => facts.reason(turn, at));
}

function differenceKind(difference) {
  if (Number.isNaN(difference)) return "unknown";
  const at = DIFFERENCES.findIndex((bound) => difference <= bound);
  return `d${at < 0 ? DIFFERENCES.length : at}`;
}

// Of each annotation, read once. Beside it, since it is shown as it is on record.
const numbers = new WeakMap();

// float16, little-endian, in base64.
function halves(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 2 }, (_, n) => {
    const bits = view.getUint16(2 * n, true);
    const sign = bits & 0x8000 ? -1 : 1;
    const power = (bits >> 10) & 31;
    const rest = bits & 1023;
    if (power === 31) return rest ? NaN : sign * Infinity;
    return sign * (power ? (1 + rest / 1024) * 2 ** (power - 15) : rest * 2 ** -24);
  });
}

export function probabilityKind(logprob) {
  if (logprob === null || logprob === undefined) return "unknown";
  const p = Math.exp(logprob);
  const at = PROBABILITIES.findIndex((bound) => p >= bound);
  return `p${at < 0 ? PROBABILITIES.length : at}`;
}
