// Up to eight runs over one another: curves, how they ended, what their configurations do not share.

import { get } from "./api.js";
import { heldOut, lineChart } from "./chart.js";
import { card, fresh, h, link, notesLine, number, path, percent, stateChip } from "./dom.js";

export const name = "compare";
const CURVES = [
  ["outcome_mean", "Outcome reward", "mean per episode"],
  ["success_mean", "Success in training", "share of episodes"],
  ["loss", "Loss", "loss"],
  ["kl_k3", "KL, behaviour to learner", "nats"],
  ["entropy", "Entropy", "nats per token"],
  ["lag_mean", "Staleness", "steps"],
];

function leaves(value, prefix = "", into = new Map()) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, one] of Object.entries(value)) leaves(one, prefix ? `${prefix}.${key}` : key, into);
  } else into.set(prefix, JSON.stringify(value));
  return into;
}

export async function show({ root, query, signal }) {
  const ids = (query.get("runs") ?? "").split(",").filter(Boolean).slice(0, 8);
  const charts = [...CURVES, ["", "Held-out success", "share of episodes"]].map(([metric, title, label]) =>
    lineChart({ title, label, named: true, smooth: 0.6, fixed: label.startsWith("share") ? [0, 1] : undefined, metric }));
  const table = h("div", { class: "scroll" });
  const diff = h("div", { class: "scroll" });
  root.append(h("div", { class: "title" }, h("h1", {}, `${ids.length} runs compared`)), h("div", { class: "grid charts" }, charts), card("How they stand", "", table), card("What differs", "in their configurations", diff));

  async function refresh() {
    const runs = await Promise.all(ids.map((id) => get(["runs", id], {}, signal)));
    const names = CURVES.map(([metric]) => metric).join(",");
    const curves = await Promise.all(ids.map((id) => get(["runs", id, "metrics"], { names }, signal)));
    charts.forEach((chart, k) => {
      chart.update(runs.map((run, tone) => {
        if (k < CURVES.length) return { name: run.id, tone, x: curves[tone].step, y: curves[tone].values[CURVES[k][0]] };
        return { ...heldOut(run.id, Object.values(run.evaluations)[0] ?? [])[0], tone };
      }));
    });
    const head = (...cells) => h("tr", {}, cells.map((cell, k) => h("th", { class: k > 1 ? "num" : "" }, cell)));
    fresh(table, h("table", {}, h("thead", {}, head("run", "state", "steps", "reward", "success", "held-out")), h("tbody", {}, runs.map((run, tone) => h(
      "tr", {}, h("td", {}, h("i", { class: `key tone${tone}` }), link(path("run", run.id), run.id), notesLine(run)), h("td", {}, stateChip(run)),
      h("td", { class: "num" }, `${number(run.step)} of ${number(run.steps)}`), h("td", { class: "num" }, number(run.reward)), h("td", { class: "num" }, percent(run.success)), h("td", { class: "num" }, percent(run.held_out.at(-1)?.[1])),
    )))));
    const settings = runs.map((run) => leaves(run.config));
    const keys = [...new Set(settings.flatMap((one) => [...one.keys()]))].filter((key) => new Set(settings.map((one) => one.get(key))).size > 1);
    fresh(diff, keys.length ? h("table", { class: "differs" }, h("thead", {}, h("tr", {}, ["setting", ...ids].map((cell) => h("th", {}, cell)))), h("tbody", {}, keys.map((key) => h("tr", {}, h("td", {}, h("code", {}, key)), settings.map((one) => h("td", {}, h("code", {}, one.get(key) ?? "–"))))))) : h("p", { class: "quiet" }, "Their configurations are equal."));
  }

  await refresh();
  return { title: "Compare", refresh };
}
