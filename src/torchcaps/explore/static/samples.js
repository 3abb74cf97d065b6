// Samples: a column a capsule, a row a set of numbers.
import { channel } from "./api.js";
import { colors } from "./canvas.js";
import { arrows, by, fill, h, offer } from "./dom.js";
import { take } from "./instantiation.js";
import { called, on, set, state } from "./state.js";
import { decode, each, toCanvas } from "./wire.js";

let grid = null;

const send = channel(
  (answer, { note }) => {
    if (note.facts !== state.facts) return;
    grid = { ...answer, pictures: each(decode(answer.images)).map(each), key: note.key };
    by("samples-error").hidden = by("samples-wait").hidden = true;
    paint();
  },
  (error) => {
    by("samples-error").hidden = error.status === undefined;
    by("samples-error").textContent = error.message;
    by("samples-wait").hidden = true;
  },
);

const domain = () => (state.facts.domains.includes(state.domain) ? state.domain : state.facts.domains[0]);

function want() {
  const { facts, tab, count, seed } = state;
  if (tab !== "samples" || !facts) return;
  const able = facts.has_decoder && facts.domains.length > 0;
  by("samples-able").hidden = !able;
  by("samples-unable").hidden = able;
  by("samples-unable").textContent = facts.has_decoder
    ? "This run's images are not on this machine, so there are no poses to sample. Start the explorer with --data-dir FOLDER to name the folder that holds them."
    : "This model has no decoder, so its capsules cannot draw. Its first panel shows the test images with the nearest poses instead.";
  if (!able) return;
  offer(by("samples-domain"), facts.domains.map((d) => [d, d]), domain());
  by("samples-domain-field").hidden = facts.domains.length < 2;
  by("samples-count").value = String(count);
  const body = { count, domain: domain(), seed };
  const key = JSON.stringify([facts.id, body]);
  if (grid?.key === key) return;
  by("samples-wait").hidden = Boolean(grid);
  send(`/api/runs/${facts.id}/sample-grid`, body, { facts, key });
}

function paint() {
  const { names } = state.facts;
  const table = by("samples-grid");
  table.style.setProperty("--columns", String(grid.capsules.length));
  const short = (name) => name.replace(/^capsule /, "");
  const heads = grid.capsules.map((j) => h("span.sample-head", { title: called(state.facts, j) }, short(names[j])));
  const tiles = grid.pictures.flatMap((row, n) =>
    row.map((picture, m) => {
      const j = grid.capsules[m];
      const label = `${called(state.facts, j)}, sample ${n + 1}`;
      const props = { type: "button", "aria-label": label, title: label, tabIndex: n + m ? -1 : 0, "data-testid": `samples-${n}-${m}` };
      return h("button.thumb", { ...props, onclick: () => take(j, grid.poses[n][m]) }, toCanvas(picture));
    }),
  );
  fill(table, ...heads, ...tiles);
}

/** For save.js. */
export function sheet() {
  if (!grid) return null;
  const side = grid.capsules.length > 12 ? 44 : 60;
  return {
    width: 40 + (side + 4) * grid.capsules.length, height: 100 + (side + 4) * grid.pictures.length, title: `${state.facts.name}: samples`,
    paint(pen, { x, y }) {
      const c = colors();
      grid.capsules.forEach((j, m) => {
        const name = state.facts.names[j].replace(/^capsule /, "");
        pen.text(x + m * (side + 4) + side / 2, y + 10, name.slice(0, 8), { size: 11, fill: c.soft, align: "middle" });
        grid.pictures.forEach((row, n) => pen.image(toCanvas(row[m]), x + m * (side + 4), y + 20 + n * (side + 4), side, side));
      });
    },
    numbers: () => ({ capsules: grid.capsules, poses: grid.poses, domain: domain(), seed: state.seed }),
  };
}

/** Wire the panel up. */
export function start() {
  by("samples-domain").onchange = ({ target }) => set({ domain: target.value });
  by("samples-count").onchange = ({ target }) => set({ count: Number(target.value) });
  by("samples-again").onclick = () => set({ seed: state.seed + 1 });
  arrows(by("samples-grid"), { columns: () => grid?.capsules.length ?? 1 });
  on(["facts"], () => {
    grid = null;
    fill(by("samples-grid"));
  });
  on(["facts", "tab", "count", "seed", "domain"], want);
}
