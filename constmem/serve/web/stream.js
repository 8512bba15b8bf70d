// Points that came one after another, and the one state of constant size that remembers them.
// The list of points is the page's, to draw them and to go back; predictions need the state alone.

export class Stream {
  constructor(model) {
    this.model = model;
    this.state = model.empty();
    this.points = [];  // {at: inputs and outputs, born}
    this.faded = 0;  // how much the logarithm of a weight has lost since the first point
    this.times = [];  // of the last updates, in milliseconds
  }

  get updateTime() {  // the median: a pause of the browser's is no update
    return this.times.length ? [...this.times].sort((a, b) => a - b)[this.times.length >> 1] : null;
  }

  // Older points first lose `fade` of the logarithm of their weight
  add(at, fade = 0) {
    const start = performance.now();
    if (fade && this.points.length) {
      this.model.decay(this.state, -fade);
      this.faded += fade;
    }
    this.model.update(this.state, at);
    this.points.push({ at, born: this.faded });
    this.times = [...this.times.slice(-31), performance.now() - start];
  }

  weight(point) { return Math.exp(point.born - this.faded); }

  // Gives how it went: "removed" from the state, or "again" where the rest had to be observed again
  removeAt(index) {
    const [point] = this.points.splice(index, 1);
    const part = this.model.observe([point.at]);
    const done = this.points.length > 0 && this.model.remove(this.state, part, point.born - this.faded);
    this.model.free(part);
    if (!done) this.#replay();
    return done || !this.points.length ? "removed" : "again";
  }

  #replay() {
    this.model.free(this.state);
    this.state = this.model.empty();
    let last = null;
    for (const { at, born } of this.points) {
      if (last !== null && born > last) this.model.decay(this.state, last - born);
      this.model.update(this.state, at);
      last = born;
    }
    if (last !== null && this.faded > last) this.model.decay(this.state, last - this.faded);
  }

  // What `work` makes of the state after the first `count` points
  after(count, work) {
    if (count >= this.points.length) return work(this.state);
    const state = this.model.observe(this.points.slice(0, count).map((point) => point.at));
    try {
      return work(state);
    } finally {
      this.model.free(state);
    }
  }

  merge(other) {
    this.model.merge(this.state, other.state);
    this.points.push(...other.points.map(({ at }) => ({ at, born: this.faded })));
  }

  clear() {
    this.points = [];
    this.faded = 0;
    this.#replay();
  }
}

// Draws once a frame, however many changes came: none of them waits for a picture
export function oncePerFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

export const counted = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
export const kilobytes = (bytes) => `${Math.round(bytes / 1000).toLocaleString("en")} kB`;
export const milliseconds = (time) => (time === null ? "–" : `${time < 10 ? time.toFixed(2) : Math.round(time)} ms`);
