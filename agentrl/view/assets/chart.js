// Curves and bars in SVG, drawn anew at the width they have. Colours are classes; a text is a text node.

import { fresh, h, number, s } from "./dom.js";

const PAD = { left: 50, right: 12, top: 10, bottom: 34 };
const DOTS = 48; // points up to which each is a dot
const SIGNS = { fault: "▲", alarm: "◆", restart: "↺", checkpoint: "▮", weights: "↑", setting: "●" };

export function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => (high - low) / one <= most);
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + 1e-9 * size; at += 1) found.push(at * size);
  return found;
}

// A tick's number without zeros at its end: 0.6, 0.003, 12,000.
const tick = (value) => {
  const round = Number(value.toPrecision(6));
  return Number.isInteger(round) || Math.abs(round) < 1e-4 ? number(round) : String(round).replace("-", "−");
};

const known = (values) => values.filter((value) => value !== null && value !== undefined);

function bounds(series, fixed) {
  const values = series.flatMap((one) => known([...one.y, ...(one.low ?? []), ...(one.high ?? [])]));
  let low = fixed?.[0] ?? Math.min(...values);
  let high = fixed?.[1] ?? Math.max(...values);
  if (!values.length) return [0, 1];
  if (low === high) { const room = Math.abs(low) || 1; low -= room / 2; high += room / 2; }
  const room = 0.06 * (high - low);
  return [fixed?.[0] ?? (low >= 0 && low - room < 0 ? 0 : low - room), fixed?.[1] ?? high + room];
}

// A running mean in which each earlier value counts for less, or the values themselves.
function smoothed(values, share) {
  if (!share) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = share * sum + value;
    weight = share * weight + 1;
    return sum / weight;
  });
}

function curve(xs, ys, at) {
  let text = "";
  let pen = false;
  xs.forEach((x, k) => {
    if (ys[k] === null || ys[k] === undefined) { pen = false; return; }
    const [a, b] = at(x, ys[k]);
    text += `${pen ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`;
    pen = true;
  });
  return text;
}

// The area between two curves.
function area(xs, lows, highs, at) {
  const there = xs.map((_, k) => k).filter((k) => known([lows[k], highs[k]]).length === 2);
  const back = there.toReversed();
  return curve([...there, ...back].map((k) => xs[k]), [...there.map((k) => highs[k]), ...back.map((k) => lows[k])], at);
}

// The curves of a held-out set by its points: success, and pass@k for the most episodes of a task, with their intervals.
export function heldOut(set, points) {
  const most = Math.max(1, ...points.flatMap((one) => Object.keys(one.pass_at).map(Number)));
  const of = (name, k, value) => ({
    name, dots: true, x: points.map((one) => one.step), y: points.map((one) => value(one) ?? null),
    low: points.map((one) => one.pass_at[k]?.low ?? null), high: points.map((one) => one.pass_at[k]?.high ?? null),
  });
  return [of(set, 1, (one) => one.success), ...(most > 1 ? [of(`${set}, pass@${most}`, most, (one) => one.pass_at[most]?.value)] : [])];
}

// Lines by optimizer step. `options`: label (of the numbers), fixed ([low, high]), marks ([{step, kind, text}], checkpoints and weights as ticks at the axis),
// pick (called with a step), smooth (0 to 1), height. Series: {name, x, y, tone (0 to 7), dots, low and high (the ends of
// y's interval)}.
export function lineChart(options) {
  const box = h("div", { class: "chart", tabindex: "0", role: "img" });
  const tip = h("div", { class: "tip", hidden: true });
  let series = [];
  let width = 0;
  let marks = options.marks ?? [];
  let cursor = null;

  function draw() {
    if (width < 100) return;
    const height = options.height ?? 190;
    const drawn = series.filter((one) => known(one.y).length);
    const xs = [...new Set([...drawn.flatMap((one) => one.x)])].sort((a, b) => a - b);
    box.setAttribute("aria-label", `${options.title}: ${drawn.map((one) => `${one.name} ${number(known(one.y).at(-1))}`).join(", ")}`);
    if (!drawn.length) {
      box.replaceChildren(h("p", { class: "quiet nothing" }, options.nothing ?? "Nothing measured yet"), tip);
      return;
    }
    const [low, high] = bounds(drawn, options.fixed);
    const first = xs[0];
    const last = Math.max(xs.at(-1), first + 1);
    const inner = { w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
    const px = (x) => PAD.left + ((x - first) / (last - first)) * inner.w;
    const py = (y) => PAD.top + (1 - (y - low) / (high - low)) * inner.h;
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const y of ticks(low, high, 5)) {
      svg.append(
        s("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: py(y), y2: py(y) }),
        s("text", { class: "tick", x: PAD.left - 7, y: py(y) + 3.5, "text-anchor": "end" }, tick(y)),
      );
    }
    for (const x of ticks(first, last, Math.max(2, Math.floor(inner.w / 70)))) {
      if (!Number.isInteger(x)) continue;
      svg.append(s("text", { class: "tick", x: px(x), y: height - PAD.bottom + 15, "text-anchor": "middle" }, number(x)));
    }
    svg.append(
      s("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: height - PAD.bottom, y2: height - PAD.bottom }),
      s("text", { class: "label", x: width - PAD.right, y: height - 4, "text-anchor": "end" }, options.across ?? "optimizer step"),
      s("text", { class: "label", x: 0, y: height - 4 }, options.label ?? ""),
    );
    for (const one of drawn.filter(({ low: ends }) => ends)) {
      svg.append(s("path", { class: `band tone${one.tone ?? 0}`, d: area(one.x, one.low, one.high, (a, b) => [px(a), py(b)]) }));
      one.x.forEach((x, k) => {
        if (known([one.low[k], one.high[k]]).length === 2) svg.append(s("line", { class: `whisker tone${one.tone ?? 0}`, x1: px(x), x2: px(x), y1: py(one.low[k]), y2: py(one.high[k]) }));
      });
    }
    for (const one of drawn) {
      const few = one.dots || known(one.y).length <= DOTS;
      const smooth = few && one.dots ? 0 : options.smooth ?? 0;
      const soft = smoothed(one.y, smooth);
      if (smooth) svg.append(s("path", { class: `line raw tone${one.tone ?? 0}`, d: curve(one.x, one.y, (a, b) => [px(a), py(b)]) }));
      svg.append(s("path", { class: `line tone${one.tone ?? 0}`, d: curve(one.x, soft, (a, b) => [px(a), py(b)]) }));
      if (few) {
        one.x.forEach((x, k) => {
          if (one.y[k] !== null && one.y[k] !== undefined) {
            svg.append(s("circle", { class: `dot tone${one.tone ?? 0}`, cx: px(x), cy: py(soft[k]), r: one.dots ? 3.2 : 2 }));
          }
        });
      }
    }
    for (const mark of marks) {
      if (mark.step < first || mark.step > last) continue;
      if (mark.kind === "checkpoint" || mark.kind === "weights") {
        const [from, to] = mark.kind === "checkpoint" ? [0, 5] : [-4, 0];
        if (mark.kind === "checkpoint" || inner.w / (last - first) >= 4) svg.append(s("line", { class: mark.kind, x1: px(mark.step), x2: px(mark.step), y1: height - PAD.bottom + from, y2: height - PAD.bottom + to }));
        continue;
      }
      svg.append(
        s("line", { class: `mark ${mark.kind}`, x1: px(mark.step), x2: px(mark.step), y1: PAD.top, y2: height - PAD.bottom }),
        s("text", { class: `sign ${mark.kind}`, x: px(mark.step), y: PAD.top + 2, "text-anchor": "middle" }, SIGNS[mark.kind] ?? ""),
      );
    }
    const line = s("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" });
    svg.append(line);
    box.replaceChildren(svg, tip);

    function point(k) {
      cursor = k;
      const x = xs[k];
      line.setAttribute("x1", px(x));
      line.setAttribute("x2", px(x));
      line.setAttribute("visibility", "visible");
      const rows = drawn.map((one) => {
        const at = one.x.indexOf(x);
        return at < 0 || one.y[at] === null ? null : h("div", {}, h("i", { class: `key tone${one.tone ?? 0}` }), `${one.name} `, h("b", {}, number(one.y[at])), known([one.low?.[at]]).length ? ` (${number(one.low[at])} to ${number(one.high[at])})` : null);
      });
      const here = marks.filter((mark) => mark.step === x).slice(0, 3).map((mark) => h("div", { class: "told" }, `${SIGNS[mark.kind] ?? ""} ${mark.text}`));
      tip.replaceChildren(h("div", { class: "at" }, `step ${number(x)}`), ...rows.filter(Boolean), ...here);
      tip.hidden = false;
      const left = px(x) + 12 + tip.offsetWidth > width ? px(x) - 12 - tip.offsetWidth : px(x) + 12;
      tip.style.left = `${Math.max(0, left)}px`;
    }
    function leave() { tip.hidden = true; line.setAttribute("visibility", "hidden"); cursor = null; }
    svg.addEventListener("pointermove", (event) => {
      const x = first + ((event.clientX - svg.getBoundingClientRect().left - PAD.left) / inner.w) * (last - first);
      point(xs.reduce((best, one, k) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? k : best), 0));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("click", () => { if (cursor !== null && xs[cursor] > 0) options.pick?.(xs[cursor]); });
    box.onblur = leave;
    box.onkeydown = (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      if (event.key in moves) {
        event.preventDefault();
        point(Math.min(xs.length - 1, Math.max(0, (cursor ?? (moves[event.key] > 0 ? -1 : xs.length)) + moves[event.key])));
      } else if (event.key === "Enter" && cursor !== null && xs[cursor] > 0) options.pick?.(xs[cursor]);
    };
  }

  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now !== width) { width = now; draw(); }
  }).observe(box);
  const legend = h("div", { class: "legend" });
  const whole = h("section", { class: "card plot" }, h("h2", {}, options.title, options.note ? h("span", { class: "note" }, options.note) : null, legend), box);
  whole.update = (given, news) => {
    series = given;
    marks = news ?? marks;
    const named = given.length > 1 || options.named ? given : [];
    const banded = given.some((one) => known(one.low ?? []).length);
    fresh(legend, named.map((one) => h("span", {}, h("i", { class: `key tone${one.tone ?? 0}` }), one.name)), banded ? h("span", {}, h("i", { class: "key band" }), "95% interval") : null);
    draw();
  };
  whole.set = (changes) => { Object.assign(options, changes); draw(); };
  return whole;
}

// A small curve without axes.
export function sparkline(values, width = 120, height = 28) {
  const there = known(values);
  const svg = s("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": there.length ? `from ${number(there[0])} to ${number(there.at(-1))}` : "no values yet" });
  if (there.length < 2) return svg;
  const low = Math.min(...there);
  const high = Math.max(...there);
  const at = (k, value) => [2 + (k / (values.length - 1)) * (width - 6), 3 + (1 - (high > low ? (value - low) / (high - low) : 0.5)) * (height - 6)];
  const xs = values.map((_, k) => k);
  const [x, y] = at(values.findLastIndex((value) => value !== null), there.at(-1));
  svg.append(s("path", { class: "line tone0", d: curve(xs, values, at) }), s("circle", { class: "dot tone0", cx: x, cy: y, r: 2.2 }));
  return svg;
}

// Bars side by side. Bars: {label, n, more (drawn on top, in another tone), chosen, pick, told}.
export function bars(given, { height = 120, across = "", up = "" } = {}) {
  const box = h("div", { class: "bars" });
  const draw = (width) => {
    if (width < 100) return;
    const pad = { left: 44, right: 4, top: 14, bottom: 32 };
    const inner = { w: width - pad.left - pad.right, h: height - pad.top - pad.bottom };
    const most = Math.max(1, ...given.map((bar) => bar.n + (bar.more ?? 0)));
    const slot = inner.w / Math.max(1, given.length);
    const wide = Math.min(56, Math.max(3, slot - 4));
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    for (const y of ticks(0, most, 3)) {
      const py = pad.top + (1 - y / most) * inner.h;
      svg.append(s("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: py, y2: py }), s("text", { class: "tick", x: pad.left - 6, y: py + 3.5, "text-anchor": "end" }, tick(y)));
    }
    const skip = Math.max(1, Math.ceil(44 / slot));
    given.forEach((bar, k) => {
      const x = pad.left + slot * k + (slot - wide) / 2;
      const tall = (inner.h * bar.n) / most;
      const more = (inner.h * (bar.more ?? 0)) / most;
      const floor = pad.top + inner.h;
      const group = s("g", bar.pick ? { class: `bar pick${bar.chosen ? " chosen" : ""}`, tabindex: "0", role: "button", "aria-pressed": String(Boolean(bar.chosen)), "aria-label": bar.told ?? `${bar.label}: ${bar.n}` } : { class: "bar" });
      group.append(s("title", {}, bar.told ?? `${bar.label}: ${number(bar.n)}`));
      if (bar.pick) group.append(s("rect", { class: "catch", x: pad.left + slot * k, y: pad.top, width: slot, height: inner.h }));
      group.append(s("rect", { class: "fill", x, y: floor - Math.max(tall, bar.n ? 2 : 0), width: wide, height: Math.max(tall, bar.n ? 2 : 0), rx: 2 }));
      if (more) group.append(s("rect", { class: "fill more", x, y: floor - tall - more, width: wide, height: more, rx: 2 }));
      if (k % skip === 0 || k === given.length - 1) group.append(s("text", { class: "tick", x: x + wide / 2, y: floor + 14, "text-anchor": "middle" }, bar.label));
      if (bar.pick) {
        group.addEventListener("click", bar.pick);
        group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); bar.pick(); } });
      }
      svg.append(group);
    });
    svg.append(s("text", { class: "label", x: width - pad.right, y: height - 2, "text-anchor": "end" }, across), s("text", { class: "label", x: 0, y: height - 2 }, up));
    box.replaceChildren(svg);
  };
  new ResizeObserver(([entry]) => draw(Math.floor(entry.contentRect.width))).observe(box);
  return box;
}
