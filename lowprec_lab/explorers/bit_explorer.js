// BitExplorer in the browser: what the bits of a code mean, and to which code a real number rounds.
//
// Everything that a click changes is computed here, so no click waits for the kernel. Numbers are exact: a typed
// decimal and the values of a format are ratios of BigInts, and only what is marked with "≈" is shortened.
//
// The model has two traits (bit_explorer.py says more):
//   _panels  one object a format: its fields, the table of its values, and whose code made the table
//   _state   {text, codes, problems, mode, overflow}: the real number as it was written, and a code for each format

// ---------------------------------------------------------------------------------------------- exact real numbers
// {kind: "finite", negative, num, den} with BigInts num >= 0 and den > 0; {kind: "inf", negative}; {kind: "nan"}.

const LARGEST_DECIMAL_EXPONENT = 5000; // keeps a typed 1e999999999 from filling the memory

function power(base, exponent) {
  return BigInt(base) ** BigInt(exponent);
}

function finite(negative, num, den) {
  return { kind: "finite", negative, num, den };
}

function timesPower(real, base, exponent) {
  return exponent >= 0
    ? finite(real.negative, real.num * power(base, exponent), real.den)
    : finite(real.negative, real.num, real.den * power(base, -exponent));
}

function decimal(digits, exponent = "0") {
  const [whole, fraction = ""] = digits.split(".");
  const real = finite(false, BigInt(whole + fraction || "0"), 1n);
  return timesPower(real, 10, Number(exponent) - fraction.length);
}

// The exact number that a text means: a decimal, a fraction "1/3", a power "2^-9" or "1.5*2^-9", "inf", "nan"; null
// when it cannot be read.
export function parseReal(text) {
  const compact = text.replace(/[\s_]/g, "").replace(/−/g, "-").replace(/×/g, "*").replace(/\*\*/g, "^").toLowerCase();
  if (/^[+-]?nan$/.test(compact)) return { kind: "nan" };
  if (/^[+-]?(inf|infinity|∞)$/.test(compact)) return { kind: "inf", negative: compact.startsWith("-") };
  const number = String.raw`(\d+\.?\d*|\.\d+)(?:e([+-]?\d+))?`;
  const match =
    compact.match(new RegExp(`^([+-]?)${number}(?:/${number})?$`)) ||
    compact.match(new RegExp(`^([+-]?)(?:${number}\\*)?2\\^([+-]?\\d+)$`));
  if (!match) return null;
  const [, sign, digits = "1", exponent = "0", second, secondExponent = "0"] = match;
  const isPower = compact.includes("^");
  const exponents = [exponent, isPower ? second : secondExponent].map(Number);
  if (exponents.some((e) => Math.abs(e) > LARGEST_DECIMAL_EXPONENT)) return null;
  let real = decimal(digits, exponent);
  if (isPower) real = timesPower(real, 2, Number(second));
  else if (second !== undefined) {
    const divisor = decimal(second, secondExponent);
    if (divisor.num === 0n) return null;
    real = finite(false, real.num * divisor.den, real.den * divisor.num);
  }
  return { ...real, negative: sign === "-" };
}

const scratch = new DataView(new ArrayBuffer(8));

// A float64 as (negative, significand, exponent): value = significand * 2^exponent, significand odd or 0.
function float64Parts(value) {
  scratch.setFloat64(0, value);
  const bits = scratch.getBigUint64(0);
  const field = Number((bits >> 52n) & 0x7ffn);
  let significand = (bits & 0xfffffffffffffn) | (field ? 1n << 52n : 0n);
  let exponent = (field || 1) - 1075;
  while (significand && !(significand & 1n)) {
    significand >>= 1n;
    exponent += 1;
  }
  return { negative: bits >> 63n === 1n, significand, exponent: significand ? exponent : 0 };
}

export function fromFloat64(value) {
  if (Number.isNaN(value)) return { kind: "nan" };
  if (!Number.isFinite(value)) return { kind: "inf", negative: value < 0 };
  const { negative, significand, exponent } = float64Parts(value);
  return timesPower(finite(negative, significand, 1n), 2, exponent);
}

function compareMagnitudes(a, b) {
  const left = a.num * b.den;
  const right = b.num * a.den;
  return left < right ? -1 : left > right ? 1 : 0;
}

function add(a, b) {
  const left = (a.negative ? -a.num : a.num) * b.den;
  const right = (b.negative ? -b.num : b.num) * a.den;
  const sum = left + right;
  return finite(sum < 0n, sum < 0n ? -sum : sum, a.den * b.den);
}

function negated(real) {
  return { ...real, negative: !real.negative };
}

function divide(a, b) {
  return finite(a.negative !== b.negative, a.num * b.den, a.den * b.num);
}

// The float64 next to a real number (within one unit in the last place): for positions and for "≈".
function toNumber(real) {
  if (real.kind === "nan") return NaN;
  if (real.kind === "inf") return real.negative ? -Infinity : Infinity;
  if (real.num === 0n) return real.negative ? -0 : 0;
  const shift = real.den.toString(2).length - real.num.toString(2).length + 64;
  const quotient = shift >= 0 ? (real.num << BigInt(shift)) / real.den : real.num / (real.den << BigInt(-shift));
  const half = Math.trunc(shift / 2); // two steps: 2^-shift alone may be below the smallest float64
  const magnitude = Number(quotient) * 2 ** -half * 2 ** -(shift - half);
  return real.negative ? -magnitude : magnitude;
}

// All digits of a real number whose denominator has no prime but 2 and 5; null for 1/3.
function exactDecimal(real) {
  if (real.kind === "nan") return "NaN";
  if (real.kind === "inf") return real.negative ? "−∞" : "∞";
  let { num, den } = real;
  let places = 0;
  while (den !== 1n) {
    if (num % den === 0n) {
      num /= den;
      den = 1n;
    } else {
      if (places > LARGEST_DECIMAL_EXPONENT) return null;
      if (den % 2n === 0n) [num, den] = [num * 5n, den / 2n];
      else if (den % 5n === 0n) [num, den] = [num * 2n, den / 5n];
      else {
        const common = greatestCommonDivisor(num, den);
        if (common === 1n) return null;
        [num, den] = [num / common, den / common];
        continue;
      }
      places += 1;
    }
  }
  const digits = num.toString().padStart(places + 1, "0");
  const whole = digits.slice(0, digits.length - places);
  const fraction = digits.slice(digits.length - places).replace(/0+$/, "");
  return (real.negative ? "−" : "") + whole + (fraction ? "." + fraction : "");
}

function greatestCommonDivisor(a, b) {
  while (b) [a, b] = [b, a % b];
  return a;
}

// ------------------------------------------------------------------------------------------------------- number text

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function superscript(number) {
  return Array.from(String(number), (character) => SUPERSCRIPT[character]).join("");
}

// Up to `digits` significant digits, without noise: "0.1015625", "3.39e38", "−∞".
function short(value, digits = 7) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  if (value === 0) return Object.is(value, -0) ? "−0" : "0";
  const rounded = Number(value.toPrecision(digits));
  const size = Math.abs(rounded);
  const text = size >= 10 ** digits || size < 1e-4 ? rounded.toExponential() : String(rounded);
  return text.replace("e+", "e").replaceAll("-", "−");
}

// What fits a cell of the table (".0039", "-4.9e-4"); the exact value is in its title and its name.
function cellText(value) {
  const size = Math.abs(value);
  if (size === 0 || !Number.isFinite(value)) return short(value);
  if (size >= 1 && size < 1e5) return short(value, Number.isInteger(value) ? 5 : 3);
  const sign = value < 0 ? "−" : "";
  if (size >= 1e-3 && size < 1) return sign + String(Number(size.toPrecision(size < 1e-2 ? 2 : 3))).replace(/^0/, "");
  return sign + Number(size.toPrecision(2)).toExponential().replace("e+", "e");
}

// "13 × 2⁻⁷": every value of a binary format is a whole number times a power of two.
function wholeTimesPower(value) {
  const { negative, significand, exponent } = float64Parts(value);
  const factor = `${negative ? "−" : ""}${significand}`;
  if (exponent === 0) return factor;
  return significand === 1n ? `${negative ? "−" : ""}2${superscript(exponent)}` : `${factor} × 2${superscript(exponent)}`;
}

// What the input shows for a value: exact, so that reading it back gives the value.
function exactText(value) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value < 0 ? "-inf" : "inf";
  const digits = exactDecimal(fromFloat64(value)).replace("−", "-");
  if (digits.length <= 20) return digits;
  const { negative, significand, exponent } = float64Parts(value);
  return `${negative ? "-" : ""}${significand === 1n ? "" : significand + "*"}2^${exponent}`;
}

function bitName(field, index, fmt) {
  if (field === "sign") return "sign bit, 1 means negative";
  const worth = field === "exponent" ? String(2 ** index) : `1/${2 ** (fmt.mantissa_bits - index)}`;
  return `${field} bit ${index}, worth ${worth}`;
}

function worthLabel(field, index, fmt) {
  if (field === "sign") return "±";
  if (field === "exponent") return index < 8 ? String(2 ** index) : `2${superscript(index)}`;
  const place = fmt.mantissa_bits - index;
  return { 1: "½", 2: "¼", 3: "⅛" }[place] ?? `2${superscript(-place)}`;
}

// ----------------------------------------------------------------------------------------------------------- formats

const ZERO = 0;
const SUBNORMAL = 1;
const NORMAL = 2;
const INF = 3;
const NAN = 4;
const CLASSES = [
  { name: "zero", cue: "○" },
  { name: "subnormal", cue: "◇" },
  { name: "normal", cue: "●" },
  { name: "infinity", cue: "∞" },
  { name: "NaN", cue: "✕" },
];

export function splitFields(fmt, code) {
  const magnitude = 2 ** (fmt.exponent_bits + fmt.mantissa_bits);
  const step = 2 ** fmt.mantissa_bits;
  return {
    sign: Math.floor(code / magnitude),
    exponent: Math.floor((code % magnitude) / step),
    mantissa: code % step,
  };
}

export function classifyFields(fmt, { sign, exponent, mantissa }) {
  const exponentFull = exponent === 2 ** fmt.exponent_bits - 1;
  if (fmt.specials === "ieee" && exponentFull) return mantissa ? NAN : INF;
  if (fmt.specials === "fn" && exponentFull && mantissa === 2 ** fmt.mantissa_bits - 1) return NAN;
  if (fmt.specials === "fnuz" && sign && !exponent && !mantissa) return NAN;
  if (!fmt.subnormals || exponent) return NORMAL;
  return mantissa ? SUBNORMAL : ZERO;
}

// Exact: the mantissa has at most 24 bits, and no exponent of a format leaves float64.
export function decodeFields(fmt, fields) {
  const kind = classifyFields(fmt, fields);
  const sign = fields.sign ? -1 : 1;
  if (kind === NAN) return NaN;
  if (kind === INF) return sign * Infinity;
  const hidden = kind === NORMAL ? 1 : 0;
  const exponent = (kind === NORMAL ? fields.exponent : 1) - fmt.bias;
  return sign * (hidden + fields.mantissa / 2 ** fmt.mantissa_bits) * 2 ** exponent;
}

function signBit(fmt) {
  return fmt.signed ? 2 ** (fmt.exponent_bits + fmt.mantissa_bits) : 0;
}

function largestFiniteCode(fmt) {
  const all = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1;
  if (fmt.specials === "ieee") return all - 2 ** fmt.mantissa_bits;
  return fmt.specials === "fn" ? all - 1 : all;
}

function infinityCode(fmt, negative) {
  return largestFiniteCode(fmt) + 1 + (negative ? signBit(fmt) : 0);
}

function nanCode(fmt, negative) {
  if (fmt.specials === "finite") return null;
  if (fmt.specials === "fnuz") return signBit(fmt);
  const quiet = fmt.specials === "ieee" ? 2 ** (fmt.mantissa_bits - 1) : 0;
  return largestFiniteCode(fmt) + 1 + quiet + (negative ? signBit(fmt) : 0);
}

function hex(code, fmt) {
  return "0x" + code.toString(16).toUpperCase().padStart(Math.ceil(fmt.width / 4), "0");
}

// The values of one format: from the kernel's table (formats up to 16 bits), else from the fields.
export class Values {
  constructor(panel) {
    this.fmt = panel;
    this.values = panel.values ? new Float64Array(bytesOf(panel.values)) : null;
    this.classes = panel.classes ? new Uint8Array(bytesOf(panel.classes)) : null;
    this.order = this.values && this.sortedMagnitudes();
  }

  value(code) {
    return this.values ? this.values[code] : decodeFields(this.fmt, splitFields(this.fmt, code));
  }

  kind(code) {
    return this.classes ? this.classes[code] : classifyFields(this.fmt, splitFields(this.fmt, code));
  }

  // The codes of the finite values with a clear sign bit, by value. That is the order of the codes themselves, unless
  // the table is a learner's and not right yet.
  sortedMagnitudes() {
    const codes = Array.from({ length: largestFiniteCode(this.fmt) + 1 }, (_, code) => code);
    const first = this.values[0] >= 0 && Number.isFinite(this.values[codes.length - 1]);
    const ascending = first && codes.every((code) => code === 0 || this.values[code] > this.values[code - 1]);
    if (ascending) return null;
    const usable = codes.filter((code) => Number.isFinite(this.values[code]) && this.values[code] >= 0);
    return usable.length ? usable.sort((a, b) => this.values[a] - this.values[b]) : null;
  }

  codeAt(position) {
    return this.order ? this.order[position] : position;
  }

  get last() {
    return this.order ? this.order.length - 1 : largestFiniteCode(this.fmt);
  }

  // The next finite value up (direction 1) or down (-1) from a finite one, as a code; null at either end.
  neighbour(code, direction) {
    const sign = signBit(this.fmt);
    const negative = sign > 0 && code >= sign;
    const here = negative ? code - sign : code;
    const position = (this.order ? this.order.indexOf(here) : here) + (negative ? -direction : direction);
    if (position > this.last) return null;
    if (position >= 0) return this.codeAt(position) + (negative && !(position === 0 && direction > 0) ? sign : 0);
    return sign && this.fmt.subnormals ? this.codeAt(1) + (negative ? 0 : sign) : null; // through zero
  }
}

function bytesOf(view) {
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}

// ---------------------------------------------------------------------------------------------------------- rounding

const MODES = [
  ["nearest_even", "nearest, ties to even"],
  ["nearest_away", "nearest, ties away from zero"],
  ["toward_zero", "toward zero"],
  ["up", "up"],
  ["down", "down"],
];
const POLICIES = [
  ["saturate", "saturate"],
  ["to_special", "to infinity or NaN"],
];

// {code, problem}: the code that a real number rounds to, by a search in the table of values, exact throughout.
export function roundReal(real, table, mode, overflow) {
  const { fmt } = table;
  const negative = real.kind !== "nan" && real.negative;
  const largest = table.codeAt(table.last) + (negative ? signBit(fmt) : 0);
  if (real.kind === "nan") {
    const code = nanCode(fmt, false);
    return code === null ? { code: 0, problem: `${fmt.name} has no NaN` } : { code, problem: "" };
  }
  if (negative && !fmt.signed && !(real.kind === "finite" && real.num === 0n)) {
    const code = nanCode(fmt, false);
    return code === null ? { code: 0, problem: `${fmt.name} has no negative numbers` } : { code, problem: "" };
  }
  const position = real.kind === "inf" ? null : roundedPosition(real, table, mode, negative);
  if (position !== null) {
    const magnitude = table.codeAt(position);
    const signless = fmt.specials === "fnuz" && magnitude === 0;
    return { code: magnitude + (negative && !signless ? signBit(fmt) : 0), problem: "" };
  }
  if (overflow === "saturate") return { code: largest, problem: "" };
  if (fmt.specials === "ieee") return { code: infinityCode(fmt, negative), problem: "" };
  const code = nanCode(fmt, negative);
  if (code !== null) return { code, problem: "" };
  return { code: largest, problem: `${fmt.name} has neither infinity nor NaN: it can only saturate` };
}

// Where |real| lands among the magnitudes of the table; null when it overflows.
function roundedPosition(real, table, mode, negative) {
  const outwards = mode === (negative ? "down" : "up");
  const inwards = mode === "toward_zero" || mode === (negative ? "up" : "down");
  const below = positionBelow(real, table);
  if (below < 0) return 0; // a format without zero: nothing is nearer than its smallest value
  const lower = fromFloat64(table.value(table.codeAt(below)));
  if (inwards || compareMagnitudes(real, lower) === 0) return below;
  const above = below === table.last ? null : below + 1;
  if (outwards) return above;
  const upper = above === null ? beyondLargest(table, lower) : fromFloat64(table.value(table.codeAt(above)));
  const twice = finite(false, real.num * 2n, real.den);
  const side = compareMagnitudes(twice, add({ ...lower, negative: false }, { ...upper, negative: false }));
  if (side !== 0) return side < 0 ? below : above;
  // Without mantissa bits the last digit is the hidden 1, odd on both sides: IEEE 754-2019 4.3.1 gives the larger one.
  const even = table.fmt.mantissa_bits > 0 ? table.codeAt(below) % 2 === 0 : lower.num === 0n;
  return mode === "nearest_even" && even ? below : above;
}

function positionBelow(real, table) {
  let low = -1;
  let high = table.last + 1;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (compareMagnitudes(fromFloat64(table.value(table.codeAt(middle))), real) <= 0) low = middle;
    else high = middle;
  }
  return low;
}

// The value that would follow the largest one if the exponent had no end: it decides what still rounds down.
function beyondLargest(table, largest) {
  const { fmt } = table;
  const { exponent } = splitFields(fmt, largestFiniteCode(fmt));
  return add(largest, timesPower(finite(false, 1n, 1n), 2, Math.max(exponent, +fmt.subnormals) - fmt.bias - fmt.mantissa_bits));
}

// The distance between the values of the binade of a code: a power of two, also at either end of the format.
function spacing(fmt, code) {
  const { exponent } = splitFields(fmt, code);
  return 2 ** (Math.max(exponent, +fmt.subnormals) - fmt.bias - fmt.mantissa_bits);
}

// --------------------------------------------------------------------------------------------------------------- DOM

let serial = 0; // ids must be unique in a page that shows several explorers

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

// Colours follow what is really behind the explorer, so they are right in any theme of any notebook.
function isDark(node) {
  for (let at = node; at; at = at.parentElement) {
    const channels = getComputedStyle(at).backgroundColor.match(/[\d.]+/g)?.map(Number) ?? [];
    if (channels.length >= 3 && channels[3] !== 0) {
      return 0.299 * channels[0] + 0.587 * channels[1] + 0.114 * channels[2] < 128;
    }
  }
  return false;
}

function moveFocus(items, from, key, columns = 1) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
  if (key === "Home") return items[columns > 1 ? from - (from % columns) : 0];
  if (key === "End") return items[columns > 1 ? from - (from % columns) + columns - 1 : items.length - 1];
  return step === undefined ? undefined : items[from + step];
}

function makeTabStop(items, chosen) {
  for (const item of items) if (item.tabIndex === 0) item.tabIndex = -1;
  chosen.tabIndex = 0;
}

// ------------------------------------------------------------------------------------------------ one format, drawn

class Panel {
  constructor(explorer, index, panel, several) {
    this.explorer = explorer;
    this.index = index;
    this.table = new Values(panel);
    this.fmt = panel;
    this.id = `lpbits-${(serial += 1)}`;
    this.node = element("section", { class: "lpbits-panel", "aria-labelledby": `${this.id}-name` });
    this.node.style.setProperty("--lpbits-format", panel.color);
    const top = element("div", { class: "lpbits-top" }, this.bits(), this.reading());
    this.node.append(this.header(), top, this.facts(), this.line());
    if (panel.width === 8 && this.table.values) this.node.append(this.grid(!several));
  }

  header() {
    const { fmt } = this;
    const parts = [fmt.signed ? "1 sign" : "no sign", `${fmt.exponent_bits} exponent`, `${fmt.mantissa_bits} mantissa bits`, `bias ${fmt.bias}`];
    const badge = element("p", { class: "lpbits-badge", "data-origin": fmt.origin }, fmt.line);
    if (fmt.note) badge.append(element("span", { class: "lpbits-note" }, fmt.note));
    return element(
      "header",
      { class: "lpbits-header" },
      element("p", { id: `${this.id}-name`, class: "lpbits-name" }, fmt.name), // no heading: its level is the page's to say
      element("p", { class: "lpbits-layout" }, parts.map((part) => part.replaceAll(" ", "\u00a0")).join(" · ")),
      badge,
    );
  }

  bits() {
    const { fmt } = this;
    this.buttons = [];
    const toolbar = element("div", {
      class: "lpbits-bits",
      role: "toolbar",
      "aria-label": `Bits of ${fmt.name}: arrow keys move, space flips`,
      "data-lm-suppress-shortcuts": "true", // JupyterLab would take the arrow keys and the space for itself
    });
    if (fmt.width > 16) toolbar.classList.add("lpbits-many");
    const widths = { sign: +fmt.signed, exponent: fmt.exponent_bits, mantissa: fmt.mantissa_bits };
    for (const [field, count] of Object.entries(widths)) {
      if (!count) continue;
      const row = element("div", { class: "lpbits-row" });
      for (let index = count - 1; index >= 0; index -= 1) row.append(this.bit(field, index));
      const caption = element("span", { class: "lpbits-caption", "aria-hidden": "true" }, field);
      const group = { class: "lpbits-field", "data-field": field, role: "group", "aria-label": field };
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
      { type: "button", class: "lpbits-bit", tabindex: "-1", "aria-label": bitName(field, index, this.fmt) },
      element("span", { class: "lpbits-digit" }),
      element("span", { class: "lpbits-worth", "aria-hidden": "true" }, worthLabel(field, index, this.fmt)),
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
    this.valueNode = element("output", { class: "lpbits-value" });
    this.kindNode = element("span", { class: "lpbits-kind" });
    this.wholeNode = element("span", { class: "lpbits-whole" });
    this.digitsNode = element("p", { class: "lpbits-digits" });
    this.allDigits = element("details", { class: "lpbits-all-digits" }, element("summary", {}, "all digits"), this.digitsNode);
    return element(
      "div",
      { class: "lpbits-reading" },
      element("p", { class: "lpbits-headline" }, this.valueNode, this.kindNode, this.wholeNode),
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
      const button = element("button", { type: "button", class: "lpbits-step" });
      button.addEventListener("click", () => this.explorer.chooseCode(this.index, button.neighbour));
      button.direction = direction;
      return button;
    });
    this.fact.neighbours.append(...this.steps);
    return element("div", { class: "lpbits-facts" }, ...lists);
  }

  line() {
    this.lineNode = element("div", {});
    this.captionNode = element("figcaption", {});
    return element("figure", { class: "lpbits-line" }, this.lineNode, this.captionNode);
  }

  // The 16 x 16 table: the high half of the code picks the row, the low half the column.
  grid(open) {
    const table = element("table", {
      class: "lpbits-table",
      role: "grid",
      "aria-label": `All 256 values of ${this.fmt.name}`,
      "data-lm-suppress-shortcuts": "true",
    });
    const head = element("tr", {}, element("td", { class: "lpbits-corner" }));
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
    const details = element("details", { class: "lpbits-all" }, summary, element("div", { class: "lpbits-scroll" }, table), this.legend());
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
    const list = element("ul", { class: "lpbits-legend" });
    CLASSES.forEach(({ name, cue }, kind) => {
      if (!counts[kind]) return;
      const key = element("span", { class: "lpbits-key", "data-kind": kind, "aria-hidden": "true" }, cue);
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
      element("span", { class: "lpbits-ink", "data-field": field }, bits.toString(2).padStart(width, "0")),
    );
    this.fact.code.replaceChildren(
      element("span", { class: "lpbits-code" }, ...binary.flatMap((node) => [node, " "])),
      element("span", { class: "lpbits-code lpbits-hex" }, hex(code, fmt)),
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
    const ink = (field, content) => element("span", { class: "lpbits-ink", "data-field": field }, String(content));
    const piece = (...content) => element("span", { class: "lpbits-piece" }, ...content); // where a line may break
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
      element("span", { class: "lpbits-formula", "aria-hidden": "true" }, ...shown),
      element("span", { class: "lpbits-spoken" }, spoken),
    ];
    if (kind !== NORMAL) nodes.push(element("span", { class: "lpbits-aside" }, "exponent field 0: no hidden 1, and the exponent that field 1 has"));
    if (!Object.is(exact, this.value)) {
      nodes.push(element("strong", { class: "lpbits-differs" }, `The bits say ${short(exact, 9)}; this decode gives ${short(this.value, 9)}.`));
    }
    return nodes;
  }

  errorText() {
    const problem = this.state.problems[this.index];
    if (problem) return [element("strong", { class: "lpbits-differs" }, problem)];
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
    parts.push(element("span", { class: "lpbits-aside" }, details.join(" · ")));
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
        element("span", { class: "lpbits-spoken" }, `${word}: `),
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

const MARGIN = 26;

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
    this.fixed.append(svg("line", { class: "lpbits-axis", x1: MARGIN, x2: width - MARGIN, y1: 26, y2: 26 }));
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
    for (const [kind, d] of Object.entries(path)) if (d) this.fixed.append(svg("path", { class: `lpbits-tick lpbits-${kind}`, d }));
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
      this.fixed.append(svg("text", { class: "lpbits-tick-label", x: this.x(value) + end, y: 41, "text-anchor": anchor }, text));
    }
  }

  // Returns where the value is on the line.
  drawInto(picture, value, real) {
    picture.append(this.fixed);
    if (Number.isNaN(value)) {
      picture.append(svg("text", { class: "lpbits-tick-label", x: this.width / 2, y: 84, "text-anchor": "middle" }, "NaN is not on the number line"));
      return null;
    }
    const x = Number.isFinite(value) ? this.x(value) : value < 0 ? MARGIN - 12 : this.width - MARGIN + 12;
    const wanted = toNumber(real);
    if (Number.isFinite(wanted) && Math.abs(this.x(wanted) - x) > 8) {
      picture.append(svg("path", { class: "lpbits-wanted", d: diamond(this.x(wanted), 12) }));
    }
    picture.append(svg("path", { class: "lpbits-here", d: `M${x} 24l-5.5 -11h11z` }));
    return x;
  }
}

function diamond(x, y) {
  return `M${x} ${y - 5}l5 5l-5 5l-5 -5z`;
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
  picture.append(svg("path", { class: "lpbits-funnel", d: `M${hub - 3} 46L${MARGIN} 70H${width - MARGIN}L${hub + 3} 46z` }));
  drawBin(picture, panel, x, top, low, high);
  picture.append(svg("line", { class: "lpbits-axis", x1: MARGIN, x2: width - MARGIN, y1: top, y2: top }));
  const labels = [];
  values.forEach((v, index) => {
    const here = around[index] === code;
    picture.append(svg("line", { class: here ? "lpbits-tick lpbits-here-tick" : "lpbits-tick", x1: x(v), x2: x(v), y1: top - (here ? 14 : 8), y2: top }));
    labels.push({ x: x(v), text: short(v, 7), rank: here ? 0 : Math.abs(index - around.indexOf(code)), here });
  });
  picture.append(svg("circle", { class: "lpbits-here", cx: x(value), cy: top, r: 4.5 }));
  drawLabels(picture, labels, top + 18, width);
  drawWanted(picture, panel, { x, top, low, high, width });
}

// Labels nearest to the value first; one that would touch another is left out.
function drawLabels(picture, labels, y, width) {
  const taken = [];
  for (const { x: place, text, here } of labels.sort((a, b) => a.rank - b.rank)) {
    const half = text.length * 3.6 + 5;
    const x = Math.min(Math.max(place, half), width - half);
    if (taken.some(([from, to]) => x + half > from && x - half < to)) continue;
    taken.push([x - half, x + half]);
    const style = here ? "lpbits-tick-label lpbits-here-label" : "lpbits-tick-label";
    picture.append(svg("text", { class: style, x, y, "text-anchor": "middle" }, text));
  }
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
  picture.append(svg("rect", { class: "lpbits-bin", x: x(from), y: top - 22, width: Math.max(0, x(to) - x(from)), height: 22 }));
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
  picture.append(svg("line", { class: "lpbits-wanted-line", x1: place, x2: place, y1: top - 25, y2: top }));
  picture.append(svg("path", { class: "lpbits-wanted", d: diamond(place, top - 25) }));
  picture.append(svg("text", { class: "lpbits-wanted-label", x: label, y: top - 34, "text-anchor": "middle" }, text));
}

function clipped(text) {
  return text.length > 18 ? text.slice(0, 17) + "…" : text;
}

// ------------------------------------------------------------------------------------------------------ the explorer

class Explorer {
  constructor(model, root) {
    this.model = model;
    this.id = `lpbits-${(serial += 1)}`;
    this.root = element("div", { class: "lpbits", role: "group", "aria-label": "Bit explorer" });
    this.panelBox = element("div", { class: "lpbits-panels" });
    this.status = element("p", { class: "lpbits-spoken", role: "status" });
    this.root.append(this.controls(), this.panelBox, this.status);
    root.append(this.root);
    // In command mode JupyterLab takes single keys from every button of an output: "d d" would delete the cell.
    this.root.addEventListener("keydown", (event) => {
      const meantForThePage = event.ctrlKey || event.metaKey || event.altKey || event.key === "Escape";
      if (!meantForThePage && !(event.shiftKey && event.key === "Enter")) event.stopPropagation();
    });
    this.build();
  }

  get state() {
    return this.model.get("_state");
  }

  controls() {
    this.input = element("input", {
      id: `${this.id}-real`,
      class: "lpbits-input",
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
    this.hint = element("p", { id: `${this.id}-hint`, class: "lpbits-hint" });
    const labelled = (label, node) => element("div", { class: "lpbits-control" }, element("label", { for: node.id }, label), node);
    return element(
      "div",
      { class: "lpbits-controls" },
      labelled("Real number", this.input),
      labelled("Rounding", this.mode),
      labelled("Overflow", this.overflow),
      this.hint,
    );
  }

  choice(key, options) {
    const select = element("select", { id: `${this.id}-${key}`, class: "lpbits-select" });
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

  dress() {
    this.root.dataset.theme = isDark(this.root.parentElement) ? "dark" : "light";
  }
}

function render({ model, el }) {
  const explorer = new Explorer(model, el);
  const draw = () => explorer.draw();
  const build = () => explorer.build();
  model.on("change:_state", draw);
  model.on("change:_panels", build);
  const sized = new ResizeObserver(() => requestAnimationFrame(() => explorer.resize()));
  sized.observe(explorer.root);
  explorer.dress();
  requestAnimationFrame(() => explorer.dress()); // the element is in the page only now
  const themed = new MutationObserver(() => requestAnimationFrame(() => explorer.dress()));
  for (const node of [document.documentElement, document.body]) {
    themed.observe(node, { attributes: true, attributeFilter: ["class", "style", "theme", "data-jp-theme-name", "data-jp-theme-light"] });
  }
  return () => {
    model.off("change:_state", draw);
    model.off("change:_panels", build);
    sized.disconnect();
    themed.disconnect();
  };
}

export default { render };
