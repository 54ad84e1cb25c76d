// RoundingExplorer in the browser: a number between two values, and which of them each mode chooses.
//
// shared.js comes first. Rounding is done here, exactly, so that dragging does not wait for the kernel. The model:
//   _panels  [the format; `samples`: what a round_to that differs from the definition gives for every number where a
//            rounding may change (ladder.py says which), a row for each mode and policy, else null; whose code it is]
//   _state   {text, mode, overflow}

const MODE_NAMES = {
  nearest_even: "nearest, ties to even",
  nearest_away: "nearest, ties away",
  toward_zero: "toward zero",
  up: "up",
  down: "down",
};
const MODE_KEYS = Object.keys(MODE_NAMES);
const FINE = 64n; // arrow keys and the mouse move by this part of the distance between two values
const COARSE = 4n;
const PER_GAP = 8;
const SNAP = 6; // pixels within which the mouse finds a tie or a value

// What `round_to` makes of a number: from the samples of one that differs from the definition, else exact.
class Rounding {
  constructor(panel) {
    this.table = new Values(panel);
    this.ladder = new Ladder(panel);
    this.panel = panel;
    this.samples = panel.samples ? new Float32Array(bytesOf(panel.samples)) : null;
  }

  exact(real, mode, overflow) {
    const { code, problem } = roundReal(real, this.table, mode, overflow);
    return problem ? NaN : this.table.value(code);
  }

  result(real, mode, overflow) {
    const at = this.samples ? this.sampleOf(real) : null;
    if (at === null) return this.exact(real, mode, overflow);
    const { policies, tried } = this.panel;
    return this.samples[(MODE_KEYS.indexOf(mode) * policies.length + policies.indexOf(overflow)) * tried + at];
  }

  // Which of the numbers tried stands for this one; null when none does.
  sampleOf(real) {
    const { first, tried } = this.panel;
    const elsewhere = tried - 6;
    if (real.kind === "nan") return elsewhere + 3;
    if (real.kind === "inf") return elsewhere + (real.negative ? 2 : 1);
    if (real.num === 0n && real.negative) return elsewhere;
    const step = this.ladder.below(real);
    if (step === this.ladder.top || (step === this.ladder.bottom && compare(real, this.ladder.real(step)) < 0)) {
      return elsewhere + (real.negative ? 5 : 4);
    }
    const at = (step - first) * PER_GAP;
    if (at < 0 || at + PER_GAP >= elsewhere) return null;
    const t = toNumber(this.ladder.part(real, step));
    const isTie = compareMagnitudes(this.ladder.part(real, step), finite(false, 1n, 2n)) === 0;
    if (isTie) return at + 4;
    if (compare(real, this.ladder.real(step)) === 0) return at;
    if (t <= 0.5) return at + (t < 0.125 ? 1 : t < 0.375 ? 2 : 3);
    return at + (t < 0.625 ? 5 : t < 0.875 ? 6 : 7);
  }

  code(value) {
    if (!Number.isFinite(value)) return roundReal(fromFloat64(value), this.table, "nearest_even", "to_special").code;
    const { code, problem } = roundReal(fromFloat64(value), this.table, "nearest_even", "to_special");
    return problem || this.table.value(code) !== value ? null : code;
  }
}

const HEIGHT = 244;
const AXIS = 122;
const BIN = 16;

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpround-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpround", role: "group", "aria-label": "Rounding explorer" });
    this.header = element("div", { class: "lplab-header" });
    this.root.append(this.controls(), element("div", { class: "lpround-body" }, this.header, this.line(), this.table()));
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.root.append(this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    this.input = element("input", {
      id: `${this.id}-real`,
      class: "lplab-input",
      type: "text",
      autocomplete: "off",
      spellcheck: "false",
      maxlength: "400",
      "aria-describedby": `${this.id}-hint`,
    });
    this.input.addEventListener("input", () => this.read());
    this.overflow = element("select", { id: `${this.id}-overflow`, class: "lplab-select" });
    this.overflow.addEventListener("change", () => this.save({ overflow: this.overflow.value }));
    this.hint = element("p", { id: `${this.id}-hint`, class: "lplab-hint" });
    const labelled = (label, node) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node);
    return element("div", { class: "lplab-controls" }, labelled("Number", this.input), labelled("Overflow", this.overflow), this.hint);
  }

  line() {
    this.picture = element("div", {});
    this.marker = element("div", {
      class: "lpround-marker",
      role: "slider",
      tabindex: "0",
      "aria-label": "Number to round",
      "aria-describedby": `${this.id}-keys`,
      "data-lm-suppress-shortcuts": "true", // JupyterLab would take the arrow keys for itself
    });
    this.marker.addEventListener("keydown", (event) => this.key(event));
    this.stage = element("div", { class: "lpround-stage" }, this.picture, this.marker);
    this.stage.addEventListener("pointerdown", (event) => this.grab(event));
    this.stage.addEventListener("pointermove", (event) => this.held && this.drag(event.clientX));
    for (const end of ["pointerup", "pointercancel"]) this.stage.addEventListener(end, () => this.release());
    this.caption = element("figcaption", { class: "lpround-caption" });
    const keys = "Drag the marker, or use the arrow keys; with Shift, bigger steps; Home and End go to the neighbours.";
    return element(
      "figure",
      { class: "lplab-line" },
      this.stage,
      this.caption,
      element("p", { id: `${this.id}-keys`, class: "lpround-keys" }, keys),
    );
  }

  table() {
    const head = element("tr", {}, ...["Mode", "becomes", "code", "error"].map((title) => element("th", { scope: "col" }, title)));
    this.rows = Object.entries(MODE_NAMES).map(([mode, name]) => {
      const radio = element("input", { type: "radio", name: `${this.id}-mode`, value: mode, id: `${this.id}-${mode}` });
      radio.addEventListener("change", () => this.save({ mode }));
      const label = element("label", { for: radio.id }, name);
      const [value, code, error] = ["value", "code", "error"].map((cell) => element("td", { class: `lpround-${cell}` }));
      const row = element("tr", { "data-mode": mode }, element("th", { scope: "row" }, radio, label), value, code, error);
      row.addEventListener("click", (event) => event.target.closest("th") || this.save({ mode }));
      return { mode, row, radio, value, code, error };
    });
    const hint = element("p", { class: "lpround-keys" }, "Shaded on the line: what the chosen mode sends to each value. A dot at the edge of a bin: the tie is on its side.");
    const body = element("tbody", {}, ...this.rows.map(({ row }) => row));
    return element(
      "div",
      { class: "lpround-scroll", "data-lm-suppress-shortcuts": "true" },
      element("table", { class: "lpround-table", "aria-label": "What each mode makes of the number" }, element("thead", {}, head), body),
      hint,
    );
  }

  // -------------------------------------------------------------------------------------------------- what is changed

  build() {
    [this.panel] = this.model.get("_panels");
    const { panel } = this;
    this.rounding = new Rounding(panel);
    this.ladder = this.rounding.ladder;
    this.view = this.view ?? null;
    const badge = element("p", { class: "lplab-badge", "data-origin": panel.origin }, panel.line);
    if (panel.note) badge.append(element("span", { class: "lplab-note" }, panel.note));
    const layout = `${panel.exponent_bits} exponent · ${panel.mantissa_bits} mantissa bits`.replaceAll(/(\d) /g, "$1\u00a0");
    this.header.replaceChildren(
      element("p", { class: "lplab-name" }, panel.name),
      element("p", { class: "lplab-layout" }, layout),
      badge,
    );
    this.root.style.setProperty("--lplab-format", panel.color);
    const options = POLICIES.filter(([policy]) => panel.policies.includes(policy));
    this.overflow.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
    this.draw();
  }

  read() {
    const readable = parseReal(this.input.value) !== null;
    this.input.setAttribute("aria-invalid", readable ? "false" : "true");
    this.showHint(readable);
    if (readable) this.save({ text: this.input.value });
  }

  showHint(readable) {
    this.hint.textContent = readable
      ? "a decimal, a fraction like 1/3, a power like 2^-9, inf or nan"
      : "This is not a number that can be read: write 0.1, 1e-3, 1/3, 3*2^-9, inf or nan (exponents up to 5000).";
    this.hint.dataset.problem = readable ? "no" : "yes";
  }

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  grab(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.held = true;
    this.stage.setPointerCapture(event.pointerId);
    this.marker.focus({ preventScroll: true });
    if (!event.target.closest(".lpround-marker")) this.drag(event.clientX);
  }

  drag(clientX) {
    const { x, scale, from, to } = this.view;
    const px = clientX - this.stage.getBoundingClientRect().left;
    const value = Math.min(Math.max(this.view.low + (px - x(this.view.low)) / scale, this.view.low), this.view.high);
    let step = from;
    while (step < to - 1 && this.ladder.value(step + 1) <= value) step += 1;
    const [low, high] = [this.ladder.value(step), this.ladder.value(step + 1)];
    const part = (value - low) / (high - low);
    const near = [0.5, 0, 1].find((each) => Math.abs(part - each) * (high - low) * scale < SNAP);
    const chosen = near ?? Math.round(part * Number(FINE)) / Number(FINE);
    this.save({ text: exactText(low + (high - low) * chosen) });
  }

  release() {
    if (!this.held) return;
    this.held = false;
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const sideways = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    const jump = { Home: -1, PageDown: -1, End: 1, PageUp: 1 }[event.key];
    const direction = sideways ?? jump;
    if (direction === undefined) return;
    event.preventDefault();
    this.move(direction, jump ? 1n : event.shiftKey ? COARSE : FINE);
  }

  // To the next multiple of the gap / parts.
  move(direction, parts) {
    const { ladder } = this;
    const [first, last] = [ladder.real(ladder.bottom), ladder.real(ladder.top)];
    let real = this.real.kind === "finite" ? this.real : this.real.kind === "inf" ? (this.real.negative ? first : last) : fromFloat64(0);
    if (compare(real, first) < 0) real = first;
    if (compare(real, last) > 0) real = last;
    if (direction > 0 && compare(real, last) === 0) return;
    let step = Math.min(ladder.below(real), ladder.top - 1);
    if (direction < 0 && compare(real, ladder.real(step)) === 0) step -= 1;
    if (step < ladder.bottom) return;
    const part = ladder.part(real, step);
    const whole = (part.num * parts) / part.den;
    const isMultiple = (part.num * parts) % part.den === 0n;
    const next = direction > 0 ? whole + 1n : isMultiple ? whole - 1n : whole;
    const moved = ladder.at(step, next < 0n ? finite(true, -next, parts) : finite(false, next, parts));
    this.save({ text: exactText(toNumber(moved)) });
  }

  // ----------------------------------------------------------------------------------------------------- what is shown

  draw() {
    const { state, ladder } = this;
    this.real = parseReal(state.text) ?? { kind: "nan" };
    if (this.input.value !== state.text) this.input.value = state.text;
    this.input.setAttribute("aria-invalid", "false");
    this.showHint(true);
    this.overflow.value = state.overflow;
    this.number = toNumber(this.real);
    this.step = this.real.kind === "finite" ? ladder.below(this.real) : this.real.kind === "nan" ? 0 : this.real.negative ? ladder.bottom : ladder.top;
    this.part = this.real.kind === "finite" && this.step < ladder.top ? this.ladder.part(this.real, this.step) : null;
    this.isTie = this.part !== null && compare(this.part, finite(false, 1n, 2n)) === 0;
    this.isValue = this.part !== null && this.part.num === 0n && ladder.isValue(this.step);
    this.results = MODE_KEYS.map((mode) => ({
      mode,
      value: this.rounding.result(this.real, mode, state.overflow),
      exact: this.rounding.exact(this.real, mode, state.overflow),
    }));
    this.drawRows();
    this.drawLine();
    this.caption.textContent = this.sentence();
    this.drawMarker();
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = `${this.sentence()} ${this.summary()}`), 400);
  }

  drawRows() {
    const { state } = this;
    this.results.forEach(({ mode, value, exact }, index) => {
      const row = this.rows[index];
      row.radio.checked = mode === state.mode;
      row.row.dataset.chosen = mode === state.mode;
      row.value.textContent = short(value, 9);
      const code = this.rounding.code(value);
      row.code.replaceChildren(...(code === null ? ["not a value"] : codeText(this.panel, code)));
      row.error.textContent = this.errorText(value);
      if (!Object.is(value, exact)) {
        row.error.replaceChildren(element("strong", { class: "lplab-differs" }, `the definition gives ${short(exact, 9)}`));
      }
    });
  }

  errorText(value) {
    const { real } = this;
    if (real.kind === "nan" || Number.isNaN(value)) return real.kind === "nan" ? "none" : "the number became NaN";
    if (!Number.isFinite(value)) return real.kind === "inf" ? "none" : "infinite";
    if (real.kind === "inf") return "infinite";
    const error = add(fromFloat64(value), negated(real));
    if (error.num === 0n) return "none";
    const digits = exactDecimal(error);
    const exact = digits !== null && digits.length <= 14;
    const sign = error.negative ? "" : "+";
    const gap = this.part === null ? null : add(this.ladder.real(this.step + 1), negated(this.ladder.real(this.step)));
    const steps = gap && !this.isValue ? ` (${short(Math.abs(toNumber(divide(error, gap))), 3)} of the gap)` : "";
    return `${exact ? "" : "≈ "}${sign}${exact ? digits : short(toNumber(error), 6)}${steps}`;
  }

  // The values that are shown: they stay while the marker is well among them, and while it is held.
  look() {
    const { ladder } = this;
    const width = Math.max(280, this.picture.clientWidth || this.width || 720);
    const around = this.panel.mantissa_bits === 0 ? 1 : width < 560 ? 2 : 3;
    const shown = this.view;
    const isInside = shown && this.step > shown.from && this.step < shown.to - 1;
    const atEnd = shown && ((shown.to === ladder.top && this.step >= shown.from + 2) || (shown.from === ladder.bottom && this.step <= shown.to - 3));
    let [from, to] = shown ? [shown.from, shown.to] : [];
    if (!shown || shown.around !== around || !(this.held || isInside || atEnd)) {
      from = Math.max(ladder.bottom, Math.min(this.step - around, ladder.top - 2 * around - 1));
      to = Math.min(ladder.top, from + 2 * around + 1);
      from = Math.max(ladder.bottom, to - 2 * around - 1);
    }
    this.width = width;
    const [low, high] = [ladder.value(from), ladder.value(to)];
    const margin = width < 560 ? 34 : 52;
    const scale = (width - 2 * margin) / (high - low);
    this.view = { from, to, low, high, around, scale, x: (value) => margin + (value - low) * scale };
  }

  drawLine() {
    this.look();
    const { width, ladder, view } = this;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": this.lineLabel() });
    this.drawBins(picture);
    this.drawTicks(picture);
    this.place = Number.isNaN(this.number) ? width / 2 : view.x(Math.min(Math.max(this.number, view.low), view.high));
    this.drawTargets(picture);
    const isOutside = this.number < view.low || this.number > view.high;
    const text = `${isOutside && this.number < 0 ? "← " : ""}${clipped(this.state.text)}${isOutside && this.number > 0 ? " →" : ""}`;
    const half = text.length * 4.2;
    const x = Math.min(Math.max(this.place, half + 4), width - half - 4);
    picture.append(svg("text", { class: "lpround-number", x, y: 15, "text-anchor": "middle" }, text));
    if (this.isTie) picture.append(svg("circle", { class: "lpround-tie", cx: this.place, cy: 34, r: 15 }));
    picture.append(svg("path", { class: "lplab-wanted", d: `M${this.place} 24l10 10l-10 10l-10 -10z` }));
    this.picture.replaceChildren(picture);
  }

  drawTicks(picture) {
    const { ladder, view } = this;
    const [low, high] = [Math.max(view.from, ladder.lowest), Math.min(view.to, ladder.last)].map((step) => view.x(ladder.value(step)));
    if (view.to > ladder.last) picture.append(svg("line", { class: "lpround-beyond", x1: high, x2: view.x(view.high), y1: AXIS, y2: AXIS }));
    if (view.from < ladder.lowest) picture.append(svg("line", { class: "lpround-beyond", x1: view.x(view.low), x2: low, y1: AXIS, y2: AXIS }));
    const ends = [view.from > ladder.bottom && view.from >= ladder.lowest ? 14 : low, view.to < ladder.top && view.to <= ladder.last ? this.width - 14 : high];
    picture.append(svg("line", { class: "lplab-axis", x1: ends[0], x2: ends[1], y1: AXIS, y2: AXIS }));
    const labels = [];
    const chosen = new Set(this.results.map(({ value }) => value));
    for (let step = view.from; step <= view.to; step += 1) {
      const value = ladder.value(step);
      const x = view.x(value);
      const isValue = ladder.isValue(step);
      const isChosen = isValue && chosen.has(value);
      picture.append(svg("line", { class: isValue ? (isChosen ? "lplab-here-tick" : "lplab-tick") : "lpround-phantom", x1: x, x2: x, y1: AXIS - (isValue ? 10 : 7), y2: AXIS + BIN }));
      const rank = Math.abs(step - this.step - 0.4);
      if (isValue) labels.push({ x, text: short(value, 8), rank, here: isChosen, step });
      if (step < view.to && ladder.isValue(step) && ladder.isValue(step + 1)) {
        const middle = view.x((value + ladder.value(step + 1)) / 2);
        picture.append(svg("line", { class: "lpround-half", x1: middle, x2: middle, y1: AXIS - 4, y2: AXIS + BIN }));
      }
    }
    drawLabels(picture, labels.map((each) => ({ ...each })), AXIS + BIN + 16, this.width);
    for (const { x, step } of labels) {
      if (step < this.step || step > this.step + 1 || this.panel.mantissa_bits === 0) continue;
      const parity = this.ladder.code(step) % 2 ? "odd" : "even";
      picture.append(svg("text", { class: "lplab-tick-label", x, y: AXIS + BIN + 30, "text-anchor": "middle" }, parity));
    }
    this.labelBeyond(picture);
  }

  labelBeyond(picture) {
    const { ladder, view } = this;
    const sides = [
      [ladder.last, view.to, view.to > ladder.last],
      [view.from, ladder.lowest, view.from < ladder.lowest && this.panel.signed],
    ];
    for (const [from, to, isShown] of sides) {
      if (!isShown) continue;
      const x = (view.x(ladder.value(from)) + view.x(ladder.value(to))) / 2;
      if (to - from < 2) continue;
      picture.append(svg("text", { class: "lplab-tick-label", x, y: AXIS + BIN + 16, "text-anchor": "middle" }, "no values here"));
    }
  }

  // Bins: what the chosen mode sends to each value, neighbours in alternating shades, with a dot on the side of a tie.
  drawBins(picture) {
    const { ladder, view, state } = this;
    const result = (step, part) => this.rounding.result(ladder.at(step, part), state.mode, state.overflow);
    const bins = [];
    const ties = [];
    const ofMarker = this.results.find(({ mode }) => mode === state.mode).value;
    for (let step = view.from; step < view.to; step += 1) {
      const [low, high] = [ladder.value(step), ladder.value(step + 1)];
      const middle = (low + high) / 2;
      const [left, tie, right] = [finite(false, 1n, 4n), finite(false, 1n, 2n), finite(false, 3n, 4n)].map((part) => result(step, part));
      extend(bins, low, middle, left);
      extend(bins, middle, high, right);
      if (!Object.is(left, right)) ties.push([middle, Object.is(tie, right) ? 1 : Object.is(tie, left) ? -1 : 0]);
    }
    bins.forEach(({ from, to, value }) => {
      const code = this.rounding.code(value);
      const shade = !Number.isFinite(value) ? "special" : (code ?? 0) % 2 ? "odd" : "even";
      const box = { x: view.x(from), y: AXIS, width: Math.max(0, view.x(to) - view.x(from)), height: BIN };
      picture.append(svg("rect", { class: "lpround-bin", "data-shade": shade, "data-here": Object.is(value, ofMarker), ...box }));
    });
    for (const [middle, side] of ties) {
      if (side) picture.append(svg("circle", { class: "lpround-owner", cx: view.x(middle) + side * 5, cy: AXIS + BIN / 2, r: 2.5 }));
    }
  }

  // An arrow from the marker to each value that is chosen, and under it the modes that choose it.
  drawTargets(picture) {
    const { view, width, place, ladder } = this;
    const groups = new Map();
    for (const { mode, value } of this.results) {
      const key = Object.is(value, -0) ? 0 : value;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(mode);
    }
    const between = view.x((ladder.value(this.step) + ladder.value(Math.min(this.step + 1, ladder.top))) / 2);
    const taken = {}; // rows of text below each side
    for (const [value, modes] of groups) {
      const isSpecial = !Number.isFinite(value);
      const isShown = !isSpecial && value >= view.low && value <= view.high;
      const isLow = value < view.low || (isSpecial && this.number < 0);
      const x = isShown ? view.x(value) : isLow ? 20 : width - 20;
      const chosen = modes.includes(this.state.mode);
      const end = AXIS - (isShown ? 10 : 22);
      const straight = Math.abs(x - place) < 1;
      const d = straight ? `M${place} 46V${end - 6}` : `M${place} 46C${place} 84 ${x} 62 ${x} ${end - 6}`;
      picture.append(svg("path", { class: "lpround-arrow", "data-chosen": chosen, d }));
      picture.append(svg("path", { class: "lpround-head", "data-chosen": chosen, d: `M${x} ${end}l-5 -9h10z` }));
      const name = short(value, 6);
      if (!isShown) picture.append(svg("text", { class: "lpround-off", x, y: AXIS - 6, "text-anchor": isLow ? "start" : "end", dx: isLow ? -14 : 14 }, isSpecial ? name : isLow ? `← ${name}` : `${name} →`));
      const anchor = straight ? "middle" : x < place ? "end" : "start";
      let at = straight ? x : isShown ? (x < place ? Math.max(between - 7, x) : Math.min(between + 7, x)) : isLow ? 6 : width - 6;
      let side = isShown ? anchor : isLow ? "start" : "end";
      if (side === "end" && at < 140) [side, at] = ["start", 6];
      if (side === "start" && at > width - 140) [side, at] = ["end", width - 6];
      const names = modes.length === MODE_KEYS.length ? ["all five modes"] : modes.map((mode) => MODE_NAMES[mode]);
      const column = `${side}${Math.round(at)}`;
      names.forEach((text, row) => {
        const y = AXIS + BIN + 50 + 16 * (row + (taken[column] ?? 0));
        const isChosen = modes.length === MODE_KEYS.length || modes[row] === this.state.mode;
        picture.append(svg("text", { class: "lpround-mode", "data-chosen": isChosen, x: at, y, "text-anchor": side }, text));
      });
      taken[column] = (taken[column] ?? 0) + names.length;
    }
  }

  drawMarker() {
    const { marker, view } = this;
    marker.style.left = `${this.place}px`;
    marker.setAttribute("aria-valuemin", String(view.low));
    marker.setAttribute("aria-valuemax", String(view.high));
    marker.setAttribute("aria-valuenow", String(Number.isNaN(this.number) ? view.low : Math.min(Math.max(this.number, view.low), view.high)));
    marker.setAttribute("aria-valuetext", `${this.state.text}; ${this.summary()}`);
  }

  resize() {
    if (this.picture.clientWidth && this.picture.clientWidth !== this.width) this.draw();
  }

  // ------------------------------------------------------------------------------------------------------------- words

  // "nearest, ties to even: 0.1015625; up: 0.1015625"; modes that agree together.
  summary() {
    const groups = new Map();
    for (const { mode, value } of this.results) groups.set(short(value, 9), [...(groups.get(short(value, 9)) ?? []), MODE_NAMES[mode]]);
    if (groups.size === 1) return `all five modes give ${[...groups.keys()][0]}`;
    return [...groups].map(([value, modes]) => `${modes.join(" and ")} give${modes.length > 1 ? "" : "s"} ${value}`).join("; ");
  }

  sentence() {
    const { real, ladder, step, panel } = this;
    const text = this.state.text;
    if (real.kind === "nan") return "NaN is no number: no mode can round it.";
    if (real.kind === "inf") return `Infinity is beyond the largest value, ${short(ladder.largest, 9)}: the overflow policy decides in every mode.`;
    if (this.isValue) return `${clipped(text)} is a value of the format: every mode should keep it.`;
    if (real.negative && !panel.signed && real.num !== 0n) return `${panel.name} has no sign, and so no negative numbers.`;
    if (step > ladder.last - 1 && step >= ladder.last) return this.beyondSentence();
    if (step < ladder.lowest && panel.signed) return this.beyondSentence();
    if (step < ladder.lowest) return `Nothing is below the smallest value, ${short(ladder.value(0), 9)}.`;
    const [low, high] = [step, step + 1].map((each) => `${short(ladder.value(each), 9)}`);
    if (this.isTie) return `A tie: ${clipped(text)} is exactly half-way between ${low} and ${high}.${this.evenSentence()}`;
    return `${clipped(text)} is ${short(100 * toNumber(this.part), 3)} % of the way from ${low} to ${high}; a tie would be at ${short((ladder.value(step) + ladder.value(step + 1)) / 2, 9)}.`;
  }

  evenSentence() {
    if (this.panel.mantissa_bits === 0) return " Without mantissa bits no neighbour is even, and the larger one is taken.";
    const even = this.ladder.code(this.step) % 2 ? this.step + 1 : this.step;
    return ` The code of ${short(this.ladder.value(even), 9)} ends in 0: it is the even one.`;
  }

  beyondSentence() {
    const { ladder } = this;
    const sign = this.real.negative ? "−" : "";
    const half = spacing(this.panel, ladder.last) / 2;
    const policy = this.state.overflow === "saturate" ? "saturate makes that the largest value" : "to_special makes that infinity, or NaN without one";
    const at = this.isTie && this.real.num !== 0n && Math.abs(this.number) === ladder.largest + half ? "is exactly half a step beyond" : "is beyond";
    return `${clipped(this.state.text)} ${at} the largest value, ${sign}${short(ladder.largest, 9)}. To nearest, what is more than half a step beyond (${sign}${short(ladder.largest + half, 9)}) overflows; ${policy}.`;
  }

  lineLabel() {
    return `Number line of ${this.panel.name} around ${this.state.text}: ${this.summary()}`;
  }
}

function extend(bins, from, to, value) {
  const last = bins[bins.length - 1];
  if (last && Object.is(last.value, value)) last.to = to;
  else bins.push({ from, to, value });
}

function codeText(fmt, code) {
  const bits = code.toString(2).padStart(fmt.width, "0");
  const cut = [+fmt.signed, +fmt.signed + fmt.exponent_bits];
  const fields = [bits.slice(0, cut[0]), bits.slice(cut[0], cut[1]), bits.slice(cut[1])].filter(Boolean).join(" ");
  return [element("span", { class: "lplab-code" }, `${fields}`), " ", element("span", { class: "lplab-aside" }, hex(code, fmt))];
}

export default { render: (context) => mount(context, Explorer) };
