// Texts of the panels: a line for newcomers, and details behind “More”. A system that has none here is named by its kind.
import { h } from "./dom.js";

/** @typedef {"capsnet" | "matrix" | "sparse" | "poe"} Kind */

/** The line over a panel. @type {Record<string, string>} */
const LEADS = {
  parents: "A capsule is a small group of numbers that stands for one thing. Its bar says how sure the model is that this thing is in the picture. The small picture beside it is what this capsule draws on its own. If the capsule is off, the picture is dimmed and shows what it usually stands for.",
  routing: "Each small capsule in the layer below (a child) sees one region of the picture and votes for the numbers of every capsule above (a parent). Routing takes a few rounds: votes that agree with the others count more in the next round.",
  instantiation: "A capsule's numbers say how its thing looks: slanted, thick, wide. Move a slider and the picture is redrawn. Nobody told the model what its numbers should mean: it learned that itself.",
  samples: "Each column shows one capsule drawing on its own, each time from other numbers. Choose a picture to change its numbers.",
  compare: "Two models look at the same picture, each in the size that it was trained on.",
};

/** The same where nothing can be drawn. @type {Record<string, string>} */
const BLIND = {
  parents: "A capsule is a small group of numbers that stands for one thing. Its bar says how sure the model is that this thing is in the picture.",
  samples: "Other models draw here: one capsule in each column.",
  instantiation: "A capsule's numbers say how its thing is placed and turned, seen from the camera. This model has no decoder, so they can be read but not drawn.",
};

/** The line over the panel that says what a system is about. @type {Record<Kind, string>} */
const ABOUT = {
  capsnet: "Several capsules can be on at once. When two digits lie on top of each other, the two longest capsules each draw their own digit, in two colors. That separates the digits again.",
  matrix: "This network learned to name toys seen from many sides. Turn the toy with the sliders under its picture; they choose among real test images. Each class has a capsule with a 4×4 pose matrix. Beside it are the test images with the nearest poses: they show what the capsule takes the toy for.",
  sparse: "These capsules learned without labels. They compete for every picture: routing gives each capsule some support, capsules that seldom win get a boost, and only the highest ranks take part in drawing.",
  poe: "Each column is one expert: a capsule that learned without labels to draw one kind of thing. Choose a drawing to open it, then change its size, slant and position.",
};
const ROUTERS = "The same votes, routed in two ways, round by round. The network was trained with the router on the left. The one on the right gets votes that were not trained for it, so expect worse answers.";

const SINGLE = "Each small capsule in the layer below (a child) sees one region of the picture and votes for the numbers of every capsule above (a parent). This network routes in a single round.";

const WHOLE = "Each small capsule in the layer below (a child) sees the whole picture and votes for the numbers of every capsule above (a parent). This network routes in a single round.";

/** Whether the children have places in the picture, or each sees all of it. @param {{places: number[]}} facts */
export const hasPlaces = ({ places }) => places[0] * places[1] > 1;

/** @param {string} panel @param {any} facts of the run */
export function lead(panel, facts) {
  if (panel === "lead") return ABOUT[facts.kind] ?? "";
  if (panel === "routers") return ROUTERS;
  if (panel === "routing" && facts.iterations === 1) return hasPlaces(facts) ? SINGLE : WHOLE;
  return (facts.has_decoder ? LEADS : { ...LEADS, ...BLIND })[panel];
}

/** Behind “More”, by kind of model. @type {Record<string, Record<Kind, string[]>>} */
const MORE = {
  lead: {
    sparse: ["Support is how much of the picture routing gives to a capsule. Support times boost is the score, and the score decides the rank. The mask is the factor that a capsule's numbers are multiplied by: 1 for the first rank, less for each further rank, 0 from about the seventh (exp(−12 r / (J − 1)) in the paper, cut at 0.01). “Wins” is how often the capsule came first near the end of training. The boost of a capsule that won too seldom was raised, that of one that won too often was lowered (algorithm 1 of Rawlinson 2018). A dimmed picture shows what a weak or silenced capsule usually draws."],
    poe: ["A name such as “mostly sevens” comes from the test images that the expert wins. An expert that wins few images, or many kinds, has a number instead. Experts with a probability below 0.05 of being on are dimmed. Where a model has frames, size, slant and position are measured and removed before the experts see the picture, and put back when they draw."],
    matrix: ["The four pictures of a row are test images that this capsule wins, those with the nearest poses first; they are dimmed where the capsule is off. The small square is the pose: blue-green where a number is positive, orange where it is negative."],
    capsnet: ["The lengths of capsules are not probabilities and need not add up to 1, so two can be long at once. capsnet-digits was trained on single digits, capsnet-multimnist on pairs only (Sabour 2017, section 6)."],
  },
  parents: {
    capsnet: [
      "A CapsNet (Sabour, Frosst and Hinton 2017) has one capsule for every class. Its numbers form a vector. The vector's length, between 0 and 1, is the bar: is the thing there? Its direction says how the thing looks.",
      "A second network, the decoder, has learned to redraw a picture from the numbers of the right capsule. Given those of another, it draws what that capsule would have seen. Several bars can be long at once: lengths are not probabilities and need not add up to 1.",
    ],
    matrix: [
      "A matrix capsule (Hinton, Sabour and Frosst 2018) has an activation and a 4×4 matrix. The activation, between 0 and 1, is the bar: is the thing there? The matrix, its pose, says how the thing is placed and turned, seen from the camera.",
      "There is no decoder in this system, so nothing is redrawn.",
    ],
    sparse: [
      "These capsules (Rawlinson, Ahmed and Kowadlo 2018) learned without labels. They compete: the more support a capsule gets from routing, the higher its rank, and only the first ranks reach the decoder. The others are silenced: their bar is 0.",
      "The winner is the capsule of the first rank. The capsules that are not silenced draw the picture together.",
    ],
    poe: [
      "Products of expert capsules (Hauser 2019) learn without labels, each as an expert on some kind of shape. The bar is the probability that the capsule is on, ‖z‖² / (1 + ‖z‖²), where z are its numbers. In models where capsules compete, which is not in the paper, capsules that lose are reduced, most of them to 0.",
      "All capsules that are on draw the picture together; the small picture shows what one draws on its own.",
    ],
  },
  routing: {
    capsnet: [
      "The shares that a child gives to the parents add up to 1. In the first round they are all equal. Then each vote is compared with the parent's numbers (by their scalar product), and where the two agree the child's share for this parent grows. A square of the heat map is one position of the grid of children. It shows the shares that its children give to the chosen parent, times how active they are. A child sees a window that is wider than its square.",
      "In the plot each dot is a vote, seen along the two directions in which votes differ most. Large dots have large shares. Votes that lie far out are drawn at the border. The ring is the weighted mean of the votes. Choose a square of the map to follow the children of that position.",
    ],
    matrix: [
      "EM routing treats the votes for a parent as points and fits a bell curve (a Gaussian) to them. Variational Bayes routing does the same with a whole range of curves, weighted by how likely each is. Then the shares of each child are computed again: parents whose curve explains its vote well get more. A square of the heat map shows the shares that the children of a position give to the chosen parent, times how active they are.",
      "Of EM routing there are also the histograms of figure 2 of the paper: how far the votes lie from the parent's mean, weighted by their shares. If many lie near 0, the votes agree, and the parent becomes active.",
    ],
    sparse: [
      "The shares that a child gives to the parents add up to 1. Where a vote agrees with a parent, the child's share for it grows in the next round. The support that a capsule collects in this way decides its rank, and the rank decides whether it draws.",
      "In the plot each dot is a vote, seen along the two directions in which votes differ most. Large dots have large shares. Votes that lie far out are drawn at the border. Choose a square of the map to follow the children of that position.",
    ],
    poe: [
      "Here the shares are usually equal, so the heat map shows what each position adds to the chosen capsule: its share, times how far its vote points in the capsule's direction.",
      "In the plot each dot is a vote, seen along the two directions in which votes differ most. Choose a square of the map to follow the children of that position.",
    ],
  },
  instantiation: {
    capsnet: ["The sliders reach 0.25 up and down from what the model saw, as in figure 4 of Sabour 2017. With “wider” they reach four times as far, where drawings fall apart. On the pad, two numbers move at once; the small pictures show what is drawn there."],
    matrix: ["These are the 4×4 numbers of the pose. This system has no decoder: the numbers can be read, but nothing can be drawn from them."],
    sparse: ["The sliders reach from −1 to 1, as in figure 5 of Rawlinson 2018. On the pad, two numbers move at once; the small pictures show what is drawn there."],
    poe: ["The numbers are z, before they are squashed into the unit ball. The sliders reach 2.5 standard deviations of what this capsule has seen. On the pad, two numbers move at once."],
  },
  samples: {
    capsnet: ["The numbers are those that test images gave to the capsule."],
    matrix: [],
    sparse: ["The numbers are those that test images gave to the capsule. A capsule that won no image has no column."],
    poe: ["Where the numbers come from: “empirical” are near those of pictures that the capsule has seen; “complete” are from a bell curve (a Gaussian) in all directions; “restricted” are from the half of these directions that training visited. Compare figure 2 of Hauser 2019."],
  },
  compare: {},
};
const BOTH = ["Bars mean different things in different systems: a length, an activation, a probability. Compare which capsule comes first and by how much, not the numbers themselves."];

const ATTENTION = ["A vote's share grows with how well it agrees with the votes of all children for the same parent, measured by scalar products, plus a learned bias. The shares of a child add up to 1. There are no rounds (Mazzia, Salvetti and Chiaberge 2021).", "In the plot each dot is a vote, seen along the two directions in which votes differ most. Large dots have large shares. The ring is the weighted mean of the votes."];

/** What the curves show. */
export const CURVES = {
  agreement: "How well the votes for a capsule agree with its numbers, weighted by their shares. The chosen capsule is in color, the others are gray.",
  entropy: "How undecided the children are, on average. At the highest value, a child gives every parent the same share; at 0, it gives everything to one.",
  activation: "The activation of each capsule if routing stopped after this round.",
};

/** @param {string} panel @param {any} facts of the run @returns {HTMLElement | null} */
export function more(panel, facts) {
  const own = panel === "routing" && facts.routers[0] === "attention" ? ATTENTION : MORE[panel]?.[facts.kind];
  const words = panel === "compare" ? BOTH : (own ?? []);
  if (!words.length) return null;
  return h("details.more", {}, h("summary", {}, "More about this"), ...words.map((text) => h("p", {}, text)));
}

/** The kinds in words. @type {Record<Kind, string>} */
const KINDS = { capsnet: "CapsNet", matrix: "matrix capsules", sparse: "sparse capsules", poe: "products of experts" };

/** @param {string} kind @returns {string} the system in words */
export const systemName = (kind) => KINDS[kind] ?? kind;
