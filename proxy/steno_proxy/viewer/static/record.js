// A session's turns as a tree: who goes on from whom, and the paths from its roots to its leaves.

export const OPEN = "open";

export class Recording {
  constructor() {
    this.turns = [];
    this.byId = new Map();
    this.children = new Map();
    this.underWay = new Set(); // ids of turns whose answers the proxy is sampling now
  }

  // Takes pages as they come; a turn that was open is replaced by what became of it. A page tells of the retries that were known
  // when it was read, so a turn that comes later tells what it takes the place of.
  take(turns) {
    for (const turn of turns) {
      const retried = this.byId.get(turn.retry_of);
      if (retried && !retried.superseded_by) this.replace({ ...retried, superseded_by: turn.turn_id });
      const known = this.byId.get(turn.turn_id);
      if (known && JSON.stringify(known) === JSON.stringify(turn)) continue;
      const before = this.byId.get(turn.parent_id);
      if (before && sameTools(before, turn)) turn.tools = before.tools; // each turn brings all of them: they are kept once
      this.replace(turn);
      if (!known) {
        const parent = turn.parent_id ?? "";
        if (!this.children.has(parent)) this.children.set(parent, []);
        this.children.get(parent).push(turn.turn_id);
      }
    }
  }

  replace(turn) {
    this.byId.set(turn.turn_id, turn);
    this.turns[turn.index] = turn;
  }

  get(turnId) {
    return this.byId.get(turnId);
  }

  // Open turns that may get their end, the newest first. One that was asked again, or that another goes on from, gets none: its
  // proxy is gone.
  get waiting() {
    const waits = (turn) => turn.finish_reason === OPEN && !turn.superseded_by && !this.children.has(turn.turn_id);
    return this.turns.filter(waits).reverse();
  }

  isLive(turn) {
    return turn.finish_reason === OPEN && this.underWay.has(turn.turn_id);
  }

  below(turnId) {
    return (this.children.get(turnId) ?? []).map((id) => this.byId.get(id)).sort((a, b) => a.index - b.index);
  }

  get roots() {
    return this.below("");
  }

  get leaves() {
    return this.turns.filter((turn) => !this.children.has(turn.turn_id));
  }

  // From the root to this turn.
  path(turnId) {
    const found = [];
    for (let turn = this.byId.get(turnId); turn; turn = this.byId.get(turn.parent_id)) found.push(turn);
    return found.reverse();
  }

  // The longest path's leaf: mostly the task itself, beside titles and sub-agents.
  get mainLeaf() {
    const depth = new Map();
    let best = null;
    for (const { turn } of this.rows()) {
      depth.set(turn.turn_id, (depth.get(turn.parent_id) ?? 0) + 1);
      if (!best || depth.get(turn.turn_id) >= depth.get(best.turn_id)) best = turn;
    }
    return best;
  }

  // The leaf below this turn that was recorded last.
  newestLeaf(turnId) {
    let newest = null;
    const waiting = turnId ? [this.byId.get(turnId)] : this.roots;
    while (waiting.length) {
      const turn = waiting.pop();
      const below = this.below(turn.turn_id);
      if (!below.length && (!newest || turn.index > newest.index)) newest = turn;
      waiting.push(...below);
    }
    return newest;
  }

  // Rows of the tree: only a branch indents, so that three hundred turns in a row stay one column.
  rows() {
    const found = [];
    const waiting = this.roots.map((turn) => [turn, 0]).reverse();
    while (waiting.length) {
      const [turn, depth] = waiting.pop();
      const below = this.below(turn.turn_id);
      found.push({ turn, depth, branches: below.length });
      for (const child of below.slice().reverse()) waiting.push([child, depth + (below.length > 1 ? 1 : 0)]);
    }
    return found;
  }

  get began() {
    return Math.min(...this.turns.map((turn) => turn.timings.queued));
  }

  get ended() {
    return Math.max(...this.turns.map((turn) => lastMoment(turn)));
  }
}

export const lastMoment = (turn) => turn.timings.last_token ?? turn.timings.first_token ?? turn.timings.started ?? turn.timings.queued;

export const sameTools = (a, b) => a.tools === b.tools || JSON.stringify(a.tools) === JSON.stringify(b.tools);

// Whether its client has not had all of it, as far as is known.
export const undelivered = (turn) => turn.delivered !== null && turn.delivered < turn.completion_ids.length;

export const sampled = (turn) => turn.completion_ids.length || turn.upstream_tokens || 0;

// Text of a message's content: a string, or parts.
export function contentText(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((part) => (typeof part.text === "string" ? part.text : `[${part.type ?? "part"}]`)).join("\n");
}

export function meanLogprob(turn) {
  const known = turn.sampling_logprobs.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}
