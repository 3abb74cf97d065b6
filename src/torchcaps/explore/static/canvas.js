// Figures, drawn with a pen (pen.js) into a box {x, y, w, h}; and canvases that redraw themselves.
import { CanvasPen } from "./pen.js";
import { toCanvas } from "./wire.js";

/** @typedef {{x: number, y: number, w: number, h: number}} Box */

/** The page's colors as they are now, light or dark. @returns {Record<string, string>} */
export function colors() {
  const css = getComputedStyle(document.documentElement);
  const names = ["card", "ink", "soft", "faint", "line", "accent", "warm", "track"];
  return Object.fromEntries(names.map((name) => [name, css.getPropertyValue(`--${name}`).trim()]));
}

const screens = new Set();

/**
 * A canvas as wide as its place, drawn again when that or the theme changes.
 * @param {HTMLCanvasElement} canvas @param {(width: number) => number} tall @param {(pen: any, box: Box, c: any) => void} paint
 * @returns {() => void} draw again
 */
export function screen(canvas, tall, paint) {
  const redraw = () => {
    const w = canvas.parentElement?.clientWidth ?? 0;
    if (!w) return;
    const h = tall(w);
    Object.assign(canvas.style, { width: `${w}px`, height: `${h}px` });
    paint(new CanvasPen(canvas, w, h), { x: 0, y: 0, w, h }, colors());
  };
  screens.add(redraw);
  new ResizeObserver(redraw).observe(canvas.parentElement);
  return redraw;
}

/** All figures, for a new theme. */
export const repaint = () => screens.forEach((redraw) => redraw());

/** How hot 0..1 is, over a dark picture: [r, g, b, share of cover]. */
const heatOf = (v) => [150 + 105 * v, 40 + 165 * v, 20 + 85 * v ** 2, 0.82 * v ** 0.7];

/**
 * The picture in gray with a map [h w] of 0..1 over it, a square a place; the chosen place is framed.
 * @param {import("./wire.js").Picture} picture @param {{h: number, w: number, values: ArrayLike<number>}} map
 * @returns {HTMLCanvasElement}
 */
export function heat(picture, map, chosen = null, side = 336) {
  const [, ph, pw] = picture.shape;
  const scale = side / Math.max(ph, pw);
  const [width, height] = [Math.round(pw * scale), Math.round(ph * scale)];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const to = canvas.getContext("2d");
  to.imageSmoothingEnabled = false;
  to.globalAlpha = 0.8;
  to.fillRect(0, 0, width, height);
  to.drawImage(toCanvas(picture), 0, 0, width, height);
  to.globalAlpha = 1;
  const edge = (n, of, long) => Math.round((n * long) / of);
  for (let y = 0; y < map.h; y++)
    for (let x = 0; x < map.w; x++) {
      const [r, g, b, cover] = heatOf(map.values[y * map.w + x]);
      to.fillStyle = `rgb(${r} ${g} ${b} / ${cover})`;
      const [left, top] = [edge(x, map.w, width), edge(y, map.h, height)];
      to.fillRect(left, top, edge(x + 1, map.w, width) - left, edge(y + 1, map.h, height) - top);
    }
  if (chosen) {
    const [y, x] = chosen;
    Object.assign(to, { strokeStyle: "#fff", lineWidth: Math.max(2, side / 110) });
    to.strokeRect(edge(x, map.w, width) + 1, edge(y, map.h, height) + 1, width / map.w - 2, height / map.h - 2);
  }
  return canvas;
}

/** Signed difference of two pictures, the mean over colors: too dark orange, too bright blue. @returns {HTMLCanvasElement} */
export function difference(image, reconstruction) {
  const [c, h, w] = image.shape;
  const planes = c >= 3 ? [0, h * w, 2 * h * w] : [0]; // of two channels the first, as it is shown
  const canvas = Object.assign(document.createElement("canvas"), { width: w, height: h });
  const data = new ImageData(w, h);
  for (let n = 0; n < h * w; n++) {
    const d = planes.reduce((sum, plane) => sum + image.bytes[n + plane] - reconstruction.bytes[n + plane], 0) / planes.length / 255;
    const strength = Math.abs(d) ** 0.8;
    const [r, g, b] = d > 0 ? [255, 150, 60] : [70, 170, 235];
    data.data.set([r * strength, g * strength, b * strength, 255], 4 * n);
  }
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

/** Two pictures over each other, the first in orange, the second in blue. */
export function twoColors(first, second) {
  const [, h, w] = first.shape;
  const canvas = Object.assign(document.createElement("canvas"), { width: w, height: h });
  const data = new ImageData(w, h);
  for (let n = 0; n < h * w; n++) {
    const [a, b] = [first.bytes[n] / 255, second.bytes[n] / 255];
    data.data.set([255 * a + 70 * b, 150 * a + 170 * b, 60 * a + 235 * b, 255], 4 * n);
  }
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

/** A number in few characters. */
export function brief(x) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 0.095 ? x.toFixed(2) : size >= 1e-3 ? x.toFixed(3) : x.toExponential(0);
  return text.replace("-", "−");
}

/** Numbers that leave so large a share of the others below and above them. @returns {[number, number]} */
export function middle(numbers, cut) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return [at(cut), at(1 - cut)];
}

/** The range of numbers, never empty, zero included where asked. */
function span(numbers, zero) {
  const low = Math.min(...numbers, zero ? 0 : Infinity);
  const high = Math.max(...numbers, zero ? 0 : -Infinity);
  return high - low > 1e-9 ? [low, high] : [low - 0.5, high + 0.5];
}

/**
 * Lines over the iterations; the chosen one in color, the others behind it.
 * @param {{series: number[][], chosen?: number, at: number, zero?: boolean}} what series [n][t]
 */
export function curves(pen, box, c, { series, chosen = 0, at, zero = false }) {
  const [left, right, top, bottom] = [box.x + 40, box.x + box.w - 10, box.y + 10, box.y + box.h - 24];
  const steps = series[0].length;
  const [low, high] = span(series.flat(), zero);
  const x = (t) => (steps === 1 ? (left + right) / 2 : left + 8 + ((right - left - 16) * t) / (steps - 1));
  const y = (v) => bottom - ((bottom - top) * (v - low)) / (high - low);
  pen.line([[left, bottom], [right, bottom]], { stroke: c.line });
  pen.line([[left, top], [right, top]], { stroke: c.line, alpha: 0.6 });
  pen.text(left - 6, bottom + 4, brief(Math.abs(low) < 1e-2 * high ? 0 : low), { size: 11, fill: c.soft, align: "end" });
  pen.text(left - 6, top + 4, brief(high), { size: 11, fill: c.soft, align: "end" });
  for (let t = 0; t < steps; t++)
    pen.text(x(t), bottom + 17, String(t + 1), { size: 11, fill: t === at ? c.ink : c.soft, align: "middle", weight: t === at ? 700 : 400 });
  pen.line([[x(at), top], [x(at), bottom]], { stroke: c.soft, alpha: 0.5, dash: [2, 4] });
  const order = series.map((_, n) => n).filter((n) => n !== chosen);
  for (const n of [...order, chosen]) {
    const mine = n === chosen;
    const points = series[n].map((v, t) => [x(t), y(v)]);
    pen.line(points, { stroke: mine ? c.accent : c.faint, width: mine ? 2.5 : 1.25 });
    if (mine) points.forEach(([px, py], t) => pen.circle(px, py, t === at ? 5 : 2.5, { fill: t === at ? c.warm : c.accent }));
  }
}

/**
 * Votes in their two main directions: the larger and darker, the more of them the parent gets at this iteration.
 * @param {{votes: number[][], coupling: number[], chosen: number[][], chosenCoupling: number[], mean: number[][], at: number}} what
 */
export function scatter(pen, box, c, { votes, coupling, chosen, chosenCoupling, mean, at }) {
  pen.rect(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1, { stroke: c.line, radius: 8 });
  if (!votes.length && !chosen.length) return;
  const near = (k) => [...middle([...votes, ...chosen].map((p) => p[k]), 0.01), ...mean.map((p) => p[k])];
  const [[x0, x1], [y0, y1]] = [span(near(0)), span(near(1))];
  const unit = Math.min((box.w - 44) / (x1 - x0), (box.h - 44) / (y1 - y0));
  const inside = (v, start, long) => Math.max(start + 9, Math.min(start + long - 9, v)); // far ones stand at the frame
  const x = (p) => inside(box.x + box.w / 2 + unit * (p[0] - (x0 + x1) / 2), box.x, box.w);
  const y = (p) => inside(box.y + box.h / 2 - unit * (p[1] - (y0 + y1) / 2), box.y, box.h);
  const most = Math.max(...coupling, ...chosenCoupling, 1e-12);
  const dots = (points, sizes, fill) =>
    points.forEach((p, n) => {
      const size = Math.max(0, sizes[n] / most);
      pen.circle(x(p), y(p), 1.5 + 5 * Math.sqrt(size), { fill, alpha: 0.1 + 0.6 * size });
    });
  dots(votes, coupling, c.accent);
  dots(chosen, chosenCoupling, c.warm);
  pen.line(mean.slice(0, at + 1).map((p) => [x(p), y(p)]), { stroke: c.ink, width: 1.5, alpha: 0.7 });
  mean.slice(0, at).forEach((p) => pen.circle(x(p), y(p), 2.5, { fill: c.ink, alpha: 0.6 }));
  const now = mean[at];
  pen.circle(x(now), y(now), 7, { fill: c.card, stroke: c.ink, width: 2 });
  pen.circle(x(now), y(now), 2.5, { fill: c.ink });
}

/** Columns of counts between edges, one iteration; `most` is the height of all of them. */
export function histogram(pen, box, c, { edges, counts, most, strong, name }) {
  const [bottom, top] = [box.y + box.h - 20, box.y + 20];
  const wide = box.w / counts.length;
  counts.forEach((n, k) => {
    const tall = ((bottom - top) * n) / (most || 1);
    pen.rect(box.x + k * wide + 0.5, bottom - tall, Math.max(0.5, wide - 1), tall, { fill: strong ? c.accent : c.faint, radius: 1 });
  });
  pen.line([[box.x, bottom], [box.x + box.w, bottom]], { stroke: c.line });
  pen.text(box.x, bottom + 14, brief(edges[0]), { size: 11, fill: c.soft });
  pen.text(box.x + box.w, bottom + 14, brief(edges.at(-1)), { size: 11, fill: c.soft, align: "end" });
  pen.text(box.x, box.y + 12, name, { size: 12, fill: strong ? c.ink : c.soft, weight: strong ? 600 : 400 });
}

/** A row a capsule: name, bar, number. */
export function bars(pen, box, c, { names, values, chosen, wide = 70 }) {
  const tall = box.h / names.length;
  names.forEach((name, j) => {
    const y = box.y + j * tall;
    const long = box.w - wide - 48;
    pen.text(box.x + wide - 8, y + tall / 2 + 4, name, { size: 12, fill: j === chosen ? c.ink : c.soft, align: "end", weight: j === chosen ? 700 : 400 });
    pen.rect(box.x + wide, y + tall * 0.25, long, tall * 0.5, { fill: c.track, radius: 3 });
    pen.rect(box.x + wide, y + tall * 0.25, long * Math.max(0, Math.min(1, values[j])), tall * 0.5, { fill: j === chosen ? c.accent : c.faint, radius: 3 });
    pen.text(box.x + box.w, y + tall / 2 + 4, values[j].toFixed(2), { size: 12, fill: j === chosen ? c.ink : c.soft, align: "end" });
  });
}
