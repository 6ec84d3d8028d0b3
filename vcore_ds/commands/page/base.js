// Elements, numbers and colours. Text from a run reaches the page as text nodes only.

// Labels of the curves' groups, charts, lines and charts of a sweep, and descriptions of traces by `encode_traces` in page.py.
const NOTHING = { groups: [], curves: [], histograms: [], tokens: [], followed: [], scores: [], sweep: { lines: [], charts: [] }, weightRange: 1 };
const report = { ...NOTHING, ...JSON.parse(document.getElementById("report").textContent) };
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

function select(label, options, value, onchange) {
  const control = element("select", { onchange: () => onchange(control.value) });
  control.append(...options.map(([key, text]) => element("option", { value: key }, text)));
  control.value = value;
  return element("label", {}, label, control);
}

const count = (value) => value.toLocaleString("en-US");
const needsExponent = (value) => value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3);
const withExponent = (value, digits) => Number(value.toPrecision(digits)).toExponential().replace("e+", "e");

// Four significant digits, or the given number, without an exponent where a person would not write one.
function number(value, digits = 4) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (needsExponent(value)) return withExponent(value, digits - 1);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size))) });
  return String(Number(value.toPrecision(digits)));
}

// Labels of an axis, of any spacing: four digits, or the number that places each within a tenth of the distance
// to the next; all with an exponent where one needs it.
function labels(values) {
  const sorted = [...new Set(values)].sort((a, b) => a - b);
  const distance = Math.min(...sorted.slice(1).map((value, i) => value - sorted[i]));
  const isPlaced = (text, i) => Math.abs(Number(text.replaceAll(",", "")) - values[i]) < distance / 10;
  const write = values.some(needsExponent) ? (value, digits) => (value === 0 ? "0" : withExponent(value, digits)) : number;
  for (let digits = 4; digits < 17; digits++) {
    const texts = values.map((value) => write(value, digits));
    if (texts.every(isPlaced)) return texts;
  }
  return values.map(String);
}

// Round numbers that divide a range into about `parts` parts, with at most 12 digits.
function ticks(low, high, parts) {
  const rough = (high - low) / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999) ?? rough;
  const [first, last] = [Math.ceil(low / unit - 1e-9), Math.floor(high / unit + 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * unit).toPrecision(12)));
}

// A colour of a scale: from -1 (low) through 0 to 1 (high), or from 0 to 1 (much). The theme's colours, mixed by the
// browser, so that they change with it.
function colour(place, isDiverging) {
  const end = !isDiverging ? "--much" : place < 0 ? "--low" : "--high";
  const share = Math.min(1, Math.abs(place)) * 100;
  return `color-mix(in oklab, var(${end}) ${share.toFixed(1)}%, var(--middle))`;
}

// The tokens of traces, as commands/page.py packs them; `kind` is the key of their descriptions in the JSON.
async function unpack(kind, place) {
  const text = atob(document.getElementById(`${kind}-${place}`).textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const bytes = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const data = { ...report[kind][place], codes: {}, numTokens: 0 };
  data.sequences = data.sequences.map((one) => ({ ...one, start: data.numTokens, end: (data.numTokens += one.tokens) }));
  let offset = 0;
  const take = (Type) => new Type(bytes.slice(offset, (offset += Type.BYTES_PER_ELEMENT * data.numTokens)));
  [data.text, data.rank] = [take(Uint32Array), take(Uint32Array)];
  for (const name of data.measures) data.codes[name] = take(Uint8Array);
  data.flags = take(Uint8Array);
  return data;
}

const tokensOf = (kind, place) => (report[kind][place].unpacked ??= unpack(kind, place));
