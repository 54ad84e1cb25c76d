// ExponentHeatmap in the browser: a map of layers and steps, and the histogram of one cell with the range of a format.
//
// shared.js comes first. The kernel sends all histograms once; medians and shares are worked out here. The model:
//   _panels  [{layers, steps, first, width, counts: {gradients, activations}, formats, scales}]
//   _state   {kind, shown, fmt, scale, layer, column}

const KINDS = [
  ["gradients", "gradients"],
  ["activations", "activations"],
];
const SHOWN = [
  ["exponent", "median exponent"],
  ["underflow", "share that becomes zero"],
  ["overflow", "share that is too large"],
];
const ROW = 20;
const LABELS = 176;
const HISTOGRAM = 170;
// From low to high, and lighter: the order can be seen without telling colours apart.
const RAMPS = {
  exponent: [[48, 18, 59], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]],
  underflow: [[252, 251, 253], [188, 189, 220], [117, 107, 177], [63, 0, 125]],
  overflow: [[255, 245, 235], [253, 174, 107], [230, 85, 13], [127, 39, 4]],
};

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.fields = {};
    this.id = `lpheat-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpheat", role: "group", "aria-label": "Exponent heat map" });
    this.title = element("p", { class: "lpheat-title" });
    this.mapNode = element("div", { class: "lplab-line" });
    this.legend = element("p", { class: "lpheat-legend" });
    this.sentence = element("p", { class: "lpheat-sentence" });
    this.histogramNode = element("div", { class: "lplab-line" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    const body = element("div", { class: "lpheat-body" }, this.title, this.mapNode, this.legend, this.cellControls(), this.sentence, this.histogramNode);
    this.root.append(this.controls(), body, this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  // ------------------------------------------------------------------------------------------------------- the controls

  labelled(label, node, wide = false) {
    return element("div", { class: wide ? "lplab-control lpheat-wide" : "lplab-control" }, element("label", { for: node.id }, label), node);
  }

  choice(key, label, read = (text) => text) {
    const node = element("select", { id: `${this.id}-${key}`, class: "lplab-select" });
    node.addEventListener("change", () => this.save({ [key]: read(node.value) }));
    this.fields[key] = node;
    return this.labelled(label, node);
  }

  slider(key, label) {
    const attributes = { id: `${this.id}-${key}`, class: "lpheat-slider", type: "range", step: "1", "data-lm-suppress-shortcuts": "true" };
    const node = element("input", attributes);
    node.addEventListener("input", () => this.save({ [key]: Number(node.value) }));
    this.fields[key] = node;
    return this.labelled(label, node, true);
  }

  controls() {
    const controls = [this.choice("kind", "Numbers"), this.choice("shown", "Colour"), this.choice("fmt", "Format"), this.slider("scale", "Scale")];
    this.scaleLabel = controls[3].firstChild;
    return element("div", { class: "lplab-controls" }, ...controls);
  }

  cellControls() {
    const controls = [this.choice("layer", "Layer", Number), this.slider("column", "Step")];
    this.stepLabel = controls[1].firstChild;
    return element("div", { class: "lplab-controls" }, ...controls);
  }

  build() {
    const [panel] = this.model.get("_panels");
    this.panel = panel;
    this.counts = Object.fromEntries(Object.entries(panel.counts).map(([kind, bytes]) => [kind, new Int32Array(bytesOf(bytes))]));
    const fill = (key, options) => this.fields[key].replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
    fill("kind", KINDS);
    fill("shown", SHOWN);
    fill("fmt", panel.formats.map((each) => [each.name, each.label]));
    fill("layer", panel.layers.map((name, place) => [String(place), name]));
    [this.fields.scale.min, this.fields.scale.max] = panel.scales;
    [this.fields.column.min, this.fields.column.max] = [0, panel.steps.length - 1];
    this.draw();
  }

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  // --------------------------------------------------------------------------------------------------------- the numbers

  get format() {
    return this.panel.formats.find((each) => each.name === this.state.fmt) ?? this.panel.formats[0];
  }

  // The counts of one cell, as a view: number k counts the exponent first + k, before scaling.
  cell(layer, column) {
    const { width, steps } = this.panel;
    const start = (layer * steps.length + column) * width;
    return this.counts[this.state.kind].subarray(start, start + width);
  }

  facts(layer, column) {
    const { low, high } = this.format;
    const offset = this.panel.first + this.state.scale;
    let [total, under, over, half, median] = [0, 0, 0, 0, NaN];
    const counts = this.cell(layer, column);
    for (let k = 0; k < counts.length; k += 1) {
      total += counts[k];
      if (k + offset < low) under += counts[k];
      if (k + offset >= high) over += counts[k];
    }
    for (let k = 0; k < counts.length && total; k += 1) {
      half += counts[k];
      if (half * 2 >= total) {
        median = k + offset;
        break;
      }
    }
    return { total, exponent: median, underflow: total ? under / total : NaN, overflow: total ? over / total : NaN };
  }

  // ------------------------------------------------------------------------------------------------------- what is shown

  draw() {
    const { state, panel } = this;
    for (const [key, node] of Object.entries(this.fields)) if (node.value !== String(state[key])) node.value = state[key];
    const scale = `2${superscript(state.scale)}`;
    this.scaleLabel.textContent = `Scale: ${scale}`;
    this.fields.scale.setAttribute("aria-valuetext", `2 to the power of ${state.scale}`);
    this.stepLabel.textContent = `Step: ${panel.steps[state.column]}`;
    this.fields.column.setAttribute("aria-valuetext", `step ${panel.steps[state.column]}`);
    this.title.textContent = this.heading(scale);
    this.drawMap();
    this.sentence.textContent = this.words();
    this.drawHistogram();
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = this.words()), 400);
  }

  heading(scale) {
    const { kind, shown } = this.state;
    const numbers = `${kind[0].toUpperCase()}${kind.slice(1)}${this.state.scale ? ` × ${scale}` : ""}`;
    if (shown === "exponent") return `${numbers}: the exponent that half of them lie at or below`;
    return `${numbers}: the share that ${shown === "underflow" ? "becomes zero in" : "is too large for"} ${this.format.label}`;
  }

  drawMap() {
    const { layers, steps } = this.panel;
    const { shown, layer, column } = this.state;
    this.width = this.mapNode.clientWidth || 900;
    const names = this.width > 480 ? LABELS : 96;
    const cellWidth = (this.width - names - 4) / steps.length;
    const height = layers.length * ROW;
    const values = layers.map((_, row) => steps.map((_, place) => this.facts(row, place)[shown]));
    const known = values.flat().filter(Number.isFinite);
    const [low, high] = shown === "exponent" ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const label = `${this.title.textContent}, for ${layers.length} layers and ${steps.length} steps`;
    const picture = svg("svg", { class: "lpheat-map", width: this.width, height: height + 20, role: "img", "aria-label": label });
    values.forEach((row, at) => {
      const style = at === layer ? "lpheat-layer lpheat-chosen-layer" : "lpheat-layer";
      const name = names === LABELS ? layers[at] : layers[at].split(".").slice(-2).join(".");
      picture.append(svg("text", { class: style, x: names - 6, y: at * ROW + 14, "text-anchor": "end" }, name));
      row.forEach((value, place) => {
        const box = { x: names + place * cellWidth, y: at * ROW, width: cellWidth + 0.5, height: ROW };
        picture.append(svg("rect", { ...box, fill: Number.isFinite(value) ? colour(shown, (value - low) / (high - low || 1)) : "none" }));
      });
    });
    const box = { x: names + column * cellWidth, y: layer * ROW, width: cellWidth, height: ROW };
    picture.append(svg("rect", { class: "lpheat-cursor", ...box }));
    picture.append(svg("rect", { class: "lpheat-cursor-inner", x: box.x + 1.5, y: box.y + 1.5, width: Math.max(cellWidth - 3, 1), height: ROW - 3 }));
    const ticks = [...new Set([0, 0.25, 0.5, 0.75, 1].map((part) => Math.round(part * (steps.length - 1))))];
    for (const place of ticks) {
      const x = names + (place + 0.5) * cellWidth;
      const text = svg("text", { class: "lpheat-step", x: Math.min(x, this.width - 14), y: height + 15, "text-anchor": "middle" }, String(steps[place]));
      picture.append(text);
    }
    picture.addEventListener("click", (event) => {
      const from = picture.getBoundingClientRect();
      const [row, place] = [Math.floor((event.clientY - from.top) / ROW), Math.floor((event.clientX - from.left - names) / cellWidth)];
      const inside = row >= 0 && row < layers.length;
      if (inside) this.save({ layer: row, column: place < 0 ? this.state.column : Math.min(place, steps.length - 1) });
    });
    this.mapNode.replaceChildren(picture);
    this.drawLegend(shown, low, high);
  }

  drawLegend(shown, low, high) {
    const stops = Array.from({ length: 9 }, (_, k) => colour(shown, k / 8));
    const bar = element("span", { class: "lpheat-bar", style: `background: linear-gradient(to right, ${stops.join(", ")})` });
    const ends = shown === "exponent" ? [`2${superscript(low)}`, `2${superscript(high)}`] : ["0 %", "100 %"];
    const words = Number.isFinite(low) ? ends : ["nothing counted", ""];
    this.legend.replaceChildren(words[0], bar, words[1], element("span", {}, "steps from left to right; click a cell, or choose it below"));
  }

  words() {
    const { layer, column, kind } = this.state;
    const { total, exponent, underflow, overflow } = this.facts(layer, column);
    const place = `${this.panel.layers[layer]}, step ${this.panel.steps[column]}`;
    if (!total) return `${place}: no ${kind} that are finite and not zero.`;
    return `${place}: ${total.toLocaleString("en")} ${kind}; half of them lie at or below exponent ${exponent}. ${this.format.label} makes ${percent(underflow)} of them zero, and ${percent(overflow)} are too large.`.replaceAll("-", "−");
  }

  // The histogram of the chosen cell after scaling, with the range of the format above it.
  drawHistogram() {
    const { panel, state, format } = this;
    const counts = this.cell(state.layer, state.column);
    const offset = panel.first + state.scale;
    const low = Math.min(offset, format.low, -20) - 1;
    const high = Math.max(offset + panel.width, Math.min(format.high, 40), 18) + 1;
    const [from, to] = [Math.max(low, -80), Math.min(high, 80)];
    const x = (exponent) => 10 + ((Math.min(Math.max(exponent, from), to) - from) / (to - from)) * (this.width - 20);
    const top = Math.max(...counts, 1);
    const picture = svg("svg", { width: this.width, height: HISTOGRAM, role: "img", "aria-label": `Histogram of exponents: ${this.words()}` });
    const [base, room] = [HISTOGRAM - 22, HISTOGRAM - 64];
    counts.forEach((count, k) => {
      const exponent = k + offset;
      if (!count || exponent < from || exponent >= to) return;
      const lost = exponent < format.low || exponent >= format.high;
      const height = Math.max((count / top) * room, 1);
      picture.append(svg("rect", { class: lost ? "lpheat-lost" : "lpheat-kept", x: x(exponent) + 0.5, y: base - height, width: Math.max(x(exponent + 1) - x(exponent) - 1, 1), height }));
    });
    picture.append(svg("line", { class: "lplab-axis", x1: 10, x2: this.width - 10, y1: base, y2: base }));
    const stride = to - from > 90 ? 20 : 10;
    for (let exponent = Math.ceil(from / stride) * stride; exponent <= to; exponent += stride) {
      picture.append(svg("text", { class: "lplab-tick-label", x: x(exponent), y: HISTOGRAM - 6, "text-anchor": "middle" }, `2${superscript(exponent)}`));
    }
    const bar = (style, left, right) => right > left && picture.append(svg("line", { class: style, x1: x(left), x2: x(right), y1: 24, y2: 24 }));
    bar("lpheat-subnormal", format.low + 1, format.normal);
    bar("lpheat-range", format.normal, format.high);
    const middle = (x(format.low + 1) + x(format.high)) / 2;
    const label = `the range of ${format.label}; dashed: subnormal`;
    const half = label.length * 3.7;
    picture.append(svg("text", { class: "lpheat-range-label", x: Math.max(Math.min(middle, this.width - half), half), y: 14, "text-anchor": "middle" }, label));
    this.histogramNode.replaceChildren(picture);
  }

  resize() {
    if (this.mapNode.clientWidth && this.mapNode.clientWidth !== this.width) this.draw();
  }

  stop() {
    clearTimeout(this.announcing);
  }
}

function colour(shown, part) {
  const ramp = RAMPS[shown];
  const place = Math.min(Math.max(part, 0), 1) * (ramp.length - 1);
  const at = Math.min(Math.floor(place), ramp.length - 2);
  const mixed = ramp[at].map((channel, k) => Math.round(channel + (ramp[at + 1][k] - channel) * (place - at)));
  return `rgb(${mixed.join(", ")})`;
}

function percent(share) {
  const value = 100 * share;
  return `${value === 0 ? "0" : value < 0.01 ? "less than 0.01" : value.toFixed(value < 10 ? 2 : 1)}\u00a0%`;
}

export default { render: (context) => mount(context, Explorer) };
