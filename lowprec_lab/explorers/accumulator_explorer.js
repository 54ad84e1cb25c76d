// AccumulatorExplorer in the browser: a running total in a format next to the exact one, step by step.
//
// shared.js comes first. The kernel works out all totals once for each change of the settings. The model:
//   _panels  [the format, the rounded start and increment, the totals of each method and whose code made them, the
//            settings that they belong to]
//   _state   {fmt, increment, start, method, n}

const METHODS = [
  ["sequential", "one after the other"],
  ["pairwise", "pairwise"],
  ["kahan", "Kahan"],
];
const PLOT = 250;
const STEP = 132;
const FRAME_MS = 40;

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpsum-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpsum", role: "group", "aria-label": "Accumulator explorer" });
    this.header = element("div", { class: "lplab-header" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    const body = element("div", { class: "lpsum-body" }, this.header, this.reading(), this.plot(), this.player(), this.step());
    this.root.append(this.controls(), body, this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    this.fields = {};
    const labelled = (label, node) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node);
    const text = (key, label) => {
      const attributes = { id: `${this.id}-${key}`, class: "lplab-input", type: "text", autocomplete: "off", spellcheck: "false", maxlength: "60" };
      const node = element("input", { ...attributes, "aria-describedby": `${this.id}-hint` });
      node.addEventListener("change", () => this.read(key, node));
      node.addEventListener("keydown", (event) => event.key === "Enter" && this.read(key, node));
      this.fields[key] = node;
      return labelled(label, node);
    };
    const choice = (key, label) => {
      const node = element("select", { id: `${this.id}-${key}`, class: "lplab-select" });
      node.addEventListener("change", () => this.save({ [key]: node.value }));
      this.fields[key] = node;
      return labelled(label, node);
    };
    const controls = [text("increment", "Increment"), text("start", "Start"), choice("fmt", "Format"), choice("method", "Sum")];
    this.fields.method.append(...METHODS.map(([value, label]) => element("option", { value }, label)));
    this.hint = element("p", { id: `${this.id}-hint`, class: "lplab-hint" });
    return element("div", { class: "lplab-controls" }, ...controls, this.hint);
  }

  reading() {
    const fact = (name, node) => element("div", {}, element("dt", {}, name), node);
    this.totalNode = element("dd", { class: "lpsum-total" });
    this.exactNode = element("dd", { class: "lpsum-exact" });
    this.lostNode = element("dd", { class: "lpsum-lost" });
    this.countNode = element("dd", { class: "lpsum-count" });
    return element(
      "dl",
      { class: "lplab-numbers lpsum-reading" },
      fact("additions", this.countNode),
      fact("total in the format", this.totalNode),
      fact("exact total", this.exactNode),
      fact("lost so far", this.lostNode),
    );
  }

  plot() {
    this.plotNode = element("div", {});
    return element("figure", { class: "lplab-line" }, this.plotNode);
  }

  player() {
    const button = (label, name, act) => {
      const node = element("button", { type: "button", class: "lplab-step", "aria-label": name }, label);
      node.addEventListener("click", () => {
        this.stop();
        act();
      });
      return node;
    };
    this.slider = element("input", { type: "range", class: "lpsum-slider", min: "0", step: "1", "aria-label": "Additions", "data-lm-suppress-shortcuts": "true" });
    this.slider.addEventListener("input", () => {
      this.stop();
      this.go(Number(this.slider.value));
    });
    this.adds = [1, 10, 100].map((count) => button(`+ ${count}`, count === 1 ? "one addition" : `${count} additions`, () => this.go(this.n + count)));
    this.back = button("− 1", "one addition back", () => this.go(this.n - 1));
    this.first = button("Start over", "start over", () => this.go(0));
    this.play = element("button", { type: "button", class: "lplab-step lpsum-play" });
    this.play.addEventListener("click", () => this.toggle());
    this.nameplay();
    return element("div", { class: "lpsum-player" }, this.slider, element("div", { class: "lpsum-buttons" }, this.play, this.back, ...this.adds, this.first));
  }

  step() {
    this.stepNode = element("div", {});
    this.sentenceNode = element("figcaption", { class: "lpsum-sentence" });
    return element("figure", { class: "lplab-line" }, element("p", { class: "lpsum-title" }, "The next addition, close up"), this.stepNode, this.sentenceNode);
  }

  // -------------------------------------------------------------------------------------------------- what is changed

  build() {
    const [panel] = this.model.get("_panels");
    this.panel = panel;
    this.ladder = new Ladder(panel);
    this.root.style.setProperty("--lplab-format", panel.color);
    this.totals = {};
    for (const [method, found] of Object.entries(panel.methods)) this.totals[method] = new Float32Array(bytesOf(found.totals));
    this.fields.fmt.replaceChildren(...panel.formats.map(([value, label]) => element("option", { value }, label)));
    this.stop();
    this.frame = null;
    this.draw();
  }

  read(key, node) {
    const real = parseReal(node.value);
    const readable = real !== null && real.kind === "finite";
    node.setAttribute("aria-invalid", readable ? "false" : "true");
    this.showHint(readable);
    if (readable && node.value !== this.state[key]) this.save({ [key]: node.value, n: 0 });
  }

  showHint(readable) {
    const { panel, state } = this;
    const changed = ["increment", "start"].filter((key) => compareText(state[key], panel[key]));
    const rounded = changed.map((key) => `${state[key]} is ${short(panel[key], 9)} in ${panel.name}`).join("; ");
    this.hint.textContent = readable ? rounded || "a decimal, a fraction like 1/3, or a power like 2^-9" : "This is no finite number that can be read: write 0.1, 1e-3, 1/3 or 3*2^-9.";
    this.hint.dataset.problem = readable ? "no" : "yes";
  }

  save(change) {
    this.stop();
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  go(n) {
    const to = Math.min(Math.max(n, 0), this.count);
    if (to === this.state.n) return;
    this.model.set("_state", { ...this.state, n: to });
    this.model.save_changes();
  }

  get isStill() {
    return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  }

  // Where motion is not wanted, playing is one jump: to where the total stops, then to the end.
  toggle() {
    if (this.playing) {
      this.stop();
      return;
    }
    const { stop } = this.shown;
    if (this.isStill) {
      this.go(stop !== null && this.n < stop ? stop : this.count);
      return;
    }
    if (this.n >= this.count) this.go(0);
    const stride = Math.max(1, Math.round(this.count / 200));
    this.playing = setInterval(() => {
      this.go(this.n + stride);
      if (this.n >= this.count) this.stop();
    }, FRAME_MS);
    this.nameplay();
  }

  stop() {
    if (this.playing) clearInterval(this.playing);
    this.playing = null;
    if (this.play) this.nameplay();
  }

  nameplay() {
    const label = this.playing ? "❚❚ Pause" : this.isStill ? "To the stop" : "▶ Play";
    this.play.replaceChildren(element("span", { "aria-hidden": "true" }, label));
    this.play.setAttribute("aria-label", this.playing ? "Pause" : this.isStill ? "To the stop" : "Play");
  }

  // ----------------------------------------------------------------------------------------------------- what is shown

  draw() {
    const { state, panel } = this;
    for (const [key, node] of Object.entries(this.fields)) if (node.value !== state[key]) node.value = state[key];
    for (const key of ["increment", "start"]) this.fields[key].setAttribute("aria-invalid", "false");
    const isStale = ["fmt", "increment", "start"].some((key) => state[key] !== panel.settings[key]) || !panel.methods[state.method];
    this.root.dataset.busy = isStale;
    this.root.setAttribute("aria-busy", isStale);
    const method = panel.methods[state.method] ? state.method : Object.keys(panel.methods)[0];
    if (this.method !== method) this.frame = null;
    this.method = method;
    this.shown = panel.methods[method];
    this.values = this.totals[method];
    this.count = this.values.length - 1;
    this.n = Math.min(state.n, this.count);
    this.total = this.values[this.n];
    this.exact = panel.start + this.n * panel.increment;
    this.showHint(true);
    this.drawHeader();
    this.drawReading();
    this.drawPlot();
    this.drawPlayer();
    this.drawStep();
    clearTimeout(this.announcing);
    if (!this.playing) this.announcing = setTimeout(() => (this.status.textContent = this.spoken()), 400);
  }

  drawHeader() {
    if (this.headerOf === this.shown) return;
    this.headerOf = this.shown;
    const { panel, shown } = this;
    const badge = element("p", { class: "lplab-badge", "data-origin": shown.origin }, shown.line);
    if (shown.note) badge.append(element("span", { class: "lplab-note" }, shown.note));
    const layout = `${panel.mantissa_bits + 1} significant bits`;
    this.header.replaceChildren(element("p", { class: "lplab-name" }, panel.name), element("p", { class: "lplab-layout" }, layout), badge);
  }

  drawReading() {
    const lost = this.exact - this.total;
    this.countNode.textContent = this.n.toLocaleString("en");
    this.totalNode.textContent = short(this.total, 9);
    this.exactNode.textContent = short(this.exact, 9);
    const share = this.exact && Number.isFinite(lost) ? ` (${short((100 * lost) / Math.abs(this.exact), 3)} %)` : "";
    this.lostNode.textContent = Number.isFinite(lost) ? `${short(lost, 9)}${lost ? share : ""}` : "everything: the total overflowed";
  }

  drawPlayer() {
    const { slider, n, count } = this;
    slider.max = count;
    slider.value = n;
    slider.setAttribute("aria-valuetext", this.spoken());
    for (const node of this.adds) node.disabled = n >= count;
    this.back.disabled = n === 0;
    this.first.disabled = n === 0;
  }

  // What does not change with n is drawn once.
  drawFrame() {
    const { panel, values, count } = this;
    const finiteTotals = values.filter(Number.isFinite);
    const ends = [panel.start, panel.start + count * panel.increment, ...finiteTotals];
    const [low, high] = ends.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Math.min(0, panel.start), panel.start]);
    const span = high - low || 1;
    const left = 58;
    const right = this.width < 560 ? 14 : 74;
    const x = (n) => left + ((this.width - left - right) * n) / count;
    const y = (value) => PLOT - 30 - ((PLOT - 48) * (value - low)) / span;
    const picture = svg("svg", { viewBox: `0 0 ${this.width} ${PLOT}`, width: this.width, height: PLOT, role: "img" });
    for (const value of niceTicks(low, high, 5)) {
      picture.append(svg("line", { class: "lpsum-grid", x1: left, x2: this.width - right, y1: y(value), y2: y(value) }));
      picture.append(svg("text", { class: "lplab-tick-label", x: left - 7, y: y(value) + 4, "text-anchor": "end" }, short(value, 4)));
    }
    for (const n of niceTicks(0, count, this.width < 560 ? 3 : 6)) {
      picture.append(svg("text", { class: "lplab-tick-label", x: x(n), y: PLOT - 12, "text-anchor": "middle" }, n.toLocaleString("en")));
    }
    picture.append(svg("text", { class: "lplab-tick-label", x: this.width - right, y: PLOT - 1, "text-anchor": "end" }, "additions"));
    const exact = [panel.start, panel.start + count * panel.increment];
    picture.append(svg("line", { class: "lpsum-exact-line", x1: x(0), x2: x(count), y1: y(exact[0]), y2: y(exact[1]) }));
    const stride = Math.max(1, Math.ceil(count / (2 * this.width)));
    const path = (to) => {
      let d = "";
      for (let n = 0; n <= to; n += stride) if (Number.isFinite(values[n])) d += d ? `H${x(n).toFixed(1)}V${y(values[n]).toFixed(1)}` : `M${x(n).toFixed(1)} ${y(values[n]).toFixed(1)}`;
      return d && Number.isFinite(values[to]) ? `${d}H${x(to).toFixed(1)}V${y(values[to]).toFixed(1)}` : d;
    };
    picture.append(svg("path", { class: "lpsum-ahead", d: path(count) }));
    if (right > 50) {
      const ofTotal = Number.isFinite(values[count]) ? y(values[count]) : null;
      const ofExact = y(exact[1]);
      picture.append(svg("text", { class: "lpsum-exact-label", x: x(count) + 8, y: ofExact + 4 }, "exact"));
      if (ofTotal !== null && Math.abs(ofTotal - ofExact) > 13) picture.append(svg("text", { class: "lpsum-total-label", x: x(count) + 8, y: ofTotal + 4 }, "total"));
    }
    const { stop } = this.shown;
    if (stop !== null && Number.isFinite(values[stop])) {
      const after = this.width < 560 ? "" : `, after ${stop.toLocaleString("en")} additions`;
      const label = `stops at ${short(values[stop], 9)}${after}`;
      const end = x(stop) + 8 + label.length * 6.6 > this.width;
      picture.append(svg("circle", { class: "lpsum-stop", cx: x(stop), cy: y(values[stop]), r: 5 }));
      picture.append(svg("text", { class: "lpsum-total-label", x: x(stop) + (end ? -8 : 8), y: y(values[stop]) + 20, "text-anchor": end ? "end" : "start" }, label));
    } else if (!Number.isFinite(values[count])) {
      const gone = values.findIndex((value) => !Number.isFinite(value));
      picture.append(svg("text", { class: "lpsum-total-label", x: x(gone) + 8, y: 26 }, `${short(values[count])} after ${gone.toLocaleString("en")}`));
    }
    const moving = svg("g", {});
    picture.append(moving);
    this.plotNode.replaceChildren(picture);
    this.frame = { picture, moving, x, y, path, right };
  }

  drawPlot() {
    const width = Math.max(280, this.plotNode.clientWidth || this.width || 720);
    if (!this.frame || width !== this.width) {
      this.width = width;
      this.drawFrame();
    }
    const { picture, moving, x, y, path, right } = this.frame;
    const { n, total, exact } = this;
    const at = x(n);
    const parts = [svg("path", { class: "lpsum-so-far", d: path(n) || "M0 0" }), svg("line", { class: "lpsum-cursor", x1: at, x2: at, y1: 14, y2: PLOT - 30 })];
    if (Number.isFinite(total)) {
      parts.push(svg("line", { class: "lpsum-gap", x1: at, x2: at, y1: y(total), y2: y(exact) }));
      parts.push(svg("circle", { class: "lpsum-here", cx: at, cy: y(total), r: 5 }));
    }
    parts.push(svg("path", { class: "lplab-wanted", d: diamond(at, y(exact)) }));
    moving.replaceChildren(...parts);
    this.slider.style.marginInline = `${x(0) - 8}px ${right - 8}px`;
    picture.setAttribute("aria-label", `Running total against the exact one. ${this.spoken()}`);
  }

  drawStep() {
    const { total, ladder, width, panel } = this;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${STEP}`, width, height: STEP, role: "img", "aria-label": "The next addition on the number line" });
    this.stepNode.replaceChildren(picture);
    const next = this.n < this.count ? this.values[this.n + 1] : null;
    this.sentenceNode.textContent = this.sentence(next);
    if (!Number.isFinite(total) || panel.increment === 0) return;
    const wanted = total + panel.increment;
    const up = panel.increment > 0;
    const here = ladder.below(fromFloat64(total));
    const gap = this.gapAt(here, up);
    const reach = Math.max(Math.abs(panel.increment) * 1.5, 2.3 * gap);
    const [low, high] = up ? [total - 0.4 * reach, total + reach] : [total - reach, total + 0.4 * reach];
    const x = (value) => MARGIN + ((value - low) / (high - low)) * (width - 2 * MARGIN);
    const axis = 84;
    picture.append(svg("line", { class: "lplab-axis", x1: MARGIN, x2: width - MARGIN, y1: axis, y2: axis }));
    const first = Math.max(ladder.lowest, ladder.below(fromFloat64(low)));
    const last = Math.min(ladder.last, ladder.below(fromFloat64(high)));
    const labels = [];
    const stride = Math.max(1, Math.ceil((last - first) / 160));
    for (let step = first; step <= last; step += stride) {
      const value = ladder.value(step);
      if (value < low) continue;
      const isHere = value === total;
      const isNext = value === next;
      picture.append(svg("line", { class: isHere || isNext ? "lplab-here-tick" : "lplab-tick", x1: x(value), x2: x(value), y1: axis - (isHere || isNext ? 11 : 7), y2: axis + 5 }));
      labels.push({ x: x(value), text: short(value, 8), rank: isHere ? 0 : isNext ? 1 : 2 + Math.abs(value - wanted) / gap, here: isHere || isNext });
    }
    if (stride > 1) labels.push({ x: x(total), text: short(total, 8), rank: 0, here: true });
    drawLabels(picture, labels, axis + 21, width);
    const below = ladder.below(fromFloat64(wanted));
    if (below < ladder.last && below >= ladder.lowest && ladder.value(below) !== wanted) {
      const middle = (ladder.value(below) + ladder.value(below + 1)) / 2;
      if (middle > low && middle < high && this.gapAt(below, true) * (width / (high - low)) > 24) {
        picture.append(svg("line", { class: "lpsum-half", x1: x(middle), x2: x(middle), y1: axis - 16, y2: axis + 5 }));
        picture.append(svg("text", { class: "lplab-tick-label", x: x(middle), y: axis + 38, "text-anchor": "middle" }, "half-way"));
      }
    }
    const sign = up ? "+ " : "− ";
    const tip = up ? -7 : 7;
    picture.append(svg("path", { class: "lpsum-add", d: `M${x(total)} ${axis - 34}H${x(wanted) + tip}` }));
    picture.append(svg("path", { class: "lpsum-add-head", d: `M${x(wanted)} ${axis - 34}l${tip * 1.3} -5v10z` }));
    picture.append(svg("line", { class: "lpsum-guide", x1: x(wanted), x2: x(wanted), y1: axis - 34, y2: axis }));
    picture.append(svg("line", { class: "lpsum-guide", x1: x(total), x2: x(total), y1: axis - 34, y2: axis }));
    const middle = Math.min(Math.max((x(total) + x(wanted)) / 2, 60), width - 60);
    picture.append(svg("text", { class: "lpsum-add-label", x: middle, y: axis - 42, "text-anchor": "middle" }, `${sign}${short(Math.abs(panel.increment), 7)}`));
    picture.append(svg("path", { class: "lplab-wanted", d: diamond(x(wanted), axis) }));
    if (next !== null && Number.isFinite(next) && next >= low && next <= high && next !== wanted) {
      const d = `M${x(wanted)} ${axis - 8}C${x(wanted)} ${axis - 26} ${x(next)} ${axis - 26} ${x(next)} ${axis - 12}`;
      picture.append(svg("path", { class: "lpsum-lands", d }), svg("path", { class: "lpsum-lands-head", d: `M${x(next)} ${axis - 5}l-4.5 -9h9z` }));
    }
    if (Number.isFinite(total)) picture.append(svg("circle", { class: "lpsum-here", cx: x(total), cy: axis, r: 5 }));
  }

  gapAt(step, up) {
    const from = up ? Math.min(step, this.ladder.top - 1) : Math.max(step, this.ladder.bottom + 1);
    return up ? this.ladder.value(from + 1) - this.ladder.value(from) : this.ladder.value(from) - this.ladder.value(from - 1);
  }

  resize() {
    if (this.plotNode.clientWidth && this.plotNode.clientWidth !== this.width) this.draw();
  }

  // ------------------------------------------------------------------------------------------------------------- words

  sentence(next) {
    const { panel, total, method } = this;
    const { increment } = panel;
    if (increment === 0) return "The increment is 0: nothing is added.";
    if (!Number.isFinite(total)) return `The total overflowed to ${short(total)}, and stays there.`;
    const gap = this.gapAt(this.ladder.below(fromFloat64(total)), increment > 0);
    const ulps = Math.abs(increment) / gap;
    const size = `Here the values are ${short(gap, 7)} apart, and the increment is ${short(ulps, 4)} ${ulps > 1 ? "times" : "of"} that`;
    if (next === null) return `${size}. This is the last addition that is shown.`;
    const wanted = total + increment;
    if (method === "pairwise") return `${size}. But pairwise nothing is added to this total: numbers are added to their neighbours, then the sums of those, so both sides stay of like size. The next total is ${short(next, 9)}.`;
    if (method === "kahan") {
      const alone = ulps < 0.5 ? ": alone it would be lost" : ulps === 0.5 ? ": alone it would be a tie" : "";
      return `${size}${alone}. What earlier additions lost is added along with it. The next total is ${short(next, 9)}.`;
    }
    if (next === total) return `${size}${ulps === 0.5 ? ": a tie, and the even neighbour is the total itself" : ""}. ${short(total, 9)} + ${short(increment, 7)} is rounded back to ${short(total, 9)}: the addition is lost.`.replaceAll("+ −", "− ");
    if (next === wanted) return `${size}. ${short(wanted, 9)} is a value of the format: nothing is lost.`;
    return `${size}. ${short(wanted, 9)} is rounded to ${short(next, 9)}: an error of ${short(next - wanted, 6)}.`;
  }

  spoken() {
    const lost = this.exact - this.total;
    return `${this.n} additions: total ${short(this.total, 9)}, exact ${short(this.exact, 9)}, lost ${short(lost, 6)}`;
  }
}

// Whether a text means another number than `value`.
function compareText(text, value) {
  const real = parseReal(text);
  return real !== null && real.kind === "finite" && compare(real, fromFloat64(value)) !== 0;
}

// Round numbers from low to high, about `count` of them.
function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const ten = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= raw);
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-12); at += 1) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

export default { render: (context) => mount(context, Explorer) };
