// What an edit changes, line by line, as text. A model chose every path and every line: they are text nodes.

import { h, number } from "./dom.js";

const MOST = 1500; // lines of a side that are compared; beyond, all old lines go and all new ones come
const AROUND = 3; // equal lines shown beside a change

// The lines of a side; a last line without its end counts, a last empty one does not.
const split = (text) => (text === "" ? [] : text.replace(/\n$/, "").split("\n"));

// [sign, line] of each line: "-" goes, "+" comes, " " stays. The longest common subsequence, of what differs.
export function diffLines(old, fresh) {
  const [a, b] = [split(old), split(fresh)];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < Math.min(a.length, b.length) - head && a.at(-1 - tail) === b.at(-1 - tail)) tail += 1;
  const [from, to] = [a.slice(head, a.length - tail), b.slice(head, b.length - tail)];
  const same = (lines) => lines.map((line) => [" ", line]);
  return [...same(a.slice(0, head)), ...between(from, to), ...same(a.slice(a.length - tail))];
}

function between(from, to) {
  const all = () => [...from.map((line) => ["-", line]), ...to.map((line) => ["+", line])];
  if (from.length > MOST || to.length > MOST) return all();
  const width = to.length + 1;
  const common = new Uint16Array((from.length + 1) * width); // of from[i…] and to[k…]
  for (let i = from.length - 1; i >= 0; i -= 1) {
    for (let k = to.length - 1; k >= 0; k -= 1) {
      common[i * width + k] = from[i] === to[k] ? common[(i + 1) * width + k + 1] + 1 : Math.max(common[(i + 1) * width + k], common[i * width + k + 1]);
    }
  }
  const lines = [];
  let [i, k] = [0, 0];
  while (i < from.length && k < to.length) {
    if (from[i] === to[k]) { lines.push([" ", from[i]]); i += 1; k += 1; }
    else if (common[(i + 1) * width + k] >= common[i * width + k + 1]) { lines.push(["-", from[i]]); i += 1; }
    else { lines.push(["+", to[k]]); k += 1; }
  }
  return [...lines, ...from.slice(i).map((line) => ["-", line]), ...to.slice(k).map((line) => ["+", line])];
}

export const isPatch = (text) => /^(@@ -\d|diff --git |\*\*\* Begin Patch)/m.test(text);

// The lines of a patch by their signs; headers are "@".
const patchLines = (text) => split(text).map((line) => {
  if (/^(@@|diff |index |--- |\+\+\+ |\*\*\*)/.test(line)) return ["@", line];
  return /^[-+]/.test(line) ? [line[0], line.slice(1)] : [" ", line.replace(/^ /, "")];
});

const NAMES = { "+": "added", "-": "removed", "@": "place", " ": "same" };

function shown(lines) {
  const near = lines.map((_, k) => lines.slice(Math.max(0, k - AROUND), k + AROUND + 1).some(([sign]) => sign !== " "));
  const rows = [];
  let left = 0;
  const skip = () => { if (left) rows.push(h("div", { class: "diff-same cut" }, `… ${number(left)} equal lines`)); left = 0; };
  lines.forEach(([sign, line], k) => {
    if (!near[k]) { left += 1; return; }
    skip();
    rows.push(h("div", { class: `diff-${NAMES[sign]}` }, sign === "@" ? line : `${sign} ${line}`));
  });
  skip();
  return h("pre", { class: "diff" }, rows);
}

// A patch in colours.
export const patchBlock = (text) => shown(patchLines(text));

// One edit of a tool call: the file that it names, and what it changes there.
export function editBlock(edit) {
  const lines = edit.patch !== undefined ? patchLines(edit.patch) : edit.old === null ? split(edit.new).map((line) => ["+", line]) : diffLines(edit.old, edit.new);
  const count = (sign) => number(lines.filter(([one]) => one === sign).length);
  const where = [edit.path, edit.place === null ? null : `line ${edit.place}`].filter(Boolean).join(", ");
  return h("details", { class: "edit", open: lines.length <= 60 },
    h("summary", {}, `${edit.name} `, where ? h("code", {}, where) : null, h("span", { class: "note" }, ` +${count("+")} −${count("-")}`)),
    shown(lines));
}
