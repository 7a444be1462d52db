// The frame: which page an address shows, keys, dark or light, news of a live run.

import { Refused, takeToken, watch } from "./api.js";
import { fresh, h, link, path } from "./dom.js";
import * as runs from "./runs_page.js";
import * as compare from "./compare_page.js";
import * as run from "./run_page.js";
import * as episodes from "./episodes_page.js";
import * as episode from "./episode_page.js";
import * as group from "./group_page.js";
import * as step from "./step_page.js";

const PAGES = [
  [/^\/?$/, runs],
  [/^\/compare$/, compare],
  [/^\/run\/([^/]+)$/, run],
  [/^\/run\/([^/]+)\/episodes$/, episodes],
  [/^\/run\/([^/]+)\/episode\/(\d+)$/, episode],
  [/^\/run\/([^/]+)\/group\/(\d+)$/, group],
  [/^\/run\/([^/]+)\/step\/(\d+)$/, step],
];
const EVERYWHERE = { "?": "these keys", t: "dark or light", g: "all runs", r: "the run", e: "its episodes" };

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const live = document.getElementById("live");
const keys = document.getElementById("keys");

let shown = { keys: {} };
let leaving = new AbortController();
let watched = { run: null, stop: new AbortController() };

function place() {
  const [address, query = ""] = location.hash.slice(1).split("?");
  const [pattern, page] = PAGES.find(([one]) => one.test(address)) ?? PAGES[0];
  const [, id, number] = pattern.exec(address) ?? [];
  return { page, id: id === undefined ? null : decodeURIComponent(id), number, query: new URLSearchParams(query) };
}

async function show() {
  if (takeToken()) return show();
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const { page, id, number, query } = place();
  follow(id);
  const root = h("div", { class: `page page-${page.name}` });
  try {
    const made = await page.show({ root, id, number, query, signal });
    if (signal.aborted) return undefined;
    shown = { keys: {}, ...made };
    document.title = `${shown.title} · agentrl`;
    crumbs.replaceChildren(...trail(id, shown.title));
    fresh(main, root);
    if (!shown.focus?.()) window.scrollTo(0, 0);
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
  return undefined;
}

function trail(id, title) {
  const parts = [link("#/", "runs")];
  if (id !== null) parts.push(link(path("run", id), id));
  if (id !== title && title !== "Runs") parts.push(h("span", { "aria-current": "page" }, title));
  return parts.flatMap((part, at) => (at ? [h("span", { class: "sep" }, "/"), part] : [part]));
}

function fail(error) {
  shown = { keys: {} };
  const closed = error instanceof Refused;
  main.replaceChildren(
    h(
      "div",
      { class: "empty" },
      h("h2", {}, closed ? "This page needs its token" : "This cannot be shown"),
      h("p", {}, closed ? "Open the address that `agentrl view` printed: it ends in the token." : error.message),
      h("p", {}, link("#/", "All runs")),
    ),
  );
}

// Listens to the news of one run at a time.
function follow(id) {
  if (watched.run === id) return;
  watched.stop.abort();
  live.textContent = "";
  watched = { run: id, stop: new AbortController() };
  if (id === null) return;
  let waiting = false;
  let first = true;
  let took = 0;
  const refresh = async () => {
    waiting = false;
    if (document.hidden) return;
    const began = performance.now();
    try { await shown.refresh?.(); } catch { /* the next news ask again */ }
    took = performance.now() - began;
  };
  // A long answer is asked for less often: the page must not cost the run.
  const changed = () => {
    if (first || waiting) { first = false; return; }
    waiting = true;
    setTimeout(refresh, Math.min(15000, Math.max(700, 10 * took)));
  };
  const lost = (gone) => { live.textContent = gone ? "no connection" : ""; };
  watch(id, changed, lost, watched.stop.signal);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("agentrl-theme", name);
}

function otherTheme() {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  theme(now === "dark" ? "light" : "dark");
}

function help() {
  const told = { ...EVERYWHERE, ...shown.told };
  const rows = Object.entries(told).map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]);
  keys.querySelector("dl").replaceChildren(...rows.flat());
  keys.showModal();
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea");
  if ((event.key === "Enter" || event.key === " ") && event.target.closest?.("a, button, summary, [role=button]")) return;
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const { id } = place();
  const own = {
    "?": help,
    t: otherTheme,
    g: () => { location.hash = "#/"; },
    ...(id === null ? {} : { r: () => { location.hash = path("run", id); }, e: () => { location.hash = path("run", id, "episodes"); } }),
    ...shown.keys,
  };
  if (own[event.key]) {
    event.preventDefault();
    own[event.key]();
  }
});

const kept = localStorage.getItem("agentrl-theme");
if (kept) theme(kept);
document.getElementById("theme").addEventListener("click", otherTheme);
document.getElementById("help").addEventListener("click", help);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("hashchange", show);
show();
