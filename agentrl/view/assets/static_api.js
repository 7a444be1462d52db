// In the place of api.js where the page is static files: answers are files, filters are applied here, nothing is live.

const files = new Map();

async function load(name) {
  if (!files.has(name)) {
    files.set(name, fetch(`data/${name}.json`).then((answer) => {
      if (!answer.ok) throw new Error("It is not in this copy of the run");
      return answer.json();
    }));
  }
  return files.get(name);
}

export class Refused extends Error {}
export const takeToken = () => false;
export const writes = false;
export async function post() {}
export async function watch() {}
export const imageUrl = async (_, { digest, type }) => `data/images/${digest}.${type.split("/")[1]}`;

const yes = { yes: true, no: false };

function matches(row, query) {
  const purpose = query.purpose || "train";
  return (purpose === "all" || row.purpose === purpose)
    && (!query.env || row.env === query.env)
    && (!query.stop || row.stop_reason === query.stop)
    && (!query.state || row.state === query.state)
    && (!(query.success in yes) || row.success === yes[query.success])
    && (!(query.late in yes) || row.late === yes[query.late])
    && (!(query.dropped in yes) || (row.dropped !== null) === yes[query.dropped])
    && (!query.step || row.step === Number(query.step))
    && (!query.min_turns || row.turns >= Number(query.min_turns))
    && (!query.max_turns || row.turns <= Number(query.max_turns));
}

function histogram(rows) {
  const known = rows.map((row) => row.outcome).filter((value) => value !== null).sort((a, b) => a - b);
  const values = [...new Set(known)];
  const width = (values.at(-1) - values[0]) / 20;
  const bins = new Map();
  for (const value of known) {
    const at = values.length <= 20 ? value : Math.min(19, Math.floor((value - values[0]) / width));
    const bin = bins.get(at) ?? { low: value, n: 0 };
    bins.set(at, { low: bin.low, high: value, n: bin.n + 1 });
  }
  return { bins: [...bins.values()], without: rows.length - known.length };
}

// Of these, the rows do not tell: the episodes themselves do.
async function sampled(rows, { role, from_weights: from, to_weights: to }) {
  if (!role && !from && !to) return rows;
  const found = await Promise.all(rows.map((row) => load(`episodes/${row.id}`)));
  return rows.filter((_, k) => {
    const newest = Math.max(...Object.values(found[k].weight_steps));
    return (!role || found[k].turns.some((turn) => turn.role === role))
      && (!from || newest >= Number(from)) && (!to || (newest >= 0 && newest <= Number(to)));
  });
}

const SORTED = { episode: "id", group: "group", outcome: "outcome", turns: "turns", tokens: "tokens", seconds: "seconds", step: "step", ended: "ended_s" };

async function texts(rows, text) {
  const found = await Promise.all(rows.map((row) => load(`episodes/${row.id}`)));
  const wanted = text.toLowerCase();
  return rows.filter((row, k) => [...found[k].start, ...found[k].turns, ...found[k].turns.flatMap((turn) => turn.observation ?? [])]
    .some((part) => (part.content ?? part.text).text.toLowerCase().includes(wanted)));
}

async function episodes(query) {
  let rows = await sampled((await load("episodes")).filter((row) => matches(row, query)), query);
  if (query.q) rows = await texts(rows, query.q);
  const key = SORTED[query.sort ?? "episode"];
  const sign = query.order === "asc" ? 1 : -1;
  const inside = (row) => (!query.min || (row.outcome !== null && row.outcome >= Number(query.min))) && (!query.max || (row.outcome !== null && row.outcome <= Number(query.max)));
  const shown = rows.filter(inside).sort((a, b) => (a[key] === null) - (b[key] === null) || sign * (a[key] - b[key]) || sign * (a.id - b.id));
  const offset = Number(query.offset || 0);
  return { total: shown.length, offset, rows: shown.slice(offset, offset + Number(query.limit ?? 50)), histogram: histogram(rows), searched_back_to: null };
}

export async function get([, id, kind, number], query = {}) {
  if (id === undefined) return load("runs");
  if (kind === undefined) return load("run");
  if (kind === "lanes" || kind === "health") return load(kind);
  if (kind === "metrics") {
    const { values, ...rest } = await load("metrics");
    return { ...rest, values: Object.fromEntries((query.names ?? "").split(",").map((name) => [name, values[name] ?? rest.step.map(() => null)])) };
  }
  return number === undefined ? episodes(query) : load(`${kind}/${number}`);
}
