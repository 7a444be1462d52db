// One episode, turn by turn: what was asked, written and answered, what each turn earned, what each token cost.

import { get } from "./api.js";
import { chip, copy, duration, fresh, h, link, number, outcomeChip, path, signed } from "./dom.js";
import { lastList } from "./episodes_page.js";

export const name = "episode";
const MODES = [["", "plain text"], ["logprob", "by probability"], ["version", "by weights"], ["raw", "raw tokens"]];
const SHADES = [[0.9, "≥ 90%"], [0.5, "50–90%"], [0.1, "10–50%"], [0.01, "1–10%"], [0, "< 1%"]];
const LONG = 700; // characters from which an observation is folded

const shade = (logprob) => SHADES.findIndex(([least]) => Math.exp(logprob) >= least);

export function cutText(part, whole) {
  const missing = part.length - part.text.length;
  return [part.text, missing > 0 ? h("span", { class: "cut" }, ` … ${number(missing)} more characters `, whole ? h("button", { type: "button", class: "button", onclick: whole }, "Show all") : null) : null];
}

export async function show({ root, id, number: episode, query, signal }) {
  let mode = query.get("color") ?? "";
  let all = false;
  let data = null;
  const head = h("div", {});
  const talk = h("div", { class: "talk" });
  const aside = h("aside", {});
  root.append(head, h("div", { class: "grid episode-grid" }, talk, aside));

  const here = (changes) => {
    const now = new URLSearchParams(location.hash.split("?")[1] ?? "");
    for (const [key, value] of Object.entries(changes)) if (value === "") now.delete(key); else now.set(key, value);
    return path("run", id, "episode", episode) + (now.size ? `?${now}` : "");
  };
  const whole = () => { all = true; refresh(); };
  const versions = () => [...new Set(data.turns.flatMap((turn) => turn.tokens.map((token) => token.version)))].sort((a, b) => a - b);

  function tokens(turn) {
    const order = versions();
    const shown = turn.tokens.map((token) => {
      const kind = mode === "version" ? `tone${order.indexOf(token.version) % 8}` : mode === "logprob" ? `shade${shade(token.logprob)}` : "raw";
      const title = `token ${token.id} · log-prob ${token.logprob.toFixed(3)} (${(100 * Math.exp(token.logprob)).toFixed(1)}%) · weights ${token.version}`;
      return h("span", { class: `token ${kind}`, title }, mode === "raw" ? `${token.text ?? ""}⟨${token.id}⟩` : token.text ?? `⟨${token.id}⟩`);
    });
    return turn.n_tokens > turn.tokens.length ? [...shown, h("span", { class: "cut" }, ` … ${number(turn.n_tokens - turn.tokens.length)} more tokens `, h("button", { type: "button", class: "button", onclick: whole }, "Show all"))] : shown;
  }

  function message(one, folded) {
    const calls = one.calls.map((call) => h("details", { open: true }, h("summary", {}, `calls ${call.name}`), h("pre", {}, call.arguments)));
    const body = [h("pre", {}, cutText(one.content, whole)), calls];
    const size = one.content.length > LONG ? ` · ${number(one.content.length)} characters` : "";
    const fold = folded ?? one.content.length > LONG;
    return h("details", { class: `message ${one.role === "assistant" ? "assistant" : one.role === "system" ? "system" : one.role === "user" ? "user" : "tool"}`, open: !fold }, h("summary", {}, h("b", {}, one.role), h("span", { class: "note" }, size)), ...body);
  }

  function turnBlock(turn) {
    const earned = Object.entries(turn.rewards).filter(([source, value]) => value || source !== "env");
    const weights = [...new Set(turn.tokens.map((token) => token.version))];
    const facts = [
      `${number(turn.n_tokens)} tokens`, duration(turn.seconds),
      weights.length ? `weights ${weights[0]}${weights.length > 1 ? `–${weights.at(-1)}` : ""}` : null,
      turn.finish !== "stop" ? `ended by ${turn.finish}` : null, turn.learns ? null : "given policy",
    ].filter(Boolean);
    return h("article", { class: "turn", id: `turn-${turn.index}` },
      h("header", {},
        h("a", { class: "anchor", href: here({ turn: turn.index }), title: "a link to this turn" }, `Turn ${turn.index}`),
        turn.role !== "policy" ? chip(turn.role) : null,
        h("span", { class: "note" }, facts.join(" · ")), h("span", { class: "grow" }),
        earned.map(([source, value]) => h("span", { class: `chip ${value > 0 ? "good" : value < 0 ? "bad" : ""}` }, `${source} ${signed(value)}`)),
        turn.advantage === null ? null : h("span", { class: `chip ${turn.advantage > 0 ? "good" : turn.advantage < 0 ? "bad" : ""}`, title: "over the other members of its group, before any scale" }, `advantage ${signed(turn.advantage)}`)),
      h("div", { class: "message assistant said" }, h("pre", {}, mode && turn.tokens.length ? tokens(turn) : cutText(turn.text, whole))),
      turn.observation === null ? h("p", { class: "quiet" }, "Not answered yet") : turn.observation.map((one) => message(one)),
    );
  }

  function legend() {
    if (mode === "logprob") return h("div", { class: "legend" }, SHADES.map(([, text], k) => h("span", {}, h("i", { class: `swatch shade${k}` }), text)), h("span", { class: "note" }, "probability when it was sampled"));
    if (mode === "version") return h("div", { class: "legend" }, versions().map((version, k) => h("span", {}, h("i", { class: `swatch tone${k % 8}` }), `weights ${version}`)));
    return null;
  }

  function side() {
    const noTokens = data.turns.length && data.turns.every((turn) => !turn.tokens.length);
    const modes = h("div", { class: "modes", role: "group", "aria-label": "How tokens are shown" }, MODES.map(([value, text]) => h("button", { type: "button", "aria-pressed": String(mode === value), onclick: () => color(value) }, text)));
    const most = Math.max(...data.siblings.map((one) => Math.abs(one.advantage ?? 0)), 1e-9);
    const members = h("table", { class: "small" }, h("thead", {}, h("tr", {}, h("th", {}, "Member"), h("th", { class: "num" }, "Outcome"), h("th", { class: "num" }, "Advantage"), h("th", { class: "num" }, "Turns"), h("th", { class: "num" }, "Tokens"))),
      h("tbody", {}, data.siblings.map((one) => h("tr", { class: one.id === data.id ? "chosen" : "" }, h("td", {}, link(path("run", id, "episode", one.id), number(one.id))), h("td", { class: "num" }, number(one.outcome)),
        h("td", { class: `num ${one.advantage > 0 ? "up" : one.advantage < 0 ? "down" : ""}` }, one.advantage === null ? "–" : signed(one.advantage), h("progress", { max: most, value: Math.abs(one.advantage ?? 0), class: one.advantage < 0 ? "minus" : "", "aria-hidden": "true" })), h("td", { class: "num" }, number(one.n_turns)), h("td", { class: "num" }, number(one.tokens))))));
    const sums = {};
    for (const turn of data.turns) for (const [source, value] of Object.entries(turn.rewards)) sums[source] = (sums[source] ?? 0) + value;
    const chat = () => [...data.start, ...data.turns.flatMap((turn) => [{ role: turn.role === "policy" ? "assistant" : turn.role, content: turn.text }, ...(turn.observation ?? [])])].map((one) => ({ role: one.role, content: one.content.text }));
    const button = (text, make) => h("button", { type: "button", class: "button", onclick: (event) => copy(JSON.stringify(make(), null, 2), event.target) }, text);
    fresh(aside, 
      h("section", { class: "card" }, h("h3", {}, "Tokens"), modes, legend(), noTokens ? h("p", { class: "note" }, "Token arrays were dropped by the run's retention (buffer.keep_steps).") : null),
      h("section", { class: "card" }, h("h3", {}, "Rewards"), h("table", { class: "small" }, h("tbody", {},
        Object.entries(sums).map(([source, value]) => h("tr", {}, h("td", {}, source === "env" ? "turns, by the environment" : `turns, by ${source}`), h("td", { class: "num" }, signed(value)))),
        h("tr", {}, h("td", {}, "outcome"), h("td", { class: "num" }, number(data.outcome))),
        Object.entries(data.outcomes).map(([role, value]) => h("tr", {}, h("td", {}, `outcome of ${role}`), h("td", { class: "num" }, number(value))))))),
      h("section", { class: "card" }, h("h3", {}, link(path("run", id, "group", data.group), `Group ${number(data.group)}`), h("span", { class: "note" }, data.group_state)), h("div", { class: "scroll" }, members)),
      data.restarts.length ? h("section", { class: "card" }, h("h3", {}, "Earlier trials"), data.restarts.map((one) => h("p", {}, `Trial ${one.trial}, ${one.turns} turns: ${one.reason}`))) : null,
      h("section", { class: "card" }, h("h3", {}, "Copy"), h("div", { class: "row" }, button("as JSON", () => data), button("as chat", chat))),
    );
  }

  function draw() {
    fresh(head, 
      h("div", { class: "title" }, h("h1", {}, `Episode ${number(data.id)}`), outcomeChip(data), data.late ? chip("late", "wait") : null, h("span", { class: "grow" }), steps()),
      h("p", { class: "note" }, [
        `${data.env}, seed ${data.seed}`, `${data.purpose}`, (data.stop_reason ?? data.state).replaceAll("_", " "), `${number(data.turns.length)} turns, ${number(data.tokens)} tokens`, duration(data.seconds),
        data.dropped ? `left untrained: ${data.dropped.replaceAll("_", " ")}` : null,
      ].filter(Boolean).join(" · "), data.step ? [" · ", link(path("run", id, "step", data.step), `trained in step ${number(data.step)}`)] : null),
      data.detail ? h("p", { class: "alarm mild" }, data.detail) : "",
    );
    fresh(talk, ...data.start.map((one) => message(one, one.role === "system" && one.content.length > LONG)), ...data.turns.map(turnBlock), data.turns.length ? "" : h("p", { class: "quiet" }, "No turn yet"));
    side();
  }

  const list = () => (lastList.run === id && lastList.ids.includes(data.id) ? lastList.ids : data.siblings.map((one) => one.id));
  function move(by) {
    const ids = list();
    const next = ids[ids.indexOf(data.id) + by];
    if (next !== undefined) location.hash = path("run", id, "episode", next) + (mode ? `?color=${mode}` : "");
  }
  function steps() {
    const ids = list();
    const at = ids.indexOf(data.id);
    return h("div", { class: "row" },
      h("button", { type: "button", class: "button", disabled: at <= 0, onclick: () => move(-1), title: "k" }, "← Previous"),
      h("button", { type: "button", class: "button", disabled: at + 1 >= ids.length, onclick: () => move(1), title: "j" }, "Next →"));
  }
  function color(value) {
    mode = value;
    history.replaceState(null, "", here({ color: value }));
    draw();
  }
  async function refresh() {
    const news = await get(["runs", id, "episodes", episode], all ? { whole: "yes" } : {}, signal);
    // A finished episode does not change: what a reader unfolded stays as it is.
    if (data && !all && data.stop_reason !== null && data.step === news.step && data.siblings.length === news.siblings.length) return;
    data = { ...news, turnsCount: news.turns.length };
    draw();
  }

  await refresh();
  const turns = () => [...talk.querySelectorAll(".turn")];
  function jump(by) {
    const found = turns();
    const at = found.findIndex((one) => one.getBoundingClientRect().top > 70);
    const next = by > 0 ? found.find((one) => one.getBoundingClientRect().top > 90) : found[(at < 0 ? found.length : at) - 1 - (at > 0 && found[at - 1].getBoundingClientRect().top > 40 ? 1 : 0)];
    (next ?? (by > 0 ? null : head))?.scrollIntoView({ block: "start" });
  }
  const cycle = () => color(MODES[(MODES.findIndex(([value]) => value === mode) + 1) % MODES.length][0]);
  return {
    title: `Episode ${episode}`,
    refresh,
    focus: () => {
      const turn = query.get("turn");
      const found = turn === null ? null : talk.querySelector(`#turn-${CSS.escape(turn)}`);
      if (!found) return false;
      found.classList.add("linked");
      found.scrollIntoView({ block: "start" });
      return true;
    },
    keys: { j: () => move(1), k: () => move(-1), n: () => jump(1), p: () => jump(-1), c: cycle, u: () => { location.hash = lastList.address ?? path("run", id, "episodes"); } },
    told: { "j k": "next, previous episode", "n p": "next, previous turn", c: "colour tokens otherwise", u: "back to the list" },
  };
}
