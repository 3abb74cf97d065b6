// Compare: two runs on the same picture, each in its own size.
import { ask, channel } from "./api.js";
import { strongest } from "./apart.js";
import { bars, colors } from "./canvas.js";
import { by, fill, h, offer } from "./dom.js";
import { systemName } from "./help.js";
import { channels, contain, place } from "./pixels.js";
import { called, on, set, state } from "./state.js";
import { decode, encode, show, toCanvas } from "./wire.js";

let facts = null; // of the other run
let otherInferred = null; // its answer

const send = channel(
  (answer, { note }) => {
    if (note.facts !== facts) return;
    otherInferred = { ...answer, image: note.image, reconstruction: answer.reconstruction && decode(answer.reconstruction) };
    by("compare-error").hidden = true;
    paint();
  },
  fail,
);

function fail(error) {
  by("compare-error").hidden = error.status === undefined;
  by("compare-error").textContent = error.message;
}

/** The picture in the size of the other run. */
function fitted() {
  const [c, height, width] = facts.shape;
  const image = state.inferred.image;
  return channels((state.fit === "keep" ? place : contain)(image, height, width), c);
}

async function open() {
  const { other } = state;
  if (other === null || facts?.id === other) return;
  [facts, otherInferred] = [null, null];
  by("compare-error").hidden = true;
  by("verdict").textContent = "";
  fill(by("compare-b"), h("p.quiet", {}, "Opening the run…"));
  try {
    const found = await ask(`/api/runs/${other}`);
    if (state.other !== other) return;
    facts = found;
    want();
  } catch (error) {
    fill(by("compare-b"));
    fail(error);
  }
}

function want() {
  const { tab, runs, inferred } = state;
  if (tab !== "compare" || !state.facts || !inferred) return;
  by("compare-lonely").hidden = runs.length > 1;
  by("compare-able").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const others = runs.filter((run) => run.id !== state.facts.id);
  if (!others.some((run) => run.id === state.other)) return set({ other: partner(others).id });
  offer(by("other"), others.map((run) => [run.id, run.name]), state.other);
  by("fit").value = state.fit;
  paint();
  if (facts?.id !== state.other) return void open();
  const image = fitted();
  send(`/api/runs/${facts.id}/infer`, { image: encode(image) }, { facts, image });
}

/** The run to compare with at first: one that learned from the same data, if there is one. */
function partner(others) {
  const data = (run) => run?.card?.data;
  const own = state.runs.find((run) => run.id === state.facts.id);
  return others.find((run) => data(run) && data(run) === data(own)) ?? others[0];
}

/** The answer of a model in words: a class, two classes of a pair, or what its strongest capsule stands for. */
const says = (f, found) => (f.things > 1 && f.classifies ? strongest(found.activation).map((j) => f.names[j]).join(" and ") : called(f, found.winner));

/** Whether the two agree, in a sentence. */
function verdict([f, found], [g, other]) {
  const [a, b] = [says(f, found), says(g, other)];
  if (!f.classifies || !g.classifies)
    return [[f, a], [g, b]].map(([one, word]) => (one.classifies ? `${one.name} says ${word}.` : `The strongest capsule of ${one.name}: ${word}.`)).join(" ");
  if (String(f.names) !== String(g.names)) return `${g.name} knows other classes than ${f.name}: its answer means nothing here.`;
  return a === b ? `Both say ${a}.` : `They differ: ${a} and ${b}.`;
}

function card(name, f, found) {
  const row = (j) => {
    const bar = h("span.bar");
    bar.style.width = `${(100 * Math.max(0, Math.min(1, found.activation[j]))).toFixed(1)}%`;
    return h(`div.capsule.small${j === found.winner ? ".wins" : ""}`, {}, h("span.capsule-name", {}, called(f, j)), h("span.track", {}, bar), h("span.number", {}, found.activation[j].toFixed(2)));
  };
  const order = f.names.map((_, j) => j).sort((a, b) => found.activation[b] - found.activation[a]);
  const many = f.names.length > 10;
  // Classes keep their order; of many capsules, those that are on, the strongest first
  const top = many ? order.slice(0, 10).filter((j) => j === found.winner || found.activation[j] >= 0.005) : [...order].sort((a, b) => a - b);
  const tile = (picture, words) => h("figure", {}, show(h("canvas.tile", { role: "img", "aria-label": words }), picture), h("figcaption", {}, words));
  return [
    h("h3", {}, f.name),
    h("p.quiet", {}, `${systemName(f.kind)}, ${f.shape[2]}×${f.shape[1]} pixels`),
    h("p.answer-small", { "data-testid": `${name}-answer` }, says(f, found)),
    h("div.pair", {}, tile(found.image, "input"), found.reconstruction ? tile(found.reconstruction, "redrawn") : h("p.quiet", {}, "This model has no decoder: nothing is redrawn.")),
    h("div.bars", {}, ...top.map(row)),
    many && h("p.quiet", {}, `The strongest of ${f.names.length} capsules; the others are off, or weaker.`),
  ];
}

function paint() {
  fill(by("compare-a"), ...card("a", state.facts, state.inferred));
  if (!otherInferred || !facts) return;
  fill(by("compare-b"), ...card("b", facts, otherInferred));
  by("verdict").textContent = verdict([state.facts, state.inferred], [facts, otherInferred]);
}

/** For save.js. */
export function sheet() {
  if (!otherInferred) return null;
  const pairs = [[state.facts, state.inferred], [facts, otherInferred]];
  const most = Math.max(...pairs.map(([f]) => f.names.length));
  return {
    width: 800, height: 230 + 22 * most, title: `${state.facts.name} and ${facts.name}`,
    paint(pen, { x, y }) {
      const c = colors();
      pairs.forEach(([f, found], n) => {
        const left = x + 390 * n;
        pen.text(left, y + 12, f.name, { size: 14, fill: c.ink, weight: 600 });
        pen.image(toCanvas(found.image), left, y + 24, 110, 110);
        if (found.reconstruction) pen.image(toCanvas(found.reconstruction), left + 122, y + 24, 110, 110);
        bars(pen, { x: left, y: y + 150, w: 350, h: 22 * f.names.length }, c, { names: f.names, values: found.activation, chosen: found.winner, wide: 90 });
      });
    },
    numbers: () => ({ runs: pairs.map(([f, found]) => ({ run: f.name, names: f.names, activation: found.activation, winner: found.winner })) }),
  };
}

/** Wire the panel up. */
export function start() {
  by("other").onchange = ({ target }) => set({ other: Number(target.value) });
  by("fit").onchange = ({ target }) => set({ fit: target.value });
  on(["inferred", "tab", "other", "fit"], want);
}
