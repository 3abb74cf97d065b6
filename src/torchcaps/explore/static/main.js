// Wires the page: opens runs, asks what the model sees, follows the link, shows whether all is well.
import { ask, channel, Gone, line, Refused } from "./api.js";
import * as apart from "./apart.js";
import { repaint } from "./canvas.js";
import * as compare from "./compare.js";
import { arrows, by, fill, h, later, offer } from "./dom.js";
import { lead, more, systemName } from "./help.js";
import * as home from "./home.js";
import * as input from "./input.js";
import * as instantiation from "./instantiation.js";
import * as lead_ from "./lead.js";
import * as parents from "./parents.js";
import * as routers from "./routers.js";
import * as routing from "./routing.js";
import { save } from "./save.js";
import { follow, isOurs, link, on, read, set, state } from "./state.js";
import * as samples from "./samples.js";
import * as tour from "./tour.js";
import * as turn from "./turn.js";
import { decode, each, encode } from "./wire.js";

const PANELS = { lead: lead_, parents, routing, instantiation, samples, routers, compare };

const send = channel(
  (answer, { note }) => {
    if (note.facts !== state.facts) return;
    const capsuleImages = answer.capsule_images && each(decode(answer.capsule_images));
    const reconstruction = answer.reconstruction && decode(answer.reconstruction);
    const nearest = answer.nearest && each(decode(answer.nearest)).map(each);
    set({ inferred: { ...answer, capsuleImages, reconstruction, nearest, image: note.image } });
    trouble("");
  },
  (error) => trouble(error),
);

function infer() {
  const { facts, image } = state;
  if (!facts || !image || String(image.shape) !== String(facts.shape)) return;
  send(`/api/runs/${facts.id}/infer`, { image: encode(image) }, { facts, image });
}

/** @param {Error | string} error shown above the page; one of a server that is gone has its own banner */
function trouble(error) {
  const words = error instanceof Gone ? "" : (error.message ?? error);
  by("trouble").textContent = words;
  by("trouble").hidden = !words;
}

/** Open a run, with what a link wishes for it. @param {number} id @param {Record<string, any>} wish */
async function open(id, wish = {}) {
  set({ home: false });
  by("page").setAttribute("aria-busy", "true");
  by("run").value = String(id);
  try {
    const facts = await ask(`/api/runs/${id}`);
    if (Number(by("run").value) !== id) return;
    set({ inferred: null, image: null, label: null, parent: null, capsule: null, pose: null, place: null, second: null });
    set({ facts, step: facts.iterations - 1, domain: facts.domains[0] ?? null, other: state.other === id ? null : state.other });
    introduce();
    await apply(wish);
    trouble("");
  } catch (error) {
    if (state.facts) by("run").value = String(state.facts.id);
    trouble(error);
  } finally {
    by("page").setAttribute("aria-busy", "false");
  }
}

/** What of a wish fits this run. */
async function apply(wish) {
  const { facts } = state;
  const fits = (j) => Number.isInteger(j) && j < facts.names.length;
  if (wish.image) set({ source: "draw", base: null });
  else if (wish.example !== undefined) set({ source: "example", example: wish.example });
  for (const key of ["tab", "changes", "wide", "count", "seed", "fit"]) if (wish[key] !== undefined) set({ [key]: wish[key] });
  if (wish.axes?.every((k) => k >= 0 && k < facts.dimension)) set({ axes: wish.axes });
  if (wish.step < facts.iterations) set({ step: wish.step });
  if (facts.domains.includes(wish.domain)) set({ domain: wish.domain });
  if (fits(wish.parent)) set({ parent: wish.parent });
  if (facts.routers.includes(wish.router)) set({ router: wish.router });
  if (wish.place?.every((x, n) => x >= 0 && x < facts.places[n])) set({ place: wish.place });
  if (fits(wish.capsule)) set({ capsule: wish.capsule, pose: wish.pose?.length === facts.dimension ? wish.pose : null });
  const other = state.runs.find((run) => run.name === wish.with);
  if (other) set({ other: other.id });
  await input.renew();
  if (wish.image) input.takePicture(wish.image);
}

/** Words about the run, and on every panel. */
function introduce() {
  const { facts } = state;
  document.title = `${facts.name} · torchcaps explore`;
  by("about").textContent = `${systemName(facts.kind)}, ${facts.parameters.toLocaleString("en")} parameters, ${facts.shape[2]}×${facts.shape[1]} pixels`;
  by("about").title = facts.about;
  for (const panel of Object.keys(PANELS)) fill(by(`words-${panel}`), h("p.lead", {}, lead(panel, facts)), more(panel, facts));
}

const MEASURES = { capsnet: "its length is", matrix: "its activation is", sparse: "it ranks first, with length", poe: "it is on with probability" };
const announce = later((words) => (by("live").textContent = words), 500);

function answer() {
  const { inferred, facts, label } = state;
  if (!inferred || !facts) return;
  const name = facts.names[inferred.winner];
  const value = inferred.activation[inferred.winner];
  const { bytes } = inferred.image;
  if (facts.things > 1 && facts.classifies) return several();
  if (bytes.every((x) => x === bytes[0])) return nothing();
  const nickname = facts.nicknames[inferred.winner];
  by("answer-lead").textContent = facts.classifies ? "The model says" : "Strongest capsule";
  by("answer").textContent = nickname ?? name;
  by("answer").classList.toggle("long", by("answer").textContent.length > 3);
  by("answer").classList.toggle("unsure", facts.classifies && value < 0.5);
  const known = facts.classifies && label ? (label.index === inferred.winner ? ", and that is right" : `; the label is ${label.name}`) : "";
  by("answer-more").textContent = `${nickname ? `${name}: ` : ""}${MEASURES[facts.kind] ?? "its activation is"} ${value.toFixed(2)}${known}`;
  announce(`${by("answer-lead").textContent} ${name}, ${value.toFixed(2)}${known}`);
}

/** Two things in one picture: the two longest capsules. */
function several() {
  const { inferred, facts, label } = state;
  if (inferred.image.bytes.every((x) => x === inferred.image.bytes[0])) return nothing();
  const [a, b] = apart.strongest(inferred.activation);
  const named = [a, b].map((j) => facts.names[j]).join(" and ");
  const wanted = label?.name.split(" and ").sort().join(" and ");
  const known = !wanted ? "" : wanted === named.split(" and ").sort().join(" and ") ? ", and that is right" : `; the label is ${label.name}`;
  by("answer-lead").textContent = "The model says";
  by("answer").textContent = named;
  by("answer").classList.add("long");
  by("answer").classList.toggle("unsure", inferred.activation[b] < 0.5);
  by("answer-more").textContent = `their lengths are ${inferred.activation[a].toFixed(2)} and ${inferred.activation[b].toFixed(2)}${known}`;
  announce(`The model says ${named}${known}`);
}

/** A blank picture: whatever the capsules say of it means nothing. */
function nothing() {
  by("answer-lead").textContent = "The picture is blank";
  by("answer").textContent = "nothing";
  by("answer").classList.add("long", "unsure");
  by("answer-more").textContent = "draw something, or choose a test image";
  announce("The picture is blank");
}

/** The front page, or a model. */
function places() {
  by("home").hidden = !state.home;
  by("page").hidden = state.home;
  for (const name of ["to-home", "share", "save-menu", "about"]) by(name).hidden = state.home;
  document.querySelector(".run-field").hidden = state.home;
  if (state.home) document.title = "torchcaps explore";
}

function tabs() {
  for (const name of Object.keys(PANELS)) {
    const here = state.tab === name;
    const tab = by(`tab-${name}`);
    tab.setAttribute("aria-selected", String(here));
    tab.tabIndex = here ? 0 : -1;
    by(`panel-${name}`).hidden = !here;
  }
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("torchcaps-theme", root.dataset.theme);
  } catch {
    // not kept, then
  }
  repaint();
}

let toasting = 0;
function toast(words) {
  Object.assign(by("toast"), { textContent: words, hidden: false });
  clearTimeout(toasting);
  toasting = setTimeout(() => (by("toast").hidden = true), 4000);
}

async function share() {
  const address = await link();
  const whole = state.source === "example" || address.includes("image=");
  const note = whole ? "" : " The picture is too large for it and is left out.";
  try {
    await navigator.clipboard.writeText(address);
    toast(`The link is copied. It opens this very state.${note}`);
  } catch {
    toast(`The address bar now holds the link.${note}`);
  }
}

function keep(format) {
  by("save-menu").open = false;
  const sheet = state.inferred && PANELS[state.tab].sheet();
  if (sheet) save(sheet, format);
  else toast("This panel has nothing to save yet.");
}

function wire() {
  Object.values(PANELS).forEach((panel) => panel.start());
  input.start();
  turn.start(input.takeExample);
  tour.start(open);
  by("run").onchange = ({ target }) => open(Number(target.value));
  by("to-home").onclick = () => [tour.go(-1), set({ home: true })];
  by("tour-start").onclick = () => tour.go(0);
  by("share").onclick = share;
  by("theme").onclick = theme;
  for (const format of ["png", "svg", "json"]) by(`save-${format}`).onclick = () => keep(format);
  for (const name of Object.keys(PANELS)) by(`tab-${name}`).onclick = () => set({ tab: name });
  arrows(by("tabs"), { selector: "button:not([hidden])" });
  by("tabs").addEventListener("arrived", ({ target }) => target.click());
  document.addEventListener("click", ({ target }) => by("save-menu").contains(target) || (by("save-menu").open = false));
  document.addEventListener("keydown", ({ key }) => key === "Escape" && (by("save-menu").open = false));
  on(["image"], infer);
  on(["inferred", "label"], answer);
  on(["tab"], tabs);
  on(["home"], places);
  on(["tab"], repaint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  line.addEventListener("busy", ({ detail }) => document.body.classList.toggle("busy", detail > 0));
  line.addEventListener("here", ({ detail: here }) => {
    by("gone").hidden = here;
    if (here) state.facts || state.home ? set({ image: state.image && { ...state.image } }) : begin();
  });
  window.addEventListener("unhandledrejection", (event) => {
    if (!(event.reason instanceof Gone || event.reason instanceof Refused)) return;
    event.preventDefault();
    trouble(event.reason);
  });
  window.addEventListener("hashchange", async () => isOurs(location.hash) || visit(await read(location.hash)));
}

/** Go where a link points. */
async function visit(wish) {
  const run = state.runs.find(({ name }) => name === wish.run) ?? state.runs[0];
  await open(run.id, wish);
}

async function begin() {
  const { runs, version } = await ask("/api/runs");
  set({ runs });
  by("version").textContent = version;
  offer(by("run"), runs.map((run) => [run.id, run.shipped ? `${run.name} (shipped)` : run.name]), 0);
  if (!runs.length) return trouble("No run was found here. Train one first: torchcaps train capsnet-glyphs --out runs/mine");
  home.paint((id) => open(id, { tab: "lead" }));
  if (location.hash.length > 1) await visit(await read(location.hash));
  else set({ home: true });
  follow();
}

if (matchMedia("(max-width: 760px)").matches) document.querySelector(".disturb").open = false;
wire();
tabs();
begin();
