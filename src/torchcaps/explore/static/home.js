// The front page: a card for every model that ships, and the runs of one's own.
import { by, fill, h } from "./dom.js";
import { systemName } from "./help.js";
import { state } from "./state.js";
import { decode, each, toCanvas } from "./wire.js";

/** Data sets as their authors spell them. */
const DATA = { mnist: "MNIST", "fashion-mnist": "Fashion-MNIST", multimnist: "MultiMNIST", smallnorb: "smallNORB" };

/** @param {(id: number) => void} open called with the run that was chosen */
export function paint(open) {
  const shipped = state.runs.filter((run) => run.card);
  const own = state.runs.filter((run) => !run.card);
  fill(by("models"), ...shipped.map((run) => card(run, open)));
  by("own-runs").hidden = !own.length;
  fill(by("own-list"), ...own.map((run) => plain(run, open)));
}

function card(run, open) {
  const pictures = each(decode(run.card.picture)).map(toCanvas);
  return h(
    "button.model", { type: "button", "data-testid": `model-${run.name}`, onclick: () => open(run.id) },
    h("span.model-pictures", { "aria-hidden": "true" }, ...pictures),
    h("span.model-name", {}, run.name),
    h("span.model-words", {}, run.card.summary),
    h("span.model-score", {}, run.card.headline),
    h("span.quiet", {}, `${systemName(run.kind)}, ${DATA[run.card.data] ?? run.card.data}`),
  );
}

const plain = (run, open) => h(
  "button.model", { type: "button", "data-testid": `own-${run.name}`, onclick: () => open(run.id) },
  h("span.model-name", {}, run.name), h("span.quiet", {}, systemName(run.kind)),
);
