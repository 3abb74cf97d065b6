// Turn a toy: test images of which viewpoint and lighting are known, walked through by sliders.
import { by, fill, slider } from "./dom.js";
import { on, state } from "./state.js";

const WORDS = { category: "toy", instance: "copy", azimuth: "turn", elevation: "height", lighting: "light" };
const ORDER = ["category", "instance", "azimuth", "elevation", "lighting"];
let sliders = {};
let take = () => {};

const values = (name) => [...new Set(state.facts.factors[name])].sort((a, b) => a - b);

/** A value of a factor in words: smallNORB counts azimuths in tens of degrees. */
function said(name, value) {
  if (name === "category") return state.facts.names[value] ?? String(value);
  return name === "azimuth" ? `${10 * value}°` : String(value);
}

/** Factors of the open run that its test images differ in. */
const free = () => ORDER.filter((name) => state.facts?.factors[name] && values(name).length > 1);

function build() {
  const names = free();
  by("turn").hidden = !names.length;
  sliders = Object.fromEntries(names.map((name) => {
    const high = values(name).length - 1;
    return [name, slider(WORDS[name], { min: 0, max: high, step: 1, label: name, say: (x) => said(name, values(name)[x]), testid: `turn-${name}` }, (x) => move(name, x))];
  }));
  fill(by("turn-sliders"), ...names.map((name) => sliders[name].row));
  follow();
}

/** The test image that differs from the one shown in one factor only. */
function move(name, place) {
  const { factors } = state.facts;
  const wanted = values(name)[place];
  const others = free().filter((other) => other !== name);
  const count = factors[name].length;
  const same = (n) => others.filter((other) => factors[other][n] === factors[other][state.example]).length;
  const fitting = Array.from({ length: count }, (_, n) => n).filter((n) => factors[name][n] === wanted);
  if (fitting.length) take(fitting.reduce((best, n) => (same(n) > same(best) ? n : best)));
}

function follow() {
  if (!state.facts || state.source !== "example") return;
  for (const [name, { set: to }] of Object.entries(sliders)) to(values(name).indexOf(state.facts.factors[name][state.example]));
}

/** @param {(n: number) => void} takeExample */
export function start(takeExample) {
  take = takeExample;
  on(["facts"], () => state.facts && build());
  on(["example", "source"], follow);
}
