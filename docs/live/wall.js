// The experts' part of the page: a wall of drawings, and the chosen one in a frame to turn.
import { Experts, intoFrame } from "./experts.js";

const SIDE = 28;
const ROWS = 4;
const FRAME = { size: [0.5, 1.6, 1], slant: [-1, 1, 0], right: [-8, 8, 0], down: [-8, 8, 0] };
const by = (id) => document.getElementById(id);
let experts = null;
let first = 0; // pose of the wall's first row
let chosen = { j: 0, z: [] };
const frame = Object.fromEntries(Object.entries(FRAME).map(([name, [, , rest]]) => [name, rest]));

function paint(canvas, values) {
  const data = new ImageData(SIDE, SIDE);
  values.forEach((x, n) => data.data.set([255 * x, 255 * x, 255 * x, 255], 4 * n));
  Object.assign(canvas, { width: SIDE, height: SIDE }).getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

function show() {
  const drawing = intoFrame(experts.draw(chosen.j, chosen.z), SIDE, frame);
  paint(by("expert"), drawing);
  by("expert-said").textContent = `expert ${chosen.j}, in its frame`;
  window.expert = { j: chosen.j, z: chosen.z, drawing: [...drawing] };
}

/** Open a stored pose of an expert. */
window.takeExpert = (j, n, place = {}) => {
  chosen = { j, z: experts.pose(j, n % experts.stored(j)) };
  Object.assign(frame, place);
  for (const name of Object.keys(FRAME)) by(`frame-${name}`).value = String(frame[name]);
  show();
};

/** Rows of drawings, each from the next pose that training left. */
function walk() {
  const tiles = [];
  for (let n = first; n < first + ROWS; n++)
    for (let j = 0; j < experts.count; j++) {
      const m = n % experts.stored(j);
      const tile = Object.assign(document.createElement("button"), { className: "tile", title: `expert ${j}`, onclick: () => window.takeExpert(j, m) });
      tile.setAttribute("aria-label", `expert ${j}, drawing ${m + 1}`);
      tile.append(paint(document.createElement("canvas"), experts.draw(j, experts.pose(j, m))));
      tiles.push(tile);
    }
  by("wall").style.setProperty("--columns", String(experts.count));
  by("wall").replaceChildren(...tiles);
  first += ROWS;
}

/** Read the weights and show the wall. */
export async function start() {
  const answer = await fetch("poe-mnist.safetensors");
  experts = new Experts(await answer.arrayBuffer(), { slab: 15, side: SIDE });
  const sliders = Object.entries(FRAME).map(([name, [low, high, rest]]) => {
    const input = Object.assign(document.createElement("input"), { type: "range", id: `frame-${name}`, min: low, max: high, step: (high - low) / 100, value: rest });
    input.oninput = () => [(frame[name] = Number(input.value)), show()];
    const label = document.createElement("label");
    label.append(name, input);
    return label;
  });
  by("frame").replaceChildren(...sliders);
  by("walk").onclick = walk;
  walk();
  window.takeExpert(5, 1);
  by("experts").hidden = false;
}
