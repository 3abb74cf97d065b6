// Products of expert capsules in plain JavaScript: from a capsule's numbers to its drawing, in a frame.
import { readTensors } from "./capsnet.js";

const STRIDE = 2;
const SLOPE = 0.2; // of the leaky ReLU below 0

const leaky = (x) => (x < 0 ? SLOPE * x : x);

/**
 * Transposed convolution of [c h w] by [c o k k], to a side that is given.
 * @param {Float32Array} input @param {number[]} shape @param {number} side of the result
 */
function spread(input, [c, h, w], weight, bias, stride, side) {
  const [, o, k] = weight.shape;
  const out = new Float32Array(o * side * side);
  for (let n = 0; n < o; n++) out.fill(bias.data[n], n * side * side, (n + 1) * side * side);
  for (let m = 0; m < c; m++)
    for (let y = 0; y < h; y++)
      for (let x = 0; x < w; x++) {
        const value = input[(m * h + y) * w + x];
        for (let n = 0; n < o; n++)
          for (let dy = 0; dy < k; dy++) {
            const row = (n * side + y * stride + dy) * side + x * stride;
            const at = ((m * o + n) * k + dy) * k;
            for (let dx = 0; dx < k; dx++) out[row + dx] += value * weight.data[at + dx];
          }
      }
  return out;
}

/** Weights of the four pixels around a place, by cubics with a = -3/4, as torch has them. */
function cubic(t) {
  const A = -0.75;
  const near = (x) => ((A + 2) * x - (A + 3)) * x * x + 1;
  const far = (x) => ((A * x - 5 * A) * x + 8 * A) * x - 4 * A;
  return [far(1 + t), near(t), near(1 - t), far(2 - t)];
}

/** Draw an upright picture [side side] in a frame: pixel p is pixel A (p - c) of it, A = (1 -slant; 0 1) / size. */
export function intoFrame(picture, side, { size = 1, slant = 0, right = 0, down = 0 }) {
  const middle = (side - 1) / 2;
  const pixel = (y, x) => (y < 0 || x < 0 || y >= side || x >= side ? 0 : picture[y * side + x]);
  return Float32Array.from({ length: side * side }, (_, n) => {
    const [px, py] = [(n % side) - middle - right, Math.floor(n / side) - middle - down];
    const [x, y] = [(px - slant * py) / size + middle, py / size + middle];
    const [x0, y0] = [Math.floor(x), Math.floor(y)];
    const [wx, wy] = [cubic(x - x0), cubic(y - y0)];
    let sum = 0;
    for (let a = 0; a < 4; a++) for (let b = 0; b < 4; b++) sum += wy[a] * wx[b] * pixel(y0 - 1 + a, x0 - 1 + b);
    return Math.max(0, Math.min(1, sum));
  });
}

/** The experts of a file of weights. */
export class Experts {
  /** @param {ArrayBuffer} buffer @param {{slab: number, side: number}} settings how many of a pose's numbers are real, and pixels of a side */
  constructor(buffer, settings) {
    this.tensors = readTensors(buffer);
    this.settings = settings;
    [this.count, , , this.dimension] = this.weight("decoder.U").shape;
  }

  weight(name) {
    return this.tensors[`state.model.${name}`];
  }

  /** How many poses of training images are stored of an expert. @param {number} j */
  stored(j) {
    return this.weight("decoder.kept").data[j];
  }

  /** A stored pose z. @param {number} j @param {number} n @returns {number[]} */
  pose(j, n) {
    const { data, shape: [, most, k] } = this.weight("decoder.examples");
    return [...data.subarray((j * most + n) * k, (j * most + n + 1) * k)];
  }

  /** The hidden capsule of a pose z = (s, r): its direction and slab, as long as it is probable. @param {number[]} z */
  hidden(z) {
    const cut = z.length - this.settings.slab;
    const square = (values) => values.reduce((sum, x) => sum + x * x, 0);
    const direction = z.slice(0, cut);
    const q = square(direction);
    const on = q / (Math.exp(-square(z.slice(cut)) / 2) + q);
    return z.map((x, k) => on * (k < cut ? x / Math.sqrt(q || 1) : x));
  }

  /** Products of every two coordinates of a hidden capsule along its principal axes, and the squares. @param {number} j @param {number[]} x */
  products(j, x) {
    const { data: A, shape: [, K, Q] } = this.weight("decoder.axes");
    const y = Array.from({ length: Q }, (_, q) => x.reduce((sum, value, k) => sum + A[(j * K + k) * Q + q] * value, 0));
    return y.flatMap((one, p) => y.slice(p).map((other) => one * other));
  }

  /** The upright drawing of one expert in a pose, all others being off. @param {number} j @param {number[]} z */
  draw(j, z) {
    const x = this.hidden(z);
    const [, I, D] = this.weight("decoder.U").shape;
    const features = Float32Array.from(this.weight("decoder.intercept").data);
    const add = ({ data, shape: [, , , K] }, numbers) => {
      for (let n = 0; n < I * D; n++) for (let k = 0; k < K; k++) features[n] += data[(j * I * D + n) * K + k] * numbers[k];
    };
    add(this.weight("decoder.U"), x);
    if (this.weight("decoder.Q")) add(this.weight("decoder.Q"), this.products(j, x));
    // Children are d channels at a place: back to maps [c h w]
    const conv2 = this.weight("autoencoder.conv2.weight");
    const [c, , kernel] = conv2.shape;
    const h = Math.round(Math.sqrt((I * D) / c));
    const maps = new Float32Array(I * D);
    for (let place = 0; place < h * h; place++) for (let m = 0; m < c; m++) maps[m * h * h + place] = features[place * c + m];
    const side = this.settings.side;
    const below = side - kernel + 1;
    const first = spread(maps, [c, h, h], conv2, this.weight("autoencoder.e1"), STRIDE, below).map(leaky);
    const conv1 = this.weight("autoencoder.conv1.weight");
    return spread(first, [conv1.shape[0], below, below], conv1, this.weight("autoencoder.e0"), 1, side).map((v) => 1 / (1 + Math.exp(-v)));
  }
}
