// Asks the server. The token comes once, behind the address's `#`, which browsers send to nobody; it stays with this origin.

const KEY = "agentrl-token";

export class Refused extends Error {}

// Takes the token out of the address; true if there was one.
export function takeToken() {
  const found = /^#token=([\w-]+)/.exec(location.hash);
  if (!found) return false;
  localStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", `${location.pathname}#/`);
  return true;
}

const headers = () => ({ authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` });
const url = (parts) => `api/${parts.map((part) => encodeURIComponent(part)).join("/")}`;

// The answer. Nobody waits for that of a page which was left: it never comes, instead of an error that nobody handles.
export async function get(parts, query = {}, signal = undefined) {
  try {
    return await answered(parts, query, signal);
  } catch (error) {
    if (signal?.aborted) return new Promise(() => {});
    throw error;
  }
}

// Texts by address, until when the server would answer the same: it is not asked meanwhile, as long as it tells us of
// everything that is written to a run.
const known = new Map();
const MOST_KNOWN = 32;
let listening = 0;
let forgotten = 0;

function forget() {
  known.clear();
  forgotten += 1;
}

async function answered(parts, query, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const asked = given.length ? `?${new URLSearchParams(given)}` : "";
  const address = url(parts) + asked;
  const kept = known.get(address);
  const began = performance.now();
  if (listening && kept && began < kept.until) return JSON.parse(kept.text);
  const before = forgotten;
  const answer = await fetch(address, { headers: headers(), signal });
  const text = await answer.text();
  const document = JSON.parse(text);
  if (answer.status === 401) throw new Refused(document.error);
  if (!answer.ok) throw new Error(document.error ?? `${answer.status}`);
  if (known.size >= MOST_KNOWN) known.clear();
  const seconds = Number(answer.headers.get("x-known-s") ?? 0);
  if (seconds > 0 && before === forgotten) known.set(address, { text, until: began + 1000 * seconds });
  return document;
}

// The address of an image. An element cannot show the token, so the page fetches the bytes and names them itself.
export async function imageUrl(run, { digest }) {
  const answer = await fetch(url(["runs", run, "images", digest]), { headers: headers() });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return URL.createObjectURL(await answer.blob());
}

// Whether this page can write.
export const writes = true;

// Asks for a change of a run: notes, pause, resume, set. Its answer; throws the reason of a refusal.
export async function post(run, what, said) {
  const answer = await fetch(url(["runs", run, what]), { method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(said) });
  forget();
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error ?? `${answer.status}`);
  return document;
}

// Calls `changed` with each server-sent event of a run, and `lost` with true while there is no connection. A plain
// EventSource cannot show a token.
export async function watch(run, changed, lost, signal) {
  while (!signal.aborted) {
    let heard = 0;
    try {
      const answer = await fetch(url(["runs", run, "events"]), { headers: headers(), signal });
      if (!answer.ok) return;
      lost(false);
      forget();
      heard = 1;
      listening += heard;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        if (parts.some((part) => part.startsWith("event: written"))) forget();
        if (parts.some((part) => part.startsWith("event: "))) changed();
      }
    } catch {
      if (signal.aborted) return;
    } finally {
      listening -= heard;
    }
    lost(true);
    await new Promise((resume) => { setTimeout(resume, 3000); });
  }
}
