// Workers: how busy each is, what it serves, and what is wrong with it, looked at again every two seconds.

import { get, lookAgain } from "./api.js";
import { h, put, update as renew } from "./dom.js";
import { brief, count, plain, seconds, time } from "./format.js";

const LOOK_MS = 2000;

export async function workersView(main, _, __, signal) {
  const head = h("span.dim.small");
  const policies = h("div");
  const cards = h("div.cards");
  put(main, h("div.page", h("div.headline", h("h1", "Workers"), head), policies, cards));
  async function look() {
    const [workers, policy] = await Promise.all([get("workers", {}, signal), get("policy", {}, signal)]);
    const updates = await Promise.all(policy.items.filter((one) => one.update_id).map((one) =>
      get(`policy/updates/${encodeURIComponent(one.update_id)}`, {}, signal).catch((error) => { if (error.name === "AbortError") throw error; return null; })));
    head.textContent = `${count(workers.items.filter((worker) => worker.connected).length)} connected`;
    renew(policies, policyTable(policy.items, updates.filter(Boolean)));
    renew(cards, workers.items.length ? workers.items.map((worker) => card(worker, policy.items))
      : h("div.empty", h("h2", "No worker is connected"), h("p.dim", "Workers dial this proxy: steno worker --proxy URL. Requests wait until one is there.")));
  }
  await lookAgain(look, LOOK_MS, signal);
}

function policyTable(policies, updates) {
  if (!policies.length) return null;
  const byId = new Map(updates.map((update) => [update.update_id, update]));
  return h("div.scroll.gap", { tabindex: 0, role: "region", "aria-label": "Policies" }, h("table", h("thead", h("tr", ["Policy", "In force", "Served by", "Last update"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", policies.map((policy) => h("tr", h("td", h("b", plain(policy.policy))), h("td.mono", plain(policy.version ?? "–")),
      h("td", Object.entries(policy.workers).map(([version, ids]) => h("div", h("span.mono", plain(version)), h("span.dim", ` ${ids.map(plain).join(", ")}`)))),
      h("td", update(byId.get(policy.update_id))))))));
}

function update(found) {
  if (!found) return h("span.dim", "none");
  return [h("span.pill", { class: { running: "open", done: "completed", failed: "aborted" }[found.state] ?? "" }, h("i", { "aria-hidden": "true" }), found.state), " ",
    h("span.dim", found.workers.map((worker) => `${plain(worker.worker_id)} ${worker.state}${worker.load_s === null ? "" : ` in ${seconds(worker.load_s)}`}`).join(", "))];
}

function card(worker, policies) {
  const versions = policies.flatMap((policy) => Object.entries(policy.workers).filter(([, ids]) => ids.includes(worker.id)).map(([version]) => version));
  const state = !worker.connected ? ["aborted", "away"] : worker.suspect || !worker.healthy ? ["aborted", worker.suspect ? "suspect" : "unhealthy"] : worker.draining ? ["", "draining"] : worker.behind.length ? ["", "behind"] : ["completed", "serving"];
  return h("article.card.worker", h("header.headline", h("h2.mono", plain(worker.id)), h("span.pill", { class: state[0] }, h("i", { "aria-hidden": "true" }), state[1])),
    gauge("Streams of this proxy", worker.in_flight, worker.max_streams), gauge("Cache", worker.load.kv_used, 1, `${(100 * worker.load.kv_used).toFixed(0)} %`),
    h("dl.pairs", pair("Models", worker.models.map((model) => `${plain(model.name)} (${brief(model.context_tokens)} tokens)`).join(", ")),
      pair("Serves", versions.map(plain).join(", ") || "–"), pair("Running, waiting", `${count(worker.load.running)}, ${count(worker.load.waiting)} of all proxies`),
      pair("Here since", time(worker.since)), pair("Heard", `${seconds(worker.idle_s)} ago`), worker.address ? pair("From", plain(worker.address)) : null),
    worker.behind.length ? h("p.warn", `Gets no new turns of ${worker.behind.map(plain).join(", ")}: it serves another version than the one in force.`) : null,
    worker.suspect ? h("p.bad", plain(worker.suspect)) : null);
}

const pair = (name, value) => [h("dt", name), h("dd", value)];

function gauge(name, value, most, words = `${count(value)} of ${count(most)}`) {
  const full = Math.min(1, most ? value / most : 0);
  return h("div.gauge", h("span", name), h("span.gauge-bar", { "aria-hidden": "true" }, h("span", { class: full > 0.9 ? "full" : null, style: { width: `${100 * full}%` } })), h("span.mono", words));
}
