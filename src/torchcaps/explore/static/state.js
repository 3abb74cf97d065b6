// One store for the page, and the link that holds it.
import { later } from "./dom.js";
import { pack, unpack } from "./wire.js";

/** @typedef {import("./wire.js").Picture} Picture */

export const STILL = { rotate: 0, dx: 0, dy: 0, zoom: 1, noise: 0, seed: 0 };
const LONGEST = 6000; // characters of a picture in a link

/** What the page knows. Names a link holds are in `write`. */
export const state = {
  runs: [], // as /api/runs lists them
  facts: null, // of the run that is open
  home: false, // the front page is shown
  tab: "parents",
  source: "example", // "draw" | "example" | "picture"
  example: 0,
  /** @type {Picture | null} before it is changed */ base: null,
  /** @type {{index: number, name: string} | null} of a test image, where it is known */ label: null,
  changes: { ...STILL },
  /** @type {Picture | null} what the model is shown */ image: null,
  inferred: null, // the answer to it
  parent: null, // whose routing is shown; null: the winner's
  step: 0, // iteration, from 0
  place: null, // [y, x] whose children are followed
  capsule: null, // that is taken apart; null: the winner
  pose: null, // its numbers, if they were moved
  axes: [0, 1], // of the pad
  wide: false,
  domain: null,
  count: 4,
  seed: 0, // of the grid of samples
  /** @type {{n: number, name: string, picture: Picture} | null} a test image over the picture */ second: null,
  router: null, // that routes beside the run's own
  other: null, // id of the second run
  fit: "stretch", // "stretch" | "keep"
};

const listeners = new Set();

/** @param {string[]} keys @param {() => void} react called once after any of them was set */
export const on = (keys, react) => listeners.add({ keys, react });

/** @param {Partial<typeof state>} patch */
export function set(patch) {
  const changed = Object.keys(patch).filter((key) => state[key] !== patch[key]);
  if (!changed.length) return;
  Object.assign(state, patch);
  for (const { keys, react } of listeners) if (keys.some((key) => changed.includes(key))) react();
  keep();
}

export const winner = () => state.inferred?.winner ?? 0;
export const parent = () => Math.min(state.parent ?? winner(), (state.facts?.names.length ?? 1) - 1);
export const capsule = () => Math.min(state.capsule ?? winner(), (state.facts?.names.length ?? 1) - 1);
/** @returns {number[]} the pose that is shown of the chosen capsule */
export const pose = () => state.pose ?? state.inferred?.pose[capsule()] ?? [];

/** What a capsule is called: by what it mostly wins, where that is known, or by its name. @param {any} facts of its run @param {number} j */
export const called = (facts, j) => facts.nicknames[j] ?? facts.names[j];
/** The same in a list to choose from, with its number and who wins. @param {any} facts @param {number} j @param {number} [first] */
export const choice = (facts, j, first) => `${called(facts, j)}${facts.nicknames[j] ? `, ${facts.names[j]}` : ""}${j === first ? " (winner)" : ""}`;
const runName = (id) => state.runs.find((run) => run.id === id)?.name ?? "";

/** The state as text for location.hash; what is as usual is left out. @returns {Promise<string>} */
async function write() {
  const s = state;
  if (!s.facts || s.home) return "";
  const words = new URLSearchParams({ run: s.facts.name, tab: s.tab });
  const say = (key, value, usual) => value !== usual && value !== null && words.set(key, String(value));
  if (s.source === "example") say("example", s.example, null);
  else if (s.base) {
    const packed = await pack(s.base);
    if (packed.length <= LONGEST) words.set("image", packed);
  }
  for (const [key, usual] of Object.entries(STILL)) say(key, round(s.changes[key]), usual);
  say("parent", s.parent, null);
  say("step", s.step + 1, s.facts.iterations);
  if (s.place) words.set("place", s.place.join("."));
  say("capsule", s.capsule, null);
  if (s.pose) words.set("pose", s.pose.map(round).join("_"));
  say("axes", s.axes.join("."), "0.1");
  say("wide", Number(s.wide), 0);
  say("domain", s.domain, s.facts.domains[0] ?? null);
  say("count", s.count, 4);
  say("samples", s.seed, 0);
  say("router", s.router, null);
  if (s.other !== null) words.set("with", runName(s.other));
  say("fit", s.fit, "stretch");
  return words.toString();
}

const round = (x) => Math.round(x * 1e4) / 1e4;

/**
 * The wish a hash holds; whatever is not sensible in it is left out.
 * @param {string} hash @returns {Promise<Record<string, any>>} run and with are names
 */
export async function read(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const number = (key, low, high) => {
    const x = Number(words.get(key) ?? NaN);
    return words.get(key) && Number.isFinite(x) && x >= low && x <= high ? x : undefined;
  };
  const whole = (key, high) => {
    const x = number(key, 0, high);
    return Number.isInteger(x) ? x : undefined;
  };
  const list = (key, mark) => words.get(key)?.split(mark).map(Number).filter((x) => Math.abs(x) <= 1e4);
  const pair = (key) => (list(key, ".")?.length === 2 && list(key, ".").every(Number.isInteger) ? list(key, ".") : undefined);
  const one = (key, of) => (of.includes(words.get(key)) ? words.get(key) : undefined);
  const packed = words.get("image") ?? "";
  const image = packed && packed.length <= LONGEST && (await unpack(packed));
  const wish = {
    run: words.get("run") ?? undefined,
    tab: one("tab", ["lead", "parents", "routing", "instantiation", "samples", "routers", "compare"]),
    example: whole("example", 1e6), image: image || undefined,
    changes: {
      rotate: number("rotate", -180, 180) ?? 0, dx: number("dx", -256, 256) ?? 0, dy: number("dy", -256, 256) ?? 0,
      zoom: number("zoom", 0.2, 3) ?? 1, noise: number("noise", 0, 1) ?? 0, seed: whole("seed", 2 ** 31 - 1) ?? 0,
    },
    parent: whole("parent", 1e4), step: whole("step", 100) ? whole("step", 100) - 1 : undefined, place: pair("place"),
    capsule: whole("capsule", 1e4), pose: list("pose", "_"), axes: pair("axes"), wide: words.get("wide") === "1",
    domain: words.get("domain") ?? undefined, count: Number(one("count", ["2", "4", "6", "8"])) || undefined, seed: whole("samples", 2 ** 31 - 1),
    router: words.get("router") ?? undefined, with: words.get("with") ?? undefined, fit: one("fit", ["stretch", "keep"]),
  };
  return Object.fromEntries(Object.entries(wish).filter(([, value]) => value !== undefined));
}

let holding = true; // until the page has taken what its own link says
let written = "";

/** From now on the address follows the state. */
export function follow() {
  holding = false;
  keep();
}

/** Whether a hash is the one we wrote ourselves. @param {string} hash */
export const isOurs = (hash) => hash.replace(/^#/, "") === written;

const keep = later(async () => {
  if (holding) return;
  written = await write();
  history.replaceState(null, "", `#${written}`);
}, 200);

/** The address now, not in a moment. */
export async function link() {
  written = await write();
  history.replaceState(null, "", `#${written}`);
  return location.href;
}
