// Sparse capsules: who wins and why. A row a capsule, in the order of its rank.
import { bars, brief, colors } from "./canvas.js";
import { by, fill, h } from "./dom.js";
import { called, on, set, state } from "./state.js";
import { show } from "./wire.js";

const here = () => state.tab === "lead" && state.facts?.kind === "sparse" && state.inferred?.competition;

const title = (j) => called(state.facts, j);

function row(j, { support, boost, score, rank, mask, frequency }, most) {
  const tile = h("canvas.tile", { width: 1, height: 1, "aria-hidden": "true" });
  if (state.inferred.capsuleImages) show(tile, state.inferred.capsuleImages[j]);
  tile.classList.toggle("dimmed", Boolean(state.inferred.silent?.[j]));
  const measure = (value, of, name) => {
    const bar = h("span.bar");
    bar.style.width = `${(100 * Math.max(0, Math.min(1, value / of))).toFixed(1)}%`;
    return h("span.measure", { title: name }, h("span.track", {}, bar), h("span.number", {}, brief(value)));
  };
  const cells = [
    h("span.number.place", {}, String(rank[j] + 1)), tile, h("span.capsule-name", {}, title(j), state.facts.nicknames[j] && h("span.nickname", {}, state.facts.names[j])),
    measure(support[j], most.support, "support"), h("span.number", { title: "boost" }, `× ${brief(boost[j])}`), measure(score[j], most.score, "score"), measure(mask[j], 1, "mask"),
    h("span.number", { title: "comes first" }, `${(100 * frequency[j]).toFixed(0)} %`),
  ];
  const label = `rank ${rank[j] + 1}: ${title(j)}, support ${brief(support[j])}, boost ${brief(boost[j])}, mask ${brief(mask[j])}`;
  return h(`button.competitor${mask[j] ? "" : ".silent"}${rank[j] ? "" : ".wins"}`, { type: "button", "aria-label": label, "data-testid": `competitor-${j}`, "data-rank": rank[j], onclick: () => set({ parent: j, capsule: j, pose: null, tab: "routing" }) }, ...cells);
}

/** A name that no other capsule has. */
const full = (j) => (state.facts.nicknames[j] ? `${state.facts.names[j]} (${state.facts.nicknames[j]})` : state.facts.names[j]);

/** Why the first is the first, in a sentence. */
function why({ support, boost, score, mask }, order) {
  const [first, second] = order;
  const best = support.indexOf(Math.max(...support));
  const gap = score[second] ? 100 * (score[first] / score[second] - 1) : 100;
  const lead = `${full(first)} comes first, ${gap.toFixed(gap < 10 ? 1 : 0)} % ahead of ${full(second)}`;
  const reason = best === first ? ": routing gave it the most support" : `. ${full(best)} has more support, but its boost is only ${brief(boost[best])} against ${brief(boost[first])}`;
  const left = mask.filter((m) => m > 0).length;
  const capital = (words) => `${words[0].toUpperCase()}${words.slice(1)}`;
  return `${`${lead}${reason}`.split(". ").map(capital).join(". ")}. ${left} of ${mask.length} capsules reach the decoder; the others are silenced.`;
}

function paint() {
  if (!here()) return;
  const { competition } = state.inferred;
  const order = competition.rank.map((_, j) => j).sort((a, b) => competition.rank[a] - competition.rank[b]);
  const most = { support: Math.max(...competition.support, 1e-9), score: Math.max(...competition.score, 1e-9) };
  by("competition-why").textContent = why(competition, order);
  const focused = document.activeElement?.dataset?.testid;
  fill(by("competitors"), ...order.map((j) => row(j, competition, most)));
  if (focused?.startsWith("competitor-")) by(focused)?.focus();
}

/** For save.js. */
export function sheet() {
  const { competition } = state.inferred;
  if (!competition) return null;
  const order = competition.rank.map((_, j) => j).sort((a, b) => competition.rank[a] - competition.rank[b]);
  return {
    width: 560, height: 70 + 24 * order.length, title: `${state.facts.name}: competition`,
    paint(pen, { x, y }) {
      const most = Math.max(...competition.score, 1e-9);
      bars(pen, { x, y, w: 540, h: 24 * order.length }, colors(), { names: order.map(title), values: order.map((j) => competition.score[j] / most), chosen: 0, wide: 130 });
    },
    numbers: () => ({ names: state.facts.names, ...competition }),
  };
}

/** Wire the panel up. */
export function start() {
  on(["inferred", "tab", "facts"], paint);
}
