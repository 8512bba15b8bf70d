// A CMANP that observes, merges, removes and predicts: the same numbers as constmem.CMANP.

import { Attention, FeedForward, Perceptron } from "./layers.js";
import { Regression } from "./regression.js";

const CHUNK = 128;  // points observed at once
const MAX_SHARE = 0.999;  // of a slot's normaliser that can be removed; beyond, what is left is rounding error
const EMPTY = -(2 ** 100);

export class CMANP {
  constructor(weights) {
    const c = (this.config = weights.config);
    this.kernels = weights.kernels;
    const { dim, depth, dim_x, dim_y, hidden, embed_depth } = c;
    this.groups = depth * c.num_heads;
    this.channels = dim / c.num_heads;
    this.slotCount = this.groups * c.num_slots;
    this.embed = new Perceptron(weights, "embed", dim_x + dim_y, dim, dim, embed_depth);
    this.embedTarget = new Perceptron(weights, "embed_target", dim_x, dim, dim, embed_depth);
    this.latents = weights.tensor("latents", c.num_latents, dim);
    this.#prepare(weights);
    this.readings = range(depth).map((i) => {
      const name = `stack.readings.${i}`;
      const block = (part) => [
        new FeedForward(weights, `${name}.${part}.0`, c),
        new Attention(weights, `${name}.${part}.1`, c, false),
        new FeedForward(weights, `${name}.${part}.2`, c),
      ];
      const cross = new Attention(weights, `${name}.cross`, c, true);
      return { out: weights.linear(`${name}.out`, dim, dim), data: block("data"), cross, latents: block("latents") };
    });
    this.cross = range(depth).map((i) => new Attention(weights, `cross.${i}`, c, true));
    this.feed = range(depth).map((i) => new FeedForward(weights, `feed.${i}`, c));
    this.headNorm = weights.norm("head.norm", dim);
    this.predictor = new Perceptron(weights, "head.predictor", dim, hidden, 2 * dim_y, 2);
    this.regression = c.moments ? new Regression(weights, c) : null;
    this.scales = "scales.x_mean" in weights.header ? {
      x: [weights.numbers("scales.x_mean", dim_x), weights.numbers("scales.x_std", dim_x)],
      y: [weights.numbers("scales.y_mean", dim_y), weights.numbers("scales.y_std", dim_y)],
    } : null;
    weights.requireAllUsed();
    this.spare = [];
    this.sizes = { slots: this.slotCount * (this.channels + 1), moments: this.regression?.size ?? 0 };
  }

  // The queries are weights, so scores are one linear map of normalised tokens, and values another beside it
  #prepare(weights) {
    const k = this.kernels, { dim, depth, num_heads: heads, num_slots: s } = this.config, c = this.channels;
    const part = (name, ...shape) => weights.tensor(`stack.observation.${name}`, ...shape);
    const slots = part("slots", depth, s, dim), keyValue = part("key_value", 2, depth, dim, dim);
    const scale = k.f32(part("slots_scale", depth, 1, dim), depth * dim).slice();
    const shift = k.f32(part("slots_shift", depth, 1, dim), depth * dim).slice();
    const gain = k.f32(part("tokens_scale", depth, 1, dim), depth * dim).slice();
    const offset = k.f32(part("tokens_shift", depth, dim, 1), depth * dim).slice();
    const query = part("query", depth, dim, dim);
    const normed = k.norm(slots, depth * s, dim);
    const own = k.f32(normed, depth * s * dim);
    for (let i = 0; i < own.length; i++) {
      const at = Math.floor(i / (s * dim)) * dim + (i % dim);
      own[i] = own[i] * scale[at] + shift[at];
    }
    this.slots = this.config.residual === "normed" ? normed : slots;
    const outputs = this.slotCount + depth * dim;
    const at = k.floats(dim * outputs), bias = k.floats(outputs);
    k.within(() => {
      const rows = k.floats(outputs * dim);  // of scores, then of values
      const shifted = k.floats(2 * depth * dim), q = k.floats(s * dim), transposed = k.floats(dim * dim);
      const kv = k.f32(keyValue, 2 * depth * dim * dim), shifts = k.f32(shifted, 2 * depth * dim);
      for (let row = 0; row < shifts.length; row++) {
        const d = Math.floor(row / dim) % depth;
        let sum = 0;
        for (let j = 0; j < dim; j++) {
          sum += kv[row * dim + j] * offset[d * dim + j];
          kv[row * dim + j] *= gain[d * dim + j];
        }
        shifts[row] = sum;
      }
      for (let d = 0; d < depth; d++) {
        const its = k.f32(query + 4 * d * dim * dim, dim * dim);
        for (let i = 0; i < its.length; i++) its[i] /= Math.sqrt(c);
        k.run.transpose(query + 4 * d * dim * dim, dim, transposed, dim, dim);
        k.run.matmul(normed + 4 * d * s * dim, dim, transposed, dim, q, dim, s, dim, dim, 0);
        for (let h = 0; h < heads; h++) {
          const first = d * dim + h * c, group = (d * heads + h) * s;
          k.run.matmul(q + 4 * h * c, dim, keyValue + 4 * first * dim, dim, rows + 4 * group * dim, dim, s, c, dim, 0);
          k.run.matmul(q + 4 * h * c, dim, shifted + 4 * first, 1, bias + 4 * group, 1, s, c, 1, 0);
        }
      }
      k.f32(rows + 4 * this.slotCount * dim, depth * dim * dim).set(kv.subarray(depth * dim * dim));
      k.f32(bias + 4 * this.slotCount, depth * dim).set(shifts.subarray(depth * dim));
      k.run.transpose(rows, dim, at, outputs, dim);
    });
    this.scoring = { at, inputs: dim, outputs, bias };
  }

  get bytes() { return 8 * (this.sizes.slots + this.sizes.moments) + 8; }

  // A state is numbers in the kernels' memory (values, log-normalisers, moments), and how many points it saw.
  // Whoever needs one no more gives its place back by `free`.
  empty() {
    const all = this.sizes.slots + this.sizes.moments, at = this.spare.pop() ?? this.kernels.doubles(all);
    const state = { at, lse: at + 8 * this.slotCount * this.channels, moments: at + 8 * this.sizes.slots, count: 0 };
    this.kernels.f64(at, all).fill(0);
    this.kernels.f64(state.lse, this.slotCount).fill(EMPTY);
    return state;
  }

  free(state) { this.spare.push(state.at); }

  copy(state) {
    const made = this.empty(), all = this.sizes.slots + this.sizes.moments;
    this.kernels.f64(made.at, all).set(this.kernels.f64(state.at, all));
    return Object.assign(made, { count: state.count });
  }

  // The state of exactly these points, each an array of inputs and outputs
  observe(points) {
    const state = this.empty(), part = this.empty();
    for (let i = 0; i < points.length; i += CHUNK) this.merge(state, this.#observed(part, points.slice(i, i + CHUNK)));
    this.free(part);
    return state;
  }

  #observed(part, points) {
    const k = this.kernels, s = this.config.num_slots, n = points.length;
    k.within(() => {
      const seen = this.#scores(points), scratch = k.floats(3 * (s + 4) + s * this.channels);
      k.run.observe(seen, n, this.groups, s, this.channels, part.at, part.lse, scratch);
      k.f64(part.moments, this.sizes.moments).fill(0);
      this.regression?.observe(k, part.moments, points.map((point) => this.#scaled(point)));
    });
    return Object.assign(part, { count: n });
  }

  #scores(points) {
    const k = this.kernels, { dim, dim_x, dim_y } = this.config, n = points.length, x = k.floats(n * (dim_x + dim_y));
    k.f32(x, n * (dim_x + dim_y)).set(points.flatMap((point) => this.#scaled(point)));
    return k.linear(k.norm(this.embed.run(k, x, n), n, dim), n, this.scoring);
  }

  #scaled(point) {
    if (!this.scales) return point;
    const { dim_x } = this.config, { x, y } = this.scales;
    return point.map((v, i) => (i < dim_x ? (v - x[0][i]) / x[1][i] : (v - y[0][i - dim_x]) / y[1][i - dim_x]));
  }

  // One point more, in one pass over the state
  update(state, point) {
    const k = this.kernels, s = this.config.num_slots;
    k.within(() => {
      const seen = this.#scores([point]), scratch = k.doubles(this.channels);
      k.run.extend(state.at, state.lse, seen, this.groups, s, this.channels, scratch);
      this.regression?.observe(k, state.moments, [this.#scaled(point)]);
    });
    state.count += 1;
  }

  // Take in all points of the other, which count exp(shift) times as much as they did
  merge(state, other, shift = 0) {
    this.kernels.run.merge(state.at, state.lse, other.at, other.lse, this.slotCount, this.channels, shift);
    this.#addMoments(state, other, Math.exp(shift));
    state.count += other.count;
  }

  // Take out points that it has seen; false, and nothing changes, where only rounding error would be left
  remove(state, other, shift = 0) {
    const k = this.kernels;
    if (!(k.run.largest_share(state.lse, other.lse, this.slotCount, shift) <= MAX_SHARE)) return false;
    k.run.subtract(state.at, state.lse, other.at, other.lse, this.slotCount, this.channels, shift);
    this.#addMoments(state, other, -Math.exp(shift));
    state.count -= other.count;
    return true;
  }

  #addMoments(state, other, weight) {
    const mine = this.kernels.f64(state.moments, this.sizes.moments), its = this.kernels.f64(other.moments, mine.length);
    for (let i = 0; i < mine.length; i++) mine[i] += weight * its[i];
  }

  // Let all points count exp(shift) times as much as they did: negative forgets
  decay(state, shift) {
    this.kernels.run.decay(state.lse, this.slotCount, shift);
    const moments = this.kernels.f64(state.moments, this.sizes.moments), factor = Math.exp(shift);
    for (let i = 0; i < moments.length; i++) moments[i] *= factor;
  }

  // Mean and standard deviation at targets, each an array of inputs: Float64Arrays of m dim_y numbers
  predict(state, targets) {
    const k = this.kernels, { dim, dim_x, dim_y } = this.config, m = targets.length;
    return k.within(() => {
      const levels = this.#read(state), x = k.floats(m * dim_x);
      const own = targets.map((t) => this.#scaled(t));
      k.f32(x, m * dim_x).set(own.flat());
      let tokens = this.embedTarget.run(k, x, m);
      const known = this.regression?.known(k, state.moments, own, levels.at(-1));
      if (known) k.run.add(tokens, known.tokens, m * dim);
      levels.forEach((level, i) => {
        const kept = k.floats(m * dim);
        k.within(() => {
          const out = this.feed[i].run(k, this.cross[i].run(k, tokens, m, level, this.config.num_latents), m);
          k.f32(kept, m * dim).set(k.f32(out, m * dim));
        });
        tokens = kept;
      });
      const out = k.f32(this.predictor.run(k, k.norm(tokens, m, dim, ...this.headNorm), m), 2 * m * dim_y);
      return this.#restored(known ? known.mixture(out) : this.#normals(out, m));
    });
  }

  #normals(out, m) {
    const { dim_y, std: kind } = this.config, mean = new Float64Array(m * dim_y), std = new Float64Array(m * dim_y);
    const softplus = (v) => (v > 20 ? v : Math.log1p(Math.exp(v)));
    for (let i = 0; i < mean.length; i++) {
      const at = Math.floor(i / dim_y) * 2 * dim_y + (i % dim_y), raw = out[at + dim_y];
      mean[i] = out[at];
      std[i] = kind === "exp" ? Math.exp(raw) : 0.05 + 0.95 * softplus(raw);
    }
    return { mean, std };
  }

  #restored({ mean, std }) {
    if (!this.scales) return { mean, std };
    const [shift, scale] = this.scales.y, dim_y = this.config.dim_y;
    return { mean: mean.map((v, i) => shift[i % dim_y] + scale[i % dim_y] * v), std: std.map((v, i) => scale[i % dim_y] * v) };
  }

  // The latents after every block
  #read(state) {
    const k = this.kernels, { dim, num_heads: heads, num_slots: s, num_latents: l } = this.config, c = this.channels;
    let latents = this.latents;
    return this.readings.map((reading, i) => {
      const level = k.floats(l * dim);
      k.within(() => {
        const value = k.floats(s * dim), to = k.f32(value, s * dim), numbers = k.f64(state.at, this.slotCount * c);
        for (let h = 0; h < heads; h++) {
          const from = ((i * heads + h) * s) * c;
          for (let j = 0; j < s; j++) for (let t = 0; t < c; t++) to[j * dim + h * c + t] = numbers[from + j * c + t];
        }
        let data = k.linear(value, s, reading.out);
        k.run.add(data, this.slots + 4 * i * s * dim, s * dim);
        for (const layer of reading.data) data = layer.run(k, data, s);
        let out = reading.cross.run(k, latents, l, data, s);
        for (const layer of reading.latents) out = layer.run(k, out, l);
        k.f32(level, l * dim).set(k.f32(out, l * dim));
      });
      return (latents = level);
    });
  }
}

const range = (n) => [...Array(n).keys()];
