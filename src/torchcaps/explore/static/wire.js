// Pictures as they travel: {"shape": [..., c, h, w], "data": base64 of bytes}; and as the page holds them.

/** @typedef {{shape: number[], bytes: Uint8Array}} Picture [c h w], 0..255 */
/** @typedef {{shape: number[], data: string}} Wired */

/** @param {string} text @returns {Uint8Array} */
export function fromBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  return bytes;
}

/** @param {Uint8Array} bytes @returns {string} */
function toBase64(bytes) {
  let raw = "";
  for (let n = 0; n < bytes.length; n += 8192) raw += String.fromCharCode(...bytes.subarray(n, n + 8192));
  return btoa(raw);
}

/** @param {Wired} wired @returns {Picture} */
export const decode = (wired) => ({ shape: wired.shape, bytes: fromBase64(wired.data) });

/** @param {Picture} picture @returns {Wired} */
export const encode = (picture) => ({ shape: picture.shape, data: toBase64(picture.bytes) });

/** Pictures along the first axis of [n ... c h w]. @param {Picture} many @returns {Picture[]} */
export function each(many) {
  const [n, ...shape] = many.shape;
  const size = many.bytes.length / n;
  return Array.from({ length: n }, (_, k) => ({ shape, bytes: many.bytes.subarray(k * size, (k + 1) * size) }));
}

/** Of two channels (stereo) the first is shown; of three, color. @param {Picture} picture @returns {ImageData} */
function toImageData({ shape: [c, h, w], bytes }) {
  const data = new ImageData(w, h);
  const [green, blue] = c >= 3 ? [h * w, 2 * h * w] : [0, 0];
  for (let n = 0; n < h * w; n++) {
    data.data[4 * n] = bytes[n];
    data.data[4 * n + 1] = bytes[n + green];
    data.data[4 * n + 2] = bytes[n + blue];
    data.data[4 * n + 3] = 255;
  }
  return data;
}

/** A canvas of the picture's own size; CSS scales it. @param {HTMLCanvasElement} canvas @param {Picture} picture */
export function show(canvas, picture) {
  const [, h, w] = picture.shape;
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  canvas.getContext("2d").putImageData(toImageData(picture), 0, 0);
  return canvas;
}

/** @param {Picture} picture */
export const toCanvas = (picture) => show(document.createElement("canvas"), picture);

/** @param {GenericTransformStream} stream @param {Uint8Array} bytes @returns {Promise<Uint8Array>} */
async function through(stream, bytes) {
  const piped = new Blob([bytes]).stream().pipeThrough(stream);
  return new Uint8Array(await new Response(piped).arrayBuffer());
}

/** Picture -> text for a link: c.h.w.bytes, deflated. @param {Picture} picture @returns {Promise<string>} */
export async function pack(picture) {
  const small = await through(new CompressionStream("deflate-raw"), picture.bytes);
  const text = toBase64(small).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return `${picture.shape.join(".")}.${text}`;
}

/** The inverse; null if the text holds no picture. @param {string} text @returns {Promise<Picture | null>} */
export async function unpack(text) {
  const [c, h, w, body] = text.split(".");
  const shape = [c, h, w].map(Number);
  const sensible = shape.every((n) => Number.isInteger(n) && n > 0 && n <= 256);
  if (!sensible || !body) return null;
  try {
    const small = fromBase64(body.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = await through(new DecompressionStream("deflate-raw"), small);
    return bytes.length === shape[0] * shape[1] * shape[2] ? { shape, bytes } : null;
  } catch {
    return null; // a link that was cut or changed
  }
}
