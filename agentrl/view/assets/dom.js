// Elements and numbers. A text from a run goes into the page as a text node, here and nowhere else: there is no HTML.

const SVG = "http://www.w3.org/2000/svg";

const there = (child) => child !== null && child !== undefined && child !== false;

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter(there));
  return element;
}

// Puts children in the place of those that are there; nothing is left out where one is null.
export const fresh = (element, ...children) => element.replaceChildren(...children.flat(Infinity).filter(there));
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export const DASH = "–";

// A number in at most four figures: 0.0123, 1.25, 873, 12,345.
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(1).replaceAll("-", "−");
  return (size >= 100 ? value.toFixed(0) : value.toPrecision(digits)).replace("-", "−");
}

export const percent = (value) => (value === null || value === undefined ? DASH : `${(100 * value).toFixed(1)}%`);
export const signed = (value) =>
  value === null || value === undefined ? DASH : `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(value).toFixed(2)}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function ago(time) {
  if (!time) return DASH;
  const seconds = Date.now() / 1000 - time;
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export const link = (href, ...children) => h("a", { href }, ...children);
export const chip = (text, kind = "") => h("span", { class: `chip ${kind}` }, text);
export const card = (title, note, ...children) =>
  h("section", { class: "card" }, h("h2", {}, title, note ? h("span", { class: "note" }, note) : null), ...children);

export const path = (...parts) => `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;

export function stateChip(run) {
  if (run.error) return chip("unreadable", "bad");
  if (run.live && run.paused_s !== null) return chip(`paused for ${duration(run.paused_s)}`, "wait");
  if (run.live) return chip(run.phase && run.phase !== "train" ? run.phase : "training", "go");
  return run.state === "over" ? chip("finished", "done") : chip("stopped", "wait");
}

// The tags of a run, and the first line of its note.
export const notesLine = (run) => (run.tags.length || run.note ? h("div", { class: "said-of" }, run.tags.map((tag) => chip(tag, "tag")), run.note ? h("span", { class: "note" }, run.note.split("\n")[0].slice(0, 160)) : null) : null);

export function outcomeChip(row) {
  if (row.success === true) return chip("solved", "good");
  if (row.success === false) return chip("not solved", "bad");
  return chip(row.state === "finished" ? "ended" : row.state, "");
}

export async function copy(text, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = said; }, 1500);
}
