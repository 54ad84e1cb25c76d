// What the explorers share: exact numbers, formats, rounding, and how a widget is put on a page.
//
// Numbers are exact: a typed decimal and the values of a format are ratios of BigInts, and only what is marked with "≈"
// is shortened. anywidget takes one file, so widget.py puts this text in front of each explorer's own.

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

// ------------------------------------------------------------------------------------------------ the values in order

function compare(a, b) {
  const difference = add(a, negated(b));
  return difference.num === 0n ? 0 : difference.negative ? -1 : 1;
}

const BEYOND = 3;

// The values of a format as steps, numbered through zero, and on beyond the largest as if its binade had no end.
class Ladder {
  constructor(fmt) {
    this.fmt = fmt;
    this.last = largestFiniteCode(fmt);
    this.largest = decodeFields(fmt, splitFields(fmt, this.last));
    this.top = this.last + BEYOND;
    this.lowest = fmt.signed ? -this.last - (fmt.subnormals ? 0 : 1) : 0;
    this.bottom = fmt.signed ? this.lowest - BEYOND : -1;
  }

  magnitude(step) {
    return step >= 0 ? step : this.fmt.subnormals ? -step : -step - 1;
  }

  isValue(step) {
    return step >= this.lowest && step <= this.last;
  }

  code(step) {
    return this.magnitude(step) + (step < 0 ? signBit(this.fmt) : 0);
  }

  value(step) {
    if (step < 0 && !this.fmt.signed) return this.fmt.subnormals ? -spacing(this.fmt, 0) : 0;
    const at = this.magnitude(step);
    const over = Math.max(0, at - this.last);
    const size = over ? this.largest + over * spacing(this.fmt, this.last) : decodeFields(this.fmt, splitFields(this.fmt, at));
    return step < 0 ? -size : size;
  }

  real(step) {
    return fromFloat64(this.value(step));
  }

  // The highest step whose value is not above a finite number; an end of the ladder for what is beyond it.
  below(real) {
    let [low, high] = [this.bottom, this.top];
    while (high > low) {
      const middle = Math.floor((low + high + 1) / 2);
      if (compare(this.real(middle), real) <= 0) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // How far a number is from the value of `step` to the next one: {num, den}, a part of that distance.
  part(real, step) {
    const low = this.real(step);
    return divide(add(real, negated(low)), add(this.real(step + 1), negated(low)));
  }

  at(step, part) {
    const low = this.real(step);
    const gap = add(this.real(step + 1), negated(low));
    return add(low, finite(gap.negative !== part.negative, gap.num * part.num, gap.den * part.den));
  }
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

// ---------------------------------------------------------------------------------------------- parts of a number line

const MARGIN = 26;

function diamond(x, y) {
  return `M${x} ${y - 5}l5 5l-5 5l-5 -5z`;
}

// Labels nearest to the value first; one that would touch another is left out.
function drawLabels(picture, labels, y, width) {
  const taken = [];
  for (const { x: place, text, here } of labels.sort((a, b) => a.rank - b.rank)) {
    const half = text.length * 3.6 + 5;
    const x = Math.min(Math.max(place, half), width - half);
    if (taken.some(([from, to]) => x + half > from && x - half < to)) continue;
    taken.push([x - half, x + half]);
    const style = here ? "lplab-tick-label lplab-here-label" : "lplab-tick-label";
    picture.append(svg("text", { class: style, x, y, "text-anchor": "middle" }, text));
  }
}

function clipped(text) {
  return text.length > 18 ? text.slice(0, 17) + "…" : text;
}

// ------------------------------------------------------------------------------------------------------- on the page

// In command mode JupyterLab takes single keys from every button of an output: "d d" would delete the cell.
function keepKeys(root) {
  root.addEventListener("keydown", (event) => {
    const meantForThePage = event.ctrlKey || event.metaKey || event.altKey || event.key === "Escape";
    if (!meantForThePage && !(event.shiftKey && event.key === "Enter")) event.stopPropagation();
  });
}

// Puts an explorer into its cell. It has a `root`, builds itself anew when the kernel sends other `_panels`, draws
// itself at each change of `_state`, and takes up a change of its width (`resize`) and of the notebook's theme.
function mount({ model, el }, Explorer) {
  const explorer = new Explorer(model, el);
  const listeners = { "change:_state": () => explorer.draw(), "change:_panels": () => explorer.build() };
  for (const [event, listener] of Object.entries(listeners)) model.on(event, listener);
  const sized = new ResizeObserver(() => requestAnimationFrame(() => explorer.resize()));
  sized.observe(explorer.root);
  const dress = () => (explorer.root.dataset.theme = isDark(explorer.root.parentElement) ? "dark" : "light");
  dress();
  requestAnimationFrame(dress); // the element is in the page only now
  const themed = new MutationObserver(() => requestAnimationFrame(dress));
  for (const node of [document.documentElement, document.body]) {
    themed.observe(node, { attributes: true, attributeFilter: ["class", "style", "theme", "data-jp-theme-name", "data-jp-theme-light"] });
  }
  return () => {
    for (const [event, listener] of Object.entries(listeners)) model.off(event, listener);
    sized.disconnect();
    themed.disconnect();
    explorer.stop?.();
  };
}
