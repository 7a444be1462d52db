// The members of a group side by side: same task, what each did with it, and who did better than the others.

import { get } from "./api.js";
import { chip, fresh, h, link, number, path, signed } from "./dom.js";
import { cutText, pictures } from "./episode_page.js";
import { playAgain } from "./steering.js";

export const name = "group";

export async function show({ root, id, number: group, signal }) {
  const head = h("div", {});
  const again = playAgain(id, group, () => refresh());
  const below = h("div", { class: "grid" });
  root.append(head, again, below);
  async function refresh() {
    const found = await get(["runs", id, "groups", group], {}, signal);
    again.update(await get(["runs", id], {}, signal));
    const kind = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "");
    const member = (one) => h("article", { class: "member card" },
      h("header", {}, h("h2", {}, link(path("run", id, "episode", one.id), `Episode ${one.id}`)), h("div", { class: "row" },
        one.outcome === null ? chip(one.stop_reason ?? "running") : chip(`outcome ${number(one.outcome)}`, one.outcome > 0 ? "good" : "bad"),
        one.advantage === null ? null : chip(`advantage ${signed(one.advantage)}`, kind(one.advantage)))),
      h("p", { class: "note" }, `${number(one.n_turns)} turns · ${number(one.tokens)} tokens · ${(one.stop_reason ?? "running").replaceAll("_", " ")}`),
      one.turns.map((turn, k) => h("div", { class: "message assistant said" }, h("div", { class: "note" }, `${k}`, turn.reward ? ` · ${signed(turn.reward)}` : ""), h("pre", {}, cutText(turn.text)))));
    fresh(head,
      h("div", { class: "title" }, h("h1", {}, `Group ${found.id}`), chip(found.state, found.state === "trained" || found.state === "taken" ? "done" : "")),
      h("p", { class: "note" }, `${found.task.env}, seed ${found.task.seed} · admitted at step ${number(found.started_step)}`, found.taken_step ? [" · ", link(path("run", id, "step", found.taken_step), `taken by step ${number(found.taken_step)}`)] : null),
    );
    fresh(below,
      h("details", { class: "card" }, h("summary", {}, "The task"), found.start.map((one) => h("div", { class: "message user" }, h("b", {}, one.role), h("pre", {}, cutText(one.content)), pictures(id, one.images)))),
      h("div", { class: "members" }, found.members.map(member)),
    );
  }
  await refresh();
  return { title: `Group ${group}`, refresh };
}
