// Steers a run under way, as the commands pause, resume, set and requeue do: asks, and shows as text what was answered.

import { post } from "./api.js";
import { chip, fresh, h } from "./dom.js";

// A value as somebody types it.
const typed = (value) => (value === null ? "off" : typeof value === "string" ? value : JSON.stringify(value));

// Buttons that ask for a change, and the answer to the last one.
function asking(id, changed) {
  let busy = false;
  const said = h("p", { class: "told", role: "status" });

  async function ask(what, document) {
    if (busy) return false;
    busy = true;
    said.className = "told note";
    said.textContent = "Asked…";
    try {
      said.textContent = (await post(id, what, document)).told;
      said.className = "told done";
      return true;
    } catch (error) {
      said.textContent = error.message;
      said.className = "told refused";
      return false;
    } finally {
      busy = false;
      await changed().catch(() => {}); // the next news ask again
    }
  }

  const button = (text, what, document, hint) => h("button", { type: "button", class: "button", title: hint, onclick: () => ask(what, document) }, text);
  return { ask, button, said };
}

const AGAIN = "What failed through no doing of the policy, and what was given up";
const steers = (run) => run.steers && run.live;

// For the page of a group: what failed in it is played again.
export function playAgain(id, group, changed) {
  const { button, said } = asking(id, changed);
  const box = h("div", { class: "card steer", hidden: true }, button("Play its failures again", "requeue", { group: Number(group) }, AGAIN), said);
  box.update = (run) => { box.hidden = !steers(run); };
  return box;
}

export function steering(id, changed) {
  const { ask, button, said } = asking(id, changed);
  let settings = {};
  const pause = button("Pause", "pause", { now: false }, "Turns and a step under way end first");
  const now = button("Pause now", "pause", { now: true }, "Turns stop amid their tokens, which are kept");
  const resume = button("Resume", "resume", {}, "The run goes on");
  const again = button("Play failures again", "requeue", {}, AGAIN);

  const known = h("datalist", { id: "settings" });
  const key = h("input", { type: "text", list: "settings", placeholder: "train.lr", "aria-label": "Setting", autocomplete: "off", spellcheck: "false", oninput: () => { value.placeholder = key.value in settings ? typed(settings[key.value]) : "1e-6"; } });
  const value = h("input", { type: "text", placeholder: "1e-6", "aria-label": "Its new value", autocomplete: "off", spellcheck: "false" });
  async function set(event) {
    event.preventDefault();
    if (await ask("set", { settings: [`${key.value.trim()}=${value.value.trim()}`] })) value.value = "";
  }
  const form = h("form", { class: "row", onsubmit: set }, key, h("span", { "aria-hidden": "true" }, "="), value, known, h("button", { type: "submit", class: "button" }, "Set"));

  const state = h("span", {});
  const awaited = h("p", { class: "note" });
  const box = h("details", { class: "card steer", hidden: true }, h("summary", {}, "Steer this run", state),
    h("div", { class: "row" }, pause, now, resume, again, h("span", { class: "grow" }), form), awaited, said);

  box.update = (run) => {
    const { paused, wanted, settings: held } = run.steering;
    box.hidden = !steers(run);
    pause.hidden = Boolean(paused);
    now.hidden = Boolean(paused?.now);
    resume.hidden = !paused;
    settings = held;
    fresh(known, Object.entries(held).map(([name, one]) => h("option", { value: name }, `now ${typed(one)}`)));
    const asked = Object.entries(wanted).map(([name, one]) => `${name} = ${typed(one)}`).join(", ");
    fresh(state, paused ? chip(paused.now ? "paused, turns too" : "paused", "wait") : null, asked ? chip("settings asked for", "go") : null);
    awaited.textContent = asked ? `From the next step on: ${asked}` : "";
    awaited.hidden = !asked;
  };
  return box;
}
