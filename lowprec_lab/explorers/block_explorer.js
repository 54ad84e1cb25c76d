// BlockExplorer in the browser: a row of numbers, what the scale of each block reaches, and one block in full.
//
// shared.js comes first. The kernel has quantized for every format, mode and size of the outlier. The model:
//   _panels  for each format: its element (with the values of all codes), block, rows (float32, one for each size of the
//            outlier), modes (codes, scale, byte, tensor_scale, errors, error, lost), plain (one scale for the row:
//            scale, errors, error, lost), and the outlier's place
//   _state   {fmt, mode, log2_outlier, place, number}: the block that has `number` is shown in full

const LABELS = { MXFP8: "MXFP8 E4M3", MXFP4: "MXFP4 E2M1", "1x128": "1 × 128, E4M3" };
const STORED = { NVFP4: "E4M3", "1x128": "float32" };
const COLUMNS = ["Block", "Numbers", "Amax", "becomes", "Scale byte", "Scale", "Become 0", "Error", "With one scale"];
const [LEFT, NUMBERS, GAP, ERRORS] = [46, 190, 16, 78];
const DEEP = 14; // so many binades below the largest number of the row without its outlier are drawn
const LEAST = 1e-3; // smaller errors are drawn there
const SLACK = 1 + 2 ** -20; // scales in float32 are rounded

const percent = (share) => (Number.isFinite(share) ? `${share ? Number((100 * share).toPrecision(3)) : 0} %` : short(share));
const put = (node, text) => node.textContent === text || (node.textContent = text);
const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpblock-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpblock", role: "group", "aria-label": "Block explorer" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.header = element("div", { class: "lplab-header" });
    this.mapNode = element("div", { class: "lpblock-map" });
    this.sentenceNode = element("p", { class: "lpblock-sentence" });
    const caption = "Up: magnitude. Shaded: what the scale of the block reaches. ✕ becomes 0, ▲ is cut, ○ the outlier. Dashed: below it all become 0 under one scale for the row. Below: the error of each block, ● with its own scale, ◇ with one for the row.";
    const figure = element("figure", { class: "lplab-line" }, this.mapNode, element("figcaption", {}, caption));
    const body = element("div", { class: "lpblock-body" }, this.header, this.reading(), this.sentenceNode, figure, this.tables());
    this.root.append(this.controls(), body, this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    const choice = (key, chosen) => {
      const node = element("select", { id: `${this.id}-${key}`, class: "lplab-select" });
      node.addEventListener("change", () => this.save(chosen(node.value)));
      return node;
    };
    const slider = (key, changed) => {
      const node = element("input", { id: `${this.id}-${key}`, class: "lpblock-slider", type: "range", step: "1", min: "0", "data-lm-suppress-shortcuts": "true" });
      node.addEventListener("input", () => this.save(changed(Number(node.value))));
      return [node, element("output", { for: node.id, class: "lpblock-size" })];
    };
    this.format = choice("fmt", (fmt) => ({ fmt, mode: this.modeIn(this.panels[fmt]) }));
    this.mode = choice("mode", (mode) => ({ mode }));
    [this.sizeSlider, this.sizeNode] = slider("outlier", (log2_outlier) => ({ log2_outlier }));
    [this.placeSlider, this.placeNode] = slider("place", (place) => ({ place, number: place }));
    const control = (label, node, ...more) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node, ...more);
    return element(
      "div",
      { class: "lplab-controls" },
      control("Format", this.format),
      control("Scale", this.mode),
      control("Outlier", this.sizeSlider, this.sizeNode),
      control("Place of the outlier", this.placeSlider, this.placeNode),
    );
  }

  reading() {
    this.facts = {};
    const fact = (key, label) => {
      this.facts[key] = element("dd", { class: `lpblock-${key}` });
      return element("div", {}, element("dt", {}, label), this.facts[key]);
    };
    return element(
      "dl",
      { class: "lplab-numbers" },
      fact("error", "error of the others"),
      fact("plain", "error with one scale"),
      fact("lost", "become 0"),
      fact("plainlost", "become 0 with one scale"),
      fact("bits", "bits a number"),
    );
  }

  tables() {
    this.rowsNode = element("tbody", {});
    const heads = COLUMNS.map((name) => element("th", { scope: "col" }, name));
    const table = element("table", { class: "lpblock-table" }, element("thead", {}, element("tr", {}, ...heads)), this.rowsNode);
    const scrolled = (label, ...children) => element("div", { class: "lpblock-scroll", role: "group", tabindex: "0", "aria-label": label }, ...children);
    this.listName = element("p", { class: "lplab-caption" });
    this.listNode = element("ul", { class: "lpblock-numbers" });
    this.listBox = scrolled("The block in full", this.listNode);
    return element("div", { class: "lpblock-tables" }, scrolled("All blocks", table), element("div", { class: "lpblock-full" }, this.listName, this.listBox));
  }

  build() {
    const panels = this.model.get("_panels").map((panel) => this.unpacked(panel));
    this.panels = Object.fromEntries(panels.map((panel) => [panel.name, panel]));
    this.format.replaceChildren(...panels.map(({ name }) => element("option", { value: name }, LABELS[name] ?? name)));
    this.sizeSlider.max = String(panels[0].highest);
    this.placeSlider.max = String(panels[0].length - 1);
    this.laid = this.listed = "";
    this.draw();
  }

  unpacked(panel) {
    const floats = (view) => view && new Float32Array(bytesOf(view));
    const doubles = (view) => new Float64Array(bytesOf(view));
    const errors = (part) => ({ errors: doubles(part.errors), error: doubles(part.error), lost: part.lost });
    const modes = Object.entries(panel.modes).map(([name, part]) => [
      name,
      { ...errors(part), codes: new Uint8Array(bytesOf(part.codes)), scale: floats(part.scale), byte: part.byte && new Uint8Array(bytesOf(part.byte)), tensorScale: floats(part.tensor_scale) },
    ]);
    const values = doubles(panel.element.values);
    const positive = values.filter((value) => value > 0 && Number.isFinite(value));
    const rows = floats(panel.rows);
    const length = rows.length / (panel.highest + 1);
    return {
      ...panel,
      values,
      rows,
      length,
      blocks: Math.ceil(length / panel.block),
      reach: [Math.min(...positive) / 2, Math.max(...positive)],
      modes: Object.fromEntries(modes),
      plain: { ...errors(panel.plain), scale: floats(panel.plain.scale) },
    };
  }

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  modeIn(panel) {
    const { mode } = this.state;
    return mode in panel.modes ? mode : Object.keys(panel.modes)[0];
  }

  // What is shown of the chosen format, mode and size: a number, its value, and the facts of its block.
  choose() {
    const { fmt, log2_outlier: size } = this.state;
    const panel = this.panels[fmt];
    const mode = this.modeIn(panel);
    const found = panel.modes[mode];
    const [at, block] = [size * panel.length, size * panel.blocks];
    const numbers = panel.rows.subarray(at, at + panel.length);
    const codes = found.codes.subarray(at, at + panel.length);
    const scale = found.scale.subarray(block, block + panel.blocks);
    const values = Float32Array.from(codes, (code, k) => panel.values[code] * scale[Math.floor(k / panel.block)]);
    const part = (array) => array && array.subarray(block, block + panel.blocks);
    const lost = (k) => values[k] === 0 && numbers[k] !== 0;
    const cut = (k) => values[k] !== 0 && Math.abs(numbers[k]) > scale[Math.floor(k / panel.block)] * panel.reach[1] * SLACK;
    const shown = { panel, mode, size, found, numbers, codes, scale, values, lost, cut };
    return { ...shown, byte: part(found.byte), errors: part(found.errors), plainErrors: part(panel.plain.errors), plainScale: panel.plain.scale[size] };
  }

  draw() {
    const shown = (this.shown = this.choose());
    const { panel, mode, size, found } = shown;
    this.mode.replaceChildren(...Object.keys(panel.modes).map((name) => element("option", { value: name }, name)));
    [this.format.value, this.mode.value, this.sizeSlider.value, this.placeSlider.value] = [panel.name, mode, size, this.state.place];
    this.mode.disabled = this.mode.options.length === 1;
    this.sizeNode.textContent = size ? `2${superscript(size)} × the largest` : "as large as the largest";
    this.placeNode.textContent = `number ${this.state.place}`;
    const texts = { error: percent(found.error[size]), plain: percent(panel.plain.error[size]), lost: String(found.lost[size]), plainlost: String(panel.plain.lost[size]), bits: String(panel.bits) };
    for (const [key, text] of Object.entries(texts)) this.facts[key].textContent = text;
    const spoken = `error of the others ${texts.error}, with one scale for the row ${texts.plain}; ${texts.lost} become 0, with one scale ${texts.plainlost}`;
    const outlier = size ? `2 to the power of ${size} times the largest` : "as large as the largest";
    this.sizeSlider.setAttribute("aria-valuetext", `${outlier}: ${spoken}`);
    this.placeSlider.setAttribute("aria-valuetext", `number ${this.state.place}`);
    this.drawHeader(panel);
    this.sentenceNode.textContent = this.sentence(shown);
    this.drawMap(shown, `A row of ${panel.length} numbers in ${LABELS[panel.name] ?? panel.name}, outlier ${outlier}: ${spoken}`);
    this.drawTable(shown);
    this.drawBlock(shown);
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = `${outlier}: ${spoken}`), 400);
  }

  drawHeader(panel) {
    const badge = element("p", { class: "lplab-badge", "data-origin": panel.origin }, panel.line);
    if (panel.note) badge.append(element("span", { class: "lplab-note" }, panel.note));
    this.root.style.setProperty("--lplab-format", panel.element.color);
    const layout = `${panel.block} codes of ${panel.short} share a scale in ${STORED[panel.name] ?? "E8M0"}`;
    this.header.replaceChildren(element("p", { class: "lplab-name" }, LABELS[panel.name] ?? panel.name), element("p", { class: "lplab-layout" }, layout), badge);
  }

  sentence({ panel, size, found, numbers, scale, lost, cut, byte }) {
    const all = Array.from(numbers.keys());
    const home = Math.floor(panel.place / panel.block);
    const gone = all.filter(lost);
    const inside = gone.filter((k) => Math.floor(k / panel.block) === home).length;
    const plain = panel.plain.lost[size];
    const sentences = [];
    if (!gone.length) sentences.push(`No number becomes 0${plain ? `; with one scale for the row it would be ${plain.toLocaleString("en")}` : ""}.`);
    else if (inside === gone.length) sentences.push(`${count(inside, "number becomes", "numbers become")} 0, in the block of the outlier and nowhere else; with one scale for the row: ${plain.toLocaleString("en")}.`);
    else sentences.push(`${count(inside, "number becomes", "numbers become")} 0 in the block of the outlier, and ${(gone.length - inside).toLocaleString("en")} in other blocks; with one scale for the row: ${plain.toLocaleString("en")}.`);
    const over = all.filter(cut).length;
    if (over) sentences.push(`${count(over, "number is", "numbers are")} above the largest value that the scale reaches, and cut to it.`);
    const none = panel.name === "NVFP4" ? byte.filter((each, at) => each === 0 && scale[at] === 0).length : 0;
    if (none) sentences.push(`The scale of ${count(none, "block", "blocks")} has become 0: beside the scale of the tensor, E4M3 does not reach down to it.`);
    return sentences.join(" ");
  }

  // ------------------------------------------------------------------------------------------------- the row

  drawMap(shown, label) {
    const width = (this.width = Math.max(280, this.mapNode.clientWidth || this.width || 720));
    const height = NUMBERS + GAP + ERRORS + 4;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
    const { panel } = shown;
    const step = (width - LEFT - 4) / panel.length;
    const across = (k) => LEFT + k * step;
    const edge = (block) => across(Math.min(block * panel.block, panel.length));
    this.numberAt = (x) => Math.max(0, Math.min(panel.length - 1, Math.floor((x - LEFT) / step)));
    this.drawChosen(picture, edge, panel);
    this.drawReach(picture, shown, { across, edge, step, width });
    this.drawErrors(picture, shown, { edge, width });
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      this.save({ number: this.numberAt(((event.clientX - box.left) * width) / box.width) });
    });
    this.mapNode.replaceChildren(picture);
  }

  drawChosen(picture, edge, panel) {
    const chosen = Math.floor(this.state.number / panel.block);
    const height = NUMBERS + GAP + ERRORS;
    picture.append(svg("rect", { class: "lpblock-chosen", x: edge(chosen) + 0.5, y: 1, width: edge(chosen + 1) - edge(chosen) - 1, height }));
    for (let block = 0; block <= panel.blocks; block += 1) picture.append(svg("line", { class: "lpblock-border", x1: edge(block), x2: edge(block), y1: 1, y2: height + 1 }));
  }

  drawReach(picture, { panel, numbers, scale, lost, cut, plainScale }, { across, edge, step, width }) {
    const sizes = Array.from(numbers, (number) => Math.log2(Math.abs(number)));
    const others = sizes.filter((_, k) => k !== panel.place);
    const most = Math.max(...others);
    const bottom = Math.floor(Number.isFinite(most) ? most : sizes[panel.place]) - DEEP;
    const tops = Array.from(scale, (each) => Math.log2(each * panel.reach[1]));
    const top = Math.max(...sizes, ...tops.filter(Number.isFinite)) + 1;
    const y = (power) => 2 + (NUMBERS * (top - Math.max(power, bottom))) / (top - bottom);
    tops.forEach((end, block) => {
      const low = Math.log2(scale[block] * panel.reach[0]);
      if (Number.isFinite(end) && end > bottom) picture.append(svg("rect", { class: "lpblock-reach", x: edge(block) + 1, y: y(end), width: edge(block + 1) - edge(block) - 2, height: y(low) - y(end) }));
    });
    let [kept, crosses, triangles] = ["", "", ""];
    sizes.forEach((power, k) => {
      const [x, end] = [across(k + 0.5), y(power)];
      if (lost(k)) crosses += `M${x - 2.5} ${end - 2.5}l5 5m0 -5l-5 5`;
      else if (power > bottom) kept += `M${x} ${y(bottom)}V${end}`;
      if (cut(k)) triangles += `M${x - 4} ${end + 3}h8l-4 -7z`;
    });
    const paths = { kept, lost: crosses, cut: triangles };
    for (const [kind, d] of Object.entries(paths)) picture.append(svg("path", { class: `lpblock-mark-${kind}`, d, "stroke-width": kind === "kept" ? Math.max(0.8, Math.min(2, 0.55 * step)) : 1.4 }));
    picture.append(svg("circle", { class: "lpblock-outlier", cx: across(panel.place + 0.5), cy: Math.max(8, y(sizes[panel.place])), r: 6 }));
    const plain = Math.log2(plainScale * panel.reach[0]);
    if (plain > bottom) picture.append(svg("line", { class: "lpblock-plain-line", x1: LEFT, x2: width - 4, y1: y(plain), y2: y(plain) }));
    const every = top - bottom > 24 ? 8 : 4;
    for (let power = Math.ceil(bottom / every) * every; power <= top; power += every) this.tick(picture, `2${superscript(power)}`, y(power));
  }

  drawErrors(picture, { panel, errors, plainErrors }, { edge }) {
    const from = NUMBERS + GAP;
    const y = (error) => from + ERRORS * (Math.log10(1.5 / Math.min(1.5, Math.max(LEAST, Number.isNaN(error) ? 1.5 : error))) / Math.log10(1.5 / LEAST));
    for (const power of [-2, -1, 0]) this.tick(picture, `${100 * 10 ** power} %`, y(10 ** power));
    errors.forEach((error, block) => {
      const x = (edge(block) + edge(block + 1)) / 2;
      const plain = y(plainErrors[block]);
      picture.append(
        svg("line", { class: "lpblock-between", x1: x, x2: x, y1: y(error), y2: plain }),
        svg("path", { class: "lpblock-plain", d: diamond(x, plain) }),
        svg("circle", { class: "lpblock-own", cx: x, cy: y(error), r: 4 }),
      );
    });
  }

  tick(picture, text, y) {
    picture.append(svg("line", { class: "lpblock-tick", x1: LEFT - 4, x2: LEFT, y1: y, y2: y }), svg("text", { class: "lplab-tick-label", x: LEFT - 7, y: y + 4, "text-anchor": "end" }, text));
  }

  // ------------------------------------------------------------------------------------------------- the blocks

  drawTable(shown) {
    const { panel } = shown;
    if (this.laid !== panel.name) this.layTable(panel);
    this.laid = panel.name;
    const chosen = Math.floor(this.state.number / panel.block);
    this.rows.forEach(({ row, button, cells }, block) => {
      const is = block === chosen;
      row.dataset.chosen = is ? "yes" : "no";
      button.setAttribute("aria-pressed", String(is));
      this.textsOf(shown, block).forEach((text, column) => put(cells[column], text));
    });
  }

  layTable(panel) {
    this.rows = Array.from({ length: panel.blocks }, (_, block) => {
      const button = element("button", { type: "button", class: "lplab-step", "aria-label": `Show block ${block} in full` }, String(block));
      button.addEventListener("click", () => this.save({ number: block * panel.block }));
      const cells = COLUMNS.slice(1).map(() => element("td", {}));
      return { button, cells, row: element("tr", {}, element("th", { scope: "row" }, button), ...cells) };
    });
    this.rowsNode.replaceChildren(...this.rows.map(({ row }) => row));
  }

  textsOf({ panel, numbers, values, scale, byte, lost, errors, plainErrors, found, size }, block) {
    const own = this.numbersOf(panel, block);
    const largest = own.reduce((best, k) => (Math.abs(numbers[k]) > Math.abs(numbers[best]) ? k : best));
    const amax = Math.abs(numbers[largest]);
    const stored = byte ? `${byte[block]} (0x${byte[block].toString(16).toUpperCase().padStart(2, "0")})` : "4 bytes";
    return [
      `${own[0]}–${own.at(-1)}`,
      short(amax, 4),
      short(Math.abs(values[largest]), 4),
      stored,
      this.scaleText(panel, scale[block], found.tensorScale?.[size]),
      `${own.filter(lost).length} of ${own.length}`,
      percent(errors[block]),
      percent(plainErrors[block]),
    ];
  }

  scaleText(panel, scale, tensorScale) {
    if (tensorScale !== undefined) return `${short(scale / tensorScale, 4)} × ${short(tensorScale, 3)}`;
    const isPower = scale > 0 && Number.isFinite(scale) && Number.isInteger(Math.log2(scale));
    return isPower ? `2${superscript(Math.log2(scale))}` : short(scale, 4);
  }

  numbersOf(panel, block) {
    const from = block * panel.block;
    return Array.from({ length: Math.min(panel.block, panel.length - from) }, (_, k) => from + k);
  }

  drawBlock(shown) {
    const { panel } = shown;
    const block = Math.floor(this.state.number / panel.block);
    const own = this.numbersOf(panel, block);
    put(this.listName, `Block ${block} in full: number, code, value`);
    this.listBox.setAttribute("aria-label", `Block ${block} in full`);
    const wanted = `${panel.name} ${own.length}`;
    if (this.listed !== wanted) {
      this.items = own.map(() => this.newItem(panel.element));
      this.listNode.replaceChildren(...this.items.map(({ node }) => node));
    }
    this.listed = wanted;
    own.forEach((k, at) => this.drawItem(this.items[at], shown, k));
  }

  newItem({ exponent_bits: exponent, mantissa_bits: mantissa }) {
    const spoken = (text = "") => element("span", { class: "lplab-spoken" }, text);
    const [name, number, value] = [spoken(), element("span", { class: "lpblock-number" }), element("span", { class: "lpblock-value" })];
    const fields = [["sign", 0, 1], ["exponent", 1, 1 + exponent], ["mantissa", 1 + exponent, 1 + exponent + mantissa]];
    const bits = fields.map(([field, from, to]) => ({ from, to, node: element("span", { class: `lpblock-bits-${field}` }) }));
    const code = element("span", { class: "lplab-code lpblock-code" }, ...bits.map(({ node }) => node));
    return { name, number, value, bits, node: element("li", {}, name, number, spoken(" has the code "), code, spoken(" and becomes "), value) };
  }

  drawItem({ node, name, number, value, bits }, { panel, numbers, codes, values, lost, cut }, k) {
    const digits = codes[k].toString(2).padStart(bits[2].to, "0");
    const kind = lost(k) ? "lost" : cut(k) ? "cut" : "kept";
    const remark = { lost: "✕ ", cut: "▲ ", kept: "" }[kind];
    const isOutlier = k === panel.place;
    node.dataset.kind = kind;
    node.dataset.outlier = isOutlier ? "yes" : "no";
    put(name, `number ${k}${isOutlier ? ", the outlier" : ""}: `);
    put(number, short(numbers[k], 4));
    put(value, remark + short(values[k], 4));
    for (const { from, to, node: field } of bits) put(field, digits.slice(from, to));
  }

  resize() {
    if (this.mapNode.clientWidth && this.mapNode.clientWidth !== this.width) this.draw();
  }

  stop() {
    clearTimeout(this.announcing);
  }
}

export default { render: (context) => mount(context, Explorer) };
