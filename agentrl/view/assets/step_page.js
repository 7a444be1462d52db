// One optimizer step: which episodes it trained, and every number that it measured.

import { get } from "./api.js";
import { card, fresh, h, link, number, path } from "./dom.js";
import { episodeTable, lastList } from "./episodes_page.js";

export const name = "step";

export async function show({ root, id, number: step, signal }) {
  const found = await get(["runs", id, "steps", step], {}, signal);
  const at = Number(step);
  const go = (to) => { if (to > 0) location.hash = path("run", id, "step", to); };
  Object.assign(lastList, { run: id, ids: found.episodes.map((row) => row.id), address: location.hash });
  const solved = found.episodes.filter((row) => row.success).length;
  const rows = Object.entries(found.values);
  const body = h("tbody", {});
  const fill = (text) => fresh(body, ...rows.filter(([key]) => key.includes(text)).map(([key, value]) => h("tr", {}, h("td", {}, h("code", {}, key)), h("td", { class: "num" }, number(value, 4)))));
  fill("");
  root.append(
    h("div", { class: "title" }, h("h1", {}, `Step ${number(at)}`), h("span", { class: "grow" }), h("div", { class: "row" },
      h("button", { type: "button", class: "button", disabled: at <= 1, onclick: () => go(at - 1) }, "← Previous"), h("button", { type: "button", class: "button", onclick: () => go(at + 1) }, "Next →"))),
    h("p", { class: "note" }, `${new Date(1000 * found.time_s).toLocaleString()} · attempt ${found.attempt} · trained ${number(found.episodes.length)} episodes, ${number(solved)} of them solved`),
    ...found.alarms.map((alarm) => h("div", { class: "alarm" }, h("b", {}, "Alarm "), alarm)),
    h("div", { class: "grid step-grid" },
      h("section", { class: "card flush" }, h("h2", {}, "Episodes"), h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Episodes" }, found.episodes.length ? episodeTable(id, found.episodes) : h("p", { class: "quiet" }, "It trained none."))),
      card("Measured", link(path("run", id), "as curves"), h("input", { type: "search", placeholder: "Filter…", "aria-label": "Filter metrics", oninput: (event) => fill(event.target.value) }), h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Measured" }, h("table", { class: "small" }, body)))),
  );
  return { title: `Step ${step}`, keys: { j: () => go(at + 1), k: () => go(at - 1) }, told: { "j k": "next, previous step" } };
}
