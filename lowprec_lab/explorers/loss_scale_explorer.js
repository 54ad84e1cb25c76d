// LossScaleExplorer in the browser: a hill of gradients that the loss scale moves along the range of a format.
//
// shared.js comes first. The kernel has counted what becomes of the gradients at every scale. The model:
//   _panels  for each format: its edges (log2), [exponent, count] of the gradients, outcomes for each scale
//   _state   {fmt, log2_scale}

const HEIGHT = 230;
const AXIS = HEIGHT - 34;
const FROM = -52;
const TO = 24;
const KINDS = [
  ["lost", "rounded to zero"],
  ["subnormal", "subnormal"],
  ["normal", "normal"],
  ["overflow", "too large"],
];

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpscale-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpscale", role: "group", "aria-label": "Loss scale explorer" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.plotNode = element("div", {});
    this.sentenceNode = element("figcaption", { class: "lpscale-sentence" });
    const figure = element("figure", { class: "lplab-line" }, this.plotNode, this.sentenceNode);
    this.root.append(this.controls(), element("div", { class: "lpscale-body" }, this.reading(), figure), this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    this.format = element("select", { id: `${this.id}-fmt`, class: "lplab-select" });
    this.format.addEventListener("change", () => this.save({ fmt: this.format.value }));
    this.slider = element("input", { id: `${this.id}-scale`, class: "lpscale-slider", type: "range", step: "1", "data-lm-suppress-shortcuts": "true" });
    this.slider.addEventListener("input", () => this.save({ log2_scale: Number(this.slider.value) }));
    this.scaleNode = element("output", { for: this.slider.id, class: "lpscale-scale" });
    const control = (label, node, ...more) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node, ...more);
    return element("div", { class: "lplab-controls" }, control("Format", this.format), control("Loss scale", this.slider, this.scaleNode));
  }

  reading() {
    this.shares = {};
    const facts = KINDS.map(([kind, label]) => {
      this.shares[kind] = element("dd", { class: `lpscale-${kind}` });
      return element("div", {}, element("dt", {}, label), this.shares[kind]);
    });
    return element("dl", { class: "lplab-numbers lpscale-reading" }, ...facts);
  }

  build() {
    const panels = this.model.get("_panels");
    this.panels = Object.fromEntries(panels.map((panel) => [panel.name, panel]));
    this.format.replaceChildren(...panels.map(({ name, short: label }) => element("option", { value: name }, label)));
    [this.slider.min, this.slider.max] = panels[0].scales;
    this.draw();
  }

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  draw() {
    const { fmt, log2_scale: exponent } = this.state;
    this.panel = this.panels[fmt];
    this.format.value = fmt;
    this.slider.value = exponent;
    const counts = this.panel.outcomes[exponent - this.panel.scales[0]];
    const total = counts.reduce((a, b) => a + b, 0);
    const share = (count) => `${((100 * count) / total).toFixed(1)} %`;
    KINDS.forEach(([kind], k) => (this.shares[kind].textContent = share(counts[k])));
    this.scaleNode.textContent = `2${superscript(exponent)}`;
    const spoken = `2 to the power of ${exponent}: ${KINDS.map(([, label], k) => `${share(counts[k])} ${label}`).join(", ")}`;
    this.slider.setAttribute("aria-valuetext", spoken);
    this.sentenceNode.textContent = this.sentence(counts, total);
    this.drawPlot(exponent, spoken);
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = spoken), 400);
  }

  sentence([lost, , , overflow], total) {
    const { short: name } = this.panel;
    if (overflow) return `${overflow.toLocaleString("en")} of ${total.toLocaleString("en")} gradients do not fit into ${name}: this step would be skipped, and the scale lowered.`;
    if (lost > total / 2) return `Most gradients are rounded to zero in ${name}. A larger scale brings them back.`;
    if (lost) return `${lost.toLocaleString("en")} gradients are still rounded to zero in ${name}, and none overflows.`;
    return `Every gradient has a place in ${name}.`;
  }

  drawPlot(exponent, spoken) {
    const width = Math.max(280, this.plotNode.clientWidth || this.width || 720);
    this.width = width;
    const x = (at) => MARGIN + ((Math.min(Math.max(at, FROM), TO) - FROM) * (width - 2 * MARGIN)) / (TO - FROM);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": `Gradients and the range of ${this.panel.short}. ${spoken}` });
    const [smallest, normal, largest] = this.panel.edges;
    for (const left of [smallest, normal]) {
      picture.append(svg("rect", { class: "lpscale-range", x: x(left), y: 12, width: Math.max(x(largest) - x(left), 0), height: AXIS - 12 }));
    }
    const highest = Math.max(...this.panel.bins.map(([, count]) => count));
    const bars = (shift, style) => {
      for (const [at, count] of this.panel.bins) {
        const [from, to] = [at + shift, at + shift + 1];
        if (to <= FROM || from >= TO) continue;
        const height = Math.max((count / highest) * (AXIS - 34), 1.5);
        picture.append(svg("rect", { class: style(from), x: x(from) + 0.5, y: AXIS - height, width: Math.max(x(to) - x(from) - 1, 1), height }));
      }
    };
    if (exponent) bars(0, () => "lpscale-before");
    bars(exponent, (from) => `lpscale-bar lpscale-bar-${from < smallest - 1 ? "lost" : from < normal ? "subnormal" : from >= Math.floor(largest) + 1 ? "overflow" : "normal"}`);
    picture.append(svg("line", { class: "lplab-axis", x1: MARGIN, x2: width - MARGIN, y1: AXIS, y2: AXIS }));
    for (let at = -48; at <= TO; at += width < 560 ? 24 : 8) {
      picture.append(svg("text", { class: "lplab-tick-label", x: x(at), y: AXIS + 17, "text-anchor": "middle" }, `2${superscript(at)}`));
    }
    this.plotNode.replaceChildren(picture);
  }

  resize() {
    if (this.plotNode.clientWidth && this.plotNode.clientWidth !== this.width) this.draw();
  }
}

export default { render: (context) => mount(context, Explorer) };
