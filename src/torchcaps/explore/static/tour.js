// A guided tour in six steps: each opens a panel of a model and says what to see there.
import { by } from "./dom.js";
import { state } from "./state.js";

/** Kinds of model in the order in which a step would like to have them; words, and where to look. */
const STEPS = [
  {
    kinds: ["capsnet"], wish: { tab: "parents", example: 0 }, look: "capsules", title: "What is a capsule?",
    words: "A small group of numbers that stands for one thing. This network has one capsule for each digit. The longest bar shows which digit it sees. The small picture beside a bar is what that capsule draws.",
  },
  {
    kinds: ["capsnet"], wish: { tab: "instantiation", example: 0 }, look: "numbers", title: "How does the thing look?",
    words: "The capsule's numbers describe this digit: how slanted, thick or wide it is. Move a slider and see the drawing change. Nobody told the network what its numbers should mean.",
  },
  {
    kinds: ["capsnet"], wish: { tab: "routing", example: 0, step: 0 }, look: "votes-canvas", title: "Children vote",
    words: "The layer below has many small capsules. Each looks at one region of the picture and votes for the numbers of every digit capsule. Each dot is a vote. In the first round all votes count the same.",
  },
  {
    kinds: ["capsnet"], wish: { tab: "routing", example: 0, step: 2 }, look: "heats", title: "Routing finds agreement",
    words: "Votes that agree with the others count more in the next round. The map shows which regions support the winner. Step through the rounds with the keys , and . or press Play.",
  },
  {
    kinds: ["poe"], wish: { tab: "lead", example: 0 }, look: "wall", title: "Capsules can learn without labels",
    words: "Each column is one capsule of another network, drawing on its own. It was never told what a digit is, and yet most capsules draw one kind of digit. Capsules that are off for your picture are dimmed. Choose a drawing and change its slant.",
  },
  {
    kinds: ["matrix", "capsnet"], wish: { tab: "lead", example: 0 }, look: "turn", title: "A thing from many sides",
    words: "Matrix capsules have a small matrix, the pose, that says from which side a thing is seen. Move the slider “turn” and watch whether the answer stays the same. This is the end of the tour. Now draw something yourself.",
  },
];

/** A model of a kind that ships; of several, the one whose routing takes rounds, or one of digits. @param {string} kind */
function shipped(kind) {
  const all = state.runs.filter((run) => run.card && run.kind === kind);
  return all.find((run) => run.name === "capsnet-digits") ?? all.find((run) => run.card.data === "mnist") ?? all[0];
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
  // The words stand at the bottom left: beside what is shown on a desktop, below it on a phone
  by(look)?.scrollIntoView({ block: matchMedia("(max-width: 760px)").matches ? "start" : "center" });
}
