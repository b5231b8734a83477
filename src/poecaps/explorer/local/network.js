// A model in the browser: from codes to images and back, as poecaps.CapsuleNetwork computes it.
//
// Sums are computed in double precision and stored in single precision. Arrays are one-dimensional,
// with the last axis varying fastest; shapes are in the comments, with the letters of the library:
// I input capsules of K numbers, J output capsules of D numbers.

const dot = (a, i, b, j, length) => {
  let sum = 0;
  for (let k = 0; k < length; k += 1) sum += a[i + k] * b[j + k];
  return sum;
};

const normOf = (a, i, length) => Math.sqrt(dot(a, i, a, i, length));

/** Multiply each vector of D numbers by a function of its norm. */
function scaled(vectors, dim, factor) {
  const result = new Float32Array(vectors.length);
  for (let i = 0; i < vectors.length; i += dim) {
    const norm = normOf(vectors, i, dim);
    const by = norm > 0 ? factor(norm) / norm : 0;
    for (let d = 0; d < dim; d += 1) result[i + d] = by * vectors[i + d];
  }
  return result;
}

/** Route capsules x (I, K) by agreement with weights (I, J, D, K): z (J, D) and c (I, J). */
function route(x, { weight, shape: [inputs, outputs, dim, size], options }, squash) {
  const { iterations, sharpness, normalize, agreement } = options;
  const votes = new Float32Array(inputs * outputs * dim); // u_ij = W_ij x_i
  for (let i = 0; i < inputs; i += 1) {
    for (let row = 0; row < outputs * dim; row += 1) {
      const at = i * outputs * dim + row;
      votes[at] = dot(weight, at * size, x, i * size, size);
    }
  }
  const compared = agreement === "cosine" ? scaled(votes, dim, () => 1) : votes;
  const logits = new Float64Array(inputs * outputs);
  let c = softmax(logits, inputs, outputs, normalize);
  let z = mix(c, votes, inputs, outputs, dim);
  for (let step = 1; step < iterations; step += 1) {
    const target = agreement === "cosine" ? scaled(z, dim, () => 1) : squash(z, dim);
    for (let i = 0; i < inputs; i += 1) {
      for (let j = 0; j < outputs; j += 1) {
        const at = i * outputs + j;
        logits[at] += sharpness * dot(compared, at * dim, target, j * dim, dim);
      }
    }
    c = softmax(logits, inputs, outputs, normalize);
    z = mix(c, votes, inputs, outputs, dim);
  }
  return { z, c };
}

/** Normalize e^b (I, J) over the inputs or over the outputs. */
function softmax(b, inputs, outputs, normalize) {
  const of = (at) => (normalize === "inputs" ? at % outputs : Math.floor(at / outputs));
  const sums = new Float64Array(normalize === "inputs" ? outputs : inputs);
  const greatest = sums.map(() => -Infinity); // so that nothing overflows
  b.forEach((value, at) => {
    greatest[of(at)] = Math.max(greatest[of(at)], value);
  });
  const c = b.map((value, at) => Math.exp(value - greatest[of(at)]));
  c.forEach((value, at) => {
    sums[of(at)] += value;
  });
  return c.map((value, at) => value / sums[of(at)]);
}

/** Mix votes (I, J, D) with coefficients c (I, J): z_j = Σ_i c_ij u_ij, (J, D). */
function mix(c, votes, inputs, outputs, dim) {
  const z = new Float64Array(outputs * dim);
  for (let i = 0; i < inputs; i += 1) {
    for (let j = 0; j < outputs; j += 1) {
      const at = i * outputs + j;
      for (let d = 0; d < dim; d += 1) z[j * dim + d] += c[at] * votes[at * dim + d];
    }
  }
  return Float32Array.from(z);
}

/** Reorder filters (A, B, S, S) to (S, S, A, B), or to (S, S, B, A). */
function reorder(filters, [a, b, side], isSwapped) {
  const result = new Float32Array(filters.length);
  for (let i = 0; i < a; i += 1) {
    for (let j = 0; j < b; j += 1) {
      for (let k = 0; k < side * side; k += 1) {
        const at = k * a * b + (isSwapped ? j * a + i : i * b + j);
        result[at] = filters[(i * b + j) * side * side + k];
      }
    }
  }
  return result;
}

/** Add Σ_a x_a W_ab to `sums` (B), for x (A) and W (A, B) within larger arrays. */
function addProduct(sums, to, x, from, weight, at, inputs, outputs) {
  for (let a = 0; a < inputs; a += 1) {
    const value = x[from + a];
    const row = at + a * outputs;
    for (let b = 0; b < outputs; b += 1) sums[to + b] += value * weight[row + b];
  }
}

/**
 * Convolve images (H, W, A) with filters (S, S, A, B): (h, w, B), or transposed, from (h, w, A) to
 * (H, W, B) of a given size.
 */
function convolve(x, [height, width], filters, [side, inputs, outputs], stride) {
  const [rows, columns] = [height, width].map((n) => Math.floor((n - side) / stride) + 1);
  const sums = new Float64Array(rows * columns * outputs);
  for (let r = 0; r < rows; r += 1) {
    for (let c = 0; c < columns; c += 1) {
      for (let k = 0; k < side * side; k += 1) {
        const y = stride * r + Math.floor(k / side);
        const from = (y * width + stride * c + k % side) * inputs;
        const to = (r * columns + c) * outputs;
        addProduct(sums, to, x, from, filters, k * inputs * outputs, inputs, outputs);
      }
    }
  }
  return sums;
}

function convolveTransposed(x, [rows, columns], filters, [side, inputs, outputs], stride, size) {
  const [height, width] = size;
  const sums = new Float64Array(height * width * outputs);
  for (let r = 0; r < rows; r += 1) {
    for (let c = 0; c < columns; c += 1) {
      for (let k = 0; k < side * side; k += 1) {
        const y = stride * r + Math.floor(k / side);
        const to = (y * width + stride * c + k % side) * outputs;
        const from = (r * columns + c) * inputs;
        addProduct(sums, to, x, from, filters, k * inputs * outputs, inputs, outputs);
      }
    }
  }
  return sums;
}

/** Add a bias (B) to (…, B) and apply the leaky ReLU. */
function activate(sums, bias, slope) {
  const result = new Float32Array(sums.length);
  const count = bias?.length ?? 1;
  for (let i = 0; i < sums.length; i += 1) {
    const value = sums[i] + (bias ? bias[i % count] : 0);
    result[i] = value < 0 ? slope * value : value;
  }
  return result;
}

/** The share of the filters that overlap at each pixel along a side; see overlap_shares. */
function overlapShares(side, length, positions) {
  const full = Math.max(1, Math.floor(side ** 2 / 2));
  return Array.from({ length }, (_, pixel) => {
    const pairs = Array.from({ length: positions }, (__, position) =>
      Math.max(side - Math.abs(pixel - 2 * position - (side - 1)), 0));
    return Math.min(Math.max(sum(pairs), 1), full) / full;
  });
}

export class Network {
  /** `info` describes the model, `array(name)` returns an array or null. */
  constructor(info, array) {
    this.info = info;
    const { features, image_shape: [channels], kernel_size: side } = info;
    const filters = (part, layer, isSwapped) => reorder(
      array(`${part}.conv${layer}_weight`), [features, layer === 1 ? channels : features, side],
      isSwapped,
    );
    const layer = (kind) => (options, number) => {
      const name = `${kind}.${number}.weight`;
      const balance = array(`${kind}.${number}.balance`);
      return { options, weight: array(name), shape: info.arrays[name].shape, balance };
    };
    const drawn = info.arrays["pixel_decoder.conv1_weight"] ? "pixel_decoder" : "autoencoder";
    this.seeing = {
      filters: [filters("autoencoder", 1, true), filters("autoencoder", 2, true)],
      biases: [array("autoencoder.conv1_bias"), array("autoencoder.conv2_bias")],
    };
    this.drawing = {
      filters: [filters(drawn, 1, false), filters(drawn, 2, false)],
      biases: [array(`${drawn}.deconv1_bias`), array(`${drawn}.deconv2_bias`)],
      pixelBias: drawn === "pixel_decoder" ? array("pixel_decoder.pixel_bias") : null,
      shares: this.#withMargin.map((length, axis) => (info.even_overlap
        ? overlapShares(side, length, info.grid[axis]) : new Array(length).fill(1))),
    };
    this.encoders = info.encoders.map(layer("encoders"));
    this.decoders = info.decoders.map(layer("decoders"));
    const parts = ["mean", "matrix", "inverse", "components", "factors"];
    this.preprocessing = Object.fromEntries(parts.map((part) =>
      [part, array(`preprocessing.${part}`)]));
    [, this.capsuleDim] = info.arrays["preprocessing.mean"].shape;
    this.squash = this.squash.bind(this);
  }

  squash(z, dim) {
    const most = this.info.largest_norm;
    return scaled(z, dim, (norm) => Math.min(norm ** 2 / (1 + norm ** 2), most));
  }

  unsquash(x, dim) {
    return scaled(x, dim, (norm) => {
      const p = Math.min(norm, this.info.largest_norm);
      return Math.sqrt(p / (1 - p));
    });
  }

  /** Decode preactivations z (J, D) to the bytes of an image (H, W, C). */
  decode(z) {
    return this.decodeSquashed(this.squash(z, this.info.parameters));
  }

  decodeSquashed(code) {
    const x = this.decoders.toReversed().reduce((y, layer) =>
      this.squash(route(y, layer, this.squash).z, layer.shape[2]), code);
    return this.#draw(this.#fromCapsules(x));
  }

  /** Encode the bytes of an image (H, W, C). */
  encode(pixels) {
    let x = this.#toCapsules(this.#see(pixels));
    let routing = null;
    let freeEnergy = null;
    for (const layer of this.encoders) {
      const { z, c } = route(x, layer, this.squash);
      const [inputs, outputs, dim] = layer.shape;
      routing = routing ? product(routing, c, inputs, outputs) : c;
      freeEnergy ??= -sum(norms(z, dim).map((norm) => Math.log(1 + norm ** 2)));
      x = this.squash(this.#withoutLosers(z, layer), dim);
    }
    return {
      code: x,
      z: this.unsquash(x, this.info.parameters),
      firing: norms(x, this.info.parameters),
      freeEnergy,
      routing: this.#atPositions(routing),
    };
  }

  /** Set experts that lose the competition to 0. */
  #withoutLosers(z, { options: { winners }, balance, shape: [, , dim] }) {
    if (winners === null) return z;
    const scores = norms(z, dim).map((norm, j) => 2 * Math.log(norm) + (balance?.[j] ?? 0));
    const least = scores.toSorted((a, b) => b - a)[winners - 1];
    return z.map((value, at) => (scores[Math.floor(at / dim)] >= least ? value : 0));
  }

  /** Sum coefficients (I, J) over the capsules at each position: (J, rows, columns). */
  #atPositions(c) {
    const { experts, grid: [rows, columns] } = this.info;
    const each = c.length / experts / rows / columns; // capsules at a position
    return Array.from({ length: experts }, (_, j) =>
      Array.from({ length: rows }, (__, row) => Array.from({ length: columns }, (___, column) => {
        const first = (row * columns + column) * each;
        return sum(Array.from({ length: each }, (____, i) => c[(first + i) * experts + j]));
      })));
  }

  /** Height and width of an image with its margin. */
  get #withMargin() {
    return this.info.image_shape.slice(1).map((length) => length + 2 * this.info.margin);
  }

  /** Return row and column in the image of a pixel of the image with its margin. */
  #inImage(pixel) {
    const [, width] = this.#withMargin;
    return [Math.floor(pixel / width), pixel % width].map((each) => each - this.info.margin);
  }

  /** Compute features (rows, columns, F) of the bytes of an image (H, W, C). */
  #see(pixels) {
    const { image_shape: [channels, height, width], kernel_size: side, features, stride } = this.info;
    const { filters, biases } = this.seeing;
    const slope = this.info.negative_slope;
    const size = this.#withMargin;
    const image = new Float32Array(size[0] * size[1] * channels);
    for (let at = 0; at < image.length; at += 1) { // pixels beyond a side are those at the side
      const [row, column] = this.#inImage(Math.floor(at / channels));
      const y = Math.min(Math.max(row, 0), height - 1);
      const x = Math.min(Math.max(column, 0), width - 1);
      image[at] = pixels[(y * width + x) * channels + at % channels] / 255;
    }
    const first = convolve(image, size, filters[0], [side, channels, features], 1);
    const hidden = activate(first, biases[0], slope);
    const inner = size.map((length) => length - side + 1);
    const second = convolve(hidden, inner, filters[1], [side, features, features], stride);
    return activate(second, biases[1], slope);
  }

  /** Compute the bytes of an image (H, W, C) from features (rows, columns, F). */
  #draw(x) {
    const { image_shape: [channels, height, width], kernel_size: side, features, stride } = this.info;
    const { filters, biases, pixelBias, shares } = this.drawing;
    const size = this.#withMargin;
    const inner = size.map((length) => length - side + 1);
    const wide = [side, features, features];
    const first = convolveTransposed(x, this.info.grid, filters[1], wide, stride, inner);
    const hidden = activate(first, biases[1], this.info.negative_slope);
    const narrow = [side, features, channels];
    const logits = convolveTransposed(hidden, inner, filters[0], narrow, 1, size);
    return Uint8ClampedArray.from({ length: height * width * channels }, (_, at) => {
      const channel = at % channels;
      const pixel = Math.floor(at / channels);
      const [y, x] = [Math.floor(pixel / width), pixel % width];
      const { margin } = this.info;
      const [row, column] = [y + margin, x + margin];
      const value = logits[(row * size[1] + column) * channels + channel]
        / (shares[0][row] * shares[1][column]);
      const bias = (biases[0] ? biases[0][channel] : 0)
        + (pixelBias ? pixelBias[channel * height * width + pixel] : 0);
      return 255 / (1 + Math.exp(-value - bias));
    });
  }

  #toCapsules(a) {
    const { mean, matrix } = this.preprocessing;
    const centred = a.map((value, at) => value - mean[at]);
    return this.squash(this.#equalize(this.#transform(matrix, centred), false), this.capsuleDim);
  }

  #fromCapsules(x) {
    const { mean, inverse } = this.preprocessing;
    const z = this.#equalize(this.unsquash(x, this.capsuleDim), true);
    return this.#transform(inverse, z).map((value, at) => value + mean[at]);
  }

  /** Multiply each capsule by its matrix: (I, K, K), (I, K) → (I, K). */
  #transform(matrices, z) {
    const dim = this.capsuleDim;
    return z.map((_, at) => dot(matrices, at * dim, z, at - at % dim, dim));
  }

  /** Scale the leading principal components of all capsules, or scale them back. */
  #equalize(z, isInverse) {
    const { components, factors } = this.preprocessing; // (I·K, r), (r)
    if (!components) return z;
    const rank = factors.length;
    const shares = new Float64Array(rank);
    z.forEach((value, at) => {
      for (let r = 0; r < rank; r += 1) shares[r] += value * components[at * rank + r];
    });
    factors.forEach((factor, r) => {
      shares[r] *= (isInverse ? 1 / factor : factor) - 1;
    });
    return z.map((value, at) => value + dot(components, at * rank, shares, 0, rank));
  }
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const norms = (vectors, dim) =>
  Array.from({ length: vectors.length / dim }, (_, i) => normOf(vectors, i * dim, dim));

/** Multiply coefficients (A, I) by coefficients (I, J): (A, J). */
function product(a, b, inputs, outputs) {
  const rows = a.length / inputs;
  const result = new Float64Array(rows * outputs);
  for (let row = 0; row < rows; row += 1) {
    addProduct(result, row * outputs, a, row * inputs, b, 0, inputs, outputs);
  }
  return result;
}
