// Texts of the panels: a line for newcomers, and details behind “More”. A system that has none here is named by its kind.
import { h } from "./dom.js";

/** @typedef {"capsnet" | "matrix" | "sparse" | "poe"} Kind */

/** The line over a panel. @type {Record<string, string>} */
const LEADS = {
  parents: "A capsule is a small group of numbers that stands for one thing. A bar says how sure the model is that its thing is in the picture; the tile beside it is what that capsule alone would draw, or, dimmed, what one that is off stands for.",
  routing: "Many small capsules below, each for one region of the picture, vote on the pose of every capsule above. Routing repeats a few rounds: a vote that agrees with the others counts more in the next round.",
  instantiation: "A capsule's numbers say how its thing looks: slanted, thick, wide. Move one and the picture is redrawn at once. Nobody told the model what its numbers should mean; it found that out itself.",
  samples: "Each column is one capsule drawing on its own, each row another set of numbers for it. Choose a picture to open it in the instantiation panel.",
  compare: "Two models on the same picture, each in the size it was trained on.",
};

/** The same where nothing can be drawn. @type {Record<string, string>} */
const BLIND = {
  parents: "A capsule is a small group of numbers that stands for one thing. A bar says how sure the model is that its thing is in the picture.",
  instantiation: "A capsule's numbers say how its thing stands to the viewer. This model has no decoder, so they can be read but not drawn.",
};

/** The line over the panel that says what a system is about. @type {Record<Kind, string>} */
const ABOUT = {
  capsnet: "Capsules see several things at once. Where two digits lie over each other, each of the two longest capsules draws its own, in its own color: the picture is pulled apart.",
  matrix: "This network saw toys from many sides. Turn the toy with the sliders under its picture: they walk through real test images. Each class capsule keeps a 4×4 pose; the images beside it are those whose poses are nearest, which is what the capsule believes to see.",
  sparse: "Nobody told these capsules what to stand for. They compete for every picture: routing gives each some support, seldom winners get a boost, and only the first in rank may draw.",
  poe: "Each column is an expert that learned without labels, drawing from its own numbers. Walk along the wall, choose a drawing to open it, and turn its frame.",
};
const ROUTERS = "The same children cast the same votes; two routers find agreement among them, round by round. The weights were trained with the router at the left, so the other one meets votes that were not made for it.";

const SINGLE = "Many small capsules below, each for one region of the picture, vote on the pose of every capsule above. This network routes in a single round: there is nothing to step through.";

/** @param {string} panel @param {{has_decoder: boolean, iterations: number}} facts of the run */
export function lead(panel, facts) {
  if (panel === "lead") return ABOUT[facts.kind] ?? "";
  if (panel === "routers") return ROUTERS;
  if (panel === "routing" && facts.iterations === 1) return SINGLE;
  return (facts.has_decoder ? LEADS : { ...LEADS, ...BLIND })[panel];
}

/** Behind “More”, by kind of model. @type {Record<string, Record<Kind, string[]>>} */
const MORE = {
  lead: {
    sparse: ["Support is the share of the picture's places that routing gives to a capsule, each place by its most convinced child. Support times boost is the score, and the rank goes by the score. The mask falls with the rank, exp(−12 r / (J − 1)) in the paper, and is 0 below .01. “First in” is how often the capsule came first lately in training: below a band its boost rises, above it falls (algorithm 1 of Rawlinson 2018)."],
    poe: ["A name such as “mostly sevens” comes from the test images that the expert wins; one that wins few, or many kinds, has a number. An expert whose chance of being on is below .05 for your picture is dimmed. In a frame, size, slant and place are taken from the picture's brightness before the experts see it, and put back when they draw."],
    matrix: ["A tile is a test image that the same capsule wins; the four with the nearest poses are shown, dimmed where the capsule is off. The small square is the pose: blue-green where a number is positive, orange where it is negative."],
    capsnet: ["The lengths of capsules are no probabilities and need not add up to 1, so two may be long. A network that was trained on single digits has never seen an overlay; one that was trained on MultiMNIST has seen nothing else (Sabour 2017, section 6)."],
  },
  parents: {
    capsnet: [
      "A CapsNet (Sabour, Frosst and Hinton 2017) has one capsule for every class. Its numbers form a vector. The vector's length, between 0 and 1, is the bar: is the thing there? Its direction says how the thing looks.",
      "A second network, the decoder, has learned to redraw a picture from the numbers of the right capsule. Given those of another, it draws what the picture would be if that were the answer. Several bars may be long at once: the lengths are no probabilities and need not add up to 1.",
    ],
    matrix: [
      "A matrix capsule (Hinton, Sabour and Frosst 2018) is a switch and a 4×4 matrix. The switch, between 0 and 1, is the bar: is the thing there? The matrix says how it stands to the viewer.",
      "There is no decoder in this system, so nothing is redrawn.",
    ],
    sparse: [
      "These capsules (Rawlinson, Ahmed and Kowadlo 2018) have learned without labels, so none of them is called “seven”. They compete: the more support a capsule gets from routing, the higher its rank, and only the first ranks reach the decoder. The others are silenced, their bar is 0.",
      "The winner is the capsule of the first rank. All capsules that are left draw the picture together; each has learned a kind of shape.",
    ],
    poe: [
      "Products of expert capsules (Hauser 2019) learn without labels, each as an expert on some kind of shape. The bar is the chance that the capsule is on, ‖z‖² / (1 + ‖z‖²), where z are its numbers. In runs where capsules compete, which is not in the paper, those that lose are turned down, most of them to 0.",
      "All capsules that are on draw the picture together; the tile of a row shows what one draws alone.",
    ],
  },
  routing: {
    capsnet: [
      "The shares a child gives to the parents add up to 1; they are all alike in the first round. Each child's vote is then compared with what the parent came to be (their scalar product), and where the two agree the child sends more. The heat map adds up, at each place, the shares its children give to the chosen parent, times how active they are. A square stands for one place in the grid of children; each child sees a window wider than its square.",
      "In the cloud each dot is a vote, seen along the two directions in which votes differ most. The dot grows with its share; votes that lie far out stand at the frame. The ring is where the votes, so weighted, meet. Choose a square of the map to follow the children of that place.",
    ],
    matrix: [
      "EM routing treats the votes for a parent as points and fits a bell curve (a Gaussian) to them. Then each child is shared out anew: parents whose curve explains its vote well get more. The heat map adds up, at each place, the shares its children give to the chosen parent, times how active they are.",
      "The histograms are those of figure 2 of the paper: how far the votes lie from the parent's mean, each counted by its share. Where many lie near 0, the votes agree, and the parent switches on.",
    ],
    sparse: [
      "The shares a child gives to the parents add up to 1. Where votes agree with a parent the child sends more to it in the next round. The support a capsule gathers in this way decides its rank, and the rank decides who may draw.",
      "In the cloud each dot is a vote, seen along the two directions in which votes differ most; it grows with its share; votes that lie far out stand at the frame. Choose a square of the map to follow the children of that place.",
    ],
    poe: [
      "Here the shares are usually spread evenly, so the heat map shows what each place adds to the chosen capsule: its share times how far its vote points the capsule's way, or against it.",
      "In the cloud each dot is a vote, seen along the two directions in which votes differ most. Choose a square of the map to follow the children of that place.",
    ],
  },
  instantiation: {
    capsnet: ["The sliders reach ±.25 about what the model saw, as in figure 4 of Sabour 2017; “wider” goes four times as far, where pictures fall apart. On the pad, two numbers move at once; the small pictures are what lies there."],
    matrix: ["These are the 4×4 numbers that say how the thing stands to the viewer. This system has no decoder: the numbers can be read, but nothing can be drawn from them."],
    sparse: ["The sliders reach from −1 to 1, as in figure 5 of Rawlinson 2018. On the pad, two numbers move at once; the small pictures are what lies there."],
    poe: ["The numbers are z, before they are squashed into the unit ball. The sliders reach 2.5 standard deviations about what this capsule has seen. On the pad, two numbers move at once."],
  },
  samples: {
    capsnet: ["The sets of numbers are those that test images gave to the capsule."],
    matrix: [],
    sparse: ["The sets of numbers are those that test images gave to the capsule. A capsule that won no image has no column."],
    poe: ["Where do the numbers come from? “Empirical”: from pictures the capsule has seen. “Complete”: from a bell curve (a Gaussian) in all directions. “Restricted”: from the half of these directions that training visited. Compare figure 2 of Hauser 2019."],
  },
  compare: {},
};
const BOTH = ["Bars of different kinds of model mean different things: a length, a switch, a chance. Compare who comes first and by how much, not the numbers as such."];

/** What the curves show. */
export const CURVES = {
  agreement: "How well the votes for a capsule agree with what it came to be, weighted by their shares. The chosen one is in color.",
  entropy: "How undecided the children are: the mean entropy of their shares. High: each spreads its share evenly over all parents. 0: each gives all to one.",
  activation: "What each capsule would say if routing stopped after this round.",
};

/** @param {string} panel @param {Kind} kind @returns {HTMLElement | null} */
export function more(panel, kind) {
  const words = panel === "compare" ? BOTH : (MORE[panel]?.[kind] ?? []);
  if (!words.length) return null;
  return h("details.more", {}, h("summary", {}, "More about this"), ...words.map((text) => h("p", {}, text)));
}

/** The kinds in words. @type {Record<Kind, string>} */
const KINDS = { capsnet: "CapsNet", matrix: "matrix capsules", sparse: "sparse capsules", poe: "products of experts" };

/** @param {string} kind @returns {string} the system in words */
export const systemName = (kind) => KINDS[kind] ?? kind;
