// Input: draw, take a test image, or load a picture; then disturb it. Ends in state.image, what the model is shown.
import { ask } from "./api.js";
import { arrows, by, fill, h, once, slider } from "./dom.js";
import { border, center, change, channels, contain, extent, invert, plain, resize } from "./pixels.js";
import { on, set, state, STILL } from "./state.js";
import { decode, show, toCanvas } from "./wire.js";

const SIDE = 280; // pixels of the drawing surface
const SHOWN = 12; // test images at a time

const surface = by("surface");
const pen = surface.getContext("2d", { willReadFrequently: true });
const strip = by("examples");
let share = 20 / 28; // of the side that things in this run's images take
let ground = 0; // what lies around them
let own = null; // the picture that was loaded, before it is fitted
let past = []; // surfaces before each stroke
let first = 0; // of the test images that are offered

/** Fit the surface to the model's shape, and paint what is there. */
function lay(picture) {
  const [, ph, pw] = picture.shape;
  Object.assign(surface, { width: Math.round((SIDE * pw) / Math.max(ph, pw)), height: Math.round((SIDE * ph) / Math.max(ph, pw)) });
  pen.imageSmoothingEnabled = false;
  pen.drawImage(toCanvas(picture), 0, 0, surface.width, surface.height);
  by("hint").hidden = picture.bytes.some((x) => x !== picture.bytes[0]);
}

/** The surface as [3 h w]. */
function scanned() {
  const { width: w, height: h, data } = pen.getImageData(0, 0, surface.width, surface.height);
  const out = plain([3, h, w]);
  for (let n = 0; n < h * w; n++) for (let k = 0; k < 3; k++) out.bytes[k * h * w + n] = data[4 * n + k];
  return out;
}

/** What the source gives in the model's size. */
const derive = once(() => {
  if (!state.facts) return;
  const [c, height, width] = state.facts.shape;
  if (state.source === "picture" && own) {
    const turned = by("invert").checked ? invert(own) : own;
    const gray = channels(turned, c >= 3 ? 3 : 1);
    const fitted = by("center-picture").checked ? center(gray, height, width, share) : contain(gray, height, width);
    set({ base: channels(fitted, c) });
    lay(state.base);
  } else if (state.source === "draw") {
    const scan = channels(scanned(), c >= 3 ? 3 : 1);
    const fitted = by("center-drawing").checked ? center(scan, height, width, share) : resize(scan, height, width);
    set({ base: channels(fitted, c) });
  }
});

const shown = once(() => {
  if (!state.base) return;
  const image = over(change(state.base, state.changes), state.second?.picture);
  show(by("model-input"), image);
  set({ image });
});

/** Two pictures over each other: the brighter pixel of both. */
function over(image, other) {
  if (!other || String(other.shape) !== String(image.shape)) return image;
  return { shape: image.shape, bytes: image.bytes.map((x, n) => Math.max(x, other.bytes[n])) };
}

/** @param {number} n */
export async function takeExample(n) {
  const { facts } = state;
  const at = Math.min(n, facts.examples - 1);
  const { image, label, name } = await ask(`/api/runs/${facts.id}/examples/${at}`);
  if (state.facts !== facts) return;
  const base = decode(image);
  set({ source: "example", example: at, base, label: label === null && facts.things < 2 ? null : { index: label, name } });
  lay(base);
}

/** A picture a link held, or one of another size. */
export function takePicture(picture) {
  const [c, height, width] = state.facts.shape;
  by("center-drawing").checked = false;
  const base = channels(resize(picture, height, width), c);
  set({ source: "draw", base, label: null });
  lay(base);
}

/** A clean surface. */
function clear() {
  past = [];
  by("center-drawing").checked = true;
  const base = plain(state.facts.shape, ground);
  set({ source: "draw", base, label: null });
  lay(base);
}

/** For a run that was just opened. */
export async function renew() {
  const { facts } = state;
  first = Math.floor(state.example / SHOWN) * SHOWN; // the page of the image that is shown
  first = Math.min(first, Math.max(0, facts.examples - SHOWN));
  by("source-example").disabled = !facts.examples;
  const limit = Math.round(Math.max(facts.shape[1], facts.shape[2]) / 2);
  for (const key of ["dx", "dy"]) Object.assign(sliders[key].input, { min: -limit, max: limit });
  await offerExamples();
  if (state.facts !== facts) return;
  if (state.source === "example" && facts.examples) await takeExample(state.example);
  else if (state.source === "picture" && own) derive();
  else if (state.source === "draw" && state.base) derive();
  else clear();
}

async function offerExamples() {
  const { facts } = state;
  const numbers = Array.from({ length: Math.min(SHOWN, facts.examples) }, (_, k) => first + k);
  const found = await Promise.all(numbers.map((n) => ask(`/api/runs/${facts.id}/examples/${n}`)));
  if (state.facts !== facts) return;
  const pictures = found.map(({ image }) => decode(image));
  share = extent(pictures);
  ground = pictures.length && border(pictures[0]) > 127 ? 255 : 0;
  fill(strip, ...found.map(({ name, n }, k) => exampleButton(n, name, pictures[k])));
  mark();
}

function exampleButton(n, name, picture) {
  const label = name ? `Test image ${n}, ${name}` : `Test image ${n}`;
  return h("button.thumb", { type: "button", "aria-label": label, title: label, value: n, onclick: () => takeExample(n) }, toCanvas(picture));
}

function mark() {
  for (const one of strip.children) one.setAttribute("aria-pressed", state.source === "example" && Number(one.value) === state.example);
}

async function load(file) {
  if (!file) return;
  try {
    const bitmap = await createImageBitmap(file);
    const scale = Math.min(1, 512 / Math.max(bitmap.width, bitmap.height));
    const [w, height] = [Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale))];
    const to = Object.assign(document.createElement("canvas"), { width: w, height }).getContext("2d");
    Object.assign(to, { fillStyle: "#fff", imageSmoothingQuality: "high" });
    to.fillRect(0, 0, w, height);
    to.drawImage(bitmap, 0, 0, w, height);
    const { data } = to.getImageData(0, 0, w, height);
    own = plain([3, height, w]);
    for (let n = 0; n < height * w; n++) for (let k = 0; k < 3; k++) own.bytes[k * height * w + n] = data[4 * n + k];
    by("invert").checked = border(channels(own, 1)) > 127 !== ground > 127;
    by("picture-name").textContent = file.name;
    set({ source: "picture", label: null });
    derive();
  } catch {
    by("picture-name").textContent = `${file.name} is no picture that this browser can open. Try PNG or JPEG.`;
  }
}

function stroke() {
  let last = null;
  const at = (event) => {
    const r = surface.getBoundingClientRect();
    return [((event.clientX - r.left) * surface.width) / r.width, ((event.clientY - r.top) * surface.height) / r.height];
  };
  const draw = (event) => {
    const rub = by("rubber").getAttribute("aria-pressed") === "true";
    const light = ground > 127 !== rub ? "#000" : "#fff";
    const width = (Number(brush.input.value) * surface.width) / 100;
    Object.assign(pen, { strokeStyle: light, lineWidth: rub ? 2 * width : width, lineCap: "round", lineJoin: "round" });
    for (const one of event.getCoalescedEvents?.().length ? event.getCoalescedEvents() : [event]) {
      const now = at(one);
      pen.beginPath();
      pen.moveTo(...(last ?? now));
      pen.lineTo(...now);
      pen.stroke();
      last = now;
    }
    by("hint").hidden = true;
    derive();
  };
  surface.addEventListener("pointerdown", (event) => {
    if (event.button || !state.facts) return;
    past = [...past.slice(-19), pen.getImageData(0, 0, surface.width, surface.height)];
    if (state.source !== "draw") by("center-drawing").checked = false; // drawn over something: it stays where it is
    set({ source: "draw", label: null });
    surface.setPointerCapture(event.pointerId);
    last = null;
    draw(event);
  });
  surface.addEventListener("pointermove", (event) => surface.hasPointerCapture(event.pointerId) && draw(event));
}

function undo() {
  const before = past.pop();
  if (!before) return;
  pen.putImageData(before, 0, 0);
  derive();
}

const moved = (key) => (value) => set({ changes: { ...state.changes, [key]: value } });
const sliders = {
  rotate: slider("rotate", { min: -180, max: 180, step: 1, unit: "°", testid: "rotate" }, moved("rotate")),
  dx: slider("right", { min: -14, max: 14, step: 0.5, digits: 1, unit: " px", label: "shift right", testid: "dx" }, moved("dx")),
  dy: slider("down", { min: -14, max: 14, step: 0.5, digits: 1, unit: " px", label: "shift down", testid: "dy" }, moved("dy")),
  zoom: slider("size", { min: 0.4, max: 1.8, step: 0.01, digits: 2, unit: "×", value: 1, testid: "zoom" }, moved("zoom")),
  noise: slider("noise", { min: 0, max: 0.6, step: 0.01, digits: 2, testid: "noise" }, moved("noise")),
};
const brush = slider("brush", { min: 3, max: 16, step: 1, value: 9, unit: " %", testid: "brush" }, () => {});

/** Wire the panel up. */
export function start() {
  fill(by("changes"), ...Object.values(sliders).map(({ row }) => row));
  by("brush-place").append(brush.row);
  stroke();
  by("undo").onclick = undo;
  by("clear").onclick = clear;
  by("rubber").onclick = ({ currentTarget: b }) => b.setAttribute("aria-pressed", b.getAttribute("aria-pressed") !== "true");
  by("reset-changes").onclick = () => set({ changes: { ...STILL } });
  by("new-noise").onclick = () => set({ changes: { ...state.changes, seed: state.changes.seed + 1, noise: state.changes.noise || 0.2 } });
  for (const name of ["center-drawing", "center-picture", "invert"]) by(name).onchange = derive;
  by("file").onchange = ({ target }) => load(target.files[0]);
  by("input").addEventListener("dragover", (event) => event.preventDefault());
  by("input").addEventListener("drop", (event) => {
    event.preventDefault();
    load(event.dataTransfer.files[0]);
  });
  by("more-examples").onclick = () => {
    first = (first + SHOWN) % Math.max(1, state.facts.examples);
    first = Math.min(first, Math.max(0, state.facts.examples - SHOWN));
    offerExamples();
  };
  arrows(strip, { columns: () => getComputedStyle(strip).gridTemplateColumns.split(" ").length });
  for (const kind of ["draw", "example", "picture"]) by(`source-${kind}`).onchange = () => choose(kind);
  on(["base", "changes", "second"], shown);
  on(["source", "example"], mirror);
  on(["changes"], () => Object.entries(sliders).forEach(([key, { set: to }]) => to(state.changes[key])));
  mirror();
}

function choose(kind) {
  if (kind === "draw") clear();
  else if (kind === "example") takeExample(state.example);
  else if (own) [set({ source: "picture", label: null }), derive()];
  else set({ source: "picture" });
}

function mirror() {
  by(`source-${state.source}`).checked = true;
  for (const kind of ["draw", "example", "picture"]) by(`tools-${kind}`).hidden = state.source !== kind;
  mark();
}
