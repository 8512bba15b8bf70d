// Weights as the library saves them, through gzip: config.json and model.safetensors.gz, checked before they are used.

const AGAIN = "Write them again with `constmem page`, or save the model again.";
const DEFAULTS = { moments: 0, experts: 48 };
const KNOWN = new Set([
  "dim_x", "dim_y", "dim", "depth", "num_slots", "num_latents", "num_heads", "hidden", "embed_depth", "residual", "std",
  "moments", "experts", "components",
]);
const SIZES = { F64: 8, F32: 4, F16: 2 };

export async function fetchWeights(folder, kernels) {
  const [config, content] = await Promise.all([fetched(`${folder}/config.json`), fetched(`${folder}/model.safetensors.gz`).then((content) => unpacked(content, folder))]);
  let settings;
  try {
    settings = JSON.parse(new TextDecoder().decode(config));
  } catch {
    throw new Error(`${folder}/config.json is damaged: it is no JSON. ${AGAIN}`);
  }
  return new Weights(settings, new Uint8Array(content), kernels, folder);
}

export const lacking = (what) => new Error(
  `This browser cannot run the page: it has no ${what}. Chrome and Edge since 91, Firefox since 113 and Safari since 16.4 have it.`);

export async function fetched(url) {
  let response;
  try {
    response = await fetch(url);
  } catch {
    throw new Error(`${url} could not be fetched: the server cannot be reached. Open this tab again later.`);
  }
  if (!response.ok) throw new Error(`${url} could not be fetched (${response.status}). Are all files of the page on the server?`);
  return response.arrayBuffer();
}

// A server that knows .gz may have had the browser unpack it already
async function unpacked(content, folder) {
  const [first, second] = new Uint8Array(content);
  if (first !== 0x1f || second !== 0x8b) return content;
  if (!globalThis.DecompressionStream) throw lacking("DecompressionStream");
  try {
    return await new Response(new Blob([content]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  } catch {
    throw new Error(`${folder}/model.safetensors.gz is damaged: it cannot be unpacked. ${AGAIN}`);
  }
}

// Settings as the library writes them to take their checksum
function sorted(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return JSON.stringify(value);
  return `{${Object.keys(value).sort().map((key) => `${JSON.stringify(key)}: ${sorted(value[key])}`).join(", ")}}`;
}

export class Weights {
  constructor(settings, bytes, kernels, name) {
    this.name = name;
    this.kernels = kernels;
    if (settings?.model !== "cmanp" || typeof settings.config !== "object") {
      const found = typeof settings?.model === "string" && settings.model !== "cmanp" ? `a model of kind "${settings.model}"` : "no model";
      throw new Error(`${name} holds ${found}, but this page runs CMANP ("cmanp") only.`);
    }
    this.config = { ...DEFAULTS, ...settings.config };
    for (const [key, value] of Object.entries(this.config)) {
      if (!KNOWN.has(key) && value) {  // what is off is not needed
        throw new Error(`${name} has a setting that this page does not know: ${key} = ${value}. It runs CMANP with normal predictions only.`);
      }
    }
    this.header = this.#read(bytes, { config: settings.config, model: settings.model });
    this.used = new Set();
  }

  #damaged(why) {
    return new Error(`${this.name}/model.safetensors is damaged: ${why}. ${AGAIN}`);
  }

  #read(bytes, settings) {
    if (bytes.length < 8) throw this.#damaged("it is empty or cut short");
    const length = Number(new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true));
    if (length > bytes.length - 8) throw this.#damaged("it is cut short, or no safetensors file");
    let header;
    try {
      header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
    } catch {
      throw this.#damaged("its header cannot be read");
    }
    const about = header.__metadata__ ?? {};
    if (about.format !== "constmem.model") throw new Error(`${this.name} was not written by constmem. ${AGAIN}`);
    const version = (about.version ?? "0").replace(/s$/, "");
    if (version !== "1") {
      throw new Error(`${this.name} is of format version ${version}, but this page reads version 1. Take the page of the constmem that wrote it.`);
    }
    this.#requireWhole(bytes, length, about);
    if (about.config !== undefined && this.kernels.digest(new TextEncoder().encode(sorted(settings))) !== about.config) {
      throw new Error(`${this.name}/config.json is not the one that was saved with these weights: one of both was changed or is of another model. ${AGAIN}`);
    }
    this.data = bytes.subarray(8 + length);
    for (const [key, tensor] of Object.entries(header)) {
      if (key === "__metadata__") continue;
      const [from, to] = tensor.data_offsets ?? [], size = SIZES[tensor.dtype];
      const numbers = (tensor.shape ?? []).reduce((a, b) => a * b, 1);
      if (!size || !(from >= 0) || !(to <= this.data.length) || to - from !== size * numbers) {
        throw this.#damaged(`the place of ${key} is not in it`);
      }
    }
    return header;
  }

  #requireWhole(bytes, length, about) {
    if (about.checksum === undefined) {
      if ((about.version ?? "").endsWith("s")) throw this.#damaged("its checksum is lost");
      return;  // written by an earlier version
    }
    const place = new TextDecoder("latin1").decode(bytes.subarray(0, 8 + length)).indexOf(`"checksum":"${about.checksum}"`) + 12;
    const blank = bytes.slice();
    blank.fill(48, place, place + 64);
    if (this.kernels.digest(blank) !== about.checksum) throw this.#damaged("its checksum is not that of what it holds");
  }

  // A tensor as float32 in the kernels' memory
  tensor(key, ...shape) {
    const found = this.header[key];
    if (!found || found.shape.join() !== shape.join()) {
      throw new Error(`The weights of ${this.name} do not fit its config.json: ${key} is ${found ? `of shape ${found.shape}` : "missing"}, not ${shape}. One of both is of another model.`);
    }
    this.used.add(key);
    const n = shape.reduce((a, b) => a * b, 1), at = this.kernels.floats(n), start = found.data_offsets[0];
    const size = SIZES[found.dtype], bytes = this.data.slice(start, start + size * n);
    if (found.dtype === "F16") {
      this.kernels.within(() => {
        const half = this.kernels.take(2 * n);
        this.kernels.u8(half, 2 * n).set(bytes);
        this.kernels.run.halves(half, at, n);
      });
    } else {
      const numbers = found.dtype === "F64" ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
      this.kernels.f32(at, n).set(numbers);
    }
    if (!this.kernels.run.finite(at, n)) throw this.#damaged(`${key} holds numbers that are not finite`);
    return at;
  }

  numbers(key, ...shape) {
    const at = this.tensor(key, ...shape);
    return Float64Array.from(this.kernels.f32(at, shape.reduce((a, b) => a * b, 1)));
  }

  // A linear map as `Kernels.linear` takes it
  linear(name, inputs, outputs, { bias = true, scale = 1 } = {}) {
    const weight = this.tensor(`${name}.weight`, outputs, inputs);
    const own = this.kernels.f32(weight, inputs * outputs);
    if (scale !== 1) for (let i = 0; i < own.length; i++) own[i] *= scale;
    const at = this.kernels.floats(inputs * outputs);
    this.kernels.run.transpose(weight, inputs, at, outputs, inputs);
    return { at, inputs, outputs, bias: bias ? this.tensor(`${name}.bias`, outputs) : 0 };
  }

  norm(name, d) {
    return [this.tensor(`${name}.weight`, d), this.tensor(`${name}.bias`, d)];
  }

  // Weights that nobody asked for would be silently ignored: the model would be another one
  requireAllUsed() {
    const rest = Object.keys(this.header).filter((key) => key !== "__metadata__" && !this.used.has(key));
    if (rest.length) throw new Error(`The weights of ${this.name} hold ${rest[0]}, which this page does not know. Take the page of the constmem that wrote it.`);
  }
}
