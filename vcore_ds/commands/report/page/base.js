// Elements, numbers and colours. Text from a run reaches the page as text nodes only.

const report = JSON.parse(document.getElementById("report").textContent);
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
    const found = values.map((value) => write(value, digits));
    if (found.every(isPlaced)) return found;
  }
  return values.map(String);
}

// Round numbers that divide a range into about `count` parts, with at most 12 digits.
function ticks(low, high, count) {
  const rough = (high - low) / count;
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

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// The tokens of traces, as commands/report/traces.py and commands/score/traces.py pack them; `kind` is the key of their
// descriptions in the page's JSON.
async function unpack(kind, place) {
  const stream = new Blob([bytesOf(document.getElementById(`${kind}-${place}`).textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  const run = report[kind][place];
  const numTokens = run.sequences.reduce((sum, sequence) => sum + sequence.tokens, 0);
  let offset = 0;
  const take = (size) => {
    const part = bytes.slice(offset, (offset += size * numTokens));
    return size === 4 ? new Uint32Array(part) : size === 2 ? new Uint16Array(part) : new Uint8Array(part);
  };
  const data = { ...run, numTokens, text: take(run.bytesText), rank: take(run.bytesRank), codes: {} };
  for (const name of ["weight", "loss", "utility", "entropy"]) if (name in run.levels) data.codes[name] = take(1);
  data.flags = take(1);
  let start = 0;
  data.sequences = run.sequences.map((sequence) => ({ ...sequence, start, end: (start += sequence.tokens) }));
  return data;
}

const unpacked = new Map();
function tokensOf(place, kind = "tokens") {
  const key = `${kind}-${place}`;
  if (!unpacked.has(key)) unpacked.set(key, unpack(kind, place));
  return unpacked.get(key);
}

function select(label, options, onchange) {
  const control = element("select", { onchange: () => onchange(control.value) });
  control.append(...options.map(([value, text]) => element("option", { value }, text)));
  return [element("label", {}, label, control), control];
}

// ---- traces --------------------------------------------------------------------------------------------------------

// Control characters, and those that turn the direction of the text, could hide what is there.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const visible = (text) => text.replace(HIDDEN, "\ufffd").replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

const TOKENS_OF_PAGE = 2500;

// Split traces into pages with a maximum number of tokens, at least one trace each.
function pagesOf(chosen) {
  const pages = [[]];
  let numTokens = 0;
  for (const one of chosen) {
    if (numTokens && numTokens + one.sequence.tokens > TOKENS_OF_PAGE) {
      pages.push([]);
      numTokens = 0;
    }
    pages.at(-1).push(one);
    numTokens += one.sequence.tokens;
  }
  return pages;
}

// ---- what is known of the token that is pointed at ------------------------------------------------------------------

const tip = document.getElementById("tip");
let tipIsNear = null;
function hideTip() {
  tip.hidden = true;
  tipIsNear = null;
}

function showTip(near, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  tipIsNear = near;
  placeTip(near);
}

function placeTip(near) {
  const box = near.getClientRects()[0] ?? near.getBoundingClientRect();
  const below = box.bottom + 6 + tip.offsetHeight <= innerHeight;
  tip.style.top = `${Math.max(4, below ? box.bottom + 6 : box.top - 6 - tip.offsetHeight)}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
}

addEventListener("scroll", () => tipIsNear && placeTip(tipIsNear), { passive: true });
