// The page: its head, where one is (`#/sessions?run=…`), and which view shows it.

import { get, post, whenLoggedOut } from "./api.js";
import { h, put, say } from "./dom.js";
import { plain, renewTimes } from "./format.js";
import { groupView, groupsView } from "./groups.js";
import { loginView } from "./login.js";
import { answered } from "./reach.js";
import { runView, runsView } from "./runs.js";
import { sessionView } from "./session.js";
import { sessionsView } from "./sessions.js";
import { workersView } from "./workers.js";

const VIEWS = [
  { pattern: /^\/runs$/, name: "Runs", view: runsView },
  { pattern: /^\/runs\/([^/]+)$/, name: "Run", view: runView, under: "Runs" },
  { pattern: /^\/groups$/, name: "Groups", view: groupsView },
  { pattern: /^\/groups\/([^/]+)$/, name: "Group", view: groupView, under: "Groups" },
  { pattern: /^\/workers$/, name: "Workers", view: workersView },
  { pattern: /^\/sessions$/, name: "Sessions", view: sessionsView },
  { pattern: /^\/sessions\/([^/]+)$/, name: "Session", view: sessionView, under: "Sessions" },
];
const LINKS = [["Runs", "#/runs"], ["Groups", "#/groups"], ["Sessions", "#/sessions"], ["Workers", "#/workers"]];
const HOME = "#/sessions";
const TIMES_MS = 5000;

const top = document.getElementById("top");
const main = document.getElementById("main");
let leaving = new AbortController();
let state = { keys: false, reads: true, version: "", live: true };

// Where one is: path and query of what follows `#`.
export function place() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  return { path: path || "/", query: new URLSearchParams(query) };
}

function head(current) {
  const links = LINKS.filter(([name]) => state.live || name === "Sessions").map(([name, to]) => h("a", { href: to, "aria-current": name === current ? "page" : null }, name));
  put(
    top,
    h("a.brand", { href: HOME }, h("img", { src: "static/mark.svg", alt: "", width: 22, height: 22 }), "steno"),
    h("nav", { "aria-label": "Views" }, links),
    h("div.space"),
    h("span.dim.small", state.live ? `proxy ${state.version}` : plain(state.version)),
    state.keys ? h("button.quiet", { onclick: logout }, "Log out") : null,
  );
}

async function logout() {
  try {
    await post("ui/logout", {});
  } catch (error) {
    put(document.getElementById("away"), `Not logged out: ${plain(error.message)}`);
    return;
  }
  state.reads = false;
  show();
}

async function show() {
  leaving.abort();
  answered();
  leaving = new AbortController();
  const { signal } = leaving;
  const { path, query } = place();
  if (!state.reads) {
    head("");
    loginView(main, async () => { state = await get("ui/state"); show(); });
    return;
  }
  if (path === "/") {
    location.replace(HOME);
    return;
  }
  for (const { pattern, name, view, under } of VIEWS) {
    const found = pattern.exec(path);
    if (!found) continue;
    head(under ?? name);
    document.title = `${name} · Steno`;
    scrollTo(0, 0);
    try {
      await view(main, found.slice(1).map(decodeURIComponent), query, signal, state);
      say(`${name} shown`);
    } catch (error) {
      if (!signal.aborted) failed(error); // what goes wrong on a page that was left is nobody's
    }
    return;
  }
  head("");
  put(main, h("div.empty", h("h1", "Nothing here"), h("p", h("a", { href: HOME }, "To the start"))));
}

function failed(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) return;
  put(main, h("div.empty", { role: "alert" }, h("h1", "This could not be read"), h("p", plain(error.message)),
    h("button", { onclick: show }, "Try again")));
}

whenLoggedOut(() => { state.reads = false; state.keys = true; show(); });
addEventListener("hashchange", show);
setInterval(renewTimes, TIMES_MS);
addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "/" && !typing) {
    const field = document.querySelector("[data-search]");
    if (field) { event.preventDefault(); field.focus(); }
  }
});
document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

try {
  state = await get("ui/state");
} catch (error) {
  failed(error);
}
show();
