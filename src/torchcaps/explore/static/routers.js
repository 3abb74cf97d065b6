// Routers: the same votes of the same picture, routed in two ways, round by round.
import { channel } from "./api.js";
import { brief, scatter, screen } from "./canvas.js";
import { by, fill, h, offer } from "./dom.js";
import { called, choice, on, parent, set, state } from "./state.js";
import { encode } from "./wire.js";

const SIDES = ["a", "b"];
const PACE = 900;

const NAMES = { dynamic: "dynamic routing", em: "EM routing", vb: "variational Bayes", attention: "attention", uniform: "equal shares, no routing" };
const found = { a: null, b: null };
const redraws = {};
let round = 0;
let playing = 0;

/** Whether a run's votes can be routed otherwise. */
export const able = (facts) => facts.routers.length > 1;
const here = () => state.tab === "routers" && state.facts && able(state.facts) && state.inferred;

/** The routers of the two sides: the run's own, and the one that was chosen. */
function chosen() {
  const { routers } = state.facts;
  return { a: routers[0], b: routers.includes(state.router) ? state.router : routers.find((name) => name === "em" && name !== routers[0]) ?? routers[1] };
}

const senders = Object.fromEntries(SIDES.map((side) => [side, channel((answer, { note }) => {
  if (note.facts !== state.facts) return;
  found[side] = { ...answer, parent: note.parent, router: note.router };
  by("routers-error").hidden = true;
  paint();
}, (error) => {
  by("routers-error").hidden = error.status === undefined;
  by("routers-error").textContent = error.message;
})]));

function want() {
  if (!here()) return;
  const { facts, inferred } = state;
  const routers = chosen();
  offer(by("router-b"), facts.routers.slice(1).map((name) => [name, NAMES[name] ?? name]), routers.b);
  offer(by("routers-parent"), facts.names.map((_, j) => [j, choice(facts, j, inferred.winner)]), parent());
  by("router-a-name").textContent = `${NAMES[routers.a] ?? routers.a}, its own`;
  for (const side of SIDES) {
    const body = { image: encode(inferred.image), parent: parent(), router: routers[side] };
    senders[side](`/api/runs/${facts.id}/routing`, body, { facts, parent: body.parent, router: routers[side] });
  }
}

const rounds = () => Math.max(1, ...SIDES.map((side) => found[side]?.mean.length ?? 1));
const at = (side) => Math.min(round, found[side].mean.length - 1);

/** The capsule that a side would name after the round that is shown. */
const says = (side) => found[side].activation[at(side)].reduce((best, x, j, all) => (x > all[best] ? j : best), 0);

function paint() {
  if (!SIDES.every((side) => found[side])) return;
  const last = rounds() - 1;
  round = Math.min(round, last);
  by("routers-step").max = String(last + 1);
  by("routers-step").value = String(round + 1);
  by("routers-said").textContent = `round ${round + 1} of ${last + 1}`;
  for (const name of ["routers-step", "routers-play"]) by(name).hidden = last === 0;
  for (const side of SIDES) {
    const one = found[side];
    const { facts } = state;
    const j = says(side);
    by(`router-${side}-answer`).textContent = called(facts, j);
    const rounds_ = one.mean.length;
    const still = rounds_ - 1 < round ? ` It has only ${rounds_} round${rounds_ > 1 ? "s" : ""}.` : "";
    const most = Math.log(facts.names.length);
    by(`router-${side}-said`).textContent = `Activation of ${called(facts, one.parent)}: ${brief(one.activation[at(side)][one.parent])}. Entropy of the children's shares: ${one.entropy[at(side)].toFixed(2)} of at most ${most.toFixed(2)}.${still}`;
    const order = facts.names.map((_, n) => n).sort((p, q) => one.activation[at(side)][q] - one.activation[at(side)][p]).slice(0, 5);
    fill(by(`router-${side}-bars`), ...order.map((n) => bar(called(facts, n), one.activation[at(side)][n], n === j)));
    redraws[side]();
  }
  const [a, b] = SIDES.map(says);
  const words = [a, b].map((j) => called(state.facts, j));
  by("routers-verdict").textContent = a === b ? `Both say ${words[0]}.` : `They differ: ${words.join(" and ")}.`;
}

function bar(name, value, wins) {
  const inner = h("span.bar");
  inner.style.width = `${(100 * Math.max(0, Math.min(1, value))).toFixed(1)}%`;
  return h(`div.capsule.small${wins ? ".wins" : ""}`, {}, h("span.capsule-name", {}, name), h("span.track", {}, inner), h("span.number", {}, value.toFixed(2)));
}

function play() {
  const stop = () => {
    clearInterval(playing);
    playing = 0;
    by("routers-play").textContent = "Play";
  };
  if (playing) return stop();
  round = round >= rounds() - 1 ? 0 : round;
  paint();
  by("routers-play").textContent = "Stop";
  playing = setInterval(() => {
    if (round >= rounds() - 1 || state.tab !== "routers") return stop();
    round += 1;
    paint();
  }, PACE);
}

/** Wire the panel up. */
export function start() {
  for (const side of SIDES)
    redraws[side] = screen(by(`router-${side}-canvas`), (w) => Math.min(w, 320), (pen, box, c) => {
      const one = found[side];
      if (!one) return;
      const t = at(side);
      scatter(pen, box, c, { votes: one.votes, coupling: one.vote_coupling[t], chosen: [], chosenCoupling: [], mean: one.mean, at: t });
    });
  by("router-b").onchange = ({ target }) => set({ router: target.value });
  by("routers-parent").onchange = ({ target }) => set({ parent: Number(target.value) });
  by("routers-step").oninput = ({ target }) => [(round = Number(target.value) - 1), paint()];
  by("routers-play").onclick = play;
  on(["facts"], () => {
    [found.a, found.b, round] = [null, null, 99];
    if (!state.facts) return;
    by("tab-routers").hidden = !able(state.facts);
    if (!able(state.facts) && state.tab === "routers") set({ tab: "parents" });
  });
  on(["inferred", "parent", "router", "tab", "facts"], want);
}

/** For save.js: nothing but the numbers would be missed. */
export const sheet = () => null;
