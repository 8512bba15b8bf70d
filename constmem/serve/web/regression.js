// The experts of a CMANP with moments: Bayesian linear regressions on Fourier features, weighed by evidence.

export class Regression {
  constructor(weights, { dim, dim_x, dim_y, moments, experts, std }) {
    Object.assign(this, { dim, dim_x, dim_y, features: moments, experts, floor: std === "bounded" ? 0.05 : 0 });
    const half = moments / 2, part = (name, ...shape) => weights.numbers(`regression.${name}`, ...shape);
    this.frequencies = part("frequencies", half, dim_x);
    const variance = part("log_variance", experts, half);
    this.scale = variance.map((v) => Math.exp(v / 2));
    this.noise = part("log_noise", experts).map((v) => Math.exp(2 * v));
    this.logPrior = logSoftmax(part("log_prior", experts));
    this.recall = weights.linear("recall", experts * (dim_y + 2), dim);
    this.weigh = weights.linear("weigh", dim, experts);
    this.latents = weights.config.num_latents;
    this.size = moments * moments + moments * dim_y + dim_y + 1;  // gram, cross, square, count
  }

  phi(point) {
    const half = this.features / 2, out = new Float64Array(this.features);
    for (let i = 0; i < half; i++) {
      let angle = 0;
      for (let j = 0; j < this.dim_x; j++) angle += this.frequencies[i * this.dim_x + j] * Math.fround(point[j]);
      out[i] = Math.cos(angle);
      out[half + i] = Math.sin(angle);
    }
    return out;
  }

  // Add these points to sums: gram, cross, square and count, side by side in the kernels' memory
  observe(k, sums, points) {
    const { features: p, dim_y: y, dim_x, size } = this;
    k.within(() => {
      const at = k.doubles(p), phi = k.f64(at, p), rest = k.f64(sums + 8 * p * p, size - p * p);
      for (const point of points) {
        phi.set(this.phi(point));
        k.run.outer(sums, at, p, 1);
        const outputs = point.slice(dim_x).map(Math.fround);
        for (let i = 0; i < p; i++) for (let o = 0; o < y; o++) rest[i * y + o] += phi[i] * outputs[o];
        outputs.forEach((v, o) => (rest[p * y + o] += v * v));
        rest[rest.length - 1] += 1;
      }
    });
  }

  // What the experts know at targets, as tokens, and how to mix what becomes of it
  known(k, at, targets, lastLevel) {
    const { features: p, half = p / 2, dim_y: y, experts, dim } = this, m = targets.length;
    const width = (m + y + 1) & ~1, phi = targets.map((t) => this.phi(t));
    const mean = new Float64Array(m * experts * y), std = new Float64Array(m * experts);
    const evidence = new Float64Array(experts), moments = k.f64(at, this.size).slice();
    k.within(() => {
      const a = k.doubles(p * p), b = k.doubles(p * width), matrix = k.f64(a, p * p), right = k.f64(b, p * width);
      for (let e = 0; e < experts; e++) {
        const noise = this.noise[e], scale = (i) => this.scale[e * half + (i % half)];
        for (let i = 0; i < p; i++) {
          const s = scale(i);
          for (let j = 0; j <= i; j++) matrix[i * p + j] = (s * scale(j) * moments[i * p + j]) / noise + (i === j ? 1 : 0);
          for (let j = 0; j < m; j++) right[i * width + j] = s * phi[j][i];
          for (let o = 0; o < y; o++) right[i * width + m + o] = s * moments[p * p + i * y + o];
          if (m + y < width) right[i * width + m + y] = 0;
        }
        const logDet = k.run.cholesky(a, p);
        k.run.solve(a, p, b, width);
        let left = 0;
        const variance = new Float64Array(m);
        for (let i = 0; i < p; i++) {
          const row = right.subarray(i * width, (i + 1) * width);
          for (let o = 0; o < y; o++) left -= (row[m + o] * row[m + o]) / noise;
          for (let j = 0; j < m; j++) {
            variance[j] += row[j] * row[j];
            for (let o = 0; o < y; o++) mean[(j * experts + e) * y + o] += (row[j] * row[m + o]) / noise;
          }
        }
        for (let j = 0; j < m; j++) std[j * experts + e] = Math.sqrt(variance[j] + noise);
        for (let o = 0; o < y; o++) left += moments[p * p + p * y + o];
        const one = moments[this.size - 1] * Math.log(2 * Math.PI * noise) + logDet;
        evidence[e] = -0.5 * (y * one + left / noise) + this.logPrior[e];
      }
      const middle = k.floats(dim), level = k.f32(lastLevel, this.latents * dim), means = new Float64Array(dim);
      level.forEach((v, i) => (means[i % dim] += v / this.latents));
      k.f32(middle, dim).set(means);
      const correction = k.f32(k.linear(middle, 1, this.weigh), experts);
      evidence.forEach((v, e) => (evidence[e] = v + correction[e]));
    });
    const logWeight = logSoftmax(evidence), columns = experts * (y + 2), given = k.floats(m * columns);
    const known = k.f32(given, m * columns);
    for (let j = 0; j < m; j++) {
      known.set(mean.subarray(j * experts * y, (j + 1) * experts * y), j * columns);
      for (let e = 0; e < experts; e++) {
        known[j * columns + experts * y + e] = Math.log(std[j * experts + e]);
        known[j * columns + experts * (y + 1) + e] = Math.exp(logWeight[e]);
      }
    }
    return {
      tokens: k.linear(given, m, this.recall),
      mixture: (out) => this.#mixture(out, mean, std, logWeight.map(Math.exp), m),
    };
  }

  // Mean and deviation of a mixture of normals, each shifted and widened by what the head says
  #mixture(out, means, stds, weight, m) {
    const { dim_y: y, experts, floor } = this, mean = new Float64Array(m * y), std = new Float64Array(m * y);
    for (let j = 0; j < m; j++) {
      for (let o = 0; o < y; o++) {
        const shift = out[j * 2 * y + o], grow = Math.exp(out[j * 2 * y + y + o]);
        const own = (e) => means[(j * experts + e) * y + o] + shift * stds[j * experts + e];
        let middle = 0, spread = 0;
        for (let e = 0; e < experts; e++) middle += weight[e] * own(e);
        for (let e = 0; e < experts; e++) {
          spread += weight[e] * ((stds[j * experts + e] * grow) ** 2 + floor ** 2 + (own(e) - middle) ** 2);
        }
        mean[j * y + o] = middle;
        std[j * y + o] = Math.sqrt(spread);
      }
    }
    return { mean, std };
  }
}

function logSoftmax(numbers) {
  const top = Math.max(...numbers), total = numbers.reduce((sum, v) => sum + Math.exp(v - top), 0);
  return numbers.map((v) => v - top - Math.log(total));
}
