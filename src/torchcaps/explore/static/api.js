// Asking the server. A busy server (503) is asked again, quietly; one that is gone is tried until it is back.

/** An answer that says no: its line is fit to be shown. */
export class Refused extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** No answer at all. */
export class Gone extends Error {}

const TRIES = 40;
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

/** How many are under way, and whether the server answers; `main.js` shows both. */
export const line = new EventTarget();
let underWay = 0;
let here = true;
const tell = (name, detail) => line.dispatchEvent(new CustomEvent(name, { detail }));

/** @param {string} path @param {object} [body] a POST if given @returns {Promise<any>} */
export async function ask(path, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  tell("busy", ++underWay);
  try {
    for (let n = 0; n < TRIES; n++) {
      const answer = await reach(path, options);
      if (answer.status !== 503) return await opened(answer);
      await wait(Math.min(200 * 1.4 ** n, 2000) * (0.75 + 0.5 * Math.random()));
    }
    throw new Refused("The server has been too busy for a while. Move anything to ask again.", 503);
  } finally {
    tell("busy", --underWay);
  }
}

async function reach(path, options) {
  try {
    const answer = await fetch(path, options);
    if (!here) tell("here", (here = true));
    return answer;
  } catch {
    if (here) {
      tell("here", (here = false));
      search();
    }
    throw new Gone("the server does not answer");
  }
}

async function opened(answer) {
  const body = await answer.json().catch(() => null);
  if (answer.ok && body) return body;
  throw new Refused(body?.error ?? `unexpected answer ${answer.status}`, answer.status);
}

async function search() {
  while (!here) {
    await wait(1500);
    await reach("/api/runs").catch(() => {});
  }
}

/**
 * One request in flight and the newest one waiting: what is dragged past is never asked.
 * @param {(answer: any, request: any) => void} use @param {(error: Error, request: any) => void} fail
 */
export function channel(use, fail = () => {}) {
  let busy = false;
  let waiting = null;
  /** @param {string} path @param {object} body @param {any} [note] handed to `use` beside the answer */
  return async function send(path, body, note) {
    waiting = { path, body, note };
    if (busy) return;
    busy = true;
    try {
      while (waiting) {
        const now = waiting;
        waiting = null;
        try {
          use(await ask(now.path, now.body), now);
        } catch (error) {
          if (!(error instanceof Gone || error instanceof Refused)) throw error;
          fail(error, now);
        }
      }
    } finally {
      busy = false; // also where `use` fails: one bad answer must not silence a panel
    }
  };
}
