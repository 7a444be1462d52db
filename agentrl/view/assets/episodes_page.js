// A run's episodes: filters, a histogram whose bins filter, sorting, texts, keys.

import { get } from "./api.js";
import { bars } from "./chart.js";
import { ago, duration, fresh, h, link, number, outcomeChip, path } from "./dom.js";

export const name = "episodes";
const LIMIT = 50;
const COLUMNS = [
  ["episode", "Episode", "num"], ["group", "Group", "num"], [null, "Result", ""], ["outcome", "Outcome", "num"], ["turns", "Turns", "num"],
  ["tokens", "Tokens", "num"], ["seconds", "Time", "num"], ["step", "Step", "num"], [null, "Ended by", ""], ["ended", "When", "num"],
];

// The list that was shown last, so that an episode's page knows what comes next.
export const lastList = { run: null, ids: [], address: null };

export function episodeTable(id, rows, { sort, order, sorted } = {}) {
  const head = COLUMNS.map(([column, title, kind]) => h("th", { class: kind, scope: "col", "aria-sort": column && column === sort ? (order === "asc" ? "ascending" : "descending") : null },
    column && sorted ? h("button", { type: "button", onclick: () => sorted(column) }, title, column === sort ? (order === "asc" ? " ↑" : " ↓") : "") : title));
  const body = rows.map((row) => h("tr", { "data-id": row.id, onclick: (event) => { if (!event.target.closest("a")) location.hash = path("run", id, "episode", row.id); } },
    h("td", { class: "num", "data-name": "episode" }, link(path("run", id, "episode", row.id), String(row.id))),
    h("td", { class: "num", "data-name": "group" }, link(path("run", id, "group", row.group), String(row.group))),
    h("td", { "data-name": "" }, outcomeChip(row), row.late ? h("span", { class: "chip wait" }, "late") : null),
    h("td", { class: "num", "data-name": "outcome" }, number(row.outcome)),
    h("td", { class: "num", "data-name": "turns" }, number(row.turns)),
    h("td", { class: "num", "data-name": "tokens" }, number(row.tokens)),
    h("td", { class: "num", "data-name": "time" }, duration(row.seconds)),
    h("td", { class: "num", "data-name": "step" }, row.step ? link(path("run", id, "step", row.step), number(row.step)) : row.dropped ? h("span", { class: "note" }, row.dropped.replaceAll("_", " ")) : "–"),
    h("td", { "data-name": "ended by" }, (row.stop_reason ?? row.state).replaceAll("_", " ")),
    h("td", { class: "num when", "data-name": "" }, ago(row.ended_s)),
  ));
  return h("table", { class: "episodes-table" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

export async function show({ root, id, query, signal }) {
  const asked = Object.fromEntries(query);
  const run = await get(["runs", id], {}, signal);
  let chosen = -1;
  let rows = [];

  const go = (changes) => {
    const next = { ...asked, offset: "", ...changes };
    const given = Object.entries(next).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    location.hash = `${path("run", id, "episodes")}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  };
  const choice = (key, label, values) => h("label", {}, h("span", {}, label), h("select", { onchange: (event) => go({ [key]: event.target.value }) },
    values.map(([value, text]) => h("option", { value, selected: (asked[key] ?? "") === value }, text))));
  const entry = (key, label, attributes) => h("label", {}, h("span", {}, label), h("input", { ...attributes, value: asked[key] ?? "", onchange: (event) => go({ [key]: event.target.value.trim() }) }));
  const any = (values) => [["", "any"], ...values.map((value) => [value, value.replaceAll("_", " ")])];
  const yes = [["", "any"], ["yes", "yes"], ["no", "no"]];
  const search = h("input", { type: "search", placeholder: "Search prompts, answers, observations…  ( / )", "aria-label": "Search texts", value: asked.q ?? "", onchange: (event) => go({ q: event.target.value, before: "" }) });
  const filters = h("div", { class: "filters" },
    choice("purpose", "Played for", [["", "training"], ...run.purposes.filter((one) => one !== "train").map((one) => [one, one]), ["all", "everything"]]),
    run.environments.length > 1 ? choice("env", "Environment", any(run.environments)) : null,
    choice("success", "Solved", yes),
    choice("stop", "Ended by", any(run.stop_reasons)),
    choice("state", "State", any(["waiting", "running", "finished", "expired"])),
    choice("late", "Late", yes),
    choice("dropped", "Left untrained", yes),
    entry("min_turns", "Turns from", { type: "number", min: 0, inputmode: "numeric" }),
    entry("max_turns", "to", { type: "number", min: 0, inputmode: "numeric" }),
    run.roles.length > 1 ? choice("role", "Role", any(run.roles)) : null,
    entry("from_weights", "Weights of steps", { type: "number", min: 0, inputmode: "numeric", title: "that sampled its tokens" }),
    entry("to_weights", "to", { type: "number", min: 0, inputmode: "numeric", title: "the last step whose weights sampled its tokens" }),
    entry("step", "Trained in step", { type: "number", min: 1, inputmode: "numeric" }),
    h("button", { type: "button", class: "button", onclick: () => { location.hash = path("run", id, "episodes"); } }, "Clear"),
  );
  const picture = h("div", {});
  const count = h("p", { class: "note", role: "status" });
  const table = h("div", { class: "scroll" });
  const pages = h("div", { class: "pages" });
  root.append(
    h("div", { class: "title" }, h("h1", {}, "Episodes"), h("span", { class: "grow" }), search),
    h("div", { class: "grid side" }, h("section", { class: "card" }, filters), h("section", { class: "card" }, h("h2", {}, "Outcome reward", h("span", { class: "note" }, "choose a bar")), picture)),
    count, h("section", { class: "card flush" }, table), pages,
  );

  function histogram({ bins, without }) {
    const short = (value) => number(Number(value.toPrecision(3)));
    const drawn = bins.map((bin) => {
      const on = asked.min === String(bin.low) && asked.max === String(bin.high);
      return { label: short(bin.low), n: bin.n, chosen: on, told: `outcome ${short(bin.low)}${bin.low === bin.high ? "" : ` to ${short(bin.high)}`}: ${number(bin.n)} episodes`, pick: () => go(on ? { min: "", max: "" } : { min: bin.low, max: bin.high }) };
    });
    fresh(picture, bins.length ? bars(drawn, { height: 150, across: "outcome reward", up: without ? `episodes; ${number(without)} without` : "episodes" }) : h("p", { class: "quiet nothing" }, "No outcome yet"));
  }

  function choose(at) {
    if (!rows.length) return;
    chosen = Math.min(rows.length - 1, Math.max(0, at));
    table.querySelectorAll("tbody tr").forEach((row, k) => row.classList.toggle("chosen", k === chosen));
    table.querySelectorAll("tbody tr")[chosen].scrollIntoView({ block: "nearest" });
  }

  async function refresh() {
    const found = await get(["runs", id, "episodes"], { sort: "ended", ...asked, limit: LIMIT }, signal);
    const kept = rows[chosen]?.id;
    rows = found.rows;
    Object.assign(lastList, { run: id, ids: rows.map((row) => row.id), address: location.hash });
    histogram(found.histogram);
    const offset = found.offset;
    const back = found.searched_back_to === null ? "" : `; texts were searched back to episode ${found.searched_back_to}`;
    count.textContent = found.total ? `${number(offset + 1)}–${number(offset + rows.length)} of ${number(found.total)} episodes${back}` : `No episode is like that${back}`;
    fresh(table, episodeTable(id, rows, { sort: asked.sort ?? "ended", order: asked.order ?? "desc", sorted: (column) => go({ sort: column, order: (asked.sort ?? "ended") === column && (asked.order ?? "desc") === "desc" ? "asc" : "desc" }) }));
    if (chosen >= 0) choose(rows.findIndex((row) => row.id === kept));
    const turn = (to, text, off) => h("button", { type: "button", class: "button", disabled: off, onclick: () => go({ offset: to || "" }) }, text);
    const further = found.searched_back_to === null ? null : h("button", { type: "button", class: "button", onclick: () => go({ before: found.searched_back_to }) }, "Search further back");
    fresh(pages, turn(Math.max(0, offset - LIMIT), "← Previous page", offset === 0), further, turn(offset + LIMIT, "Next page →", offset + rows.length >= found.total));
  }

  await refresh();
  const open = () => { if (rows[chosen]) location.hash = path("run", id, "episode", rows[chosen].id); };
  return {
    title: "Episodes",
    refresh,
    keys: {
      j: () => choose(chosen + 1), ArrowDown: () => choose(chosen + 1), k: () => choose(chosen - 1), ArrowUp: () => choose(chosen - 1),
      Enter: open, "/": () => search.focus(), "]": () => pages.lastChild.click(), "[": () => pages.firstChild.click(),
    },
    told: { "j k": "next, previous row", Enter: "open the row", "/": "search", "[ ]": "pages" },
  };
}
