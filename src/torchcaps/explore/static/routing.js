// Routing: iteration by iteration, who sends how much where, and how votes come together.
import { channel } from "./api.js";
import { brief, colors, curves, heat, histogram, middle, scatter, screen } from "./canvas.js";
import { by, fill, h, offer } from "./dom.js";
import { CURVES, hasPlaces } from "./help.js";
import { called, choice, on, parent, set, state } from "./state.js";
import { encode, fromBase64 } from "./wire.js";

const MOST = 64; // children that can be followed

let routed = null; // the answer
let shown = 0; // iteration on its way, for movement between two
let playing = 0;
let redraws = [];

const send = channel(
  (answer, { note }) => {
    if (note.facts !== state.facts) return;
    const [t, height, width] = answer.maps.shape;
    const bytes = fromBase64(answer.maps.data);
    const [low, high] = middle(bytes, 0.01).map((x) => x / 255); // one scale for all rounds; the outermost hundredths are cut
    const shade = (x) => Math.max(0, Math.min(1, (x - low) / (high - low || 1)));
    const maps = Array.from({ length: t }, (_, n) => {
      const sent = Array.from(bytes.subarray(n * height * width, (n + 1) * height * width), (x) => x / 255);
      return { h: height, w: width, sent, values: sent.map(shade) };
    });
    routed = { ...answer, maps, image: note.image, parent: note.parent };
    by("routing-error").hidden = true;
    if (state.step >= t) set({ step: t - 1 });
    shown = state.step;
    paint();
  },
  (error) => {
    by("routing-error").hidden = error.status === undefined;
    by("routing-error").textContent = error.message;
  },
);

/** The children that stand at a place. */
function children() {
  const { facts, place } = state;
  if (!place) return [];
  const [height, width] = facts.places;
  const types = Math.floor(facts.children / (height * width));
  const [y, x] = [Math.min(place[0], height - 1), Math.min(place[1], width - 1)];
  return Array.from({ length: Math.min(types, MOST) }, (_, k) => (y * width + x) * types + k);
}

function want() {
  const { facts, inferred, tab } = state;
  if (tab !== "routing" || !facts || !inferred) return;
  offer(by("parent"), facts.names.map((_, j) => [j, choice(facts, j, inferred.winner)]), parent());
  const body = { image: encode(inferred.image), parent: parent(), children: children() };
  send(`/api/runs/${facts.id}/routing`, body, { facts, image: inferred.image, parent: body.parent });
}

const last = () => (routed?.maps.length ?? state.facts?.iterations ?? 1) - 1;
const at = () => Math.min(state.step, last());

function paint() {
  if (!routed) return;
  const now = at();
  by("step").max = String(last() + 1);
  by("step").value = String(now + 1);
  by("step-said").textContent = `round ${now + 1} of ${last() + 1}`;
  for (const name of ["step", "step-back", "step-on", "play", "heats"]) by(name).hidden = last() === 0;
  document.querySelector(".keys").hidden = last() === 0;
  by("step-back").disabled = now === 0;
  by("step-on").disabled = now === last();
  by("heat").closest("figure").hidden = !hasPlaces(state.facts);
  put(by("heat"), heat(routed.image, routed.maps[now], state.place));
  fill(by("heats"), ...routed.maps.map(small));
  by("heat-said").textContent = said(now);
  document.querySelector(".thirds").hidden = last() === 0; // a curve of one point says nothing
  by("histogram-figure").hidden = !routed.histogram;
  by("activation-figure").hidden = !routed.activation;
  by("agreement-figure").hidden = !routed.agreement;
  const most = Math.log(state.facts.names.length);
  const undecided = routed.entropy[now] > 0.97 * most ? " The children stay undecided: each gives every parent almost the same share. The answer comes from many small differences." : "";
  by("entropy-now").textContent = `Here ${routed.entropy[now].toFixed(3)}${state.facts.kind === "poe" ? "" : ` of at most ${most.toFixed(3)}.${undecided}`}`;
  by("followed").textContent = state.place
    ? `Following the ${routed.chosen_votes.length} children at row ${state.place[0] + 1}, column ${state.place[1] + 1} (orange).`
    : hasPlaces(state.facts) ? "Choose a square of the heat map to follow its children's votes." : said(now);
  by("unfollow").hidden = !state.place;
  redraws.forEach((redraw) => redraw());
}

function said(now) {
  const name = called(state.facts, routed.parent);
  const mean = brief(routed.coupling[now]);
  const share = state.facts.kind === "poe" ? `On average a child gives ${name} a share of ${mean}.` : `On average a child gives ${name} a share of ${mean}; all its shares add up to 1.`;
  const scale = last() ? " All rounds have the same scale." : "";
  if (!hasPlaces(state.facts)) return share;
  return `Bright squares send much to ${name}, dark ones little.${scale} ${share}`;
}

function put(canvas, picture) {
  Object.assign(canvas, { width: picture.width, height: picture.height }).getContext("2d").drawImage(picture, 0, 0);
}

function small(map, t) {
  const picture = heat(routed.image, map, null, 112);
  const props = { type: "button", "aria-pressed": String(t === at()), "aria-label": `round ${t + 1}`, onclick: () => set({ step: t }) };
  return h("button.thumb", props, picture, h("span.caption", {}, String(t + 1)));
}

/** Let the dots grow and the ring travel from one iteration to the next. */
function glide() {
  const [from, to, began] = [shown, at(), performance.now()];
  const short = matchMedia("(prefers-reduced-motion: reduce)").matches || from === to;
  const frame = (time) => {
    const done = short ? 1 : Math.min(1, Math.max(0, time - began) / 280);
    shown = from + (to - from) * (1 - (1 - done) ** 3);
    redraws[0]?.();
    if (done < 1 && at() === to) requestAnimationFrame(frame);
    else shown = at();
  };
  frame(began);
}

/** Row t of a table, between two rows where t is no whole number. */
function between(table, t) {
  const [low, high] = [Math.floor(t), Math.ceil(t)];
  return table[low].map((x, n) => x + (t - low) * (table[high][n] - x));
}

function votes() {
  const [low, high] = [Math.floor(shown), Math.ceil(shown)];
  const mean = routed.mean.slice(0, high + 1);
  mean[high] = routed.mean[low].map((x, k) => x + (shown - low) * (routed.mean[high][k] - x));
  return {
    votes: routed.votes, coupling: between(routed.vote_coupling, shown),
    chosen: routed.chosen_votes, chosenCoupling: between(routed.chosen_coupling, shown), mean, at: high,
  };
}

const series = (table) => table[0].map((_, j) => table.map((row) => row[j]));

/** The figures by name: what `paint` shows and the sheet saves. */
const FIGURES = {
  votes: (pen, box, c) => scatter(pen, box, c, votes()),
  agreement: (pen, box, c) => routed.agreement && curves(pen, box, c, { series: series(routed.agreement), chosen: routed.parent, at: at() }),
  entropy: (pen, box, c) => curves(pen, box, c, { series: [routed.entropy], at: at(), zero: true }),
  activation: (pen, box, c) => routed.activation && curves(pen, box, c, { series: series(routed.activation), chosen: routed.parent, at: at(), zero: true }),
  histogram(pen, box, c) {
    const { edges, counts } = routed.histogram;
    const most = Math.max(...counts.flat());
    const wide = (box.w - 16 * (counts.length - 1)) / counts.length;
    counts.forEach((row, t) => histogram(pen, { x: box.x + t * (wide + 16), y: box.y, w: wide, h: box.h }, c, { edges, counts: row, most, strong: t === at(), name: `round ${t + 1}` }));
  },
};

/** For save.js. */
export function sheet() {
  if (!routed) return null;
  const n = routed.maps.length;
  return {
    width: Math.max(760, 40 + 130 * n), height: 560 + (routed.histogram ? 190 : 0),
    title: `${state.facts.name}: routing to ${state.facts.names[routed.parent]}`,
    paint(pen, { x, y }) {
      const c = colors();
      routed.maps.forEach((map, t) => {
        pen.image(heat(routed.image, map, state.place), x + 130 * t, y, 118, 118);
        pen.text(x + 130 * t, y + 134, `round ${t + 1}`, { size: 12, fill: t === at() ? c.ink : c.soft });
      });
      FIGURES.votes(pen, { x, y: y + 160, w: 330, h: 320 }, c);
      ["agreement", "entropy"].forEach((name, k) => {
        pen.text(x + 370, y + 170 + 165 * k, name, { size: 13, fill: c.ink, weight: 600 });
        FIGURES[name](pen, { x: x + 360, y: y + 178 + 165 * k, w: 340, h: 140 }, c);
      });
      if (routed.histogram) FIGURES.histogram(pen, { x, y: y + 510, w: 700, h: 150 }, c);
    },
    numbers() {
      const { image, ...rest } = routed; // which save.js writes in the form it travels in
      return { ...rest, maps: routed.maps.map((map) => map.sent) };
    },
  };
}

function move(by_) {
  set({ step: Math.max(0, Math.min(last(), at() + by_)) });
}

function play() {
  const button = by("play");
  const stop = () => {
    clearInterval(playing);
    playing = 0;
    button.textContent = "Play";
  };
  if (playing) return stop();
  set({ step: at() === last() ? 0 : at() });
  button.textContent = "Stop";
  playing = setInterval(() => (at() === last() || state.tab !== "routing" ? stop() : move(1)), 900);
}

function pick(event) {
  const r = event.currentTarget.getBoundingClientRect();
  const [height, width] = state.facts.places;
  const cell = (x, long, n) => Math.max(0, Math.min(n - 1, Math.floor((x / long) * n)));
  set({ place: [cell(event.clientY - r.top, r.height, height), cell(event.clientX - r.left, r.width, width)] });
}

/** Arrows on the heat map walk over its places. */
function walk(event) {
  const by_ = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (event.key === "Escape") set({ place: null });
  if (!by_) return;
  event.preventDefault();
  const size = state.facts.places;
  const from = state.place ?? size.map((n) => Math.floor(n / 2));
  set({ place: from.map((x, k) => Math.max(0, Math.min(size[k] - 1, x + by_[k]))) });
}

/** Wire the panel up. */
export function start() {
  const tall = { votes: (w) => Math.min(w, 380), agreement: () => 150, entropy: () => 150, activation: () => 150, histogram: () => 150 };
  redraws = Object.keys(FIGURES).map((name) =>
    screen(by(`${name}-canvas`), tall[name], (pen, box, c) => {
      if (routed && (name !== "histogram" || routed.histogram)) FIGURES[name](pen, box, c);
    }),
  );
  for (const [name, words] of Object.entries(CURVES)) by(`${name}-words`).textContent = words;
  by("parent").onchange = ({ target }) => set({ parent: Number(target.value) });
  by("step").oninput = ({ target }) => set({ step: Number(target.value) - 1 });
  by("step-back").onclick = () => move(-1);
  by("step-on").onclick = () => move(1);
  by("play").onclick = play;
  by("heat").onclick = pick;
  by("heat").onkeydown = walk;
  by("unfollow").onclick = () => set({ place: null });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input[type=text], select, [role=application]");
    if (state.tab !== "routing" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "," || event.key === ".") move(event.key === "." ? 1 : -1);
  });
  on(["facts"], () => (routed = null));
  on(["inferred", "parent", "place", "tab"], want);
  on(["step"], () => [paint(), glide()]);
}
