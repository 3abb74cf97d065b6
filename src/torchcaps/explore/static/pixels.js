// Pure functions on pictures: resample, place, turn, disturb. Nothing here touches the page.

/** @typedef {import("./wire.js").Picture} Picture */
/** @typedef {{rotate: number, dx: number, dy: number, zoom: number, noise: number, seed: number}} Changes */

const clip = (x) => Math.max(0, Math.min(255, Math.round(x)));

/** @param {number[]} shape @param {number} [value] @returns {Picture} */
export function plain(shape, value = 0) {
  return { shape: [...shape], bytes: new Uint8Array(shape.reduce((a, b) => a * b, 1)).fill(value) };
}

/** For each of `to` outputs the inputs [index, weight] it is made of: areas when it shrinks, else linear. */
function weights(from, to) {
  const step = from / to;
  return Array.from({ length: to }, (_, o) => {
    if (step <= 1) {
      const x = Math.max(0, Math.min(from - 1, (o + 0.5) * step - 0.5));
      const low = Math.floor(x);
      return [[low, 1 - (x - low)], [Math.min(low + 1, from - 1), x - low]];
    }
    const [a, b] = [o * step, Math.min((o + 1) * step, from)];
    const list = [];
    for (let n = Math.floor(a); n < Math.ceil(b); n++) list.push([n, (Math.min(n + 1, b) - Math.max(n, a)) / (b - a)]);
    return list;
  });
}

/** To h x w pixels, without regard to the shape's proportions. @param {Picture} picture @returns {Picture} */
export function resize(picture, h, w) {
  const [c, fromH, fromW] = picture.shape;
  if (fromH === h && fromW === w) return picture;
  const [rows, columns] = [weights(fromH, h), weights(fromW, w)];
  const half = new Float32Array(c * fromH * w);
  for (let y = 0; y < c * fromH; y++)
    for (let x = 0; x < w; x++) {
      let sum = 0;
      for (const [n, part] of columns[x]) sum += part * picture.bytes[y * fromW + n];
      half[y * w + x] = sum;
    }
  const out = plain([c, h, w]);
  for (let k = 0; k < c; k++)
    for (let y = 0; y < h; y++)
      for (let x = 0; x < w; x++) {
        let sum = 0;
        for (const [n, part] of rows[y]) sum += part * half[(k * fromH + n) * w + x];
        out.bytes[(k * h + y) * w + x] = clip(sum);
      }
  return out;
}

/** Mean of the outermost pixels: what lies around. @param {Picture} picture */
export function border({ shape: [, h, w], bytes }) {
  let [sum, count] = [0, 0];
  for (let y = 0; y < h; y++)
    for (let x = 0; x < w; x += y % (h - 1 || 1) ? Math.max(1, w - 1) : 1) [sum, count] = [sum + bytes[y * w + x], count + 1];
  return sum / count;
}

/** Paste at (top, left), over a ground; what does not fit is cut off. @param {Picture} picture @returns {Picture} */
function paste(picture, h, w, top, left, ground) {
  const [c, fromH, fromW] = picture.shape;
  const out = plain([c, h, w], clip(ground));
  for (let k = 0; k < c; k++)
    for (let y = Math.max(0, top); y < Math.min(h, top + fromH); y++)
      for (let x = Math.max(0, left); x < Math.min(w, left + fromW); x++)
        out.bytes[(k * h + y) * w + x] = picture.bytes[(k * fromH + y - top) * fromW + x - left];
  return out;
}

/** In the middle of h x w, every pixel kept. @param {Picture} picture */
export function place(picture, h, w) {
  const [, fromH, fromW] = picture.shape;
  return paste(picture, h, w, Math.floor((h - fromH) / 2), Math.floor((w - fromW) / 2), border(picture));
}

/** As large as it fits into h x w, in the middle, in its own proportions. @param {Picture} picture */
export function contain(picture, h, w) {
  const [, fromH, fromW] = picture.shape;
  const scale = Math.min(h / fromH, w / fromW);
  return place(resize(picture, Math.max(1, Math.round(fromH * scale)), Math.max(1, Math.round(fromW * scale))), h, w);
}

/** With another number of channels: the first again and again, or the mean of the colors. @returns {Picture} */
export function channels(picture, c) {
  const [from, h, w] = picture.shape;
  if (from === c) return picture;
  const gray = plain([1, h, w]);
  for (let n = 0; n < h * w; n++) {
    const b = picture.bytes;
    gray.bytes[n] = from >= 3 ? clip(0.299 * b[n] + 0.587 * b[n + h * w] + 0.114 * b[n + 2 * h * w]) : b[n];
  }
  const out = plain([c, h, w]);
  for (let k = 0; k < c; k++) out.bytes.set(gray.bytes, k * h * w);
  return out;
}

/** @param {Picture} picture @returns {Picture} */
export const invert = (picture) => ({ shape: picture.shape, bytes: picture.bytes.map((x) => 255 - x) });

/** Top, left, height, width of what stands out from the border; null if nothing does. @param {Picture} picture */
function box(picture) {
  const [, h, w] = picture.shape;
  const ground = border(picture);
  let [top, left, bottom, right] = [h, w, -1, -1];
  for (let y = 0; y < h; y++)
    for (let x = 0; x < w; x++)
      if (Math.abs(picture.bytes[y * w + x] - ground) > 64) {
        [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
        [left, right] = [Math.min(left, x), Math.max(right, x)];
      }
  return bottom < 0 ? null : { top, left, height: bottom - top + 1, width: right - left + 1 };
}

/** How much of the side the thing in a picture takes, 0..1; the typical one of many. @param {Picture[]} pictures */
export function extent(pictures) {
  const found = pictures.map((p) => [box(p), Math.max(p.shape[1], p.shape[2])]).filter(([b]) => b);
  const sides = found.map(([b, side]) => Math.max(b.height, b.width) / side).sort((a, b) => a - b);
  return sides.length ? sides[Math.floor(sides.length / 2)] : 20 / 28;
}

/** As MNIST was made: the thing scaled to a share of the side, its center of mass in the middle of h x w. */
export function center(picture, h, w, share) {
  const [c, fromH, fromW] = picture.shape;
  const found = box(picture);
  if (!found) return resize(picture, h, w);
  const ground = border(picture);
  const cut = paste(picture, found.height, found.width, -found.top, -found.left, ground);
  const most = 4 * Math.min(h / fromH, w / fromW); // a dot stays a dot
  const scale = Math.min((share * Math.min(h, w)) / Math.max(found.height, found.width), most);
  const small = resize(cut, Math.max(1, Math.round(found.height * scale)), Math.max(1, Math.round(found.width * scale)));
  const [, sh, sw] = small.shape;
  let [mass, my, mx] = [1e-6, 0, 0];
  for (let y = 0; y < sh; y++)
    for (let x = 0; x < sw; x++) {
      const ink = Math.abs(small.bytes[y * sw + x] - ground);
      [mass, my, mx] = [mass + ink, my + ink * (y + 0.5), mx + ink * (x + 0.5)];
    }
  return paste(small, h, w, Math.round(h / 2 - my / mass), Math.round(w / 2 - mx / mass), ground);
}

/** Numbers in [0, 1) by a seed (mulberry32), the same in every browser. @param {number} seed */
function random(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Turned, scaled and shifted about the middle, bilinear; then Gaussian noise. @param {Picture} picture @param {Changes} to */
export function change(picture, to) {
  const still = !to.rotate && !to.dx && !to.dy && to.zoom === 1;
  const out = still ? { shape: picture.shape, bytes: picture.bytes.slice() } : warp(picture, to);
  if (!to.noise) return out;
  const next = random(to.seed);
  for (let n = 0; n < out.bytes.length; n++) {
    const normal = Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
    out.bytes[n] = clip(out.bytes[n] + 255 * to.noise * normal);
  }
  return out;
}

function warp(picture, { rotate, dx, dy, zoom }) {
  const [c, h, w] = picture.shape;
  const [out, ground] = [plain(picture.shape), border(picture)];
  const angle = (-rotate * Math.PI) / 180; // positive turns anticlockwise
  const [cos, sin, midX, midY] = [Math.cos(angle) / zoom, Math.sin(angle) / zoom, (w - 1) / 2, (h - 1) / 2];
  const at = (k, y, x) => (y < 0 || x < 0 || y >= h || x >= w ? ground : picture.bytes[(k * h + y) * w + x]);
  for (let y = 0; y < h; y++)
    for (let x = 0; x < w; x++) {
      const [px, py] = [x - midX - dx, y - midY - dy];
      const [fx, fy] = [cos * px + sin * py + midX, -sin * px + cos * py + midY];
      const [x0, y0] = [Math.floor(fx), Math.floor(fy)];
      const [u, v] = [fx - x0, fy - y0];
      for (let k = 0; k < c; k++) {
        const above = at(k, y0, x0) * (1 - u) + at(k, y0, x0 + 1) * u;
        const below = at(k, y0 + 1, x0) * (1 - u) + at(k, y0 + 1, x0 + 1) * u;
        out.bytes[(k * h + y) * w + x] = clip(above * (1 - v) + below * v);
      }
    }
  return out;
}
