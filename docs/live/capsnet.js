// A CapsNet in plain JavaScript: two convolutions, votes, dynamic routing, decoder; weights from a safetensors file.

/** Read a safetensors file: a length, a JSON header, bytes. Half precision becomes float. @param {ArrayBuffer} buffer */
export function readTensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const read = { F16: (bytes) => Float32Array.from(new Uint16Array(bytes), half), U8: (bytes) => new Uint8Array(bytes), I64: (bytes) => Array.from(new BigInt64Array(bytes), Number) };
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    if (!read[dtype]) continue; // sums that only training reads, and the metadata
    const [from, to] = data_offsets;
    tensors[name] = { shape, data: read[dtype](buffer.slice(8 + length + from, 8 + length + to)) };
  }
  return tensors;
}

/** A number of half precision from its bits. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (!exponent) return sign * fraction * 2 ** -24;
  return exponent === 31 ? sign * Infinity : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Convolution without padding of [c h w] by [o c k k]. */
function convolve(input, [c, h, w], weight, bias, stride) {
  const [o, , k] = weight.shape;
  const [H, W] = [Math.floor((h - k) / stride) + 1, Math.floor((w - k) / stride) + 1];
  const out = new Float32Array(o * H * W);
  for (let n = 0; n < o; n++)
    for (let y = 0; y < H; y++)
      for (let x = 0; x < W; x++) {
        let sum = bias.data[n];
        for (let m = 0; m < c; m++)
          for (let dy = 0; dy < k; dy++) {
            const row = (m * h + y * stride + dy) * w + x * stride;
            const at = ((n * c + m) * k + dy) * k;
            for (let dx = 0; dx < k; dx++) sum += input[row + dx] * weight.data[at + dx];
          }
        out[(n * H + y) * W + x] = sum;
      }
  return { data: out, shape: [o, H, W] };
}

/** z |z| / (1 + |z|²) of numbers [from, from + size). */
function squash(values, from, size) {
  let square = 0;
  for (let k = 0; k < size; k++) square += values[from + k] ** 2;
  const factor = Math.sqrt(square) / (1 + square);
  for (let k = 0; k < size; k++) values[from + k] *= factor;
}

const lengthOf = (values, from, size) => Math.sqrt(values.subarray(from, from + size).reduce((sum, x) => sum + x * x, 0));

/** The network of a file of weights. */
export class CapsNet {
  /** @param {ArrayBuffer} buffer @param {{stride: number, primaryStride: number, iterations: number}} settings */
  constructor(buffer, settings) {
    this.tensors = readTensors(buffer);
    this.settings = settings;
  }

  weight(name) {
    return this.tensors[`state.model.${name}`];
  }

  /** Primary capsules [i d] of an image [h w] in 0..1, i = (h w type). */
  primary(image, side) {
    const features = convolve(image, [1, side, side], this.weight("conv.weight"), this.weight("conv.bias"), this.settings.stride);
    for (let n = 0; n < features.data.length; n++) features.data[n] = Math.max(0, features.data[n]);
    const { data, shape: [channels, H, W] } = convolve(features.data, features.shape, this.weight("primary.pose.weight"), this.weight("primary.pose.bias"), this.settings.primaryStride);
    const d = this.weight("classes.W").shape[3];
    const types = channels / d;
    const out = new Float32Array(data.length);
    for (let place = 0; place < H * W; place++)
      for (let t = 0; t < types; t++) {
        const from = (place * types + t) * d;
        for (let k = 0; k < d; k++) out[from + k] = data[(t * d + k) * H * W + place];
        squash(out, from, d);
      }
    return out;
  }

  /** Class capsules of an image. @returns {{rounds: {length: number[], coupling: Float32Array}[], pose: Float32Array}} */
  infer(image, side = 28) {
    const children = this.primary(image, side);
    const { data: W, shape: [I, J, K, D] } = this.weight("classes.W");
    // Votes V_ij = W_ij x_i
    const votes = new Float32Array(I * J * K);
    for (let i = 0; i < I; i++)
      for (let jk = 0; jk < J * K; jk++) {
        let sum = 0;
        const at = (i * J * K + jk) * D;
        for (let d = 0; d < D; d++) sum += W[at + d] * children[i * D + d];
        votes[i * J * K + jk] = sum;
      }
    // Dynamic routing: couple by the logits, sum, squash; raise the logits where a vote agrees with its parent
    const logits = new Float32Array(I * J);
    const rounds = [];
    let pose = new Float32Array(J * K);
    for (let t = 0; t < this.settings.iterations; t++) {
      if (t) for (let i = 0; i < I; i++) for (let j = 0; j < J; j++) for (let k = 0; k < K; k++) logits[i * J + j] += votes[(i * J + j) * K + k] * pose[j * K + k];
      const coupling = softmax(logits, J);
      pose = new Float32Array(J * K);
      for (let i = 0; i < I; i++) for (let j = 0; j < J; j++) for (let k = 0; k < K; k++) pose[j * K + k] += coupling[i * J + j] * votes[(i * J + j) * K + k];
      for (let j = 0; j < J; j++) squash(pose, j * K, K);
      rounds.push({ length: Array.from({ length: J }, (_, j) => lengthOf(pose, j * K, K)), coupling });
    }
    return { rounds, pose };
  }

  /** The image that one class capsule draws. @param {Float32Array} pose of all @param {number} j */
  draw(pose, j) {
    const [, J, K] = this.weight("classes.W").shape;
    let values = new Float32Array(J * K);
    values.set(pose.subarray(j * K, (j + 1) * K), j * K);
    for (const layer of [0, 2, 4]) {
      const { data, shape: [out, into] } = this.weight(`decoder.net.${layer}.weight`);
      const bias = this.weight(`decoder.net.${layer}.bias`).data;
      const next = new Float32Array(out);
      for (let n = 0; n < out; n++) {
        let sum = bias[n];
        for (let m = 0; m < into; m++) sum += data[n * into + m] * values[m];
        next[n] = layer === 4 ? 1 / (1 + Math.exp(-sum)) : Math.max(0, sum);
      }
      values = next;
    }
    return values;
  }
}

/** Shares over the last axis of [i j]. */
function softmax(logits, J) {
  const out = new Float32Array(logits.length);
  for (let from = 0; from < logits.length; from += J) {
    const most = Math.max(...logits.subarray(from, from + J));
    let sum = 0;
    for (let j = 0; j < J; j++) sum += out[from + j] = Math.exp(logits[from + j] - most);
    for (let j = 0; j < J; j++) out[from + j] /= sum;
  }
  return out;
}
