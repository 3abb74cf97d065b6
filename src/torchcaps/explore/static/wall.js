// The sample wall: a column a capsule, a row a set of numbers.
import { channel } from "./api.js";
import { colors } from "./canvas.js";
import { arrows, by, fill, h, offer } from "./dom.js";
import { take } from "./instantiation.js";
import { on, set, state } from "./state.js";
import { decode, each, toCanvas } from "./wire.js";

let wall = null;

const send = channel(
  (answer, { note }) => {
    if (note.facts !== state.facts) return;
    wall = { ...answer, pictures: each(decode(answer.images)).map(each), key: note.key };
    by("wall-error").hidden = by("wall-wait").hidden = true;
    paint();
  },
  (error) => {
    by("wall-error").hidden = error.status === undefined;
    by("wall-error").textContent = error.message;
    by("wall-wait").hidden = true;
  },
);

const domain = () => (state.facts.domains.includes(state.domain) ? state.domain : state.facts.domains[0]);

function want() {
  const { facts, tab, count, seed } = state;
  if (tab !== "wall" || !facts) return;
  const able = facts.draws && facts.domains.length > 0;
  by("wall-able").hidden = !able;
  by("wall-unable").hidden = able;
  by("wall-unable").textContent = facts.draws
    ? "This run's images are not on this machine, so there are no numbers to draw from. Start the explorer with --data-dir to show where they are."
    : "This model has no decoder: it can say what it sees, but it cannot draw. Choose another run to see its capsules draw.";
  if (!able) return;
  offer(by("wall-domain"), facts.domains.map((d) => [d, d]), domain());
  by("wall-domain-field").hidden = facts.domains.length < 2;
  by("wall-count").value = String(count);
  const body = { count, domain: domain(), seed };
  const key = JSON.stringify([facts.id, body]);
  if (wall?.key === key) return;
  by("wall-wait").hidden = Boolean(wall);
  send(`/api/runs/${facts.id}/wall`, body, { facts, key });
}

function paint() {
  const { names } = state.facts;
  const grid = by("wall-grid");
  grid.style.setProperty("--columns", String(wall.capsules.length));
  const short = (name) => name.replace(/^capsule /, "");
  const heads = wall.capsules.map((j) => h("span.wall-head", { title: names[j] }, short(names[j])));
  const tiles = wall.pictures.flatMap((row, n) =>
    row.map((picture, m) => {
      const j = wall.capsules[m];
      const label = `${names[j]}, sample ${n + 1}`;
      const props = { type: "button", "aria-label": label, title: label, tabIndex: n + m ? -1 : 0, "data-testid": `wall-${n}-${m}` };
      return h("button.thumb", { ...props, onclick: () => take(j, wall.poses[n][m]) }, toCanvas(picture));
    }),
  );
  fill(grid, ...heads, ...tiles);
}

/** For save.js. */
export function sheet() {
  if (!wall) return null;
  const side = wall.capsules.length > 12 ? 44 : 60;
  return {
    width: 40 + (side + 4) * wall.capsules.length, height: 100 + (side + 4) * wall.pictures.length, title: `${state.facts.name}: samples`,
    paint(pen, { x, y }) {
      const c = colors();
      wall.capsules.forEach((j, m) => {
        const name = state.facts.names[j].replace(/^capsule /, "");
        pen.text(x + m * (side + 4) + side / 2, y + 10, name.slice(0, 8), { size: 11, fill: c.soft, align: "middle" });
        wall.pictures.forEach((row, n) => pen.image(toCanvas(row[m]), x + m * (side + 4), y + 20 + n * (side + 4), side, side));
      });
    },
    numbers: () => ({ capsules: wall.capsules, poses: wall.poses, domain: domain(), seed: state.seed }),
  };
}

/** Wire the panel up. */
export function start() {
  by("wall-domain").onchange = ({ target }) => set({ domain: target.value });
  by("wall-count").onchange = ({ target }) => set({ count: Number(target.value) });
  by("wall-again").onclick = () => set({ seed: state.seed + 1 });
  arrows(by("wall-grid"), { columns: () => wall?.capsules.length ?? 1 });
  on(["facts"], () => {
    wall = null;
    fill(by("wall-grid"));
  });
  on(["facts", "tab", "count", "seed", "domain"], want);
}
