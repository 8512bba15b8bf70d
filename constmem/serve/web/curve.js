// The second tab: clicked points become a curve with its uncertainty.

import { Stream, kilobytes, milliseconds, oncePerFrame } from "./stream.js";

const X = [-2, 2], Y = [-2, 2], GRID = 121, NEAR = 14;  // pixels within which a click means a point
const GONE = 0.05;  // of its weight: a click means no point that has faded so far
const TARGETS = [...Array(GRID).keys()].map((i) => [X[0] + ((X[1] - X[0]) * i) / (GRID - 1)]);
const MOVES = { ArrowUp: [0, 1], ArrowDown: [0, -1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

export class CurveTab {
  constructor(root, model, say) {
    this.root = root;
    this.say = say;
    this.find = (name) => root.querySelector(`[data-id="${name}"]`);
    this.stream = new Stream(model);
    this.cursor = [0, 0];
    this.draw = oncePerFrame(() => this.show());
    this.#listen();
    for (const point of [[-1.4, 0.6], [-0.9, -0.2], [0.1, 0.9], [0.5, 0.3]]) this.stream.add(point);
    this.show();
  }

  get fade() {  // of the logarithm of a weight, with every point that comes
    return -Math.log(1 - Number(this.find("fade").value) / 100);
  }

  #listen() {
    const plot = this.find("plot");
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;  // which opens a menu
      const box = plot.getBoundingClientRect();
      const at = [X[0] + ((X[1] - X[0]) * (event.clientX - box.left)) / box.width, Y[1] - ((Y[1] - Y[0]) * (event.clientY - box.top)) / box.height];
      this.toggle(at, box);
    });
    plot.addEventListener("keydown", (event) => this.#key(event));
    plot.addEventListener("focus", () => this.draw());
    plot.addEventListener("blur", () => this.draw());
    this.find("fade").addEventListener("input", () => {
      this.find("fading").textContent = `${this.find("fade").value}\u00a0%`;
    });
    this.find("thousand").addEventListener("click", () => this.pour(1000));
    this.find("clear").addEventListener("click", () => {
      this.pouring = null;
      this.stream.clear();
      this.draw();
      this.say("No points are left.");
    });
  }

  #key(event) {
    if (event.key in MOVES) {
      const [right, up] = MOVES[event.key];
      this.cursor = [clamp(this.cursor[0] + 0.05 * right, X), clamp(this.cursor[1] + 0.05 * up, Y)];
      const { mean, std } = this.prediction, [x, y] = this.cursor.map((v) => clear(v.toFixed(2)));
      const i = Math.round(((this.cursor[0] - X[0]) / (X[1] - X[0])) * (GRID - 1));
      this.say(`x ${x}, y ${y}: ${clear(mean[i].toFixed(2))} predicted, unsure by ${std[i].toFixed(2)}`);
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") {
      this.toggle(this.cursor, this.find("plot").getBoundingClientRect());
    } else {
      return;
    }
    event.preventDefault();
  }

  // A point at a free place; the point that is there is removed
  toggle(at, box) {
    const place = [clamp(at[0], X), clamp(at[1], Y)];
    const far = ([x, y]) => Math.hypot(((x - place[0]) / 4) * box.width, ((y - place[1]) / 4) * box.height);
    const distances = this.stream.points.map((point) => (this.stream.weight(point) < GONE ? Infinity : far(point.at)));
    const nearest = distances.indexOf(Math.min(...distances));
    if (nearest >= 0 && distances[nearest] < NEAR) {
      const how = this.stream.removeAt(nearest);
      const note = how === "again" ? ", which were observed again" : "";
      this.say(`Removed a point: ${this.stream.points.length} left${note}.`);
    } else {
      this.stream.add(place, this.fade);
      this.cursor = place;
      this.say(`Added a point at x ${place[0].toFixed(2)}, y ${place[1].toFixed(2)}: ${this.stream.points.length} in all.`);
    }
    this.draw();
  }

  // Points of a random smooth function, some with every frame; one stream at a time
  pour(count) {
    const waves = [1, 2, 3].map((k) => ({ a: (Math.random() + 0.3) / k, b: 1.1 * k * (0.7 + Math.random()), c: 6 * Math.random() }));
    const f = (x) => waves.reduce((sum, { a, b, c }) => sum + 0.8 * a * Math.sin(b * x + c), 0);
    const mine = (this.pouring = {});
    this.stream.clear();
    this.say(`${count.toLocaleString("en")} points of another curve come.`);
    let left = count;
    const step = () => {
      if (this.pouring !== mine) return;
      for (let i = Math.min(left, 20); i > 0; i--, left--) {
        const x = X[0] + (X[1] - X[0]) * Math.random();
        this.stream.add([x, f(x) + 0.02 * gaussian()], this.fade);
      }
      this.show();
      if (left) requestAnimationFrame(step);
      else this.say(`${count.toLocaleString("en")} points came; the memory is still ${kilobytes(this.stream.model.bytes)}.`);
    };
    step();
  }

  show() {
    const stream = this.stream, start = performance.now(), { mean, std } = stream.model.predict(stream.state, TARGETS);
    const time = performance.now() - start, canvas = this.find("plot"), { width, height } = canvas;
    const pen = canvas.getContext("2d"), px = (x) => ((x - X[0]) / (X[1] - X[0])) * width;
    const py = (y) => ((Y[1] - y) / (Y[1] - Y[0])) * height;
    const unit = width / (canvas.clientWidth || width);  // of the picture's pixels in one of the screen's
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, width, height);
    pen.strokeStyle = "#e3e7ee";
    pen.lineWidth = unit;
    for (let x = X[0]; x <= X[1]; x += 0.5) line(pen, [[px(x), 0], [px(x), height]]);
    for (let y = Y[0]; y <= Y[1]; y += 1) line(pen, [[0, py(y)], [width, py(y)]]);
    const edge = (factor) => TARGETS.map(([x], i) => [px(x), py(mean[i] + factor * std[i])]);
    for (const [factor, colour] of [[2, "#dbe7fb"], [1, "#b4cdf5"]]) {
      pen.fillStyle = colour;
      pen.beginPath();
      [...edge(factor), ...edge(-factor).reverse()].forEach((corner) => pen.lineTo(...corner));
      pen.fill();
    }
    for (const point of stream.points) {
      pen.fillStyle = `rgba(20, 20, 20, ${Math.max(stream.weight(point), 0.04)})`;
      pen.beginPath();
      pen.arc(px(point.at[0]), py(point.at[1]), (stream.points.length > 200 ? 2 : 5) * unit, 0, 7);
      pen.fill();
    }
    Object.assign(pen, { strokeStyle: "#1f4fa3", lineWidth: 2 * unit });
    line(pen, edge(0));
    Object.assign(pen, { fillStyle: "#55617a", font: `${13 * unit}px system-ui, sans-serif` });
    for (const [at, text] of [[-1, "−1"], [0, "0"], [1, "1"]]) {
      pen.fillText(text, px(at) + 4 * unit, height - 6 * unit);
      pen.fillText(text, 6 * unit, py(at) - 4 * unit);
    }
    if (document.activeElement === canvas && canvas.matches(":focus-visible")) {
      Object.assign(pen, { strokeStyle: "#d0021b", lineWidth: 2 * unit });
      const [x, y] = [px(this.cursor[0]), py(this.cursor[1])];
      line(pen, [[x - 12 * unit, y], [x + 12 * unit, y]]);
      line(pen, [[x, y - 12 * unit], [x, y + 12 * unit]]);
    }
    this.find("count").textContent = stream.points.length.toLocaleString("en");
    this.find("memory").textContent = kilobytes(stream.model.bytes);
    this.find("update").textContent = milliseconds(stream.updateTime);
    this.find("complete").textContent = milliseconds(time);
    this.prediction = { mean, std };
  }
}

function line(pen, corners) {
  pen.beginPath();
  corners.forEach((corner) => pen.lineTo(...corner));
  pen.stroke();
}

const clear = (text) => (Number(text) === 0 ? text.replace("-", "") : text);  // no -0.00
const clamp = (v, [low, high]) => Math.min(Math.max(v, low), high);
const gaussian = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
