// The pad: two of a capsule's numbers at once, on a field of small pictures of what lies there.
import { ask } from "./api.js";
import { brief, screen } from "./canvas.js";
import { by, later, offer } from "./dom.js";
import { capsule, on, pose, set, state } from "./state.js";
import { decode, toCanvas } from "./wire.js";

const ACROSS = 7; // small pictures on a side of the field
const INSET = 0.5 / ACROSS; // the range reaches from the middle of the first to that of the last

let [low, high] = [[], []];
let field = { key: "", pictures: [] };
let redraw = () => {};

const ends = (k) => [low[k] ?? -1, high[k] ?? 1];
const clamp = (x, a, b) => Math.max(a, Math.min(b, x));

/** @param {number} dimension */
export function build(dimension) {
  const options = Array.from({ length: dimension }, (_, k) => [k, String(k)]);
  const axes = state.axes.map((k) => clamp(k, 0, dimension - 1));
  if (axes.some((k, n) => k !== state.axes[n])) set({ axes });
  offer(by("axis-x"), options, axes[0]);
  offer(by("axis-y"), options, axes[1]);
  field = { key: "", pictures: [] };
}

/** @param {number[]} newLow @param {number[]} newHigh */
export function aim(newLow, newHigh) {
  [low, high] = [newLow, newHigh];
  const words = state.axes.map((k) => `number ${k} is ${brief(pose()[k] ?? 0)}`).join(", ");
  by("pad").setAttribute("aria-label", `Pad over two numbers: ${words}. Arrow keys move, with Shift further.`);
  by("pad-said").textContent = state.axes.map((k) => `${k}: ${brief(pose()[k] ?? 0)}`).join("   ");
  redraw();
  survey();
}

/** All that the field depends on: everything but where on it one stands. */
function keyOf() {
  const others = pose().map((x, k) => (state.axes.includes(k) ? 0 : x));
  return JSON.stringify([state.facts?.id, capsule(), state.axes, others, state.axes.map(ends)]);
}

/** Fill the field, picture by picture, once the hand rests. */
const survey = later(async () => {
  const key = keyOf();
  const [[a, b], start, facts] = [state.axes, pose(), state.facts];
  if (field.key === key || !facts?.has_decoder || state.tab !== "instantiation") return;
  field = { key, pictures: [] };
  for (let n = 0; n < ACROSS ** 2 && field.key === key && keyOf() === key; n++) {
    const at = (k, m) => ends(k)[0] + ((ends(k)[1] - ends(k)[0]) * m) / (ACROSS - 1);
    const there = [...start];
    there[a] = at(a, n % ACROSS);
    if (b !== a) there[b] = at(b, ACROSS - 1 - Math.floor(n / ACROSS));
    const answer = await ask(`/api/runs/${facts.id}/draw`, { capsule: capsule(), pose: there }).catch(() => null);
    if (field.key !== key) return;
    if (!answer) return void (field.key = ""); // tried again at the next move
    field.pictures.push(toCanvas(decode(answer.image)));
    if (n % ACROSS === ACROSS - 1) redraw();
  }
}, 250);

function paint(pen, { w }, c) {
  const side = w / ACROSS;
  pen.rect(0, 0, w, w, { fill: "#0b0c0e", radius: 8 });
  field.pictures.forEach((picture, n) => pen.image(picture, (n % ACROSS) * side, Math.floor(n / ACROSS) * side, side, side));
  pen.rect(0, 0, w, w, { fill: "#0b0c0e", alpha: 0.35 });
  const [x, y] = state.axes.map((k, n) => {
    const [a, b] = ends(k);
    const share = clamp(((pose()[k] ?? 0) - a) / (b - a || 1), 0, 1);
    return w * (INSET + (1 - 2 * INSET) * (n ? 1 - share : share));
  });
  pen.line([[x, 0], [x, w]], { stroke: "#fff", alpha: 0.35 });
  pen.line([[0, y], [w, y]], { stroke: "#fff", alpha: 0.35 });
  pen.circle(x, y, 9, { fill: c.warm, stroke: "#fff", width: 2.5 });
}

/** @param {(changes: Record<number, number>) => void} moved */
export function start(moved) {
  const element = by("pad");
  redraw = screen(element, (w) => w, paint);
  const point = (event) => {
    const r = element.getBoundingClientRect();
    const share = (x, long) => clamp((x / long - INSET) / (1 - 2 * INSET), 0, 1);
    const shares = [share(event.clientX - r.left, r.width), 1 - share(event.clientY - r.top, r.height)];
    moved(Object.fromEntries(state.axes.map((k, n) => [k, ends(k)[0] + shares[n] * (ends(k)[1] - ends(k)[0])])));
  };
  element.addEventListener("pointerdown", (event) => {
    element.setPointerCapture(event.pointerId);
    point(event);
  });
  element.addEventListener("pointermove", (event) => element.hasPointerCapture(event.pointerId) && point(event));
  element.addEventListener("keydown", (event) => {
    const way = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 1], ArrowDown: [1, -1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const k = state.axes[way[0]];
    const [a, b] = ends(k);
    moved({ [k]: clamp(pose()[k] + (way[1] * (event.shiftKey ? 5 : 1) * (b - a)) / 50, a, b) });
  });
  by("axis-x").onchange = ({ target }) => set({ axes: [Number(target.value), state.axes[1]] });
  by("axis-y").onchange = ({ target }) => set({ axes: [state.axes[0], Number(target.value)] });
  on(["axes"], () => {
    by("axis-x").value = String(state.axes[0]);
    by("axis-y").value = String(state.axes[1]);
    aim(low, high);
  });
}

