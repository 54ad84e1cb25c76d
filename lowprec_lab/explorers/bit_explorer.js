// BitExplorer in the browser: what the bits of a code mean, and to which code a real number rounds.
//
// Everything that a click changes is computed here, so no click waits for the kernel. shared.js comes first.
//
// The model has two traits (bit_explorer.py says more):
//   _panels  one object a format: its fields, the table of its values, and whose code made the table
//   _state   {text, codes, problems, mode, overflow}: the real number as it was written, and a code for each format

// ------------------------------------------------------------------------------------------------ one format, drawn

class Panel {
  constructor(explorer, index, panel, several) {
    this.explorer = explorer;
    this.index = index;
    this.table = new Values(panel);
    this.fmt = panel;
    this.id = `lplab-${(serial += 1)}`;
    this.node = element("section", { class: "lplab-panel", "aria-labelledby": `${this.id}-name` });
    this.node.style.setProperty("--lplab-format", panel.color);
    const top = element("div", { class: "lplab-top" }, this.bits(), this.reading());
    this.node.append(this.header(), top, this.facts(), this.line());
    if (panel.width === 8 && this.table.values) this.node.append(this.grid(!several));
  }

  header() {
    const { fmt } = this;
    const parts = [fmt.signed ? "1 sign" : "no sign", `${fmt.exponent_bits} exponent`, `${fmt.mantissa_bits} mantissa bits`, `bias ${fmt.bias}`];
    const badge = element("p", { class: "lplab-badge", "data-origin": fmt.origin }, fmt.line);
    if (fmt.note) badge.append(element("span", { class: "lplab-note" }, fmt.note));
    return element(
      "header",
      { class: "lplab-header" },
      element("p", { id: `${this.id}-name`, class: "lplab-name" }, fmt.name), // no heading: its level is the page's to say
      element("p", { class: "lplab-layout" }, parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ")),
      badge,
    );
  }

  bits() {
    const { fmt } = this;
    this.buttons = [];
    const toolbar = element("div", {
      class: "lplab-bits",
      role: "toolbar",
      "aria-label": `Bits of ${fmt.name}: arrow keys move, space flips`,
      "data-lm-suppress-shortcuts": "true", // JupyterLab would take the arrow keys and the space for itself
    });
    if (fmt.width > 16) toolbar.classList.add("lplab-many");
    const widths = { sign: +fmt.signed, exponent: fmt.exponent_bits, mantissa: fmt.mantissa_bits };
    for (const [field, count] of Object.entries(widths)) {
      if (!count) continue;
      const row = element("div", { class: "lplab-row" });
      for (let index = count - 1; index >= 0; index -= 1) row.append(this.bit(field, index));
      const caption = element("span", { class: "lplab-caption", "aria-hidden": "true" }, field);
      const group = { class: "lplab-field", "data-field": field, role: "group", "aria-label": field };
      toolbar.append(element("div", group, caption, row));
    }
    this.buttons[0].tabIndex = 0;
    toolbar.addEventListener("keydown", (event) => {
      const target = moveFocus(this.buttons, this.buttons.indexOf(event.target), event.key);
      if (!target || event.key === "ArrowUp" || event.key === "ArrowDown") return;
      event.preventDefault();
      target.focus();
    });
    toolbar.addEventListener("focusin", (event) => makeTabStop(this.buttons, event.target));
    return toolbar;
  }

  bit(field, index) {
    const button = element(
      "button",
      { type: "button", class: "lplab-bit", tabindex: "-1", "aria-label": bitName(field, index, this.fmt) },
      element("span", { class: "lplab-digit" }),
      element("span", { class: "lplab-worth", "aria-hidden": "true" }, worthLabel(field, index, this.fmt)),
    );
    const place = this.fmt.width - 1 - this.buttons.length; // buttons run from the highest bit to the lowest
    button.addEventListener("click", () => {
      const set = Math.floor(this.code / 2 ** place) % 2;
      this.explorer.chooseCode(this.index, this.code + (set ? -1 : 1) * 2 ** place);
    });
    this.buttons.push(button);
    return button;
  }

  reading() {
    this.valueNode = element("output", { class: "lplab-value" });
    this.kindNode = element("span", { class: "lplab-kind" });
    this.wholeNode = element("span", { class: "lplab-whole" });
    this.digitsNode = element("p", { class: "lplab-digits" });
    this.allDigits = element("details", { class: "lplab-all-digits" }, element("summary", {}, "all digits"), this.digitsNode);
    return element(
      "div",
      { class: "lplab-reading" },
      element("p", { class: "lplab-headline" }, this.valueNode, this.kindNode, this.wholeNode),
      this.allDigits,
    );
  }

  facts() {
    this.fact = {};
    const lists = [["code", "formula", "error"], ["neighbours", "ulp"]].map((names) => {
      const list = element("dl", {});
      for (const name of names) {
        this.fact[name] = element("dd", { "data-fact": name });
        list.append(element("div", {}, element("dt", {}, name), this.fact[name]));
      }
      return list;
    });
    this.steps = [-1, 1].map((direction) => {
      const button = element("button", { type: "button", class: "lplab-step" });
      button.addEventListener("click", () => this.explorer.chooseCode(this.index, button.neighbour));
      button.direction = direction;
      return button;
    });
    this.fact.neighbours.append(...this.steps);
    return element("div", { class: "lplab-facts" }, ...lists);
  }

  line() {
    this.lineNode = element("div", {});
    this.captionNode = element("figcaption", {});
    return element("figure", { class: "lplab-line" }, this.lineNode, this.captionNode);
  }

  // The 16 x 16 table: the high half of the code picks the row, the low half the column.
  grid(open) {
    const table = element("table", {
      class: "lplab-table",
      role: "grid",
      "aria-label": `All 256 values of ${this.fmt.name}`,
      "data-lm-suppress-shortcuts": "true",
    });
    const head = element("tr", {}, element("td", { class: "lplab-corner" }));
    for (let low = 0; low < 16; low += 1) head.append(element("th", { scope: "col" }, `_${low.toString(16).toUpperCase()}`));
    table.append(element("thead", {}, head));
    const body = element("tbody");
    this.cells = [];
    for (let high = 0; high < 16; high += 1) {
      const row = element("tr", {}, element("th", { scope: "row" }, `${high.toString(16).toUpperCase()}_`));
      for (let low = 0; low < 16; low += 1) row.append(this.cell(high * 16 + low));
      body.append(row);
    }
    table.append(body);
    table.addEventListener("click", (event) => {
      const code = this.cells.indexOf(event.target.closest("[role=gridcell]"));
      if (code >= 0) this.explorer.chooseCode(this.index, code);
    });
    table.addEventListener("keydown", (event) => this.tableKey(event));
    const summary = element("summary", {}, "All 256 values");
    const details = element("details", { class: "lplab-all" }, summary, element("div", { class: "lplab-scroll" }, table), this.legend());
    details.open = open;
    return details;
  }

  cell(code) {
    const value = this.table.value(code);
    const kind = this.table.kind(code);
    const isPower = this.fmt.mantissa_bits === 0 && Number.isFinite(value);
    const text = isPower ? `2${superscript(Math.log2(Math.abs(value)))}` : cellText(value);
    const cell = element(
      "td",
      {
        role: "gridcell",
        tabindex: "-1",
        "data-kind": kind,
        "aria-label": `${hex(code, this.fmt)}: ${short(value, 9)}, ${CLASSES[kind]?.name ?? "unknown class"}`,
      },
      text,
    );
    cell.title = `${hex(code, this.fmt)} = ${short(value, 12)}`;
    this.cells.push(cell);
    return cell;
  }

  tableKey(event) {
    const from = this.cells.indexOf(event.target);
    if (from < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.explorer.chooseCode(this.index, from);
      return;
    }
    const sideways = { ArrowLeft: from % 16 === 0, ArrowRight: from % 16 === 15 }[event.key];
    const target = sideways ? undefined : moveFocus(this.cells, from, event.key, 16);
    if (!target) return;
    event.preventDefault();
    makeTabStop(this.cells, target);
    target.focus();
  }

  legend() {
    const counts = CLASSES.map(() => 0);
    for (let code = 0; code < 256; code += 1) counts[this.table.kind(code)] += 1;
    const list = element("ul", { class: "lplab-legend" });
    CLASSES.forEach(({ name, cue }, kind) => {
      if (!counts[kind]) return;
      const key = element("span", { class: "lplab-key", "data-kind": kind, "aria-hidden": "true" }, cue);
      list.append(element("li", {}, key, `${counts[kind]} ${name}`));
    });
    return list;
  }

  // ------------------------------------------------------------------------------------------------ after a change

  draw(state) {
    this.state = state;
    this.code = state.codes[this.index];
    this.value = this.table.value(this.code);
    this.kind = this.table.kind(this.code);
    this.real = parseReal(state.text) ?? { kind: "nan" };
    this.drawBits();
    this.drawReading();
    this.drawFacts();
    this.drawLine();
    if (this.cells) this.drawSelection();
  }

  drawBits() {
    this.buttons.forEach((button, order) => {
      const bit = Math.floor(this.code / 2 ** (this.fmt.width - 1 - order)) % 2;
      button.setAttribute("aria-pressed", bit ? "true" : "false");
      button.firstChild.textContent = bit;
    });
  }

  drawReading() {
    const { value } = this;
    const digits = exactDecimal(fromFloat64(value)) ?? "";
    const long = digits.length > 22;
    this.valueNode.textContent = long ? `≈ ${short(value, 9)}` : digits;
    this.allDigits.hidden = !long;
    if (long) this.digitsNode.textContent = digits;
    const { name, cue } = CLASSES[this.kind] ?? { name: "unknown class", cue: "?" };
    this.kindNode.dataset.kind = this.kind;
    this.kindNode.replaceChildren(element("span", { "aria-hidden": "true" }, cue), ` ${name}`);
    const whole = Number.isFinite(value) && value !== 0 ? wholeTimesPower(value) : "";
    this.wholeNode.textContent = whole && whole !== digits ? `= ${whole}` : "";
  }

  drawFacts() {
    const { fmt, code } = this;
    const fields = splitFields(fmt, code);
    const groups = [];
    if (fmt.signed) groups.push(["sign", fields.sign, 1]);
    groups.push(["exponent", fields.exponent, fmt.exponent_bits]);
    if (fmt.mantissa_bits) groups.push(["mantissa", fields.mantissa, fmt.mantissa_bits]);
    const binary = groups.map(([field, bits, width]) =>
      element("span", { class: "lplab-ink", "data-field": field }, bits.toString(2).padStart(width, "0")),
    );
    this.fact.code.replaceChildren(
      element("span", { class: "lplab-code" }, ...binary.flatMap((node) => [node, " "])),
      element("span", { class: "lplab-code lplab-hex" }, hex(code, fmt)),
    );
    this.fact.formula.replaceChildren(...this.formula(fields));
    this.fact.error.replaceChildren(...this.errorText());
    this.drawNeighbours();
  }

  formula(fields) {
    const { fmt } = this;
    const exact = decodeFields(fmt, fields);
    const kind = classifyFields(fmt, fields);
    const special = specialSentence(fmt, kind);
    if (special) return [special];
    const ink = (field, content) => element("span", { class: "lplab-ink", "data-field": field }, String(content));
    const piece = (...content) => element("span", { class: "lplab-piece" }, ...content); // where a line may break
    const exponent = kind === NORMAL ? fields.exponent : 1;
    const hidden = kind === NORMAL ? 1 : 0;
    const parts = 2 ** fmt.mantissa_bits;
    const shown = [];
    if (fmt.signed) shown.push(piece("(−1)", element("sup", {}, ink("sign", fields.sign)), " ×"), " ");
    shown.push(piece("2", element("sup", {}, ink("exponent", exponent), ` − ${fmt.bias}`)));
    if (fmt.mantissa_bits) shown.push(" ", piece(`× (${hidden} + `, ink("mantissa", fields.mantissa), `/${parts})`));
    const product = [`${fields.sign ? "−" : ""}2${superscript(exponent - fmt.bias)}`];
    if (fmt.mantissa_bits) product.push(short(hidden + fields.mantissa / parts, 9));
    shown.push(" ", piece(`= ${product.join(" × ")}`));
    const spoken =
      (fmt.signed ? `minus one to the power ${fields.sign}, times ` : "") +
      `two to the power ${exponent} minus ${fmt.bias}` +
      (fmt.mantissa_bits ? `, times ${hidden} plus ${fields.mantissa} over ${parts}` : "");
    const nodes = [
      element("span", { class: "lplab-formula", "aria-hidden": "true" }, ...shown),
      element("span", { class: "lplab-spoken" }, spoken),
    ];
    if (kind !== NORMAL) nodes.push(element("span", { class: "lplab-aside" }, "exponent field 0: no hidden 1, and the exponent that field 1 has"));
    if (!Object.is(exact, this.value)) {
      nodes.push(element("strong", { class: "lplab-differs" }, `The bits say ${short(exact, 9)}; this decode gives ${short(this.value, 9)}.`));
    }
    return nodes;
  }

  errorText() {
    const problem = this.state.problems[this.index];
    if (problem) return [element("strong", { class: "lplab-differs" }, problem)];
    const { real, value } = this;
    if (real.kind === "nan" || Number.isNaN(value)) return [real.kind === "nan" ? "none: NaN stays NaN" : "the number became NaN"];
    if (!Number.isFinite(value)) return [real.kind === "inf" ? "none: infinity is exact" : "infinite: the number overflowed"];
    if (real.kind === "inf") return ["infinite: the largest value stands for infinity"];
    const error = add(fromFloat64(value), negated(real));
    if (error.num === 0n) return ["none: the value is exact"];
    const sign = error.negative ? "" : "+";
    const digits = exactDecimal(error);
    const exact = digits !== null && digits.length <= 16;
    const parts = [`${exact ? "" : "≈ "}${sign}${exact ? digits : short(toNumber(error), 6)}`];
    const ulps = toNumber(divide(error, fromFloat64(spacing(this.fmt, this.code))));
    const details = [`${short(ulps, 3)} ulp`];
    if (real.num !== 0n) details.unshift(`${sign}${short(100 * toNumber(divide(error, { ...real, negative: false })), 4)} %`);
    parts.push(element("span", { class: "lplab-aside" }, details.join(" · ")));
    return parts;
  }

  drawNeighbours() {
    const isFinite = Number.isFinite(this.value);
    for (const button of this.steps) {
      const neighbour = isFinite ? this.table.neighbour(this.code, button.direction) : null;
      const [arrow, word] = button.direction < 0 ? ["←", "below"] : ["→", "above"];
      const value = neighbour === null ? "none" : short(this.table.value(neighbour), 9);
      button.neighbour = neighbour;
      button.disabled = neighbour === null;
      button.replaceChildren(
        element("span", { class: "lplab-spoken" }, `${word}: `),
        ...(button.direction < 0 ? [`${arrow} ${value}`] : [`${value} ${arrow}`]),
      );
    }
    const ulp = spacing(this.fmt, this.code);
    this.fact.ulp.textContent = isFinite ? `${wholeTimesPower(ulp)}${ulp === 1 ? "" : ` = ${short(ulp, 9)}`}` : "none";
  }

  drawSelection() {
    const cell = this.cells[this.code];
    if (this.selected !== cell) this.selected?.removeAttribute("aria-selected");
    cell.setAttribute("aria-selected", "true");
    makeTabStop(this.cells, cell);
    this.selected = cell;
  }

  drawLine() {
    // A notebook takes cells off the page that are out of view: no width then, and the last one is kept.
    const width = Math.max(260, this.lineNode.clientWidth || this.lineWidth || 640);
    if (this.lineWidth !== width) {
      this.overview = new Overview(this.table, width);
      this.lineWidth = width;
    }
    const picture = svg("svg", { viewBox: `0 0 ${width} 136`, width, height: 136, role: "img" });
    picture.setAttribute("aria-label", this.lineLabel());
    const at = this.overview.drawInto(picture, this.value, this.real);
    if (Number.isFinite(this.value)) drawZoom(picture, this, width, at);
    this.lineNode.replaceChildren(picture);
    this.captionNode.textContent = Number.isFinite(this.value) ? "◆ the real number · shaded: every real number that rounds to this value" : "";
  }

  lineLabel() {
    const [below, above] = this.steps.map((button) => (button.neighbour === null ? "none" : short(this.table.value(button.neighbour))));
    if (!Number.isFinite(this.value)) return `Number line of ${this.fmt.name}: ${short(this.value)} is not among the finite values`;
    return `Number line of ${this.fmt.name}: ${short(this.value)} between its neighbours ${below} and ${above}`;
  }
}

function specialSentence(fmt, kind) {
  if (kind === INF) return "exponent all ones, mantissa 0: infinity";
  if (kind !== NAN) return "";
  if (fmt.specials === "ieee") return "exponent all ones, mantissa not 0: NaN";
  if (fmt.specials === "fnuz") return "the code that would be −0: NaN";
  return "all exponent and mantissa bits are 1: NaN";
}

// -------------------------------------------------------------------------------------------------- the number lines

// The whole format on one line: each binade has the same width, zero is in the middle.
class Overview {
  constructor(table, width) {
    const { fmt } = table;
    this.width = width;
    this.signed = fmt.signed;
    this.largest = decodeFields(fmt, splitFields(fmt, largestFiniteCode(fmt)));
    this.smallest = decodeFields(fmt, splitFields(fmt, fmt.subnormals ? 1 : 0));
    this.hasZero = fmt.subnormals;
    this.fixed = svg("g", {});
    this.fixed.append(svg("line", { class: "lplab-axis", x1: MARGIN, x2: width - MARGIN, y1: 26, y2: 26 }));
    this.addTicks(table);
    this.addLabels(fmt);
  }

  x(value) {
    const binades = Math.log2(this.largest / this.smallest) + 1;
    const size = Math.abs(value);
    const away = size === 0 ? 0 : Math.min(1.03, Math.max(0.3, Math.log2(size / this.smallest) + 1) / binades);
    const span = this.width - 2 * MARGIN;
    if (!this.signed) return MARGIN + span * away;
    return MARGIN + (span / 2) * (1 + (value < 0 ? -away : away));
  }

  addTicks(table) {
    const { fmt } = table;
    // Every value if there is room for its tick, else a tick for each binade, or for each 2, 4, 8 ... binades.
    const binade = (this.width - 2 * MARGIN) / (Math.log2(this.largest / this.smallest) + 1) / (fmt.signed ? 2 : 1);
    const everyValue = fmt.width <= 8 && binade / 2 ** fmt.mantissa_bits > 2;
    const stride = everyValue ? 1 : 2 ** (fmt.mantissa_bits + Math.max(0, Math.ceil(Math.log2(4 / binade))));
    const path = { normal: "", subnormal: "" };
    for (let code = 0; code <= largestFiniteCode(fmt); code += stride) {
      const fields = splitFields(fmt, code);
      const value = decodeFields(fmt, fields);
      const kind = classifyFields(fmt, fields) === SUBNORMAL ? "subnormal" : "normal";
      const height = fields.mantissa === 0 && everyValue ? 7 : 4;
      for (const x of new Set(fmt.signed ? [this.x(value), this.x(-value)] : [this.x(value)])) {
        path[kind] += `M${x.toFixed(1)} ${26 - height}V26`;
      }
    }
    for (const [kind, d] of Object.entries(path)) if (d) this.fixed.append(svg("path", { class: `lplab-tick lplab-${kind}`, d }));
  }

  addLabels(fmt) {
    const minNormal = 2 ** (+fmt.subnormals - fmt.bias);
    const largest = short(this.largest, this.largest < 1e6 ? 6 : 3);
    const labels = [[this.largest, largest, "end"]];
    if (fmt.signed) labels.push([-this.largest, `−${largest}`, "start"]);
    if (this.hasZero) labels.push([0, "0", "middle"]);
    if (fmt.signed && this.hasZero && minNormal > this.smallest && this.x(minNormal) - this.x(0) > 40) {
      labels.push([minNormal, `2${superscript(Math.log2(minNormal))}`, "middle"]);
      labels.push([-minNormal, `−2${superscript(Math.log2(minNormal))}`, "middle"]);
    } else if (!this.hasZero) {
      labels.push([this.smallest, `2${superscript(Math.log2(this.smallest))}`, "start"], [1, "1", "middle"]);
    }
    for (const [value, text, anchor] of labels) {
      const end = anchor === "end" ? 14 : anchor === "start" ? -14 : 0;
      this.fixed.append(svg("text", { class: "lplab-tick-label", x: this.x(value) + end, y: 41, "text-anchor": anchor }, text));
    }
  }

  // Returns where the value is on the line.
  drawInto(picture, value, real) {
    picture.append(this.fixed);
    if (Number.isNaN(value)) {
      picture.append(svg("text", { class: "lplab-tick-label", x: this.width / 2, y: 84, "text-anchor": "middle" }, "NaN is not on the number line"));
      return null;
    }
    const x = Number.isFinite(value) ? this.x(value) : value < 0 ? MARGIN - 12 : this.width - MARGIN + 12;
    const wanted = toNumber(real);
    if (Number.isFinite(wanted) && Math.abs(this.x(wanted) - x) > 8) {
      picture.append(svg("path", { class: "lplab-wanted", d: diamond(this.x(wanted), 12) }));
    }
    picture.append(svg("path", { class: "lplab-here", d: `M${x} 24l-5.5 -11h11z` }));
    return x;
  }
}

// The neighbourhood of the value, to scale: the values around it, the real number, and what else rounds to it.
function drawZoom(picture, panel, width, at) {
  const { table, code, value } = panel;
  const around = [code];
  for (let n = 0; n < 4; n += 1) {
    const below = around[0] === null ? null : table.neighbour(around[0], -1);
    if (below !== null) around.unshift(below);
    const above = table.neighbour(around[around.length - 1], 1);
    if (above !== null) around.push(above);
  }
  const values = around.map((each) => table.value(each));
  const step = spacing(panel.fmt, code);
  const low = Math.min(values[0], value - 2 * step);
  const high = Math.max(values[values.length - 1], value + 2 * step);
  const span = width - 2 * MARGIN;
  const x = (v) => MARGIN + 14 + ((v - low) / (high - low)) * (span - 28);
  const top = 112;
  const hub = Math.min(Math.max(at, MARGIN), width - MARGIN);
  picture.append(svg("path", { class: "lplab-funnel", d: `M${hub - 3} 46L${MARGIN} 70H${width - MARGIN}L${hub + 3} 46z` }));
  drawBin(picture, panel, x, top, low, high);
  picture.append(svg("line", { class: "lplab-axis", x1: MARGIN, x2: width - MARGIN, y1: top, y2: top }));
  const labels = [];
  values.forEach((v, index) => {
    const here = around[index] === code;
    picture.append(svg("line", { class: here ? "lplab-tick lplab-here-tick" : "lplab-tick", x1: x(v), x2: x(v), y1: top - (here ? 14 : 8), y2: top }));
    labels.push({ x: x(v), text: short(v, 7), rank: here ? 0 : Math.abs(index - around.indexOf(code)), here });
  });
  picture.append(svg("circle", { class: "lplab-here", cx: x(value), cy: top, r: 4.5 }));
  drawLabels(picture, labels, top + 18, width);
  drawWanted(picture, panel, { x, top, low, high, width });
}

// The real numbers that round to this value under the chosen mode.
function drawBin(picture, panel, x, top, low, high) {
  const { table, code, value, state } = panel;
  const [below, above] = [-1, 1].map((direction) => {
    const neighbour = table.neighbour(code, direction);
    return neighbour === null ? value + direction * spacing(panel.fmt, code) : table.value(neighbour);
  });
  let [from, to] = [(below + value) / 2, (value + above) / 2];
  const inwards = state.mode === "toward_zero";
  if (state.mode === "down" || (inwards && value > 0)) [from, to] = [value, above];
  else if (state.mode === "up" || (inwards && value < 0)) [from, to] = [below, value];
  else if (inwards) [from, to] = [below, above];
  // The ends take all that lies beyond them: by saturation, or because the format has no zero.
  const saturates = state.overflow === "saturate" || panel.fmt.specials === "finite";
  if (table.neighbour(code, 1) === null && (saturates || inwards || state.mode === "down")) to = high;
  if (table.neighbour(code, -1) === null) {
    if (!panel.fmt.signed) from = 0;
    else if (saturates || inwards || state.mode === "up") from = low;
  }
  [from, to] = [Math.max(from, low), Math.min(to, high)];
  picture.append(svg("rect", { class: "lplab-bin", x: x(from), y: top - 22, width: Math.max(0, x(to) - x(from)), height: 22 }));
}

function drawWanted(picture, panel, { x, top, low, high, width }) {
  const wanted = toNumber(panel.real);
  if (Number.isNaN(wanted)) return;
  const outside = wanted < low || wanted > high;
  const place = outside ? (wanted < low ? MARGIN + 4 : width - MARGIN - 4) : x(wanted);
  if (wanted === panel.value) return;
  const text = (outside && wanted < low ? "← " : "") + clipped(panel.state.text) + (outside && wanted > high ? " →" : "");
  const half = text.length * 3.6;
  const label = Math.min(Math.max(place, half + 4), width - half - 4);
  picture.append(svg("line", { class: "lplab-wanted-line", x1: place, x2: place, y1: top - 25, y2: top }));
  picture.append(svg("path", { class: "lplab-wanted", d: diamond(place, top - 25) }));
  picture.append(svg("text", { class: "lplab-wanted-label", x: label, y: top - 34, "text-anchor": "middle" }, text));
}

// ------------------------------------------------------------------------------------------------------ the explorer

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lplab-${(serial += 1)}`;
    this.root = element("div", { class: "lplab", role: "group", "aria-label": "Bit explorer" });
    this.panelBox = element("div", { class: "lplab-panels" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.root.append(this.controls(), this.panelBox, this.status);
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
      inputmode: "text",
      autocomplete: "off",
      spellcheck: "false",
      maxlength: "400",
      "aria-describedby": `${this.id}-hint`,
    });
    this.input.addEventListener("input", () => this.read());
    this.mode = this.choice("mode", MODES);
    this.overflow = this.choice("overflow", POLICIES);
    this.hint = element("p", { id: `${this.id}-hint`, class: "lplab-hint" });
    const labelled = (label, node) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node);
    return element(
      "div",
      { class: "lplab-controls" },
      labelled("Real number", this.input),
      labelled("Rounding", this.mode),
      labelled("Overflow", this.overflow),
      this.hint,
    );
  }

  choice(key, options) {
    const select = element("select", { id: `${this.id}-${key}`, class: "lplab-select" });
    for (const [value, label] of options) select.append(element("option", { value }, label));
    select.addEventListener("change", () => this.round({ [key]: select.value }));
    return select;
  }

  build() {
    const panels = this.model.get("_panels");
    this.panels = panels.map((panel, index) => new Panel(this, index, panel, panels.length > 1));
    this.panelBox.dataset.count = panels.length;
    this.panelBox.replaceChildren(...this.panels.map((panel) => panel.node));
    this.draw();
  }

  // A typed number: rounded at every keystroke that leaves something readable.
  read() {
    const readable = parseReal(this.input.value) !== null;
    this.input.setAttribute("aria-invalid", readable ? "false" : "true");
    this.showHint(readable);
    if (readable) this.round({ text: this.input.value });
  }

  showHint(readable) {
    this.hint.textContent = readable
      ? "a decimal, a fraction like 1/3, a power like 2^-9, inf or nan"
      : "This is not a number that can be read: write 0.1, 1e-3, 1/3, 3*2^-9, inf or nan (exponents up to 5000).";
    this.hint.dataset.problem = readable ? "no" : "yes";
  }

  round(change) {
    const state = { ...this.state, ...change };
    this.save(state, this.roundEach(parseReal(state.text) ?? { kind: "nan" }, state));
  }

  // A chosen code: the other formats round its value.
  chooseCode(index, code) {
    const value = this.panels[index].table.value(code);
    const state = { ...this.state, text: exactText(value) };
    const rounded = this.roundEach(fromFloat64(value), state);
    rounded[index] = { code, problem: "" };
    this.save(state, rounded);
  }

  roundEach(real, { mode, overflow }) {
    return this.panels.map((panel) => roundReal(real, panel.table, mode, overflow));
  }

  save(state, rounded) {
    const codes = rounded.map(({ code }) => code);
    this.model.set("_state", { ...state, codes, problems: rounded.map(({ problem }) => problem) });
    this.model.save_changes();
  }

  draw() {
    const { state } = this;
    if (this.input.value !== state.text) this.input.value = state.text;
    this.input.setAttribute("aria-invalid", "false");
    this.showHint(true);
    this.mode.value = state.mode;
    this.overflow.value = state.overflow;
    for (const panel of this.panels) panel.draw(state);
    this.status.textContent = this.panels
      .map((panel) => `${panel.fmt.name}: ${hex(panel.code, panel.fmt)}, ${short(panel.value, 9)}, ${CLASSES[panel.kind]?.name ?? ""}`)
      .join("; ");
  }

  // Number lines are drawn to the width that they have, so their text keeps its size.
  resize() {
    for (const panel of this.panels) if (panel.state && panel.lineNode.clientWidth) panel.drawLine();
  }
}

export default { render: (context) => mount(context, Explorer) };
