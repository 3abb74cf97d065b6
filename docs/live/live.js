// The page: draw a digit, or take a test image; see the capsules, round by round, and what the longest one draws.
import { CapsNet } from "./capsnet.js";
import { start as startExperts } from "./wall.js";

const SIDE = 28;
const by = (id) => document.getElementById(id);
const surface = by("surface");
const pen = surface.getContext("2d", { willReadFrequently: true });
let net = null;
let image = new Float32Array(SIDE * SIDE);
let found = null;

/** Paint values [h w] of 0..1. */
function paint(canvas, values) {
  const data = new ImageData(SIDE, SIDE);
  values.forEach((x, n) => data.data.set([255 * x, 255 * x, 255 * x, 255], 4 * n));
  Object.assign(canvas, { width: SIDE, height: SIDE }).getContext("2d").putImageData(data, 0, 0);
}

/** The drawing, scaled to twenty pixels and centered by its mass, as the digits of MNIST are. */
function scanned() {
  const { data, width, height } = pen.getImageData(0, 0, surface.width, surface.height);
  let [x0, y0, x1, y1, sx, sy, mass] = [width, height, 0, 0, 0, 0, 0];
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const ink = data[4 * (y * width + x)];
    if (!ink) continue;
    [x0, y0, x1, y1] = [Math.min(x0, x), Math.min(y0, y), Math.max(x1, x), Math.max(y1, y)];
    [sx, sy, mass] = [sx + ink * x, sy + ink * y, mass + ink];
  }
  if (!mass) return new Float32Array(SIDE * SIDE);
  const scale = 20 / Math.max(x1 - x0 + 1, y1 - y0 + 1);
  const small = Object.assign(document.createElement("canvas"), { width: SIDE, height: SIDE }).getContext("2d");
  small.imageSmoothingQuality = "high";
  small.drawImage(surface, SIDE / 2 - (sx / mass) * scale, SIDE / 2 - (sy / mass) * scale, width * scale, height * scale);
  const out = small.getImageData(0, 0, SIDE, SIDE).data;
  return Float32Array.from({ length: SIDE * SIDE }, (_, n) => out[4 * n] / 255);
}

function look() {
  found = net.infer(image);
  const round = Math.min(Number(by("round").value), found.rounds.length);
  const lengths = found.rounds[round - 1].length;
  const winner = lengths.indexOf(Math.max(...lengths));
  const blank = image.every((x) => x === image[0]);
  by("answer").textContent = blank ? "nothing yet" : String(winner);
  by("said").textContent = blank ? "draw a digit" : `its length is ${lengths[winner].toFixed(2)} after round ${round}`;
  lengths.forEach((x, j) => {
    by(`bar-${j}`).style.width = `${(100 * x).toFixed(1)}%`;
    by(`row-${j}`).classList.toggle("wins", !blank && j === winner);
    by(`number-${j}`).textContent = x.toFixed(2);
  });
  paint(by("input"), image);
  paint(by("drawn"), net.draw(found.pose, winner));
  window.found = { lengths: found.rounds.map(({ length }) => length), pose: [...found.pose], drawn: [...net.draw(found.pose, winner)] };
}

function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, surface.width, surface.height);
  image = new Float32Array(SIDE * SIDE);
  look();
}

/** Show a test image that ships with the weights. */
window.takeExample = (n) => {
  const { data } = net.tensors["examples.images"];
  image = Float32Array.from(data.subarray(n * SIDE * SIDE, (n + 1) * SIDE * SIDE), (x) => x / 255);
  paint(surface, image);
  const small = Object.assign(document.createElement("canvas"), {});
  paint(small, image);
  Object.assign(surface, { width: 280, height: 280 });
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, 280, 280);
  look();
};

function wire() {
  const rows = Array.from({ length: 10 }, (_, j) => `<div class="row" id="row-${j}"><span>${j}</span><span class="track"><span class="bar" id="bar-${j}"></span></span><span id="number-${j}"></span></div>`);
  by("capsules").innerHTML = rows.join("");
  const at = (event) => {
    const r = surface.getBoundingClientRect();
    return [((event.clientX - r.left) * surface.width) / r.width, ((event.clientY - r.top) * surface.height) / r.height];
  };
  let last = null;
  const draw = (event) => {
    Object.assign(pen, { strokeStyle: "#fff", lineWidth: 24, lineCap: "round", lineJoin: "round" });
    const now = at(event);
    pen.beginPath();
    pen.moveTo(...(last ?? now));
    pen.lineTo(...now);
    pen.stroke();
    last = now;
    image = scanned();
    look();
  };
  surface.onpointerdown = (event) => {
    surface.setPointerCapture(event.pointerId);
    last = null;
    draw(event);
  };
  surface.onpointermove = (event) => surface.hasPointerCapture(event.pointerId) && draw(event);
  by("clear").onclick = clear;
  by("example").onclick = () => window.takeExample(Math.floor(Math.random() * net.tensors["examples.images"].shape[0]));
  by("round").oninput = look;
}

try {
  const answer = await fetch("capsnet-digits.safetensors");
  net = new CapsNet(await answer.arrayBuffer(), { stride: 2, primaryStride: 1, iterations: 3 });
  wire();
  clear();
  window.takeExample(0);
  await startExperts();
  document.body.dataset.ready = "true";
} catch (error) {
  by("said").textContent = "The weights cannot be read. A page that is opened as a file may not read others: serve the folder, for example by python -m http.server.";
}
