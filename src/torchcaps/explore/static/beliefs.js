// Matrix capsules: what each class capsule believes, shown by test images; its pose; and the votes, while the toy turns.
import { channel } from "./api.js";
import { scatter, screen } from "./canvas.js";
import { by, fill, h } from "./dom.js";
import { on, set, state } from "./state.js";
import { encode, toCanvas } from "./wire.js";

let routed = null;
let redraw = () => {};

const here = () => state.tab === "lead" && state.facts?.kind === "matrix" && state.inferred;

const send = channel((answer, { note }) => {
  if (note.facts !== state.facts) return;
  routed = answer;
  redraw();
});

/** A pose of 16 numbers as a square: blue where positive, orange where negative. */
function square(pose) {
  const side = Math.round(Math.sqrt(pose.length));
  const canvas = h("canvas.pose", { width: side, height: side, role: "img", "aria-label": "pose matrix" });
  const most = Math.max(...pose.map(Math.abs), 1e-9);
  const to = canvas.getContext("2d");
  pose.forEach((x, n) => {
    const strength = Math.round(100 * Math.abs(x) / most);
    to.fillStyle = x < 0 ? `rgb(217 114 42 / ${strength}%)` : `rgb(20 112 127 / ${strength}%)`;
    to.fillRect(n % side, Math.floor(n / side), 1, 1);
  });
  return canvas;
}

function row(j) {
  const { inferred, facts } = state;
  const value = inferred.activation[j];
  const bar = h("span.bar");
  bar.style.width = `${(100 * Math.max(0, Math.min(1, value))).toFixed(1)}%`;
  const pictures = (inferred.nearest?.[j] ?? []).filter((picture) => picture.bytes.some((x) => x !== picture.bytes[0]));
  const tiles = h("span.beliefs-tiles", {}, ...pictures.map((picture) => toCanvas(picture)));
  tiles.style.opacity = String(0.3 + 0.7 * Math.max(0, Math.min(1, value)));
  return h(
    `button.belief${j === inferred.winner ? ".wins" : ""}`,
    { type: "button", "data-testid": `belief-${j}`, "aria-label": `${facts.names[j]}: ${value.toFixed(2)}`, onclick: () => set({ parent: j, capsule: j, pose: null, tab: "routing" }) },
    h("span.belief-head", {}, h("span.capsule-name", {}, facts.names[j]), h("span.track", {}, bar), h("span.number", {}, value.toFixed(2))),
    square(inferred.pose[j]), pictures.length ? tiles : h("span.quiet", {}, "It wins none of the test images here."),
  );
}

function paint() {
  if (!here()) return;
  const { inferred, facts } = state;
  fill(by("beliefs"), ...facts.names.map((_, j) => row(j)));
  const [c, height, width] = inferred.image.shape;
  const eye = (n) => ({ shape: [1, height, width], bytes: inferred.image.bytes.subarray(n * height * width, (n + 1) * height * width) });
  fill(by("eyes"), ...(c === 2 ? [0, 1] : [0]).map((n) => h("figure", {}, toCanvas(c === 2 ? eye(n) : inferred.image), h("figcaption", {}, c === 2 ? ["left eye", "right eye"][n] : "the input"))));
  by("belief-votes").textContent = `Votes for ${facts.names[inferred.winner]} in the last round; the ring is where they meet.`;
  send(`/api/runs/${facts.id}/routing`, { image: encode(inferred.image), parent: inferred.winner }, { facts });
}

/** Wire the panel up. */
export function start() {
  redraw = screen(by("belief-canvas"), (w) => Math.min(w, 260), (pen, box, c) => {
    if (!routed || state.facts?.kind !== "matrix") return;
    const at = routed.mean.length - 1;
    scatter(pen, box, c, { votes: routed.votes, coupling: routed.vote_coupling[at], chosen: [], chosenCoupling: [], mean: routed.mean, at });
  });
  on(["facts"], () => (routed = null));
  on(["inferred", "tab", "facts"], paint);
}
