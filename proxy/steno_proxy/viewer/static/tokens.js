// The tokens of one path: a strip per turn, coloured by what one asks about. Only what is near the window is in the page.

import { h, put, say } from "./dom.js";
import { brief, count, plain } from "./format.js";
import { forkChip, preview } from "./outline.js";
import { MODES, TokenFacts, UNKNOWN, sessionReason } from "./token_facts.js";
import { shownText, textsOf, tokenText } from "./token_texts.js";

const CHUNK = 256;
const NEAR_PX = 1200;
const PER_ROW = { ids: 19, texts: 32 };
const ROW_PX = 22;
const PROMPTS = [["new", "new prompt tokens"], ["whole", "whole prompts"], ["none", "no prompts"]];
const FORMS = [["texts", "texts"], ["ids", "ids"]];
let chosen = { mode: "logprob", prompts: "new", form: "texts" };

export class TokenView {
  constructor(path, session, purpose) {
    this.purpose = purpose;
    this.texts = new Map();
    this.strips = [];
    this.detail = h("div.token-detail", { role: "status" });
    this.legend = h("div.legend");
    this.list = h("div.strips");
    this.watcher = new IntersectionObserver((seen) => seen.forEach((one) => (one.isIntersecting ? fill(one.target) : empty(one.target))), { rootMargin: `${NEAR_PX}px 0px` });
    this.list.addEventListener("pointerover", (event) => this.point(event.target.closest("[data-at]")));
    this.list.addEventListener("keydown", (event) => this.step(event));
    this.list.addEventListener("focusin", (event) => { if (event.target.classList.contains("strip")) this.enter(event.target); });
    this.controls = h("div.token-controls");
    this.node = h("div.token-view", this.controls, this.legend, this.list, this.detail);
    this.grow(path, session);
  }

  close() {
    this.closed = true;
    this.watcher.disconnect();
  }

  grow(path, session) {
    this.path = path;
    this.session = session; // its end and its reward say what becomes of its tokens
    this.drawControls();
    this.draw();
    this.read();
  }

  // Ids are shown until their texts are there.
  async read() {
    const lacking = this.path.map((turn) => turn.tokenizer).filter((key) => key && !this.texts.get(key));
    if (!lacking.length) return;
    const found = await textsOf(lacking).catch(() => new Map());
    if (this.closed || !found.size) return;
    this.texts = new Map([...this.texts, ...found]);
    this.drawControls();
    this.draw();
  }

  textsFor(turn) {
    return this.texts.get(turn.tokenizer) ?? null;
  }

  // Anew only where there is another choice: whoever is in one of them stays there.
  drawControls() {
    const offered = [["Colour", "mode", this.modes, this.mode], ["Show", "prompts", PROMPTS, chosen.prompts]];
    if (this.path.some((turn) => this.textsFor(turn))) offered.push(["Tokens as", "form", FORMS, chosen.form]);
    const offer = JSON.stringify(offered.map(([label, , options]) => [label, options]));
    if (offer === this.offer) return;
    this.offer = offer;
    const focused = this.controls.contains(document.activeElement) ? document.activeElement.name : null;
    put(this.controls,
      offered.map(([label, name, options, value]) => h("label.field", h("span", label),
        h("select", { name, onchange: (event) => { chosen = { ...chosen, [name]: event.target.value }; this.draw(); } },
          options.map(([option, words]) => h("option", { value: option, selected: option === value }, words))))),
      h("span.dim.small", "Point at a token, or focus a strip and use the arrow keys."));
    if (focused) this.controls.querySelector(`[name=${focused}]`)?.focus();
  }

  // What can be told of this path's tokens.
  get modes() {
    const told = { difference: this.path.some((turn) => turn.annotation), reason: sessionReason(this.session, this.purpose) !== UNKNOWN };
    return Object.entries(MODES).filter(([name]) => told[name] ?? true).map(([name, { words }]) => [name, words]);
  }

  get mode() {
    return this.modes.some(([name]) => name === chosen.mode) ? chosen.mode : "logprob";
  }

  // Strips of turns that are as they were stay. Where others take the place of some, so do the token and the strip that one is on.
  draw() {
    this.facts = new TokenFacts(this.path, this.session, this.purpose, this.mode);
    put(this.legend, this.facts.legend().map(([kind, words]) => h("span.key", h(`i.tok.${kind}`, { "aria-hidden": "true" }), words)));
    const how = [this.mode, chosen.prompts, chosen.form, this.texts, this.facts.session, this.facts.synthetic];
    const same = how.every((one, n) => one === this.how?.[n]);
    this.how = how;
    let stay = 0;
    while (same && stay < this.path.length && this.strips[stay]?.turn === this.path[stay]) stay += 1;
    const on = this.at ? { turn: this.at.closest(".strip").dataset.turn, part: this.at.parentNode.about.part, at: this.at.dataset.at } : null;
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.turn : null;
    for (const { node } of this.strips.slice(stay)) {
      for (const chunk of node.querySelectorAll(".chunk")) this.watcher.unobserve(chunk);
      node.remove();
    }
    this.strips = [...this.strips.slice(0, stay), ...this.path.slice(stay).map((turn) => ({ turn, node: this.strip(turn) }))];
    this.list.append(...this.strips.slice(stay).map(({ node }) => node));
    if (!this.at?.isConnected) this.markAgain(on);
    if (focused && !this.list.contains(document.activeElement)) this.stripOf(focused)?.focus({ preventScroll: true });
  }

  stripOf(turnId) {
    return this.list.querySelector(`.strip[data-turn="${CSS.escape(turnId)}"]`);
  }

  // The token in the same place of the same turn, if that is still shown.
  markAgain(on) {
    this.at = null;
    const chunks = on ? [...(this.stripOf(on.turn)?.querySelectorAll(".chunk") ?? [])] : [];
    const chunk = chunks.find(({ about }) => about.part === on.part && about.from <= on.at && on.at < about.to);
    if (!chunk) return this.show(null);
    fill(chunk);
    return this.mark(chunk.querySelector(`[data-at="${on.at}"]`));
  }

  strip(turn) {
    const { facts } = this;
    const prompt = chosen.prompts === "none" ? [] : chosen.prompts === "whole" ? facts.before(turn) : [];
    const fresh = chosen.prompts === "none" ? [] : turn.new_prompt_ids;
    const node = h("div.strip", { tabindex: 0, role: "group", "aria-label": `Tokens of turn ${turn.index}`, dataset: { turn: turn.turn_id } });
    const texts = chosen.form === "texts" ? this.textsFor(turn) : null;
    const perRow = texts ? PER_ROW.texts : PER_ROW.ids;
    const runs = [["older", prompt], ["fresh", fresh], ["done", turn.completion_ids]];
    for (const [part, ids] of runs) {
      for (let from = 0; from < ids.length; from += CHUNK) {
        const chunk = h(`div.chunk.${part}`, { class: from + CHUNK < ids.length ? null : "last" });
        chunk.about = { view: this, turn, part, ids, texts, from, to: Math.min(from + CHUNK, ids.length) };
        chunk.style.setProperty("min-height", `${Math.ceil((chunk.about.to - from) / perRow) * ROW_PX}px`);
        node.append(chunk);
        this.watcher.observe(chunk);
      }
    }
    if (!turn.completion_ids.length) node.append(h("p.dim", turn.upstream_tokens ? `An upstream counted ${count(turn.upstream_tokens)} tokens and gave no ids.` : "Nothing was sampled."));
    return h("section.token-turn", { id: `tokens-${turn.turn_id}` },
      h("header", h("h3", h("span.number", `#${turn.index}`), forkChip(turn.fork_reason)), h("span.preview", preview(turn)), h("span.space"),
        h("span.dim.small", `${brief(prompt.length + fresh.length)} prompt · ${brief(turn.completion_ids.length)} sampled`)),
      node);
  }

  point(cell) {
    if (cell && cell !== this.at) this.mark(cell);
  }

  enter(strip) {
    if (this.at && strip.contains(this.at)) return;
    const first = strip.querySelector(".done [data-at], [data-at]");
    if (first) this.mark(first);
  }

  step(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, End: Infinity, Home: -Infinity };
    const by = steps[event.key];
    const strip = event.target.closest(".strip");
    if (by === undefined || !strip) return;
    event.preventDefault();
    const chunks = [...strip.querySelectorAll(".chunk")];
    const here = chunks.indexOf(this.at?.parentNode);
    for (const chunk of { End: chunks.slice(-1), Home: chunks.slice(0, 1) }[event.key] ?? [chunks[here - 1], chunks[here + 1]]) if (chunk) fill(chunk);
    const cells = [...strip.querySelectorAll("[data-at]")];
    const at = cells.indexOf(this.at);
    const next = cells[Math.max(0, Math.min(cells.length - 1, at + by))];
    if (!next) return;
    this.mark(next);
    next.scrollIntoView({ block: "nearest" });
    say(this.detail.textContent);
  }

  mark(cell) {
    this.at?.classList.remove("here");
    this.at = cell;
    cell.classList.add("here");
    const { turn, part, ids } = cell.parentNode.about;
    this.show(this.facts.about(turn, part, Number(cell.dataset.at), ids, this.textsFor(turn)));
  }

  show(facts) {
    this.detail.classList.toggle("idle", facts === null);
    if (facts === null) put(this.detail, h("span.dim", "No token chosen"));
    else put(this.detail, facts.map(([name, value, kind]) => h("span.one", h("span.dim", `${name} `), h("b.mono", { class: kind }, plain(value)))));
  }

  scrollTo(turnId) {
    document.getElementById(`tokens-${turnId}`)?.scrollIntoView({ block: "start" });
  }
}

function fill(chunk) {
  if (chunk.childElementCount || !chunk.about) return;
  const { view, turn, part, ids, texts, from, to } = chunk.about;
  const cells = document.createDocumentFragment();
  for (let at = from; at < to; at += 1) {
    const kind = part === "done" ? view.facts.kind(turn, at) : "context";
    const cell = document.createElement("span");
    const text = tokenText(texts, ids[at]);
    cell.className = text === null ? `tok id ${kind}` : texts.special.has(ids[at]) ? `tok special ${kind}` : `tok ${kind}`;
    cell.dataset.at = at;
    cell.textContent = text === null ? ids[at] : shownText(text);
    cells.append(cell);
  }
  chunk.append(cells);
  chunk.style.removeProperty("min-height");
}

function empty(chunk) {
  if (!chunk.childElementCount || chunk.contains(document.activeElement) || chunk.contains(chunk.about.view.at)) return;
  chunk.style.setProperty("min-height", `${chunk.offsetHeight}px`);
  chunk.replaceChildren();
}
