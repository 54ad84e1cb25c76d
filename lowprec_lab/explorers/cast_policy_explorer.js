// CastPolicyExplorer in the browser: the ops of one forward pass, and of the chosen one what is cast and why.
//
// shared.js comes first. The kernel has run the passes; nothing is worked out here. The model:
//   _panels  [{passes: {table: [rows, rows of the second pass]}, sources, tables, policies, own}]
//   _state   {table, op, again, own}

const SHORT = { cpu: "CPU", cuda: "CUDA", none: "none", own: "yours" };
const OTHER = { cpu: "cuda", cuda: "cpu", own: "cpu" };
const THICK = { FP32: 5, BF16: 2.5 };
const STREAM = 12;
const BRANCH = 30;
const LAST = "head and loss";

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpcast-${(serial += 1)}`;
    this.root = element("div", { class: "lplab lpcast", role: "group", "aria-label": "Cast policy explorer" });
    this.status = element("p", { class: "lplab-spoken", role: "status" });
    this.list = element("div", { class: "lpcast-list", role: "listbox", "aria-label": "Ops of the forward pass", "data-lm-suppress-shortcuts": "true" });
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.list.addEventListener("click", (event) => this.choose(event.target.closest(".lpcast-row")));
    this.caption = element("figcaption", { class: "lpcast-caption" });
    this.way = svg("svg", { class: "lpcast-way", "aria-hidden": "true" });
    const ops = element("figure", { class: "lpcast-ops" }, this.heads(), element("div", { class: "lpcast-scene" }, this.way, this.list), this.caption);
    this.detail = element("section", { class: "lpcast-detail", "aria-label": "The chosen op" });
    this.counts = element("dl", { class: "lplab-numbers lpcast-counts" });
    this.badges = element("div", { class: "lpcast-badges" });
    const top = element("div", { class: "lpcast-top" }, this.counts, this.badges);
    this.root.append(this.controls(), element("div", { class: "lpcast-body" }, top, ops, this.detail), this.status);
    root.append(this.root);
    keepKeys(this.root);
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    const choice = (name, label, read) => {
      const node = element("select", { id: `${this.id}-${name}`, class: "lplab-select" });
      node.addEventListener("change", () => this.save({ [name]: read(node.value) }));
      return [node, element("div", { class: "lplab-control" }, element("label", { for: node.id }, label), node)];
    };
    const [table, tableControl] = choice("table", "Table", (value) => value);
    const [again, againControl] = choice("again", "Forward pass", (value) => value === "true");
    again.append(element("option", { value: "false" }, "the first in the block"), element("option", { value: "true" }, "the second, in the same block"));
    this.fields = { table, again };
    this.hint = element("p", { class: "lplab-hint" });
    return element("div", { class: "lplab-controls" }, tableControl, againControl, this.hint);
  }

  heads() {
    const names = ["op", "goes in", "policy", "out"];
    return element("div", { class: "lpcast-row lpcast-heads", "aria-hidden": "true" }, ...names.map((name) => element("span", {}, name)));
  }

  build() {
    const [panel] = this.model.get("_panels");
    this.panel = panel;
    this.fields.table.replaceChildren(...panel.tables.map(([value, label]) => element("option", { value }, label)));
    this.badges.replaceChildren(
      ...panel.sources.map(({ origin, line, note }) => {
        const badge = element("p", { class: "lplab-badge", "data-origin": origin }, line);
        if (note) badge.append(element("span", { class: "lplab-note" }, note));
        return badge;
      }),
    );
    this.listed = null;
    this.draw();
  }

  // -------------------------------------------------------------------------------------------------- what is changed

  save(change) {
    this.model.set("_state", { ...this.state, ...change });
    this.model.save_changes();
  }

  choose(row) {
    if (!row) return;
    row.focus();
    if (row.dataset.key !== this.state.op) this.save({ op: row.dataset.key });
  }

  move(event) {
    const items = [...this.list.querySelectorAll(".lpcast-row")];
    const to = moveFocus(items, items.indexOf(event.target.closest(".lpcast-row")), event.key);
    if (to === undefined) return;
    event.preventDefault();
    this.choose(to);
  }

  // What the CPU's table says too is no change.
  setPolicy(op, policy) {
    const own = { ...this.state.own };
    if (policy === this.policyOn("cpu", op)) delete own[op];
    else own[op] = policy;
    this.save({ own });
  }

  policyOn(table, op) {
    return this.panel.passes[table][0].find((row) => row.op === op)?.policy ?? "as is";
  }

  // ---------------------------------------------------------------------------------------------------------- drawing

  draw() {
    const { state, panel } = this;
    const held = this.focused();
    const isStale = state.table === "own" && JSON.stringify(state.own) !== JSON.stringify(panel.own);
    this.root.dataset.busy = isStale; // the kernel is at work, or is gone
    this.root.setAttribute("aria-busy", isStale);
    this.fields.table.value = state.table;
    this.fields.again.value = String(state.again);
    this.hint.textContent = this.hintFor(state.table);
    this.rows = panel.passes[state.table][Number(state.again)];
    this.row = this.find(this.rows, state.op) ?? this.rows.at(-1);
    const listed = `${state.table} ${state.again}`;
    if (this.listed !== listed) {
      this.listed = listed;
      this.drawCounts();
      this.drawList();
    }
    this.mark();
    this.drawDetail();
    if (held && !held.isConnected) this.root.querySelector(`#${held.id || `${this.id}-policy`}`)?.focus({ preventScroll: true });
    clearTimeout(this.announcing);
    this.announcing = setTimeout(() => (this.status.textContent = this.spoken(this.row)), 400);
  }

  // What has the focus here: it may be drawn anew, and must not lose it.
  focused() {
    const { activeElement } = this.root.getRootNode();
    return this.root.contains(activeElement) ? activeElement : null;
  }

  // The row of a key; the loss is one op or two, as the table has it.
  find(rows, key) {
    const same = { loss: "log_softmax", log_softmax: "loss", nll_loss: "loss" }[key];
    return rows.find((row) => row.key === key) ?? rows.find((row) => row.key === same);
  }

  hintFor(table) {
    if (table === "own") return "It begins as the CPU's table. Pick an op and give it another policy; the pass runs again in the kernel.";
    if (table === "none") return "Nothing is cast: the weights are float32, and so is everything else.";
    return "Pick an op, with the mouse or the arrow keys.";
  }

  drawCounts() {
    const args = this.rows.flatMap((row) => row.args);
    const casts = (weight) => args.filter((arg) => arg.how === "cast" && arg.weight === weight).length;
    const stream = [...new Set(this.rows.filter((row) => row.op === "add" && row.out).map((row) => row.out))];
    const facts = [
      ["casts of activations", casts(false)],
      ["casts of weights", casts(true)],
      ["kept casts used", args.filter((arg) => arg.how === "kept").length],
      ["residual stream", stream.join(", then ") || "not reached"],
    ];
    this.counts.replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
    const isWhole = !this.rows.at(-1).error;
    const steady = stream.length ? `is ${stream[0]} ${isWhole ? "from end to end" : "as far as it gets"}` : "is not reached";
    const between = stream.length > 1 ? `changes from ${stream.join(" to ")}` : steady;
    const sentences = [
      ...(isWhole ? [] : ["The pass does not get to the end."]),
      `On the left the way of the data: thick in FP32, thin in BF16. The residual stream, the outer line, ${between}.`,
      "W: a weight.",
    ];
    const other = OTHER[this.state.table] === "cuda" ? "CUDA's table" : "the CPU's";
    const legend = element("span", { class: "lpcast-legend" }, ` ≠: another policy than in ${other}.`);
    this.caption.replaceChildren(sentences.join(" "), ...(this.rows.some((row) => this.isOther(row)) ? [legend] : []));
  }

  drawList() {
    const groups = [];
    for (const row of this.rows) {
      let group = groups.at(-1);
      if (group?.part !== row.part) {
        const id = `${this.id}-${row.part.replaceAll(" ", "-")}`;
        const name = element("div", { id, class: "lpcast-part", role: "presentation" }, row.part);
        group = { part: row.part, node: element("div", { role: "group", "aria-labelledby": id }, name) };
        groups.push(group);
      }
      group.node.append(this.option(row));
    }
    this.list.replaceChildren(...groups.map((group) => group.node));
    this.drawWay();
  }

  option(row) {
    const name = element("span", { class: "lpcast-name" }, element("span", { class: "lplab-code lpcast-op" }, row.op), " ", element("span", { class: "lpcast-words" }, row.words));
    const args = element("span", { class: "lpcast-args" }, ...row.args.map((arg) => this.chips(arg)));
    const policy = element("span", { class: "lpcast-policy", "data-policy": row.policy }, this.state.table === "none" ? "–" : row.policy);
    if (this.isOther(row)) policy.append(element("span", { class: "lpcast-elsewhere" }, "≠"));
    const out = element("span", {}, row.out ? chip(row.out) : element("span", { class: "lpcast-refused" }, "refused"));
    return element("div", { class: "lpcast-row", role: "option", id: `${this.id}-${row.key}`, "data-key": row.key, "aria-label": this.spoken(row), tabindex: "-1" }, name, args, policy, out);
  }

  // Whether the table that this one is compared with says something else of an op.
  isOther(row) {
    const other = OTHER[this.state.table];
    return Boolean(other) && this.panel.passes[other][0].find((each) => each.key === row.key)?.policy !== row.policy;
  }

  chips(arg) {
    const weight = arg.weight ? [element("span", { class: "lpcast-weight" }, "W")] : [];
    if (arg.how === "as it is") return element("span", { class: "lpcast-arg" }, ...weight, chip(arg.was));
    const from = arg.how === "kept" ? element("span", { class: "lpcast-chip lpcast-kept" }, "kept") : chip(arg.was);
    return element("span", { class: "lpcast-arg" }, ...weight, element("span", { class: "lpcast-joined" }, from, chip(arg.is)));
  }

  mark() {
    const options = [...this.list.querySelectorAll(".lpcast-row")];
    const chosen = options.find((option) => option.dataset.key === this.row.key);
    for (const option of options) option.setAttribute("aria-selected", option === chosen);
    makeTabStop(options, chosen);
  }

  // The residual stream and what leaves it and comes back, drawn beside the rows where these stand.
  drawWay() {
    this.width = this.list.clientWidth;
    const nodes = [...this.list.querySelectorAll(".lpcast-row")];
    const middle = nodes.map((node) => node.offsetTop + node.offsetHeight / 2);
    const isOuter = (row) => row.op === "add" || row.part === LAST;
    const parts = [];
    let last = null;
    // Pieces of one dtype that follow each other are one path: no seams.
    const line = (start, rest, dtype, goesOn = false) => {
      if (goesOn && last?.dtype === dtype) {
        last.d += rest;
        last.path.setAttribute("d", last.d);
        return;
      }
      const d = start + rest;
      last = { dtype, d, path: svg("path", { class: `lpcast-line lpcast-line-${dtype}`, d, "stroke-width": THICK[dtype] ?? 1.5 }) };
      parts.push(last.path);
    };
    this.rows.forEach((row, k) => {
      if (!this.rows[k + 1]) return;
      const [from, to] = [row, this.rows[k + 1]].map((each) => (isOuter(each) ? STREAM : BRANCH));
      const half = (middle[k] + middle[k + 1]) / 2;
      line(`M${from} ${middle[k]}`, `C${from} ${half} ${to} ${half} ${to} ${middle[k + 1]}`, row.out, true);
    });
    const adds = this.rows.map((row, k) => [row, middle[k]]).filter(([row]) => row.op === "add");
    adds.slice(1).forEach(([, y], k) => line(`M${STREAM} ${adds[k][1]}`, `V${y}`, adds[k][0].out, k > 0));
    for (const [, y] of adds) {
      parts.push(svg("circle", { class: "lpcast-add", cx: STREAM, cy: y, r: 8 }), svg("path", { class: "lpcast-plus", d: `M${STREAM - 4} ${y}h8M${STREAM} ${y - 4}v8` }));
    }
    if (this.rows.at(-1).error) {
      const [x, y] = [isOuter(this.rows.at(-1)) ? STREAM : BRANCH, middle.at(-1)];
      parts.push(svg("path", { class: "lpcast-stop", d: `M${x - 5} ${y - 5}l10 10M${x + 5} ${y - 5}l-10 10` }));
    }
    this.way.replaceChildren(...parts);
    this.way.setAttribute("height", this.list.offsetHeight);
  }

  drawDetail() {
    const { row, state } = this;
    const title = element("p", { class: "lpcast-title" }, element("span", { class: "lplab-code" }, row.op), " ", element("span", { class: "lplab-layout" }, row.words));
    const items = row.args.map((arg) => element("li", {}, element("span", { class: "lpcast-argument" }, arg.name), ...this.happens(arg)));
    items.push(element("li", {}, element("span", { class: "lpcast-argument" }, "comes out"), row.out ? chip(row.out) : element("span", { class: "lpcast-refused" }, "nothing: refused")));
    const parts = [title, element("p", { class: "lpcast-why" }, row.why), element("ul", { class: "lpcast-casts" }, ...items)];
    const more = [...(state.table === "own" ? [this.ownPolicy()] : []), this.comparison()];
    this.detail.replaceChildren(element("div", {}, ...parts), element("div", {}, ...more));
  }

  happens(arg) {
    if (arg.how === "as it is") return [chip(arg.was)];
    const words = arg.how === "kept" ? "the kept cast is used" : arg.stays ? "cast, kept" : "cast";
    return [chip(arg.was), element("span", { class: "lpcast-arrow" }, "→"), chip(arg.is), element("span", { class: "lplab-aside" }, words)];
  }

  // The same op under the other tables.
  comparison() {
    const tables = ["cpu", "cuda", "none", ...(this.state.table === "own" ? ["own"] : [])];
    const cells = (table) => {
      const row = this.panel.passes[table][0].find((each) => each.key === this.row.key);
      if (!row) return [element("td", { colspan: "3" }, { loss: "its parts one by one", log_softmax: "inside one op", nll_loss: "inside one op" }[this.row.key] ?? "not reached")];
      const ins = row.args.filter((arg) => arg.was in THICK).map((arg) => chip(arg.is));
      return [element("td", {}, table === "none" ? "–" : row.policy), element("td", {}, ...ins), element("td", {}, row.out ? chip(row.out) : "refused")];
    };
    const head = ["table", "policy", "reaches it", "out"].map((name) => element("th", { scope: "col" }, name));
    const rows = tables.map((table) => element("tr", table === this.state.table ? { class: "lpcast-current" } : {}, element("th", { scope: "row" }, SHORT[table]), ...cells(table)));
    return element("table", { class: "lpcast-table", "aria-label": `${this.row.op} under each table` }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }

  ownPolicy() {
    const { row, state, panel } = this;
    const select = element("select", { id: `${this.id}-policy`, class: "lplab-select" });
    select.append(...panel.policies.map((policy) => element("option", { value: policy }, policy)));
    select.value = state.own[row.op] ?? this.policyOn("cpu", row.op);
    select.addEventListener("change", () => this.setPolicy(row.op, select.value));
    const changes = Object.entries(state.own).map(([op, policy]) => {
      const button = element("button", { type: "button", class: "lplab-step", "aria-label": `Take back ${op}: ${policy}` }, `${op}: ${policy} ✕`);
      button.addEventListener("click", () => this.setPolicy(op, this.policyOn("cpu", op)));
      return button;
    });
    const taken = changes.length ? [element("p", { class: "lplab-caption" }, "Your changes"), element("div", { class: "lpcast-changes" }, ...changes)] : [];
    return element("div", { class: "lplab-control lpcast-own" }, element("label", { for: select.id }, `Policy of ${row.op} in your table`), select, ...taken);
  }

  resize() {
    if (this.list.clientWidth && this.list.clientWidth !== this.width) this.drawWay();
  }

  stop() {
    clearTimeout(this.announcing);
  }

  // ------------------------------------------------------------------------------------------------------------- words

  spoken(row) {
    const arg = ({ name, was, is, how }) => `${name} ${was}${how === "as it is" ? "" : how === "kept" ? `, kept as ${is}` : `, cast to ${is}`}`;
    const policy = this.state.table === "none" ? "no autocast" : row.policy;
    return `${row.op}, ${row.words}. ${policy}. ${row.args.map(arg).join("; ")}. ${row.out ? `${row.out} comes out` : "The op refuses these dtypes"}.`;
  }
}

function chip(dtype) {
  return element("span", { class: `lpcast-chip lpcast-${dtype in THICK ? dtype : "other"}` }, dtype);
}

export default { render: (context) => mount(context, Explorer) };
