// All sessions, newest first: filters and a search in the address, a page at a time. What takes long says how far it came.

import { get } from "./api.js";
import { h, put, say } from "./dom.js";
import { brief, count, many, plain, seconds, time } from "./format.js";
import { chips, rewardBar, rewardOf, statusPill } from "./pieces.js";

const PAGE = 50;
const LISTED = ["status", "run_id", "group_id"];
const SOUGHT = ["end_reason", "agent", "mark", "min_reward", "max_reward", "text"];
const STATUSES = [["", "any status"], ["open", "open"], ["completed", "completed"], ["aborted", "aborted"]];

export async function sessionsView(main, _, query, signal, state) {
  const body = h("tbody");
  const more = h("button.more", { hidden: true }, "Show older ones");
  const found = h("span.dim.small", { role: "status" });
  put(main, h("div.page", h("div.headline", h("h1", "Sessions"), found), filters(query, state.live, () => tried(again)), table(body), more));
  const seeks = state.live && SOUGHT.some((name) => query.get(name));
  const asked = { limit: PAGE, ...(seeks ? {} : { order: "newest" }) };
  for (const name of seeks ? [...LISTED, ...SOUGHT] : LISTED) asked[name] = query.get(name);
  let cursor = null;
  let shown = 0;
  let searched = 0;
  let unreadable = 0;

  async function next() {
    more.disabled = true;
    let page;
    try {
      page = await get(seeks ? "ui/sessions" : "sessions", { ...asked, cursor }, signal);
    } finally {
      more.disabled = false; // after a failure too: the next click may succeed
    }
    body.append(...page.items.map(line));
    shown += page.items.length;
    searched += page.searched ?? 0;
    unreadable += page.unreadable?.length ?? 0;
    cursor = page.next_cursor;
    more.hidden = cursor === null;
    more.textContent = seeks ? "Search on" : "Show older ones";
    const far = seeks ? `, searched ${count(searched)} of ${count(Math.max(page.total, searched))}` : "";
    const lost = unreadable ? `, ${count(unreadable)} in the archive can't be read now` : "";
    found.textContent = `${many(shown, "session")}${!seeks && cursor ? ", the newest" : ""}${far}${lost}`;
    if (!shown && !unreadable && cursor === null) body.append(h("tr", h("td.none", { colspan: 9 }, "No session matches.")));
    say(found.textContent);
    if (seeks && !page.items.length && cursor !== null && !signal.aborted) await next();
  }
  async function again() {
    if (more.disabled) return; // it is read now
    put(body);
    cursor = null;
    shown = searched = unreadable = 0;
    await next();
  }
  const tried = (what) => what().catch((error) => {
    if (error.name === "AbortError" || error.status === 401) return;
    found.textContent = `${many(shown, "session")}; more could not be read: ${plain(error.message)}`;
    say(found.textContent);
  });
  more.addEventListener("click", () => tried(next));
  await next();
}

// again: reads the list anew, where the filters are as they were.
function filters(query, live, again) {
  const go = () => {
    const wanted = new URLSearchParams();
    for (const field of form.elements) if (field.name && field.value.trim()) wanted.set(field.name, field.value.trim());
    const where = `#/sessions${wanted.size ? `?${wanted}` : ""}`;
    if (where === location.hash) again();
    else location.hash = where;
  };
  const text = (name, label, width) =>
    h("label.field", h("span", label), h("input", { name, value: query.get(name) ?? "", size: width, spellcheck: "false" }));
  const reward = (name, label) => h("label.field", h("span", label), h("input", { name, value: query.get(name) ?? "", size: 5, type: "number", step: "any" }));
  const form = h("form.filters", { onsubmit: (event) => { event.preventDefault(); go(); }, role: "search", "aria-label": "Filters" },
    text("run_id", "Run", 14), text("group_id", "Group", 14),
    h("label.field", h("span", "Status"), h("select", { name: "status", onchange: go },
      STATUSES.map(([value, name]) => h("option", { value, selected: value === (query.get("status") ?? "") }, name)))),
    live ? [text("end_reason", "End reason", 10), text("agent", "Agent", 10), text("mark", "Mark", 8), reward("min_reward", "Reward from"), reward("max_reward", "to"),
      h("label.field", h("span", "Text ", h("kbd", "/")), h("input", { name: "text", type: "search", value: query.get("text") ?? "", size: 22, minlength: 2, "data-search": true, placeholder: "said by or to the policy" }))] : null,
    h("button", { type: "submit" }, "Filter"),
    [...query.keys()].length ? h("a.clear", { href: "#/sessions" }, "Clear") : null,
  );
  return form;
}

function table(body) {
  const heads = [["Trial"], ["Status"], ["Reward", "num"], ["Turns", "num"], ["Sampled", "num"], ["Prompt", "num"], ["Forks", "num"], ["Took", "num"], ["Made", "num"]];
  return h("div.scroll", { tabindex: 0, role: "region", "aria-label": "Sessions" }, h("table.rows", h("thead", h("tr", heads.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), body));
}

function line(session) {
  const { counts } = session;
  const where = [session.run_id, session.group_id].filter(Boolean).map(plain).join(" / ");
  const took = session.first_turn_at === null ? null : (session.ended_at ?? session.updated_at) - session.first_turn_at;
  return h("tr",
    h("td.trial", h("a", { href: `#/sessions/${encodeURIComponent(session.trial_id)}` }, session.trial_id),
      h("div.under", where, chips(session.marks), session.metadata.agent ? h("span.chip", plain(session.metadata.agent)) : null)),
    h("td", statusPill(session)),
    h("td.num", rewardBar(session.reward), h("span.mono", rewardOf(session))),
    h("td.num.mono", count(counts.turns)),
    h("td.num.mono", brief(counts.completion_tokens)),
    h("td.num.mono.dim", brief(counts.prompt_tokens)),
    h("td.num.mono", counts.forks ? count(counts.forks) : h("span.dim", "0")),
    h("td.num.dim", seconds(took)),
    h("td.num.dim", time(session.created_at)));
}
