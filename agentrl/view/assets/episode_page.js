// One episode, turn by turn: what was asked, written and answered, what each turn earned, what each token cost.

import { get, imageUrl } from "./api.js";
import { chatOf, testCaseOf } from "./copies.js";
import { editBlock, isPatch, patchBlock } from "./diff.js";
import { chip, copy, duration, fresh, h, link, number, outcomeChip, path, signed } from "./dom.js";
import { lastList } from "./episodes_page.js";
import { episodeTimes } from "./lanes.js";
import { legendOf, modesOf, tokenSpans } from "./tokens.js";

export const name = "episode";
const LONG = 700; // characters from which an observation is folded

export function cutText(part, whole) {
  const missing = part.length - part.text.length;
  return [part.text, missing > 0 ? h("span", { class: "cut" }, ` … ${number(missing)} more characters `, whole ? h("button", { type: "button", class: "button", onclick: whole }, "Show all") : null) : null];
}

// The images of a message. Bytes that a browser cannot show are named, and nothing else happens.
export const pictures = (run, images) => images.map((image) => {
  const size = `${image.width} × ${image.height} pixels`;
  const gone = () => shown.replaceWith(h("p", { class: "quiet" }, `An image of ${size} that cannot be shown`));
  const shown = h("img", { class: "picture", alt: `Image of ${size}`, title: size, onload: () => URL.revokeObjectURL(shown.src), onerror: gone });
  imageUrl(run, image).then((url) => { shown.src = url; }, gone);
  return shown;
});

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
  const modes = () => modesOf(data.turns);

  function tokens(turn) {
    const shown = tokenSpans(turn, data.turns, mode);
    return turn.n_tokens > turn.tokens.length ? [...shown, h("span", { class: "cut" }, ` … ${number(turn.n_tokens - turn.tokens.length)} more tokens `, h("button", { type: "button", class: "button", onclick: whole }, "Show all"))] : shown;
  }

  function message(one, folded) {
    const calls = one.calls.map((call) => h("details", { open: true }, h("summary", {}, `calls ${call.name}`), h("pre", {}, call.arguments)));
    const patch = one.content.length === one.content.text.length && isPatch(one.content.text);
    const body = [patch ? patchBlock(one.content.text) : h("pre", {}, cutText(one.content, whole)), pictures(id, one.images), calls];
    const size = one.content.length > LONG ? ` · ${number(one.content.length)} characters` : "";
    const fold = folded ?? one.content.length > LONG;
    return h("details", { class: `message ${one.role === "assistant" ? "assistant" : one.role === "system" ? "system" : one.role === "user" ? "user" : "tool"}`, open: !fold }, h("summary", {}, h("b", {}, one.role), h("span", { class: "note" }, size)), ...body);
  }

  function turnBlock(turn) {
    const earned = Object.entries(turn.rewards).filter(([source, value]) => value || source !== "env");
    const [oldest, newest] = [turn.versions[0], turn.versions.at(-1)];
    const made = data.weight_steps[newest];
    const facts = [
      `${number(turn.n_tokens)} tokens`, duration(turn.seconds),
      turn.versions.length ? `weights ${oldest}${newest === oldest ? "" : `–${newest}`}${made === undefined ? "" : ` (of step ${made})`}` : null,
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
      Object.entries(turn.reasons).map(([source, reason]) => h("details", { class: "message tool", open: true }, h("summary", {}, h("b", {}, source), h("span", { class: "note" }, ` ${signed(turn.rewards[source])}, because`)), h("pre", {}, cutText(reason, whole)))),
      turn.edits.map(editBlock),
      turn.observation === null ? h("p", { class: "quiet" }, "Not answered yet") : turn.observation.map((one) => message(one)),
    );
  }

  // The episode that all its relatives come from, and what was forked from each.
  function familyTree() {
    const one = (episode) => (episode === data.id ? h("b", { "aria-current": "true" }, `episode ${episode}`) : link(path("run", id, "episode", episode), `episode ${episode}`));
    const branch = (episode) => {
      const forks = data.family.filter((fork) => fork.of === episode);
      return h("li", {}, one(episode), forks.length ? h("ul", {}, forks.map((fork) => h("li", {}, `from turn ${fork.turn}: `, link(path("run", id, "group", fork.group), `group ${fork.group}`), h("ul", {}, fork.members.map(branch))))) : null);
    };
    return h("ul", { class: "tree" }, branch(data.family[0].of));
  }

  const earlier = (one) => h("details", {}, h("summary", {}, `Trial ${one.trial}, ${number(one.turns.length)} turns`), h("p", { class: "note" }, one.reason), one.turns.map((turn) => h("div", { class: "message assistant" }, h("div", { class: "note" }, `Turn ${turn.index}`), h("pre", {}, cutText(turn.text)))));

  function side() {
    const noTokens = data.turns.length && data.turns.every((turn) => !turn.tokens.length);
    const choices = h("div", { class: "modes", role: "group", "aria-label": "How tokens are shown" }, modes().map(([value, text]) => h("button", { type: "button", "aria-pressed": String(mode === value), onclick: () => color(value) }, text)));
    const most = Math.max(...data.siblings.map((one) => Math.abs(one.advantage ?? 0)), 1e-9);
    const members = h("table", { class: "small" }, h("thead", {}, h("tr", {}, h("th", {}, "Member"), h("th", { class: "num" }, "Outcome"), h("th", { class: "num" }, "Advantage"), h("th", { class: "num" }, "Turns"), h("th", { class: "num" }, "Tokens"))),
      h("tbody", {}, data.siblings.map((one) => h("tr", { class: one.id === data.id ? "chosen" : "" }, h("td", {}, link(path("run", id, "episode", one.id), String(one.id))), h("td", { class: "num" }, number(one.outcome)),
        h("td", { class: `num ${one.advantage > 0 ? "up" : one.advantage < 0 ? "down" : ""}` }, one.advantage === null ? "–" : signed(one.advantage), h("progress", { max: most, value: Math.abs(one.advantage ?? 0), class: one.advantage < 0 ? "minus" : "", "aria-hidden": "true" })), h("td", { class: "num" }, number(one.n_turns)), h("td", { class: "num" }, number(one.tokens))))));
    const sums = {};
    for (const turn of data.turns) for (const [source, value] of Object.entries(turn.rewards)) sums[source] = (sums[source] ?? 0) + value;
    const button = (text, make) => h("button", { type: "button", class: "button", onclick: async (event) => copy(await make(), event.target) }, text);
    const uncut = () => (all ? data : get(["runs", id, "episodes", episode], { whole: "yes" }, signal));
    const json = (make) => async () => JSON.stringify(make(await uncut()), null, 2);
    const hint = data.step && !data.turns.some((turn) => Object.keys(turn.columns).length) && !noTokens
      ? h("p", { class: "note" }, "For ratio, entropy, gradient of each token, type ", h("code", {}, `agentrl retrain RUN --step ${data.step} --dump RUN/tokens/${data.step}.jsonl`)) : null;
    fresh(aside, 
      h("section", { class: "card" }, h("h2", {}, "Tokens"), choices, legendOf(mode, data.turns, data.weight_steps), hint, noTokens ? h("p", { class: "note" }, "Token arrays were dropped by the run's retention (buffer.keep_steps).") : null),
      h("section", { class: "card" }, h("h2", {}, "Rewards"), h("table", { class: "small" }, h("tbody", {},
        Object.entries(sums).map(([source, value]) => h("tr", {}, h("td", {}, source === "env" ? "turns, by the environment" : `turns, by ${source}`), h("td", { class: "num" }, signed(value)))),
        h("tr", {}, h("td", {}, "outcome"), h("td", { class: "num" }, number(data.outcome))),
        Object.entries(data.outcomes).map(([role, value]) => h("tr", {}, h("td", {}, `outcome of ${role}`), h("td", { class: "num" }, number(value))))))),
      h("section", { class: "card" }, h("h2", {}, link(path("run", id, "group", data.group), `Group ${data.group}`), h("span", { class: "note" }, data.group_state)), h("div", { class: "scroll" }, members)),
      h("section", { class: "card" }, h("h2", {}, "Time"), episodeTimes(data, (turn) => { location.hash = here({ turn }); })),
      data.family.length ? h("section", { class: "card" }, h("h2", {}, "Forks"), familyTree()) : null,
      data.restarts.length ? h("section", { class: "card" }, h("h2", {}, "Earlier trials"), data.restarts.map(earlier)) : null,
      h("section", { class: "card" }, h("h2", {}, "Copy"), h("div", { class: "row" },
        button("as JSON", json((one) => one)), button("as chat", json(chatOf)), button("as test case", async () => testCaseOf(await uncut(), id)))),
    );
  }

  function draw() {
    fresh(head, 
      h("div", { class: "title" }, h("h1", {}, `Episode ${data.id}`), outcomeChip(data), data.late ? chip("late", "wait") : null, h("span", { class: "grow" }), steps()),
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
  const cycle = () => color(modes()[(modes().findIndex(([value]) => value === mode) + 1) % modes().length][0]);
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
