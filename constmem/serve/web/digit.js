// The first tab: pixels of a digit are shown one by one, and the rest is predicted.

import { Stream, counted, kilobytes, milliseconds, oncePerFrame } from "./stream.js";

const SIZE = 28, CELL = 10;
const UNSEEN = [207, 223, 242];
const TARGETS = [...Array(SIZE * SIZE).keys()].map((i) => place(i));
// Strokes in a frame of 28 by 28: lines [x, y, x, y, ...] and arcs {x, y, rx, ry, from, to} in turns of a circle
const STROKES = [
  [{ x: 14, y: 14, rx: 6, ry: 9, from: 0, to: 1 }],
  [[10, 9, 15, 5, 15, 23]],
  [{ x: 14, y: 10, rx: 5.5, ry: 5, from: 0.5, to: 1.08 }, [19, 12, 8, 22.5, 20.5, 22.5]],
  [{ x: 13, y: 9.5, rx: 5.5, ry: 4.5, from: 0.55, to: 1.25 }, { x: 13, y: 18.5, rx: 6, ry: 4.7, from: 0.75, to: 1.45 }],
  [[15, 5, 7.5, 16.5, 20.5, 16.5], [16.5, 9, 16.5, 23.5]],
  [[19, 5.5, 10.5, 5.5, 9.5, 13], { x: 13.2, y: 17.2, rx: 6.2, ry: 5.6, from: 0.65, to: 1.38 }],
  [{ x: 16, y: 15, rx: 7.5, ry: 10.5, from: 0.5, to: 0.77 }, { x: 13.8, y: 17.8, rx: 5.4, ry: 5.2, from: 0, to: 1 }],
  [[8, 6, 20, 6, 12.5, 23.5]],
  [{ x: 14, y: 9.5, rx: 4.6, ry: 4.3, from: 0, to: 1 }, { x: 14, y: 18.6, rx: 5.6, ry: 4.8, from: 0, to: 1 }],
  [{ x: 13.5, y: 10.5, rx: 5.2, ry: 5, from: 0, to: 1 }, [18.7, 11, 17, 23.5]],
];

function place(index) {
  const row = Math.floor(index / SIZE), column = index % SIZE;
  return [(2 * row - (SIZE - 1)) / (SIZE - 1), (2 * column - (SIZE - 1)) / (SIZE - 1)];
}

// A digit's 784 levels in [0, 1], a little slanted, so that no two are alike
export function drawnDigit(digit, slant = 0) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIZE;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.fillRect(0, 0, SIZE, SIZE);
  pen.transform(1, 0, -slant, 1, slant * SIZE / 2, 0);
  Object.assign(pen, { strokeStyle: "white", lineWidth: 2.7, lineCap: "round", lineJoin: "round" });
  for (const stroke of STROKES[digit]) {
    pen.beginPath();
    if (Array.isArray(stroke)) for (let i = 0; i < stroke.length; i += 2) pen.lineTo(stroke[i], stroke[i + 1]);
    else pen.ellipse(stroke.x, stroke.y, stroke.rx, stroke.ry, 0, 2 * Math.PI * stroke.from, 2 * Math.PI * stroke.to);
    pen.stroke();
  }
  const { data } = pen.getImageData(0, 0, SIZE, SIZE);
  return Float64Array.from({ length: SIZE * SIZE }, (_, i) => data[4 * i] / 255);
}

export class DigitTab {
  constructor(root, model, say) {
    this.root = root;
    this.say = say;
    this.find = (name) => root.querySelector(`[data-id="${name}"]`);
    this.drawings = { A: new Stream(model), B: new Stream(model) };
    this.current = "A";
    this.digit = 5;
    this.hidden = drawnDigit(this.digit);
    this.cursor = 14 * SIZE + 14;
    this.draw = oncePerFrame(() => this.show());
    this.#listen();
    this.#changed();
    this.show();
  }

  get stream() { return this.drawings[this.current]; }

  #listen() {
    const seen = this.find("seen");
    let last = null;  // where the stroke is: all pixels on the way to its next place belong to it
    const put = (event) => {
      const box = seen.getBoundingClientRect();
      const column = Math.floor(((event.clientX - box.left) / box.width) * SIZE);
      const row = Math.floor(((event.clientY - box.top) / box.height) * SIZE);
      const [fromRow, fromColumn] = last ?? [row, column];
      const steps = Math.max(Math.abs(row - fromRow), Math.abs(column - fromColumn), 1);
      for (let i = last ? 1 : steps; i <= steps; i++) {
        const down = Math.round(fromRow + ((row - fromRow) * i) / steps);
        const right = Math.round(fromColumn + ((column - fromColumn) * i) / steps);
        if (down >= 0 && down < SIZE && right >= 0 && right < SIZE) this.apply(down * SIZE + right);
      }
      last = [row, column];
    };
    seen.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;  // which opens a menu
      seen.setPointerCapture(event.pointerId);
      last = null;
      put(event);
    });
    seen.addEventListener("pointermove", (event) => {
      if (!(event.buttons & 1)) return;
      const passed = event.getCoalescedEvents?.() ?? [];  // all places between two frames
      (passed.length ? passed : [event]).forEach(put);
    });
    seen.addEventListener("keydown", (event) => this.#key(event));
    seen.addEventListener("focus", () => this.draw());
    seen.addEventListener("blur", () => this.draw());
    this.find("more").addEventListener("click", () => this.reveal(20));
    this.find("all").addEventListener("click", () => this.reveal(SIZE * SIZE));
    this.find("next").addEventListener("click", () => this.nextDigit());
    this.find("clear").addEventListener("click", () => {
      this.stream.clear();
      this.#changed();
      this.say(`Drawing ${this.current} is empty.`);
    });
    this.find("merge").addEventListener("click", () => this.merge());
    this.find("slider").addEventListener("input", () => this.draw());
    for (const choice of this.root.querySelectorAll('input[name="drawing"]')) {
      choice.addEventListener("change", () => {
        this.current = choice.value;
        this.#changed();
      });
    }
  }

  #key(event) {
    const row = Math.floor(this.cursor / SIZE), column = this.cursor % SIZE;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      this.cursor = ((row + down + SIZE) % SIZE) * SIZE + ((column + right + SIZE) % SIZE);
      const { mean, std } = this.prediction, level = (mean[this.cursor] + 0.5).toFixed(2);
      const place = `Row ${Math.floor(this.cursor / SIZE) + 1}, column ${(this.cursor % SIZE) + 1}`;
      this.say(`${place}: ${level} predicted, unsure by ${std[this.cursor].toFixed(2)}`);
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") {
      this.apply(this.cursor);
      this.say(`Row ${row + 1}, column ${column + 1} shown. ${counted(this.stream.points.length, "pixel")} seen.`);
    } else {
      return;
    }
    event.preventDefault();
  }

  // What the chosen pen says of a pixel; a pixel that is known already is replaced, never counted twice
  apply(index) {
    const pen = this.root.querySelector('input[name="pen"]:checked').value;
    const level = { reveal: this.hidden[index], ink: 1, paper: 0 }[pen];
    this.cursor = index;
    this.#add(index, level);
    this.#changed();
  }

  #add(index, level) {
    const stream = this.stream, known = (point) => point.index === index, before = stream.points.filter(known);
    if (before.length === 1 && before[0].at[2] === level - 0.5) return;
    for (const _ of before) stream.removeAt(stream.points.findIndex(known));
    stream.add([...TARGETS[index], level - 0.5]);
    stream.points.at(-1).index = index;
  }

  reveal(count) {
    const seen = new Set(this.stream.points.map((point) => point.index));
    const rest = [...Array(SIZE * SIZE).keys()].filter((i) => !seen.has(i));
    for (let i = rest.length - 1; i > 0; i--) {
      const j = Math.floor(Math.random() * (i + 1));
      [rest[i], rest[j]] = [rest[j], rest[i]];
    }
    for (const index of rest.slice(0, count)) this.#add(index, this.hidden[index]);
    this.#changed();
    this.say(`${this.stream.points.length} of ${SIZE * SIZE} pixels seen.`);
  }

  nextDigit() {
    this.digit = (this.digit + 1 + Math.floor(Math.random() * 9)) % 10;
    this.hidden = drawnDigit(this.digit, Math.random() * 0.5 - 0.15);
    this.stream.clear();
    this.#changed();
    this.say("Another digit is hidden. Reveal some of its pixels.");
  }

  // Both drawings are in A then: their states are merged, no pixel is looked at again
  merge() {
    const { A, B } = this.drawings;
    const indices = B.points.map((point) => point.index), before = A.points.length;
    A.merge(B);
    indices.forEach((index, i) => (A.points[before + i].index = index));
    this.root.querySelector('input[name="drawing"][value="A"]').checked = true;
    this.current = "A";
    B.clear();
    this.#changed();
    this.say(`Merged: drawing A holds ${counted(A.points.length, "pixel")} now, drawing B none.`);
  }

  #changed() {
    const slider = this.find("slider"), count = this.stream.points.length;
    slider.max = count;  // first: a value beyond it would be cut
    slider.value = count;
    this.draw();
  }

  show() {
    const stream = this.stream, count = Number(this.find("slider").value), start = performance.now();
    const { mean, std } = stream.after(count, (state) => stream.model.predict(state, TARGETS));
    const time = performance.now() - start, levels = new Map();
    for (const point of stream.points.slice(0, count)) levels.set(point.index, point.at[2] + 0.5);
    paint(this.find("seen"), (i) => (levels.has(i) ? grey(levels.get(i)) : UNSEEN));
    paint(this.find("mean"), (i) => grey(mean[i] + 0.5));
    paint(this.find("std"), (i) => heat(std[i] / 0.43));
    this.#cursor();
    const average = std.reduce((a, b) => a + b) / std.length;
    this.find("count").textContent = `${count} of ${stream.points.length}`;
    this.find("memory").textContent = kilobytes(stream.model.bytes);
    this.find("update").textContent = milliseconds(stream.updateTime);
    this.find("complete").textContent = milliseconds(time);
    this.find("spread").textContent = average.toFixed(3);
    const off = [...levels].map(([i, level]) => Math.abs(mean[i] + 0.5 - level));
    this.find("off").textContent = off.length ? (off.reduce((a, b) => a + b) / off.length).toFixed(3) : "–";
    this.prediction = { mean, std };
  }

  #cursor() {
    const canvas = this.find("seen");
    if (document.activeElement !== canvas || !canvas.matches(":focus-visible")) return;
    const pen = canvas.getContext("2d"), x = (this.cursor % SIZE) * CELL, y = Math.floor(this.cursor / SIZE) * CELL;
    Object.assign(pen, { strokeStyle: "#d0021b", lineWidth: 3 });
    pen.strokeRect(x + 1, y + 1, CELL - 2, CELL - 2);
  }
}

const grey = (level) => Array(3).fill(255 * Math.min(Math.max(level, 0), 1));

// Dark blue over red to light yellow, by how large a number in [0, 1] is
function heat(level) {
  const stops = [[12, 8, 38], [114, 31, 129], [241, 96, 93], [252, 253, 191]];
  const at = Math.min(Math.max(level, 0), 0.9999) * 3, low = Math.floor(at), share = at - low;
  return stops[low].map((v, i) => v + (stops[low + 1][i] - v) * share);
}

function paint(canvas, colour) {
  const pen = canvas.getContext("2d"), width = SIZE * CELL, image = pen.createImageData(width, width);
  for (let i = 0; i < SIZE * SIZE; i++) {
    const [r, g, b] = colour(i), top = Math.floor(i / SIZE) * CELL, left = (i % SIZE) * CELL;
    for (let y = top; y < top + CELL; y++) {
      for (let x = left; x < left + CELL; x++) image.data.set([r, g, b, 255], 4 * (y * width + x));
    }
  }
  pen.putImageData(image, 0, 0);
}
