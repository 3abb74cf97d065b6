// A guided tour in six steps: each opens a panel of a model and says what to see there.
import { by } from "./dom.js";
import { state } from "./state.js";

/** Kinds of model in the order in which a step would like to have them; words, and where to look. */
const STEPS = [
  {
    kinds: ["capsnet"], wish: { tab: "parents", example: 0 }, look: "capsules", title: "What is a capsule?",
    words: "A small group of numbers that stands for one thing. This network has one for each digit. The long bar says which digit it sees; the tile beside it is what that capsule would draw.",
  },
  {
    kinds: ["capsnet"], wish: { tab: "instantiation", example: 0 }, look: "numbers", title: "How does the thing look?",
    words: "The capsule's numbers say how this very digit is drawn: slanted, thick, wide. Move a slider and see. Nobody told the network what its numbers should mean.",
  },
  {
    kinds: ["capsnet"], wish: { tab: "routing", example: 0, step: 0 }, look: "votes-canvas", title: "Children vote",
    words: "Many small capsules below each look at one region and vote on the numbers of every capsule above. Each dot is a vote. In the first round all votes count alike.",
  },
  {
    kinds: ["capsnet"], wish: { tab: "routing", example: 0, step: 2 }, look: "heats", title: "Routing finds agreement",
    words: "Votes that agree with the others count more in the next round; the map shows from where the winner gets its support. Step through the rounds with , and .",
  },
  {
    kinds: ["poe"], wish: { tab: "lead", example: 0 }, look: "wall", title: "Capsules can draw, and learn without labels",
    words: "Each column is one capsule drawing by itself. Nobody named these; what they draw shows what they stand for. Those that are off in your picture are dimmed. Choose a drawing and turn its frame.",
  },
  {
    kinds: ["matrix", "capsnet"], wish: { tab: "lead", example: 0 }, look: "turn", title: "A thing from many sides",
    words: "Matrix capsules keep a small matrix that says how a thing stands to the viewer. Turn the toy below its picture, if there is one, and watch whether the answer stays. That is the end of the tour: draw, disturb, compare.",
  },
];

/** A model of a kind that ships: of digits, if there are several. @param {string} kind */
function shipped(kind) {
  const all = state.runs.filter((run) => run.card && run.kind === kind);
  return all.find((run) => run.card.data === "mnist") ?? all[0];
}

let at = -1;
let visit = () => {};

/** @param {(id: number, wish: object) => Promise<void>} open */
export function start(open) {
  visit = open;
  by("tour-next").onclick = () => go(at + 1);
  by("tour-back").onclick = () => go(at - 1);
  by("tour-end").onclick = () => go(-1);
  document.addEventListener("keydown", ({ key }) => key === "Escape" && at >= 0 && go(-1));
}

/** Show a step; one beyond the last, or -1, ends the tour. @param {number} n */
export async function go(n) {
  document.querySelector(".looked-at")?.classList.remove("looked-at");
  at = n >= 0 && n < STEPS.length ? n : -1;
  by("tour").hidden = at < 0;
  if (at < 0) return;
  const { kinds, wish, look, title, words } = STEPS[at];
  by("tour-title").textContent = title;
  by("tour-words").textContent = words;
  by("tour-count").textContent = `step ${at + 1} of ${STEPS.length}`;
  by("tour-back").disabled = at === 0;
  by("tour-next").textContent = at === STEPS.length - 1 ? "Done" : "Next";
  const found = kinds.map(shipped).find(Boolean) ?? state.runs[0];
  await visit(found.id, wish);
  if (at !== n) return;
  by(look)?.classList.add("looked-at");
  by(look)?.scrollIntoView({ block: "center" });
}
