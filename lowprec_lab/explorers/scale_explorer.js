// ScaleExplorer in the browser: a map of a tensor, and which of its numbers an outlier takes along.
//
// shared.js comes first. The kernel has quantized for every outlier. The model:
//   _panels  for each format: shape, place of the outlier, and for each granularity the size of a group, the number of
//            scales, the kinds of all numbers (0 kept, 1 coarse, 2 lost) and the decibels, for each outlier
//   _state   {fmt, granularity, log2_outlier}

const LABELS = { tensor: "the whole tensor", row: "each row", column: "each column", block: "each block of 4 × 8" };
const KINDS = [
  ["kept", "kept"],
  ["coarse", "coarse"],
  ["lost", "becomes 0"],
];
const LOWEST_CELL = 14;

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpgroup-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpgroup", role: "group", "aria-label": "Scale explorer" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.header = element("div", { class: "lplab-header" });
    this.mapNode = element("div", {});
    this.sentenceNode = element("figcaption", { class: "lpgroup-sentence" });
    const figure = element("figure", { class: "lplab-line" }, this.mapNode, this.sentenceNode);
    this.root.append(this.controls(), element("div", { class: "lpgroup-body" }, this.header, this.reading(), figure), this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    const choice = (key) => {
      const node = element("select", { id: `${this.id}-${key}`, class: "lplab-select" });
      node.addEventListener("change", () => this.save({ [key]: node.value }));
      return node;
    };
    [this.format, this.granularity] = [choice("fmt"), choice("granularity")];
    this.slider = element("input", { id: `${this.id}-outlier`, class: "lpgroup-slider", type: "range", step: "1", min: "0", "data-lm-suppress-shortcuts": "true" });
    this.slider.addEventListener("input", () => this.save({ log2_outlier: Number(this.slider.value) }));
    this.sizeNode = element("output", { for: this.slider.id, class: "lpgroup-size" });
    const control = (label, node, ...more) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node, ...more);
    return element("div", { class: "lplab-controls" }, control("Format", this.format), control("One scale for", this.granularity), control("Outlier", this.slider, this.sizeNode));
  }

  reading() {
    this.facts = {};
    const fact = (key, label) => {
      this.facts[key] = element("dd", { class: `lpgroup-${key}` });
      return element("div", {}, element("dt", {}, label), this.facts[key]);
    };
    return element("dl", { class: "lplab-numbers lpgroup-reading" }, ...KINDS.map(([kind, label]) => fact(kind, label)), fact("decibel", "SQNR of the others"), fact("scales", "scales"));
  }

  build() {
    const panels = this.model.get("_panels");
    this.panels = Object.fromEntries(panels.map((panel) => [panel.name, panel]));
    this.kinds = {};
    for (const { name, kinds } of panels) {
      for (const [granularity, bytes] of Object.entries(kinds)) this.kinds[`${name} ${granularity}`] = new Uint8Array(bytesOf(bytes));
    }
    this.format.replaceChildren(...panels.map(({ name, short: label }) => element("option", { value: name }, label)));
    this.granularity.replaceChildren(...Object.entries(LABELS).map(([value, label]) => element("option", { value }, label)));
    this.slider.max = panels[0].highest;
    this.drawn = "";
    this.draw();
  }

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  draw() {
    const { fmt, granularity, log2_outlier: power } = this.state;
    const panel = (this.panel = this.panels[fmt]);
    [this.format.value, this.granularity.value, this.slider.value] = [fmt, granularity, power];
    const [rows, columns] = panel.shape;
    const size = rows * columns;
    const kinds = this.kinds[`${fmt} ${granularity}`].subarray(power * size, (power + 1) * size);
    const counts = [0, 0, 0];
    for (const kind of kinds) counts[kind] += 1;
    KINDS.forEach(([kind], place) => (this.facts[kind].textContent = `${((100 * counts[place]) / size).toFixed(1)} %`));
    const decibel = panel.decibels[granularity][power];
    this.facts.decibel.textContent = decibel === null ? "none" : `${decibel.toFixed(1)} dB`;
    this.facts.scales.textContent = String(panel.scales[granularity]);
    this.sizeNode.textContent = power ? `2${superscript(power)} × the largest` : "as large as the largest";
    const shares = KINDS.map(([, label], place) => `${((100 * counts[place]) / size).toFixed(1)} % ${label}`).join(", ");
    const outlier = power ? `2 to the power of ${power} times the largest` : "as large as the largest";
    this.slider.setAttribute("aria-valuetext", `${outlier}: ${shares}`);
    this.drawHeader(panel);
    this.sentenceNode.textContent = this.sentence(counts, kinds);
    this.drawMap(kinds, `A map of ${rows} by ${columns} numbers in ${panel.short}, one scale for ${LABELS[granularity]}: ${shares}`);
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = `${outlier}: ${shares}`), 400);
  }

  drawHeader(panel) {
    const badge = element("p", { class: "lplab-badge", "data-origin": panel.origin }, panel.line);
    if (panel.note) badge.append(element("span", { class: "lplab-note" }, panel.note));
    this.root.style.setProperty("--lplab-format", panel.color);
    this.header.replaceChildren(element("p", { class: "lplab-name" }, panel.name), badge);
  }

  sentence([, coarse, lost], kinds) {
    const { short: name, shape, place, blocks } = this.panel;
    const [rows, columns] = blocks[this.state.granularity];
    if (!lost && !coarse) return `Every number has the precision of ${name}.`;
    const column = (k) => k % shape[1];
    const row = (k) => Math.floor(k / shape[1]);
    const near = (k) => Math.floor(row(k) / rows) === Math.floor(place[0] / rows) && Math.floor(column(k) / columns) === Math.floor(place[1] / columns);
    let [inside, outside] = [0, 0];
    kinds.forEach((kind, k) => kind === 2 && (near(k) ? (inside += 1) : (outside += 1)));
    const numbers = (count) => `${count.toLocaleString("en")} number${count === 1 ? " has" : "s have"}`;
    if (!lost) return `${numbers(coarse)} less than the precision of ${name}; none is lost.`;
    if (this.state.granularity === "tensor") return `${numbers(lost)} become 0.`;
    return `${numbers(inside)} become 0 in the outlier's group, and ${outside ? outside.toLocaleString("en") : "none"} elsewhere.`;
  }

  drawMap(kinds, label) {
    const [rows, columns] = this.panel.shape;
    const { granularity } = this.state;
    const width = Math.max(280, this.mapNode.clientWidth || this.width || 720);
    const key = `${width} ${rows} ${columns} ${granularity}`;
    if (key !== this.drawn) this.layMap(width, rows, columns);
    this.drawn = key;
    this.picture.setAttribute("aria-label", label);
    kinds.forEach((kind, k) => {
      if (this.shown[k] === kind) return;
      this.shown[k] = kind;
      this.cells[k].setAttribute("class", `lpgroup-cell lpgroup-cell-${KINDS[kind][0]}`);
      this.marks[k].setAttribute("d", kind === 2 ? this.cross(k) : kind === 1 ? this.dot(k) : "");
      this.marks[k].setAttribute("class", `lpgroup-mark-${KINDS[kind][0]}`);
    });
  }

  layMap(width, rows, columns) {
    this.width = width;
    this.cell = [(width - 4) / columns, Math.max(LOWEST_CELL, Math.min(22, (width - 4) / columns))];
    const [across, down] = this.cell;
    const height = rows * down + 4;
    this.picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    const at = (k) => [2 + (k % columns) * across, 2 + Math.floor(k / columns) * down];
    this.at = at;
    this.cells = Array.from({ length: rows * columns }, (_, k) => svg("rect", { x: at(k)[0], y: at(k)[1], width: across, height: down }));
    this.marks = this.cells.map(() => svg("path", { d: "" }));
    this.shown = new Array(rows * columns).fill(-1);
    this.picture.append(...this.cells, ...this.marks);
    const [tall, wide] = this.panel.blocks[this.state.granularity];
    const line = (x1, y1, x2, y2) => this.picture.append(svg("line", { class: "lpgroup-border", x1, y1, x2, y2 }));
    const last = (count, step) => [...Array(Math.ceil(count / step)).keys()].map((k) => k * step).concat(count);
    for (const row of last(rows, tall)) line(2, 2 + row * down, width - 2, 2 + row * down);
    for (const column of last(columns, wide)) line(2 + column * across, 2, 2 + column * across, 2 + rows * down);
    const [x, y] = at(this.panel.place[0] * columns + this.panel.place[1]);
    this.picture.append(svg("circle", { class: "lpgroup-outlier", cx: x + across / 2, cy: y + down / 2, r: Math.max(8, down / 2) }));
    this.mapNode.replaceChildren(this.picture);
  }

  middle(k) {
    const [x, y] = this.at(k);
    return [x + this.cell[0] / 2, y + this.cell[1] / 2];
  }

  cross(k) {
    const [x, y] = this.middle(k);
    return `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`;
  }

  dot(k) {
    const [x, y] = this.middle(k);
    return `M${x - 1.5} ${y}a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0 -3 0`;
  }

  resize() {
    if (this.mapNode.clientWidth && this.mapNode.clientWidth !== this.width) this.draw();
  }
}

export default { render: (context) => mount(context, Explorer) };
