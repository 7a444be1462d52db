// One run: how far it is, how well it does, why; every number that it measured.

import { get, post, writes } from "./api.js";
import { bars, heldOut, lineChart } from "./chart.js";
import { ago, card, duration, fresh, h, link, notesLine, number, path, percent, signed, stateChip } from "./dom.js";
import { runLanes } from "./lanes.js";
import { steering } from "./steering.js";

export const name = "run";

// Title, what the axis counts, [metric, name], bounds.
const CURVES = [
  ["Reward", "mean per episode", [["outcome_mean", "outcome"], ["process_mean", "process"]]],
  ["Success", "share of episodes", [["success_mean", "training"]], [0, 1]],
  ["Loss", "policy loss", [["loss", "loss"]]],
  ["KL", "nats, behaviour to learner", [["kl_k3", "k3"]]],
  ["Entropy", "nats per token", [["entropy", "entropy"]]],
  ["Effective sample size", "share of tokens", [["ess", "ESS"]], [0, 1]],
  ["Episode length", "tokens per episode", []],
  ["Staleness", "optimizer steps", [["lag_mean", "mean"], ["lag_max", "oldest"]]],
  ["Learner's time", "seconds per step", [["busy_s", "busy"], ["idle_s", "idle"]]],
];
const ALWAYS = ["tokens_scored", "seconds.pack", "updated", "wall_s"];
const SMOOTH = 0.6;

const last = (values) => values?.filter((value) => value !== null).at(-1) ?? null;
const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
const recent = (values, n = 10) => (values ?? []).slice(-n).filter((value) => value !== null);
const total = (counts) => Object.values(counts).reduce((sum, n) => sum + n, 0);

export async function show({ root, id, query, signal }) {
  let smooth = true;
  const extra = (query.get("m") ?? "").split(",").filter(Boolean);
  const pick = (step) => { location.hash = path("run", id, "step", step); };
  const chartOf = ([title, label, , fixed]) => lineChart({ title, label, fixed, pick, smooth: SMOOTH });
  const charts = CURVES.map(chartOf);
  const added = new Map();
  const head = h("div", {});
  const steer = steering(id, () => refresh());
  const facts = h("div", { class: "facts" });
  const warnings = h("div", {});
  const health = h("div", {});
  const own = h("div", { class: "grid charts" });
  const below = h("div", { class: "grid two" });
  const minutes = h("div", {});
  const way = h("div", {});
  const happened = h("div", { class: "scroll" });
  const config = h("pre", { class: "config", tabindex: "0", role: "region", "aria-label": "Configuration" });
  const tags = h("input", { type: "text", "aria-label": "Tags, with commas between them", placeholder: "baseline, keep" });
  const note = h("textarea", { rows: 4, "aria-label": "Note", placeholder: "What this run is for, what came of it…" });
  const saved = h("span", { class: "note", role: "status" });
  async function save() {
    try {
      await post(id, "notes", { tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value });
      saved.textContent = "Saved in the run's folder";
      await refresh();
    } catch (error) { saved.textContent = error.message; }
  }
  const notes = h("details", { class: "card notes" }, h("summary", {}, "Tags and note"), tags, note, h("div", { class: "row" }, h("button", { type: "button", class: "button", onclick: save }, "Save"), saved));
  const names = h("datalist", { id: "names" });
  const add = h("input", { type: "search", list: "names", placeholder: "Add a metric by name…", "aria-label": "Add a metric by name", onchange: (event) => { insert(event.target.value); event.target.value = ""; } });
  const soften = h("label", { class: "check" }, h("input", { type: "checkbox", checked: true, onchange: (event) => { smooth = event.target.checked; for (const chart of [...charts, ...added.values()]) chart.set({ smooth: smooth ? SMOOTH : 0 }); } }), "smooth");
  root.append(
    head, steer, facts, warnings, health, minutes, way,
    h("div", { class: "bar-line" }, h("h2", {}, "Curves"), soften, h("span", { class: "note" }, "ticks below an axis: checkpoints; above it: weights served"), add, names),
    h("div", { class: "grid charts" }, charts), own, below,
    card("What happened", "faults, alarms, restarts, changed settings", happened),
    ...(writes ? [notes] : []),
    h("details", { class: "card" }, h("summary", {}, "Configuration"), config),
  );

  let all = [];
  function insert(metric) {
    if (!all.includes(metric) || added.has(metric)) return;
    const chart = lineChart({ title: metric, label: "", pick, smooth: smooth ? SMOOTH : 0 });
    chart.querySelector("h2").append(h("button", { class: "icon", type: "button", "aria-label": `take ${metric} away`, onclick: () => { chart.remove(); added.delete(metric); keep(); } }, "×"));
    added.set(metric, chart);
    own.append(chart);
    keep();
    refresh();
  }
  const keep = () => history.replaceState(null, "", path("run", id) + (added.size ? `?${new URLSearchParams({ m: [...added.keys()].join(",") })}` : ""));

  function lengths(run) {
    const [env, ...others] = run.environments;
    return [env, ...others].slice(0, 4).map((one) => [`environments.${one}.played.tokens`, others.length ? one : "tokens"]);
  }

  function header(run) {
    const took = run.train_started_s ? (run.live ? Date.now() / 1000 : run.updated_s) - run.train_started_s : null;
    fresh(head, 
      h("div", { class: "title" }, h("h1", {}, run.id), stateChip(run), h("span", { class: "grow" }),
        link(path("run", id, "episodes"), "Episodes")),
      h("p", { class: "note" }, `${run.env} · ${run.model} · ${run.algo} · seed ${run.seed} · ${run.path}`),
      notesLine(run),
      h("div", { class: "progress" },
        h("progress", { max: run.steps, value: run.step, "aria-label": "steps" }),
        h("span", {}, h("b", {}, `step ${number(run.step)}`), ` of ${number(run.steps)}`),
        h("span", { class: "note" }, run.live && run.eta_s !== null && run.paused_s === null ? `about ${duration(run.eta_s)} left` : run.live ? "" : `last step ${ago(run.updated_s)}`),
        took ? h("span", { class: "note" }, `${duration(took)} of training`) : null),
    );
    head.querySelector(".title a").classList.add("button", "primary");
  }

  function kpis(run, values, times) {
    const points = Object.values(run.evaluations)[0] ?? [];
    const first = points[0]?.success;
    const passes = Object.entries(points.at(-1)?.pass_at ?? {}).map(([k, one]) => `pass@${k} ${percent(one.value)} (${percent(one.low)} to ${percent(one.high)})`);
    const now = points.at(-1)?.success;
    const early = mean((values.outcome_mean ?? []).slice(0, 10).filter((one) => one !== null));
    const late = mean(recent(values.outcome_mean));
    const trained = (values.tokens_scored ?? []).map((tokens, at) => (values.updated?.[at] === 0 ? 0 : tokens));
    const span = times.length > 1 ? times.at(-1) - times[Math.max(0, times.length - 11)] : null;
    const speed = span ? recent(trained).slice(-Math.min(10, times.length - 1)).reduce((sum, one) => sum + one, 0) / span : null;
    const sum = (list) => recent(list).reduce((total, one) => total + one, 0);
    const whole = sum(values.wall_s) || sum(values.busy_s) + sum(values.idle_s);
    const idle = sum(values.idle_s);
    const ended = total(run.endings);
    const fact = (what, value, note) => h("div", { class: "fact" }, h("span", {}, what), h("b", {}, value), h("small", {}, note));
    fresh(facts, 
      fact("Reward", number(late), early === null ? "no step yet" : `${signed(late - early)} since the first steps`),
      fact("Success", percent(run.success), "of the last ten steps' episodes"),
      fact("Held-out success", percent(now), [points.length > 1 ? `from ${percent(first)}` : points.length ? `at step ${points[0].step}` : "not measured yet", ...passes].join("; ")),
      fact("Speed", `${number(speed)}`, "tokens trained per second"),
      fact("Staleness", number(mean(recent(values.lag_mean))), `steps; the oldest ${number(last(values.lag_max))}`),
      fact("Learner waits", whole ? percent(idle / whole) : "–", "of its time"),
      fact("Episodes", number(ended), `${number(run.failures.failed)} failed by infrastructure`),
    );
    const alarms = run.alarms.map((alarm) => h("div", { class: "alarm" }, h("b", {}, "Alarm "), alarm));
    const told = [run.status.stopped_early ? `Training ended early: ${run.status.stopped_early}` : null, run.status.waits || null, ...run.status.notices.slice(0, 5).map((one) => `Not used, ${one.boundary}: ${one.case} (${number(one.count)} times${one.place ? `, first: ${one.place}` : ""})`)].filter(Boolean);
    fresh(warnings, ...alarms, ...told.map((text) => h("div", { class: "alarm mild" }, text)));
  }

  // What goes wrong, by which figures, and what to type.
  function advised(found) {
    if (!found.length) return card("Health", "by the last three steps", h("p", { class: "quiet" }, "Nothing is wrong, as far as its figures show."));
    const one = (advice) => h("li", {},
      h("b", {}, advice.cause), h("span", { class: "chip wait" }, advice.name.replaceAll("_", " ")),
      h("p", { class: "note" }, advice.evidence), advice.type.map((line) => h("pre", { class: "typed" }, line)));
    return card("Health", "by the last three steps, causes first", h("ol", { class: "advice" }, found.map(one)));
  }

  // The way of a group through the buffer, and where groups and episodes leave it untrained.
  function flow(run) {
    const { groups, dropped, members_dropped: members, late_open: late } = run.flow;
    const stages = [["waiting", "waiting"], ["running", "running"], ["scored", "scored"], ["taken", "taken"], ["trained", "trained"]];
    const stage = ([state, label]) => h("li", {}, h("span", {}, label), h("b", {}, number(groups[state] ?? 0)));
    const left = (what, counts) => Object.entries(counts).map(([reason, n]) => h("li", {}, h("b", {}, number(n)), ` ${what}: ${reason.replaceAll("_", " ")}`));
    const lost = [...left("groups", dropped), ...left("episodes", members)];
    return card("Buffer", "training groups on their way", h("ol", { class: "pipe" }, stages.map(stage)),
      h("ul", { class: "exits" }, h("li", {}, h("b", {}, number(late)), " late episodes still out"), lost.length ? [h("li", {}, "left untrained:"), lost] : h("li", {}, "nothing left untrained")));
  }

  function endings(run) {
    const rows = Object.entries(run.endings).sort((a, b) => b[1] - a[1]);
    const most = Math.max(1, ...rows.map(([, n]) => n));
    return card("How episodes end", "training", h("ol", { class: "flow" }, rows.map(([reason, n]) => h(
      "li", {}, link(`${path("run", id, "episodes")}?${new URLSearchParams({ stop: reason })}`, reason.replaceAll("_", " ")), h("b", {}, number(n)), h("progress", { max: most, value: n, "aria-label": reason }),
    ))));
  }

  async function refresh() {
    const run = await get(["runs", id], {}, signal);
    all = run.names;
    fresh(names, ...all.map((one) => h("option", { value: one })));
    const curves = CURVES.map(([title, , own]) => (title === "Episode length" ? lengths(run) : own));
    const asked = [...new Set([...curves.flat().map(([metric]) => metric), ...ALWAYS, ...added.keys()])];
    const measured = await get(["runs", id, "metrics"], { names: asked.join(",") }, signal);
    const marks = [
      ...run.marks.events, ...run.marks.checkpoints.map((step) => ({ kind: "checkpoint", step, text: "checkpoint" })),
      ...run.marks.weights.map((step) => ({ kind: "weights", step, text: "weights served" })),
    ];
    const line = ([metric, name], tone) => ({ name, tone, x: measured.step, y: measured.values[metric] ?? [] });
    header(run);
    steer.update(run);
    if (!notes.contains(document.activeElement) && !notes.open) { tags.value = run.tags.join(", "); note.value = run.note; }
    kpis(run, measured.values, measured.time_s);
    charts.forEach((chart, k) => {
      const series = curves[k].map(line);
      if (CURVES[k][0] === "Success") {
        const sets = Object.entries(run.evaluations).flatMap(([set, points]) => heldOut(set, points));
        sets.forEach((one, at) => series.push({ ...one, tone: (at % 7) + 1 }));
      }
      chart.update(series, marks);
    });
    for (const [metric, chart] of added) chart.update([line([metric, metric], 3)], marks);
    const { lag, trained, stale } = measured.lags;
    const lately = await get(["runs", id, "lanes"], {}, signal);
    fresh(minutes, lately === null ? null : card("The last minutes", `${duration(lately.until_s - lately.since_s)}, until ${run.live ? "now" : "the end"}`, runLanes(lately, pick)));
    fresh(way, flow(run));
    fresh(health, advised(await get(["runs", id, "health"], {}, signal)));
    fresh(below,
      card("Staleness", "tokens of the last ten steps by age", lag.length ? bars(lag.map((label, k) => ({ label: label.replace("_", "–"), n: trained[k], more: stale[k], told: `${number(trained[k])} tokens trained, ${number(stale[k])} left out` })), { height: 190, across: "age, optimizer steps", up: "tokens" }) : h("p", { class: "quiet nothing" }, "Nothing trained yet")),
      endings(run),
    );
    const events = [...run.marks.events].reverse().slice(0, 100);
    fresh(happened, events.length ? h("table", {}, h("tbody", {}, events.map((event) => h("tr", {}, h("td", { class: "num" }, `step ${number(event.step)}`), h("td", {}, h("span", { class: `chip ${event.kind === "fault" || event.kind === "alarm" ? "bad" : ""}` }, event.kind)), h("td", { class: "wrap" }, event.text), h("td", {}, event.episode ? link(path("run", id, "episode", event.episode), `episode ${event.episode}`) : ""))))) : h("p", { class: "quiet" }, "No fault, no alarm, no restart, no change of a setting."));
    config.textContent = JSON.stringify(run.config, null, 2);
  }

  await refresh();
  extra.forEach(insert);
  return { title: id, refresh, told: { "e": "the run's episodes", "← →": "move along a chosen curve" } };
}
