// All runs: state, progress, a curve each; chosen ones are compared.

import { get } from "./api.js";
import { sparkline } from "./chart.js";
import { ago, duration, fresh, h, link, notesLine, number, path, percent, stateChip } from "./dom.js";

export const name = "runs";
const MOST = 8;
const chosen = new Set();

export async function show({ root, signal }) {
  const list = h("div", { class: "run-list" });
  let wanted = "";
  const only = h("input", { type: "search", placeholder: "Name, environment, model, tag…  ( / )", "aria-label": "Only runs with", oninput: (event) => { wanted = event.target.value.toLowerCase(); refresh(); } });
  const fits = (run) => [run.id, run.env, run.model, run.algo, run.note, ...(run.tags ?? [])].some((text) => text?.toLowerCase().includes(wanted));
  const compare = h("a", { class: "button primary", href: "#/" }, "Compare");
  root.append(h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "grow" }), only, compare), list);

  function offer() {
    compare.textContent = chosen.size < 2 ? "Choose two runs to compare" : `Compare ${chosen.size} runs`;
    compare.classList.toggle("off", chosen.size < 2);
    compare.href = chosen.size < 2 ? "#/" : `#/compare?${new URLSearchParams({ runs: [...chosen].join(",") })}`;
  }

  function row(run) {
    if (run.error) return h("article", { class: "run" }, h("div", {}, h("strong", {}, run.id), h("div", { class: "note" }, run.error)), stateChip(run));
    const [, last] = run.held_out.at(-1) ?? [];
    const pick = h("input", {
      type: "checkbox",
      "aria-label": `compare ${run.id}`,
      checked: chosen.has(run.id),
      onchange: (event) => {
        if (event.target.checked && chosen.size < MOST) chosen.add(run.id);
        else { chosen.delete(run.id); event.target.checked = false; }
        offer();
      },
    });
    const fact = (what, value) => h("div", { class: "fact" }, h("span", {}, what), h("b", {}, value));
    return h(
      "article",
      { class: "run" },
      pick,
      h("div", { class: "who" }, link(path("run", run.id), h("strong", {}, run.id)), h("div", { class: "note" }, `${run.env} · ${run.model} · ${run.algo}`), notesLine(run)),
      h("div", { class: "how" }, stateChip(run), h("div", { class: "note" }, run.live && run.eta_s !== null ? `about ${duration(run.eta_s)} left` : `last step ${ago(run.updated_s)}`)),
      h("div", { class: "far" }, h("progress", { max: run.steps, value: run.step, "aria-label": "steps" }), h("div", { class: "note" }, `step ${number(run.step)} of ${number(run.steps)}`)),
      h("div", { class: "curve" }, sparkline(run.spark, 150, 34), h("div", { class: "note" }, "reward")),
      h("div", { class: "run-facts" }, fact("reward", number(run.reward)), fact("success", percent(run.success)), fact("held-out", percent(last))),
    );
  }

  async function refresh() {
    const runs = await get(["runs"], {}, signal);
    for (const id of [...chosen]) if (!runs.some((run) => run.id === id)) chosen.delete(id);
    fresh(list, ...(runs.length ? runs.filter(fits).map(row) : [h("div", { class: "empty" }, h("h2", {}, "No runs here yet"), h("p", {}, "They appear as soon as `agentrl train` has made one."))]));
    offer();
  }

  await refresh();
  const again = setInterval(() => { if (!document.hidden && !list.contains(document.activeElement)) refresh().catch(() => {}); }, 5000);
  signal.addEventListener("abort", () => clearInterval(again));
  return { title: "Runs", refresh, keys: { "/": () => only.focus() }, told: { "/": "only some runs" } };
}
