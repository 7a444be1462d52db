// Time from left to right: what engines, workers and the learner did lately; where the time of an episode went.

import { duration, h, number, percent, s } from "./dom.js";
import { ticks } from "./chart.js";

const LANE = 46;
const PAD = { left: 96, right: 12, top: 6, bottom: 26 };

// Draws at the width that the box has, and again when that changes.
function sized(box, draw) {
  new ResizeObserver(([entry]) => draw(Math.floor(entry.contentRect.width))).observe(box);
  return box;
}

const largest = (values) => Math.max(1e-9, ...values);
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / Math.max(1, values.length);
// Minutes and seconds before the last sign of life.
const clock = (seconds) => `−${Math.floor(seconds / 60)}:${String(Math.round(seconds % 60)).padStart(2, "0")}`;
const idle = (share) => (share === null ? "" : ` · idle ${percent(share)}`);

// The steps of a lane's bins as an area.
function area(values, most, x, top) {
  const high = LANE - 12;
  const y = (value) => top + high * (1 - Math.min(1, value / most)) + 4;
  const points = values.map((value, k) => `L${x(k).toFixed(1)} ${y(value).toFixed(1)}L${x(k + 1).toFixed(1)} ${y(value).toFixed(1)}`);
  return `M${x(0).toFixed(1)} ${y(0).toFixed(1)}${points.join("")}L${x(values.length).toFixed(1)} ${y(0).toFixed(1)}Z`;
}

// The lanes of a run: [name, words, areas [values, tone]].
function lanesOf(found) {
  const { engine, worker, learner } = found;
  return [
    ["Engines", `${number(mean(engine.tokens_per_s))} tokens/s${idle(engine.idle)}`, [[engine.turns, 0]], "turns under way"],
    ["Workers", `${number(mean(worker.episodes))} episodes at once${idle(worker.idle)}`, [[worker.episodes, 2], [worker.environment, 1]], "episodes under way; of them in their environment"],
    ["Learner", `${number(mean(learner.tokens_per_s))} tokens/s trained${idle(learner.idle)}`, [[learner.busy, 3]], "busy"],
  ];
}

export function runLanes(found, pick) {
  const box = h("div", { class: "lanes" });
  const lanes = lanesOf(found);
  const span = found.until_s - found.since_s;
  const words = lanes.map(([name, told]) => h("div", { class: "fact" }, h("span", {}, name), h("b", {}, told)));
  const draw = (width) => {
    if (width < 140) return;
    const left = width < 500 ? 60 : PAD.left;
    const height = PAD.top + lanes.length * LANE + PAD.bottom;
    const inner = width - left - PAD.right;
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": lanes.map(([name, told]) => `${name}: ${told}`).join("; ") });
    lanes.forEach(([name, , areas, told], k) => {
      const top = PAD.top + k * LANE;
      const most = name === "Learner" ? 1 : largest(areas[0][0]);
      const x = (bin) => left + (inner * bin) / areas[0][0].length;
      svg.append(s("text", { class: "tick lane", x: 0, y: top + LANE / 2 + 2 }, name), s("line", { class: "grid", x1: left, x2: width - PAD.right, y1: top + LANE - 8, y2: top + LANE - 8 }));
      for (const [values, tone] of areas) svg.append(s("path", { class: `area tone${tone}`, d: area(values, most, x, top) }));
      svg.append(s("title", {}, told));
      if (name !== "Learner") svg.append(s("text", { class: "tick", x: left - 6, y: top + 12, "text-anchor": "end" }, number(most)));
    });
    for (const at of ticks(-span, 0, Math.max(2, Math.floor(inner / 90)))) {
      svg.append(s("text", { class: "tick", x: left + inner * (1 + at / span), y: height - 12, "text-anchor": at > -span / 50 ? "end" : "middle" }, at === 0 ? "last" : clock(-at)));
    }
    for (const mark of found.marks) {
      const x = left + (inner * (mark.time_s - found.since_s)) / span;
      const line = s("line", { class: `moment ${mark.kind}`, x1: x, x2: x, y1: PAD.top, y2: height - PAD.bottom }, s("title", {}, `${mark.kind} of step ${mark.step}`));
      line.addEventListener("click", () => { if (mark.step > 0) pick(mark.step); });
      svg.append(line);
    }
    box.replaceChildren(svg);
  };
  const key = (kind, text) => h("span", {}, h("i", { class: `key ${kind}` }), text);
  return [
    h("div", { class: "lane-facts" }, words), sized(box, draw),
    h("div", { class: "legend" }, key("tone0", "turns at engines"), key("tone2", "episodes"), key("tone1", "of them in environments"), key("tone3", "learner busy"), key("moment weights", "weights served"), key("moment checkpoint", "checkpoint")),
  ];
}

// Where an episode's time went: the queue, the engine, its environment.
export function episodeTimes(episode, pick) {
  const parts = [];
  const began = episode.started_s ?? episode.turns[0]?.started_s;
  const add = (kind, from, to, turn) => { if (to > from) parts.push({ kind, from, to, turn }); };
  if (began === undefined || began === null) return h("p", { class: "quiet" }, "Not begun yet");
  add("queue", Math.min(episode.admitted_s, began), began, null);
  let at = began;
  for (const turn of episode.turns) {
    // a fork begins with the turns of another episode, which took their time there
    if (turn.started_s < began) continue;
    add("environment", at, turn.started_s, turn.index);
    add("engine", turn.started_s, turn.started_s + turn.seconds, turn.index);
    at = turn.started_s + turn.seconds;
  }
  if (episode.ended_s) add("environment", at, episode.ended_s, null);
  const sums = { queue: 0, engine: 0, environment: 0 };
  for (const part of parts) sums[part.kind] += part.to - part.from;
  const names = { queue: ["in the buffer, until a worker took it", 5], engine: ["at the engine, its queue included", 0], environment: ["in its environment: tools, boxes", 1] };
  const end = parts.at(-1)?.to ?? began;
  const box = h("div", { class: "times" });
  const draw = (width) => {
    if (width < 60) return;
    const x = (time) => (width * (time - began)) / Math.max(end - began, 1e-9);
    const svg = s("svg", { width, height: 26, viewBox: `0 0 ${width} 26`, role: "img", "aria-label": "its time, by part" });
    for (const part of parts.filter((one) => one.kind !== "queue")) {
      const bar = s("rect", { class: `span tone${names[part.kind][1]}${part.turn === null ? "" : " pick"}`, x: x(part.from), y: part.kind === "engine" ? 2 : 7, width: Math.max(1, x(part.to) - x(part.from)), height: part.kind === "engine" ? 22 : 12 },
        s("title", {}, `${part.turn === null ? "" : `turn ${part.turn}, `}${part.kind}: ${duration(part.to - part.from)}`));
      if (part.turn !== null) bar.addEventListener("click", () => pick(part.turn));
      svg.append(bar);
    }
    box.replaceChildren(svg);
  };
  return [sized(box, draw), h("table", { class: "small" }, h("tbody", {}, Object.entries(sums).map(([kind, seconds]) => h("tr", {}, h("td", {}, h("i", { class: `key tone${names[kind][1]}` }), names[kind][0]), h("td", { class: "num" }, duration(seconds))))))];
}
