// The layers that a CMANP is made of, in float32: perceptrons, attention, gated feed-forward.

export class Perceptron {
  constructor(weights, name, inputs, hidden, outputs, depth) {
    const widths = [inputs, ...Array(depth - 1).fill(hidden), outputs];
    this.layers = widths.slice(1).map((width, i) => weights.linear(`${name}.layers.${i}`, widths[i], width));
  }

  run(k, x, m) {
    this.layers.forEach((layer, i) => {
      if (i) k.run.relu(x, m * layer.inputs);
      x = k.linear(x, m, layer);
    });
    return x;
  }
}

export class Attention {
  constructor(weights, name, { dim, num_heads: heads, residual }, cross) {
    Object.assign(this, { dim, heads, channels: dim / heads, normed: residual === "normed" });
    this.norm = weights.norm(`${name}.norm`, dim);
    this.normContext = cross ? weights.norm(`${name}.norm_context`, dim) : null;
    const scale = 1 / Math.sqrt(this.channels);
    this.query = weights.linear(`${name}.attention.query`, dim, dim, { bias: false, scale });
    this.keyValue = weights.linear(`${name}.attention.key_value`, dim, 2 * dim, { bias: false });
    this.out = weights.linear(`${name}.attention.out`, dim, dim);
  }

  // m rows attend to n rows of a context, or (without one) to themselves
  run(k, x, m, context = x, n = m) {
    const { dim, heads, channels } = this;
    const normed = k.norm(x, m, dim, ...this.norm);
    const seen = this.normContext ? k.norm(context, n, dim, ...this.normContext) : normed;
    const q = k.linear(normed, m, this.query), kv = k.linear(seen, n, this.keyValue);
    const keys = k.floats(dim * n), shares = k.floats(m * n), mixed = k.floats(m * dim);
    k.run.transpose(kv, 2 * dim, keys, n, dim);
    for (let h = 0; h < heads; h++) {
      const from = 4 * h * channels;
      k.run.matmul(q + from, dim, keys + from * n, n, shares, n, m, channels, n, 0);
      k.run.softmax(shares, m, n);
      k.run.matmul(shares, n, kv + 4 * dim + from, 2 * dim, mixed + from, dim, m, n, channels, 0);
    }
    const out = k.linear(mixed, m, this.out);
    k.run.add(out, this.normed ? normed : x, m * dim);
    return out;
  }
}

export class FeedForward {
  constructor(weights, name, { dim, hidden, residual }) {
    Object.assign(this, { dim, hidden, normed: residual === "normed" });
    this.norm = weights.norm(`${name}.norm`, dim);
    this.expand = weights.linear(`${name}.expand`, dim, 2 * hidden);
    this.contract = weights.linear(`${name}.contract`, hidden, dim);
  }

  run(k, x, m) {
    const normed = k.norm(x, m, this.dim, ...this.norm), gated = k.floats(m * this.hidden);
    k.run.gate(k.linear(normed, m, this.expand), gated, m, this.hidden);
    const out = k.linear(gated, m, this.contract);
    k.run.add(out, this.normed ? normed : x, m * this.dim);
    return out;
  }
}
