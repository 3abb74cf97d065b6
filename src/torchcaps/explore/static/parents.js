// Parents: which capsules are active, what the winner redraws, and what each draws alone.
import { bars, colors, difference, twoColors } from "./canvas.js";
import { by, fill, h } from "./dom.js";
import { called, on, parent, set, state, winner } from "./state.js";
import { show, toCanvas } from "./wire.js";

let rows = [];

/** One button a capsule: name, bar, number, what it draws. */
function build() {
  const { names, has_tiles } = state.facts;
  rows = names.map((name, j) => {
    const cells = { bar: h("span.bar"), said: h("span.number"), tile: h("canvas.tile", { width: 1, height: 1, "aria-hidden": "true" }) };
    const row = h(
      "button.capsule", { type: "button", "data-testid": `capsule-${j}`, onclick: () => choose(j) },
      h("span.capsule-name", {}, called(state.facts, j), state.facts.nicknames[j] && h("span.nickname", {}, name.replace(/^capsule /, "№ "))), h("span.track", {}, cells.bar), cells.said, has_tiles && cells.tile,
    );
    return { row, ...cells };
  });
  const list = by("capsules");
  list.classList.toggle("many", names.length > 12);
  list.classList.toggle("blind", !has_tiles);
  fill(list, ...rows.map(({ row }) => row));
}

const choose = (j) => set({ parent: j, capsule: j, pose: null });

function update() {
  const { inferred, facts } = state;
  if (!inferred || inferred.activation.length !== rows.length) return;
  rows.forEach(({ row, bar, said, tile }, j) => {
    const value = inferred.activation[j];
    bar.style.width = `${(100 * Math.max(0, Math.min(1, value))).toFixed(1)}%`;
    said.textContent = value.toFixed(2);
    row.classList.toggle("wins", j === inferred.winner);
    row.dataset.value = value.toFixed(4);
    row.setAttribute("aria-label", `${facts.names[j]}: ${value.toFixed(2)}${j === inferred.winner ? ", the winner" : ""}`);
    row.classList.toggle("silent", Boolean(inferred.silent?.[j]));
    if (inferred.capsuleImages) show(tile, inferred.capsuleImages[j]);
  });
  redraw();
  mark();
}

function redraw() {
  const { inferred, facts } = state;
  show(by("parents-input"), inferred.image);
  by("redrawn").hidden = !inferred.reconstruction;
  by("blind").hidden = facts.has_decoder;
  if (!inferred.reconstruction) return;
  if (facts.things === 2) return pair();
  show(by("parents-drawn"), inferred.reconstruction);
  const canvas = difference(inferred.image, inferred.reconstruction);
  const to = by("parents-missed");
  Object.assign(to, { width: canvas.width, height: canvas.height }).getContext("2d").drawImage(canvas, 0, 0);
  by("parents-missed").parentElement.hidden = false;
  by("drawn-by").textContent = facts.kind === "capsnet" ? `redrawn by ${facts.names[inferred.winner]}` : "redrawn by all together";
  by("error").textContent = `a pixel is off by ${(100 * gap(inferred.image, inferred.reconstruction)).toFixed(1)} % on average`;
}

/** Two things in one picture, pulled apart: what the two strongest capsules draw, each in a color. */
function pair() {
  const { inferred, facts } = state;
  const [a, b] = inferred.activation.map((_, j) => j).sort((i, j) => inferred.activation[j] - inferred.activation[i]);
  const canvas = twoColors(inferred.capsuleImages[a], inferred.capsuleImages[b]);
  for (const name of ["parents-drawn", "parents-missed"]) {
    const to = by(name);
    Object.assign(to, { width: canvas.width, height: canvas.height }).getContext("2d").drawImage(canvas, 0, 0);
  }
  by("drawn-by").textContent = `${facts.names[a]} in orange, ${facts.names[b]} in blue`;
  by("parents-missed").parentElement.hidden = true;
}

const gap = (a, b) => a.bytes.reduce((sum, x, n) => sum + Math.abs(x - b.bytes[n]), 0) / 255 / a.bytes.length;

function mark() {
  if (!state.facts) return;
  const at = parent();
  rows.forEach(({ row }, j) => row.setAttribute("aria-pressed", String(state.parent === j)));
  by("follow").hidden = state.parent === null && state.capsule === null;
  by("chosen").textContent = state.parent === null ? `The other panels show the winner, ${called(state.facts, winner())}.` : `The other panels show ${called(state.facts, at)}.`;
}

/** For save.js. */
export function sheet() {
  const { inferred, facts } = state;
  const tall = 26;
  const wide = inferred.reconstruction ? 560 : 460;
  return {
    width: 220 + wide, height: Math.max(440, 60 + tall * facts.names.length), title: `${facts.name}: parents`,
    paint(pen, { x, y }) {
      const c = colors();
      const tiles = [["input", toCanvas(inferred.image)]];
      if (inferred.reconstruction) tiles.push(["redrawn", toCanvas(inferred.reconstruction)], ["difference", difference(inferred.image, inferred.reconstruction)]);
      tiles.forEach(([name, picture], n) => {
        pen.image(picture, x, y + n * 130, 104, 104);
        pen.text(x, y + n * 130 + 118, name, { size: 12, fill: c.soft });
      });
      const long = wide - (inferred.capsuleImages ? 60 : 20);
      bars(pen, { x: x + 150, y, w: long, h: tall * facts.names.length }, c, { names: facts.names, values: inferred.activation, chosen: inferred.winner, wide: 90 });
      inferred.capsuleImages?.forEach((image, j) => pen.image(toCanvas(image), x + 150 + long + 12, y + j * tall + 1, tall - 2, tall - 2));
    },
    numbers: () => ({ names: facts.names, activation: inferred.activation, winner: inferred.winner, pose: inferred.pose }),
  };
}

/** Wire the panel up. */
export function start() {
  by("follow").onclick = () => set({ parent: null, capsule: null, pose: null });
  by("to-routing").onclick = () => set({ tab: "routing" });
  by("to-instantiation").onclick = () => set({ tab: "instantiation" });
  on(["facts"], () => state.facts && build());
  on(["inferred"], update);
  on(["parent", "capsule"], mark);
}
