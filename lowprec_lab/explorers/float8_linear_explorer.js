// Float8LinearExplorer in the browser: three products of matrices, each operand with its scales beside it.
//
// shared.js comes first. The kernel has worked out every choice. The model:
//   _panels  for each recipe: its name, and for each power of the outlier (0, 2, ...) the three products
//   _state   {recipe, log2_outlier}

const STEP = 2;
const LABELS = {
  tensorwise: "tensorwise",
  rowwise: "rowwise",
  rowwise_with_gw_hp: "rowwise, grad_weight in high precision",
  tensorwise_e4m3: "tensorwise, but E4M3 for gradients",
};
const percent = (share) => `${(100 * share).toFixed(2)} %`;

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpfp8-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpfp8", role: "group", "aria-label": "FP8 linear layer explorer" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.sentenceNode = element("p", { class: "lpfp8-sentence" });
    this.productsNode = element("div", {});
    this.root.append(this.controls(), element("div", { class: "lpfp8-body" }, this.sentenceNode, this.productsNode), this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    this.recipe = element("select", { id: `${this.id}-recipe`, class: "lplab-select" });
    this.recipe.addEventListener("change", () => this.save({ recipe: this.recipe.value }));
    this.slider = element("input", { id: `${this.id}-outlier`, class: "lpfp8-slider", type: "range", min: "0", step: String(STEP), "data-lm-suppress-shortcuts": "true" });
    this.slider.addEventListener("input", () => this.save({ log2_outlier: Number(this.slider.value) }));
    this.outlierNode = element("output", { for: this.slider.id, class: "lpfp8-outlier" });
    const control = (label, node, ...more) => element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node, ...more);
    return element("div", { class: "lplab-controls" }, control("Recipe", this.recipe), control("One token's gradient, times", this.slider, this.outlierNode));
  }

  build() {
    const panels = this.model.get("_panels");
    this.panels = Object.fromEntries(panels.map((panel) => [panel.name, panel]));
    this.recipe.replaceChildren(...panels.map(({ name }) => element("option", { value: name }, LABELS[name] ?? name)));
    this.slider.max = String(STEP * (panels[0].steps.length - 1));
    this.draw();
  }

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  draw() {
    const { recipe, log2_outlier: power } = this.state;
    const products = this.panels[recipe].steps[power / STEP];
    this.recipe.value = recipe;
    this.slider.value = String(power);
    this.outlierNode.textContent = power ? `2${superscript(power)}` : "1";
    const spoken = products.map(({ name, error }) => `${name} ${percent(error)} off`).join(", ");
    this.slider.setAttribute("aria-valuetext", `2 to the power of ${power}: ${spoken}`);
    this.sentenceNode.textContent = this.sentence(products);
    this.productsNode.replaceChildren(...products.map((product) => this.product(product)));
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = spoken), 400);
  }

  sentence(products) {
    const worst = products.reduce((a, b) => (b.error > a.error ? b : a));
    const lost = products.flatMap(({ operands }) => operands).reduce((a, b) => (b.lost > a.lost ? b : a));
    if (lost.lost > 0.2) return `${percent(lost.lost)} of ${lost.name} become zero beside one large gradient: they share its scale.`;
    return `${worst.name} is furthest off: a typical row by ${percent(worst.error)}.`;
  }

  product({ name, error, operands }) {
    const cells = operands.map(({ name: own, shape, text, lost }) =>
      element(
        "div",
        { class: "lpfp8-operand" },
        element("p", { class: "lpfp8-name" }, `${own}  ${shape[0]} × ${shape[1]}`),
        element("p", {}, text),
        element("p", { class: "lpfp8-lost", "data-many": lost > 0.05 ? "yes" : "no" }, `${percent(lost)} become 0`),
      ),
    );
    const off = element("dl", { class: "lplab-numbers lpfp8-error" }, element("dt", {}, name), element("dd", {}, percent(error)), element("dt", {}, "off, a typical row"));
    return element("div", { class: "lpfp8-product" }, this.picture(name, operands), ...cells, off);
  }

  picture(name, operands) {
    const said = operands.map((each) => `${each.name}: ${each.text}`).join("; ");
    const picture = svg("svg", { viewBox: "0 0 210 76", width: 210, height: 76, role: "img", "aria-label": `${name}. ${said}` });
    const sides = operands.map(({ shape }) => shape.map((length) => 18 + 4.5 * Math.log2(Math.max(length, 1))));
    let left = 12;
    operands.forEach((operand, place) => {
      const [height, width] = sides[place];
      const top = 41 - height / 2;
      const plain = operand.scales.length ? "" : "-plain";
      picture.append(svg("rect", { class: `lpfp8-matrix${plain}`, x: left, y: top, width, height }));
      this.scales(picture, operand, { left, top, width, height });
      left += width + 11;
      if (!place) picture.append(svg("text", { class: "lpfp8-sign", x: left, y: 46, "text-anchor": "middle" }, "×"));
      left += 17;
    });
    return picture;
  }

  scales(picture, { scales, along }, { left, top, width, height }) {
    if (along === "tensor") picture.append(svg("rect", { class: "lpfp8-scale", x: left - 8, y: top - 8, width: 6, height: 6 }));
    if (along !== "row" && along !== "column") return;
    const [least, most] = [Math.min(...scales), Math.max(...scales)];
    scales.forEach((scale, place) => {
      const opacity = 0.25 + (0.75 * (scale - least)) / Math.max(most - least, 1e-9);
      const from = place / scales.length;
      const box =
        along === "row"
          ? { x: left - 8, y: top + height * from, width: 6, height: (0.85 * height) / scales.length }
          : { x: left + width * from, y: top - 8, width: (0.85 * width) / scales.length, height: 6 };
      picture.append(svg("rect", { class: "lpfp8-scale", opacity, ...box }));
    });
  }

  resize() {}
}

export default { render: (context) => mount(context, Explorer) };
