// The compiled kernels, and the memory they work on: weights stay, working space is used again.

import { fetched, lacking } from "./weights.js";

// The smallest module with an instruction of SIMD: whoever refuses it has none
const SIMD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11];

export class Kernels {
  static async load(url) {
    if (!globalThis.WebAssembly?.validate(new Uint8Array(SIMD))) throw lacking("WebAssembly SIMD");
    const bytes = await fetched(url);
    if (!WebAssembly.validate(bytes)) throw new Error(`${url} is damaged. Write the page again with \`constmem page\`.`);
    const math = { exp: Math.exp, log: Math.log, log1p: Math.log1p };
    const { instance } = await WebAssembly.instantiate(bytes, { math });
    return new Kernels(instance.exports);
  }

  constructor(exports) {
    this.run = exports;
    this.memory = exports.memory;
    this.top = Number(exports.__heap_base.value);
  }

  // Space for bytes, aligned to 16; grows the memory where that is too small
  take(bytes) {
    const start = (this.top + 15) & ~15;
    this.top = start + bytes;
    const missing = this.top + 64 - this.memory.buffer.byteLength;
    if (missing > 0) this.memory.grow(Math.ceil(missing / 65536));
    return start;
  }

  floats(n) { return this.take(4 * n); }
  doubles(n) { return this.take(8 * n); }

  // What is taken inside of work is free again after it
  within(work) {
    const top = this.top;
    try {
      return work();
    } finally {
      this.top = top;
    }
  }

  // Views are made anew each time: growing replaces the buffer
  f32(at, n) { return new Float32Array(this.memory.buffer, at, n); }
  f64(at, n) { return new Float64Array(this.memory.buffer, at, n); }
  u8(at, n) { return new Uint8Array(this.memory.buffer, at, n); }

  // A linear map of m rows: weights are {at, inputs, outputs, bias}, transposed when they were loaded
  linear(x, m, { at, inputs, outputs, bias }) {
    const out = this.floats(m * outputs);
    this.run.matmul(x, inputs, at, outputs, out, outputs, m, inputs, outputs, bias);
    return out;
  }

  norm(x, m, d, gain = 0, shift = 0) {
    const out = this.floats(m * d);
    this.run.layer_norm(x, out, m, d, gain, shift);
    return out;
  }

  // SHA-256 of bytes, in hexadecimal
  digest(bytes) {
    return this.within(() => {
      const { words, constants } = shaTables();
      const blocks = Math.ceil((bytes.length + 9) / 64);
      const at = this.take(64 * blocks), state = this.take(32), table = this.take(256);
      const padded = this.u8(at, 64 * blocks);
      padded.fill(0);
      padded.set(bytes);
      padded[bytes.length] = 128;
      new DataView(this.memory.buffer, at + 64 * blocks - 8).setBigUint64(0, BigInt(bytes.length) * 8n);
      new Uint32Array(this.memory.buffer, state, 8).set(words);
      new Uint32Array(this.memory.buffer, table, 64).set(constants);
      this.run.sha256(state, table, at, blocks);
      const found = [...new Uint32Array(this.memory.buffer, state, 8)];
      return found.map((word) => word.toString(16).padStart(8, "0")).join("");
    });
  }
}

// The standard's numbers: 32 bits behind the point of square roots (of 8 primes) and cube roots (of 64)
function shaTables() {
  const primes = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  const fraction = (prime, power) => {  // exactly: the largest r with r^power <= prime 2^(32 power)
    const target = BigInt(prime) << BigInt(32 * power);
    let low = 0n, high = 1n << 38n;
    while (high - low > 1n) {
      const middle = (low + high) >> 1n;
      if (middle ** BigInt(power) <= target) low = middle; else high = middle;
    }
    return Number(low & 0xffffffffn);
  };
  return { words: primes.slice(0, 8).map((p) => fraction(p, 2)), constants: primes.map((p) => fraction(p, 3)) };
}
