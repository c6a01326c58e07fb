// What is known of each token: colours for the strips, words for the one that is pointed at.

import { count } from "./format.js";

export const MODES = {
  logprob: { words: "by log-probability" },
  version: { words: "by policy version" },
  mask: { words: "by mask: trained or not" },
  reason: { words: "by the ledger's reason" },
};

const PROBABILITIES = [0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.02];
const REASONS = ["trained", "constrained", "superseded", "unreadable", "unscored", "aborted", "synthetic", "text_only", "open"];

// Why no lease brings any of a session's tokens to a trainer; null: one does, or may.
export function sessionReason(session) {
  if (session.status === "open") return "open";
  if (session.status === "aborted") return "aborted";
  for (const mark of ["text_only", "synthetic"]) if (session.marks.includes(mark)) return mark;
  return session.reward === null ? "unscored" : null;
}

export class TokenFacts {
  constructor(path, session, mode) {
    this.path = path;
    this.mode = mode;
    this.session = sessionReason(session);
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
    if (turn.superseded_by) return "superseded";
    return turn.constrained.some(([start, end]) => start <= at && at < end) ? "constrained" : null;
  }

  reason(turn, at) {
    return this.session ?? this.masked(turn, at) ?? "trained";
  }

  kind(turn, at) {
    switch (this.mode) {
      case "version": return `v${this.versions.indexOf(this.version(turn, at)) % 8}`;
      case "mask": return this.masked(turn, at) === null ? "m1" : "m0";
      case "reason": return `r${REASONS.indexOf(this.reason(turn, at))}`;
      default: return probabilityKind(turn.sampling_logprobs[at]);
    }
  }

  legend() {
    const context = ["context", "prompt"];
    switch (this.mode) {
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
    const text = texts.get(ids[at]);
    const found = [["turn", `#${turn.index}`], [part === "done" ? "sampled" : "prompt", `${count(at)} of ${count(ids.length)}`], ["id", String(ids[at])]];
    if (text !== undefined) found.push(["text", JSON.stringify(text)]);
    if (part !== "done") return found;
    const logprob = turn.sampling_logprobs[at];
    if (logprob !== null && logprob !== undefined) found.push(["logprob", logprob.toFixed(4)], ["probability", `${(100 * Math.exp(logprob)).toFixed(2)} %`]);
    found.push(["version", this.version(turn, at) || "–"]);
    const worker = turn.workers.find((span) => span.start <= at && at < span.end)?.worker_id ?? turn.worker_id;
    if (worker) found.push(["worker", worker]);
    const why = this.reason(turn, at);
    found.push(["ledger", why === "trained" ? "for training" : why.replaceAll("_", " "), why === "trained" ? "" : "warn"]);
    return found;
  }
}

function reasonsOf(facts, turn) {
  const edges = [0, ...turn.constrained.flat()].filter((at) => at < turn.completion_ids.length);
  return edges.map((at) => facts.reason(turn, at));
}

export function probabilityKind(logprob) {
  if (logprob === null || logprob === undefined) return "unknown";
  const p = Math.exp(logprob);
  const at = PROBABILITIES.findIndex((bound) => p >= bound);
  return `p${at < 0 ? PROBABILITIES.length : at}`;
}
