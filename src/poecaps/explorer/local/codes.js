// Codes of a model in the browser: from slider positions and back, at random, and on a map.

const round = (value, decimals) => Math.round(value * 10 ** decimals) / 10 ** decimals || 0;
const clamp = (value, least, greatest) => Math.min(Math.max(value, least), greatest);

/** Random numbers of a seed: uniform (mulberry32) and normal (Box and Muller). */
class RandomNumbers {
  constructor(seed) {
    this.state = (seed ^ Math.floor(seed / 2 ** 32)) >>> 0;
  }

  uniform() {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let t = this.state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  }

  normal() {
    const radius = Math.sqrt(-2 * Math.log(1 - this.uniform()));
    return radius * Math.cos(2 * Math.PI * this.uniform());
  }
}

export class Codes {
  /** `info` describes the model, `array(name)` returns an array or null. */
  constructor(info, array) {
    this.info = info;
    this.array = array;
  }

  /** Return the preactivations z (J, D) of a code of slider positions. */
  preactivation({ experts: settings }) {
    const { experts, parameters, mean, deviation } = this.info;
    const z = new Float32Array(experts * parameters);
    for (const { expert, offsets, magnitude, negative } of settings) {
      const factor = negative ? -magnitude : magnitude;
      for (let d = 0; d < parameters; d += 1) {
        z[expert * parameters + d] +=
          factor * (mean[expert][d] + deviation[expert][d] * (offsets[d] ?? 0));
      }
    }
    return z;
  }

  /** Return the slider positions of preactivations z (J, D), without experts that are 0. */
  settings(z) {
    const { experts, parameters } = this.info;
    const found = [];
    for (let expert = 0; expert < experts; expert += 1) {
      const vector = z.slice(expert * parameters, (expert + 1) * parameters);
      if (vector.some((value) => value !== 0)) found.push(this.#setting(expert, vector));
    }
    return { experts: found };
  }

  #setting(expert, vector) {
    const { mean: { [expert]: mean }, deviation: { [expert]: deviation } } = this.info;
    const { decimals, offset, magnitude: most } = this.info.limits;
    const length = Math.hypot(...mean);
    const norm = length > 0 ? Math.hypot(...vector) / length : 1;
    const magnitude = clamp(round(norm, decimals), 10 ** -decimals, most);
    const negative = vector.reduce((sum, value, d) => sum + value * mean[d], 0) < 0;
    const factor = negative ? -magnitude : magnitude;
    const offsets = Array.from(vector, (value, d) =>
      clamp(round((value / factor - mean[d]) / deviation[d], decimals), -offset, offset));
    return { expert, offsets, magnitude, negative };
  }

  /** Draw a code from a domain. The numbers differ from those that the library draws. */
  draw(domain, expert, seed) {
    const random = new RandomNumbers(seed);
    const { experts, parameters } = this.info;
    if (domain === "joint") {
      const inner = this.#fromMixture("joint", 0, random);
      const [mean, components] = [this.array("joint.mean"), this.array("joint.components")];
      return this.settings(mean.map((value, at) => inner.reduce((sum, each, r) =>
        sum + each * components[at * inner.length + r], value)));
    }
    const z = new Float32Array(experts * parameters);
    const first = expert * parameters;
    z.set(domain === "learned" ? this.#fromMixture("per_expert", expert, random)
      : Float32Array.from({ length: parameters }, () => random.normal()), first);
    const direction = this.array("mean_direction");
    const agreement = z.reduce((sum, value, at) => sum + value * direction[at], 0);
    return this.settings(domain === "restricted" && agreement < 0 ? z.map((value) => -value) : z);
  }

  /** Draw from one of N mixtures of M Gaussians with means (N, M, S), factors (N, M, S, R). */
  #fromMixture(name, index, random) {
    const weights = this.array(`${name}.weights`);
    const [, count, size, rank] = this.info.arrays[`${name}.factors`].shape;
    const own = weights.subarray(index * count, (index + 1) * count);
    let left = random.uniform() * own.reduce((a, b) => a + b);
    let part = own.findIndex((weight) => (left -= weight) < 0);
    if (part < 0) part = own.findLastIndex((weight) => weight > 0);
    const noise = Array.from({ length: rank }, () => random.normal());
    const [means, factors] = [this.array(`${name}.means`), this.array(`${name}.factors`)];
    return Float32Array.from({ length: size }, (_, s) => {
      const at = (index * count + part) * size + s;
      return noise.reduce((sum, value, r) => sum + value * factors[at * rank + r], means[at]);
    });
  }

  /** Return the code at a position of the map of an expert, or of all experts. */
  onMap(expert, x, y) {
    const { experts, parameters } = this.info;
    const z = new Float32Array(experts * parameters);
    if (expert !== null) {
      const origin = this.array(`maps.${expert}.origin`);
      const axes = this.array(`maps.${expert}.axes`);
      z.set(origin.map((value, d) =>
        value + (2 * x - 1) * axes[d] + (1 - 2 * y) * axes[parameters + d]), expert * parameters);
      return this.settings(z);
    }
    const [codes, places] = [this.array("map.codes"), this.array("map.places")];
    const near = Array.from({ length: places.length / 2 }, (_, n) =>
      ({ n, distance: (places[2 * n] - x) ** 2 + (places[2 * n + 1] - y) ** 2 }))
      .sort((a, b) => a.distance - b.distance).slice(0, 3);
    const weights = near.map(({ distance }) => (distance + 1e-9) ** -2);
    const total = weights.reduce((a, b) => a + b);
    near.forEach(({ n }, i) => z.forEach((_, at) => {
      z[at] += weights[i] / total * codes[n * z.length + at];
    }));
    return this.settings(z);
  }

  /** Return three lines of Python that reproduce the image of a code. */
  python(code) {
    const { experts, parameters, source } = this.info;
    const z = this.preactivation(code);
    const rows = Array.from({ length: experts }, (_, j) =>
      Array.from(z.subarray(j * parameters, (j + 1) * parameters)));
    const on = [...rows.keys()].filter((j) => rows[j].some((value) => value !== 0));
    // Nine digits are enough for exactly this float32.
    const text = on.map((j) => `[${rows[j].map((value) => Number(value.toPrecision(9))).join(", ")}]`);
    const set = on.length
      ? `; z[0, [${on.join(", ")}]] = torch.tensor([${text.join(", ")}])` : "";
    return [
      `import poecaps, torch; network = poecaps.load(${JSON.stringify(source)})`,
      `z = torch.zeros(1, ${experts}, ${parameters})${set}`,
      "image = network.decode(poecaps.squash(z)).detach()  # (1, C, H, W), from 0 to 1",
    ].join("\n");
  }
}
