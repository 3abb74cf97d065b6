// CapsNet: two things over each other, pulled apart in two colors by the two strongest capsules.
import { ask } from "./api.js";
import { twoColors } from "./canvas.js";
import { by, fill, h } from "./dom.js";
import { on, set, state } from "./state.js";
import { decode, show, toCanvas } from "./wire.js";

const SHOWN = 12;

const here = () => state.tab === "lead" && state.facts?.kind === "capsnet";

/** The two strongest capsules, the strongest first. */
export function strongest(activation) {
  return activation.map((_, j) => j).sort((i, j) => activation[j] - activation[i]).slice(0, 2);
}

/** Test images to lay over the picture; a data set of pairs needs none. */
async function offerSeconds() {
  const { facts } = state;
  by("apart-second").hidden = facts.things > 1 || !facts.examples;
  if (by("apart-second").hidden || by("seconds").dataset.run === String(facts.id)) return;
  by("seconds").dataset.run = String(facts.id);
  const step = Math.max(1, Math.floor(facts.examples / SHOWN));
  const numbers = Array.from({ length: Math.min(SHOWN, facts.examples) }, (_, n) => n * step);
  const found = await Promise.all(numbers.map((n) => ask(`/api/runs/${facts.id}/examples/${n}`)));
  if (facts !== state.facts) return;
  fill(by("seconds"), ...found.map(({ image, name, n }) => {
    const picture = decode(image);
    const label = `Lay ${name} over it`;
    return h("button.thumb", { type: "button", title: label, "aria-label": label, value: n, "data-testid": `second-${n}`, onclick: () => set({ second: state.second?.n === n ? null : { n, name, picture } }) }, toCanvas(picture));
  }));
  mark();
}

function mark() {
  for (const one of by("seconds").children) one.setAttribute("aria-pressed", String(Number(one.value) === state.second?.n));
  by("apart-none").disabled = !state.second;
}

/** A picture, darker. */
const faded = (picture, share) => ({ shape: picture.shape, bytes: picture.bytes.map((x) => x * share) });

function put(name, canvas) {
  const to = by(name);
  Object.assign(to, { width: canvas.width, height: canvas.height }).getContext("2d").drawImage(canvas, 0, 0);
}

function paint() {
  if (!here() || !state.inferred?.capsuleImages) return;
  const { inferred, facts, second } = state;
  const [a, b] = strongest(inferred.activation);
  show(by("apart-input"), inferred.image);
  show(by("apart-a"), inferred.capsuleImages[a]);
  show(by("apart-b"), inferred.capsuleImages[b]);
  const [strong, weak] = [a, b].map((j) => Math.min(1, 2 * inferred.activation[j])); // a capsule that is off has no color
  put("apart-both", twoColors(faded(inferred.capsuleImages[a], strong), faded(inferred.capsuleImages[b], weak)));
  by("apart-a-said").textContent = `${facts.names[a]}, ${inferred.activation[a].toFixed(2)}`;
  by("apart-b-said").textContent = `${facts.names[b]}, ${inferred.activation[b].toFixed(2)}`;
  const two = facts.things > 1 || second;
  const trained = facts.things > 1 ? "" : " In training, this network saw only one thing in each picture.";
  const sure = inferred.activation[b] >= 0.5;
  by("apart-said").textContent = !two
    ? "One thing is in the picture, so one capsule should be long. Now lay a second test image over it."
    : `It sees ${facts.names[a]}${sure ? ` and ${facts.names[b]}` : `; no second capsule is longer than 0.5`}.${trained}`;
}

/** Wire the panel up. */
export function start() {
  by("apart-none").onclick = () => set({ second: null });
  on(["facts", "tab"], () => here() && offerSeconds());
  on(["second", "facts"], mark);
  on(["inferred", "tab", "facts"], paint);
}
