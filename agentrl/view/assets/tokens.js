// The tokens of a turn, coloured by a number of each: what it was sampled with, and what a step did to it.

import { h, number } from "./dom.js";

const PROBABILITY = [[0.9, "≥ 90%"], [0.5, "50–90%"], [0.1, "10–50%"], [0.01, "1–10%"], [-1, "< 1%"]];
const ENTROPY = [[0.1, "< 0.1"], [0.5, "0.1–0.5"], [1, "0.5–1"], [2, "1–2"], [Infinity, "≥ 2 nats"]];
const RATIO = [[0.8, "< 0.8"], [0.95, "0.8–0.95"], [1.05, "0.95–1.05"], [1.25, "1.05–1.25"], [Infinity, "≥ 1.25"]];
const TOLD = {
  ratio: "learner's probability over the engine's, before the step",
  entropy: "of the learner's distribution, before the step",
  advantage: "as the step trained it",
  gradient: "of the loss by the log-prob: below 0 it was made likelier",
  loss: "its part of the loss",
};

const dumped = (turns) => [...new Set(turns.flatMap((turn) => Object.keys(turn.columns)))];
const versionsOf = (turns) => [...new Set(turns.flatMap((turn) => turn.versions))].sort((a, b) => a - b);

// Ways to show the tokens: [name, words for its button].
export const modesOf = (turns) => [
  ["", "plain text"], ["logprob", "by probability"], ["version", "by weights"],
  ...dumped(turns).map((name) => [name, `by ${name.replaceAll("_", " ")}`]), ["raw", "raw tokens"],
];

const most = (turns, name) => Math.max(1e-12, ...turns.flatMap((turn) => (turn.columns[name] ?? []).map((value) => Math.abs(value ?? 0))));
const below = (bins, value) => bins.findIndex(([limit]) => value < limit);

// Gives each token its class, for a way to show them.
function painter(mode, turns) {
  if (mode === "version") {
    const order = versionsOf(turns);
    return (turn, k) => `tone${order.indexOf(turn.tokens[k].version) % 8}`;
  }
  if (mode === "logprob") return (turn, k) => `shade${PROBABILITY.findIndex(([least]) => Math.exp(turn.tokens[k].logprob) >= least)}`;
  if (mode === "raw") return () => "raw";
  const largest = most(turns, mode);
  return (turn, k) => {
    const value = turn.columns[mode]?.[k];
    if (value === null || value === undefined) return "unknown";
    if (mode === "entropy") return `shade${below(ENTROPY, value)}`;
    if (mode === "ratio") return `level${below(RATIO, value)}`;
    return `level${Math.round(2 + 2 * value / largest)}`;
  };
}

function titleOf(turn, k) {
  const { id, logprob, version } = turn.tokens[k];
  const more = Object.entries(turn.columns).filter(([, values]) => values[k] !== null && values[k] !== undefined).map(([name, values]) => ` · ${name} ${number(values[k])}`);
  return `token ${id} · log-prob ${logprob.toFixed(3)} (${(100 * Math.exp(logprob)).toFixed(1)}%) · weights ${version}${more.join("")}`;
}

// A turn's tokens as spans.
export function tokenSpans(turn, turns, mode) {
  const paint = painter(mode, turns);
  return turn.tokens.map(({ id, text }, k) =>
    h("span", { class: `token ${paint(turn, k)}`, title: titleOf(turn, k) }, mode === "raw" ? `${text ?? ""}⟨${id}⟩` : text ?? `⟨${id}⟩`));
}

// What the colours mean.
export function legendOf(mode, turns, steps) {
  const row = (entries, words) => h("div", { class: "legend" }, entries.map(([kind, text]) => h("span", {}, h("i", { class: `swatch ${kind}` }), text)), words ? h("span", { class: "note" }, words) : null);
  const binned = (kind, bins, words) => row(bins.map(([, text], k) => [`${kind}${k}`, text]), words);
  if (mode === "" || mode === "raw") return null;
  if (mode === "logprob") return binned("shade", PROBABILITY, "probability when it was sampled");
  if (mode === "version") return row(versionsOf(turns).map((version, k) => [`tone${k % 8}`, `weights ${version}${version in steps ? `, of step ${steps[version]}` : ""}`]));
  if (mode === "entropy") return binned("shade", ENTROPY, TOLD.entropy);
  if (mode === "ratio") return binned("level", RATIO, TOLD.ratio);
  const largest = most(turns, mode);
  return row([-1, -0.5, 0, 0.5, 1].map((part, k) => [`level${k}`, number(part * largest)]), TOLD[mode]);
}
