// Instantiation: the numbers of one capsule, moved by sliders, by a pad, by chance; the picture follows.
import { ask, channel } from "./api.js";
import { brief, colors } from "./canvas.js";
import { by, fill, h, later, offer, once, slider } from "./dom.js";
import * as pad from "./pad.js";
import { called, capsule, choice, on, pose, set, state } from "./state.js";
import { decode, each, show, toCanvas } from "./wire.js";

const STEPS = 9;
const WIDER = 4;

let sliders = [];
let anchor = null; // the pose that the sliders' range is about
let limits = { low: [], high: [] }; // of the anchor
let strips = []; // [k] pictures of each sweep
let swept = null; // {low, high} of the strips
let drawn = null; // the picture that is shown
let tries = 0; // samples so far, their seed

const path = (word) => `/api/runs/${state.facts.id}/${word}`;
const open = () => state.tab === "instantiation" && state.facts?.has_decoder && state.inferred;

/** The range of the sliders: the limits, or wider, and the pose always inside. */
function range() {
  const now = pose();
  const factor = state.wide ? WIDER : 1;
  const reach = (k) => {
    const [a, b] = [limits.low[k] ?? now[k] - 0.25, limits.high[k] ?? now[k] + 0.25];
    return [(a + b) / 2 - (factor * (b - a)) / 2, (a + b) / 2 + (factor * (b - a)) / 2];
  };
  const ends = now.map((x, k) => [Math.min(reach(k)[0], x), Math.max(reach(k)[1], x)]);
  return { low: ends.map((e) => e[0]), high: ends.map((e) => e[1]) };
}

const draw = channel(({ image }, { note }) => {
  if (note.facts !== state.facts || (!state.pose && state.inferred?.capsuleImages)) return; // it was reset meanwhile
  drawn = decode(image);
  show(by("drawn"), drawn);
}, refused);

const sweep = channel((answer, { note }) => {
  if (note.facts !== state.facts || note.capsule !== capsule()) return;
  strips = each(decode(answer.images)).map(each);
  swept = { low: answer.low, high: answer.high };
  if (note.anchored) {
    limits = swept;
    aim();
  }
  paintStrips();
}, refused);

const sweepSoon = later(() => {
  if (open()) sweep(path("sweep"), { capsule: capsule(), pose: pose(), steps: STEPS }, { facts: state.facts, capsule: capsule(), anchored: anchor === pose() });
}, 120);

function refused(error) {
  by("instantiation-error").hidden = error.status === undefined;
  by("instantiation-error").textContent = error.message;
}

function build() {
  const { dimension, has_decoder, domains, names } = state.facts;
  by("drawable").hidden = !has_decoder;
  by("undrawable").hidden = has_decoder;
  by("reset").hidden = by("wide-field").hidden = !has_decoder;
  sliders = Array.from({ length: has_decoder ? dimension : 0 }, (_, k) =>
    slider(String(k), { min: -1, max: 1, step: 0.005, digits: 2, label: `number ${k}`, testid: `number-${k}` }, (x) => move(k, x)),
  );
  fill(by("numbers"), ...sliders.map(({ row }) => row));
  offer(by("sample-domain"), domains.map((d) => [d, d]), state.domain ?? domains[0]);
  by("sampling").hidden = !domains.length;
  by("sample-domain-field").hidden = domains.length < 2;
  [anchor, limits, strips, swept, drawn, tries] = [null, { low: [], high: [] }, [], null, null, 0];
  fill(by("strips"));
  offer(by("capsule"), names.map((_, j) => [j, choice(state.facts, j)]), capsule());
  pad.build(dimension);
}

function move(k, value) {
  set({ pose: pose().map((x, n) => (n === k ? value : x)), capsule: capsule() });
}

/** Sliders and pad to the range and the pose. */
function aim() {
  const [now, { low, high }] = [pose(), range()];
  sliders.forEach(({ input, set: to }, k) => {
    Object.assign(input, { min: low[k], max: high[k], step: (high[k] - low[k]) / 200 || 0.001 });
    to(now[k], anchor?.[k] ?? now[k]);
  });
  pad.aim(low, high);
}

/** After a new inference, another capsule, or another pose. */
const update = once(() => {
  if (state.tab !== "instantiation" || !state.facts || !state.inferred) return;
  const { facts, inferred } = state;
  by("instantiation-error").hidden = true;
  offer(by("capsule"), facts.names.map((_, j) => [j, choice(facts, j, inferred.winner)]), capsule());
  by("reset").disabled = !state.pose;
  by("whose").textContent = state.pose ? "as you have set it" : inferred.silent?.[capsule()] ? `${called(facts, capsule())} is off in this picture; this is what it stands for` : `as ${called(facts, capsule())} saw the input`;
  if (!facts.has_decoder) return matrix();
  if (state.pose ? !anchor : anchor !== pose()) {
    anchor = pose();
    limits = capsule() === inferred.winner && !state.pose ? inferred.limits : { low: [], high: [] }; // until the sweep says
  }
  aim();
  if (state.pose || !inferred.capsuleImages) draw(path("draw"), { capsule: capsule(), pose: pose() }, { facts });
  else show(by("drawn"), (drawn = inferred.capsuleImages[capsule()]));
  sweepSoon();
});

/** Matrix capsules: the numbers alone. */
function matrix() {
  const now = pose();
  const side = Math.round(Math.sqrt(now.length));
  const most = Math.max(...now.map(Math.abs), 1e-9);
  const cells = now.map((x) => {
    const cell = h("span.cell.number", {}, brief(x));
    cell.style.setProperty("--strength", `${Math.round((70 * Math.abs(x)) / most)}%`);
    cell.classList.toggle("negative", x < 0);
    return cell;
  });
  const table = by("pose-matrix");
  table.style.setProperty("--side", String(side));
  fill(table, ...cells);
}

function paintStrips() {
  fill(by("strips"), ...strips.map((pictures, k) => {
    const [, ph, pw] = pictures[0].shape;
    const canvas = h("canvas.strip", { width: pw * STEPS, height: ph, title: `number ${k} from ${brief(swept.low[k])} to ${brief(swept.high[k])}` });
    pictures.forEach((picture, n) => canvas.getContext("2d").drawImage(toCanvas(picture), n * pw, 0));
    canvas.onclick = (event) => {
      const n = Math.min(STEPS - 1, Math.floor((event.offsetX / canvas.clientWidth) * STEPS));
      move(k, swept.low[k] + ((swept.high[k] - swept.low[k]) * n) / (STEPS - 1));
    };
    return h("div.strip-row", {}, h("span.strip-name.number", {}, String(k)), canvas);
  }));
}

/** Show a capsule with a pose: from the grid of samples, from a sample. @param {number} j @param {number[]} numbers */
export function take(j, numbers) {
  [anchor, limits] = [numbers, { low: [], high: [] }];
  set({ capsule: j, pose: numbers, tab: "instantiation" });
}

async function sample() {
  const [{ facts }, j] = [state, capsule()];
  const domain = by("sample-domain").value || facts.domains[0];
  try {
    const answer = await ask(path("sample"), { capsule: j, domain, seed: tries++ });
    if (facts !== state.facts) return;
    [anchor, limits] = [answer.pose, { low: answer.low, high: answer.high }];
    set({ capsule: j, pose: answer.pose });
  } catch (error) {
    refused(error);
  }
}

/** For save.js. */
export function sheet() {
  if (!drawn || !strips.length) return null;
  const [tall, wide] = [36, 36 * STEPS];
  return {
    width: 300 + wide, height: 90 + (tall + 4) * strips.length, title: `${state.facts.name}: ${state.facts.names[capsule()]} and its numbers`,
    paint(pen, { x, y }) {
      const c = colors();
      pen.image(toCanvas(drawn), x, y, 180, 180);
      strips.forEach((pictures, k) => {
        pen.text(x + 222, y + k * (tall + 4) + tall / 2 + 4, String(k), { size: 12, fill: c.soft, align: "end" });
        pictures.forEach((picture, n) => pen.image(toCanvas(picture), x + 230 + n * tall, y + k * (tall + 4), tall, tall));
      });
    },
    numbers: () => ({ capsule: capsule(), name: state.facts.names[capsule()], pose: pose(), ...range() }),
  };
}

/** Wire the panel up. */
export function start() {
  pad.start((changes) => set({ pose: pose().map((x, k) => changes[k] ?? x), capsule: capsule() }));
  by("capsule").onchange = ({ target }) => {
    anchor = null;
    set({ capsule: Number(target.value), pose: null });
  };
  by("reset").onclick = () => {
    anchor = null;
    set({ pose: null });
  };
  by("sample").onclick = sample;
  by("sample-domain").onchange = ({ target }) => set({ domain: target.value });
  by("wide").onchange = ({ target }) => set({ wide: target.checked });
  on(["facts"], () => state.facts && build());
  on(["inferred", "capsule", "pose", "wide", "tab"], update);
  on(["wide"], () => (by("wide").checked = state.wide));
  on(["domain"], () => (by("sample-domain").value = state.domain ?? ""));
}
