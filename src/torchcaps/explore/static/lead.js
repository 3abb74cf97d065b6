// What a system is about: the first panel, of another kind for each system.
import * as apart from "./apart.js";
import * as beliefs from "./beliefs.js";
import * as competition from "./competition.js";
import { by } from "./dom.js";
import { on, set, state } from "./state.js";
import * as wall from "./wall.js";

/** The panel of each kind of model, and the name of its tab. */
const LEADS = {
  poe: { name: "Experts", panel: wall },
  sparse: { name: "Competition", panel: competition },
  matrix: { name: "Beliefs", panel: beliefs },
  capsnet: { name: "Pull apart", panel: apart },
};

/** Whether a kind of model has such a panel. @param {string} kind */
export const has = (kind) => kind in LEADS;

function choose() {
  const { facts } = state;
  if (!facts) return;
  by("tab-lead").hidden = !has(facts.kind);
  if (!has(facts.kind)) return state.tab === "lead" && set({ tab: "parents" });
  by("tab-lead").textContent = LEADS[facts.kind].name;
  for (const kind of Object.keys(LEADS)) by(`lead-${kind}`).hidden = kind !== facts.kind;
}

/** For save.js. */
export const sheet = () => LEADS[state.facts.kind]?.panel.sheet?.() ?? null;

/** Wire the panels up. */
export function start() {
  Object.values(LEADS).forEach(({ panel }) => panel.start());
  on(["facts"], choose);
}
