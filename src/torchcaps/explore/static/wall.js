// Products of experts: a wall of samples to walk through, a column an expert, and the chosen one in a frame to turn.
import { ask, channel } from "./api.js";
import { colors } from "./canvas.js";
import { arrows, by, fill, h, offer, slider } from "./dom.js";
import { take } from "./instantiation.js";
import { on, set, state } from "./state.js";
import { decode, each, show, toCanvas } from "./wire.js";

const ROWS = 8; // that are fetched together
const MOST = 48; // rows of the wall

let wall = null; // {key, capsules, rows: [{poses, pictures}], seed}
let columns = []; // elements of each column
let chosen = null; // {capsule, pose, frame}
let sliders = [];

const here = () => state.tab === "lead" && state.facts?.kind === "poe";
const domain = () => (state.facts.domains.includes(state.domain) ? state.domain : state.facts.domains[0]);

/** What an expert is called: by what it wins, or by its number. */
export const title = (j) => state.facts.nicknames[j] ?? `expert ${j}`;

const more = channel((answer, { note }) => {
  if (!wall || note.key !== wall.key) return;
  if (!wall.rows.length) build(answer.capsules);
  const pictures = each(decode(answer.images)).map(each);
  pictures.forEach((row, n) => append(row, answer.poses[n]));
  by("wall-more").disabled = wall.rows.length >= MOST;
  begin();
  dim();
}, fail);

function fail(error) {
  by("wall-error").hidden = error.status === undefined;
  by("wall-error").textContent = error.message;
}

/** Fetch the next rows. */
function walk() {
  const { facts } = state;
  const seed = wall.seed++;
  more(`/api/runs/${facts.id}/sample-grid`, { count: ROWS, domain: domain(), seed }, { key: wall.key });
}

function want() {
  if (!here()) return;
  const { facts } = state;
  offer(by("wall-domain"), facts.domains.map((d) => [d, d]), domain());
  const key = JSON.stringify([facts.id, domain()]);
  if (wall?.key === key) return dim();
  wall = { key, rows: [], seed: 0, capsules: [] };
  chosen = null;
  by("wall-error").hidden = true;
  fill(by("wall"));
  walk();
}

function build(capsules) {
  wall.capsules = capsules;
  columns = capsules.map((j) => {
    const bar = h("span.bar");
    const head = h("button.wall-head", { type: "button", title: `Open the numbers of ${state.facts.names[j]}`, "data-testid": `wall-head-${j}`, onclick: () => openNumbers(j) }, h("span", {}, title(j)), h("span.track", {}, bar));
    return { j, bar, head, column: h("div.wall-column", {}, head) };
  });
  const table = by("wall");
  table.style.setProperty("--columns", String(capsules.length));
  fill(table, ...columns.map(({ column }) => column));
}

function append(pictures, poses) {
  const n = wall.rows.length;
  wall.rows.push({ pictures, poses });
  pictures.forEach((picture, m) => {
    const { j, column } = columns[m];
    const label = `${title(j)}, sample ${n + 1}`;
    const tile = h("button.thumb", { type: "button", "aria-label": label, title: label, tabIndex: n + m ? -1 : 0, "data-testid": `wall-${n}-${m}`, onclick: () => open(j, poses[m], tile) }, toCanvas(picture));
    column.append(tile);
  });
}

/** Open a sample of the expert that is most surely on. */
function begin() {
  if (chosen || !wall?.rows.length || !state.inferred) return;
  const m = Math.max(0, wall.capsules.indexOf(state.inferred.winner));
  open(wall.capsules[m], wall.rows[0].poses[m]);
}

/** Columns of experts that are off in this picture are dimmed. */
function dim() {
  const { inferred } = state;
  if (!here() || !inferred || !columns.length) return;
  for (const { j, bar, column } of columns) {
    const value = inferred.activation[j] ?? 0;
    bar.style.width = `${(100 * Math.max(0, Math.min(1, value))).toFixed(1)}%`;
    column.classList.toggle("off", value < 0.05);
    column.classList.toggle("wins", j === inferred.winner);
  }
  const on_ = columns.filter(({ j }) => inferred.activation[j] >= 0.05).length;
  by("wall-said").textContent = `${on_} of ${columns.length} experts ${on_ === 1 ? "is" : "are"} on for your picture; the others are dimmed. The strongest: ${title(inferred.winner)}.`;
}

/** Open one sample in its frame. */
function open(j, pose, tile = null) {
  const frame = state.facts.frame ? [...state.facts.frame.rest] : [];
  chosen = { capsule: j, pose, frame };
  by("wall").querySelector("[aria-pressed=true]")?.setAttribute("aria-pressed", "false");
  tile?.setAttribute("aria-pressed", "true");
  by("wall-title").textContent = title(j);
  by("wall-whose").textContent = state.facts.nicknames[j] ? `${state.facts.names[j]}, drawing on its own` : "drawing on its own";
  aim();
  draw();
}

function openNumbers(j) {
  set({ capsule: j, parent: j, pose: null, tab: "instantiation" });
}

const redraw = channel(({ image }, { note }) => {
  if (note === chosen) show(by("wall-drawn"), decode(image));
}, fail);

const draw = () => redraw(`/api/runs/${state.facts.id}/draw`, { capsule: chosen.capsule, pose: chosen.pose, frame: chosen.frame }, chosen);

function aim() {
  sliders.forEach(({ set: to }, k) => to(chosen.frame[k], state.facts.frame.rest[k]));
}

/** Sliders of the frame, where the model has one. */
function frames() {
  const { frame } = state.facts;
  wall = chosen = null;
  by("wall-frame").hidden = !frame;
  by("wall-unframed").hidden = Boolean(frame);
  sliders = (frame?.names ?? []).map((name, k) =>
    slider(name, { min: frame.low[k], max: frame.high[k], step: (frame.high[k] - frame.low[k]) / 100, value: frame.rest[k], digits: 2, testid: `frame-${name}` }, (x) => turn(k, x)),
  );
  fill(by("wall-sliders"), ...sliders.map(({ row }) => row));
}

function turn(k, value) {
  if (!chosen) return;
  chosen.frame[k] = value;
  draw();
}

/** Into the frame that the model found for the picture at the left. */
function asInput() {
  if (!chosen || !state.inferred?.frame) return;
  chosen.frame = [...state.inferred.frame];
  aim();
  draw();
}

/** For save.js. */
export function sheet() {
  if (!wall?.rows.length) return null;
  const side = 40;
  return {
    width: (side + 4) * wall.capsules.length, height: 60 + (side + 4) * wall.rows.length, title: `${state.facts.name}: experts`,
    paint(pen, { x, y }) {
      const c = colors();
      wall.capsules.forEach((j, m) => {
        pen.text(x + m * (side + 4) + side / 2, y + 10, title(j).replace(/^(mostly|expert) /, "").slice(0, 8), { size: 10, fill: c.soft, align: "middle" });
        wall.rows.forEach((row, n) => pen.image(toCanvas(row.pictures[m]), x + m * (side + 4), y + 18 + n * (side + 4), side, side));
      });
    },
    numbers: () => ({ capsules: wall.capsules, titles: wall.capsules.map(title), poses: wall.rows.map((row) => row.poses), domain: domain() }),
  };
}

/** Wire the panel up. */
export function start() {
  by("wall-more").onclick = walk;
  by("wall-domain").onchange = ({ target }) => set({ domain: target.value });
  by("wall-as-input").onclick = asInput;
  by("wall-upright").onclick = () => chosen && [Object.assign(chosen, { frame: [...state.facts.frame.rest] }), aim(), draw()];
  by("wall-numbers").onclick = () => chosen && take(chosen.capsule, chosen.pose);
  by("wall-again").onclick = async () => {
    if (!chosen) return;
    const { facts } = state;
    const answer = await ask(`/api/runs/${facts.id}/sample`, { capsule: chosen.capsule, domain: domain(), seed: Math.floor(Math.random() * 1e6) }).catch(fail);
    if (answer && facts === state.facts && chosen) [Object.assign(chosen, { pose: answer.pose }), draw()];
  };
  arrows(by("wall"), { selector: ".thumb" });
  on(["facts"], () => state.facts?.kind === "poe" && frames());
  on(["facts", "tab", "domain"], want);
  on(["inferred"], () => here() && [begin(), dim()]);
}
