// Traces, each of whose tokens is coloured by one of its measures: those of a run, those that it followed, scored ones.

const EXTREME = 0.05; // share of a trace's tokens that the filters of extremes show
const TOKENS_OF_SCREEN = 300, TOKENS_OF_PAGE = 2500;
const KIND = 7, IN_ANSWER = 8, AFTER_GAP = 16, PROMPT = 32; // flags of a token
const MEASURES = { weight: "Weight", loss: "Loss", utility: "Utility", probability: "Probability", entropy: "Entropy" };
const MEANINGS = {
  weight: "Orange: more weight in the loss than with uniform weights (plain SFT). Blue: less.",
  loss: "The more purple a token, the higher its loss.",
  utility: "Orange: learning the token lowers the loss on TARGET. Blue: it raises that loss.",
  probability: "The more purple a token, the higher the probability that the model gave it.",
  entropy: "The more purple a token, the less certain the model was before it.",
};
// The names of the controls, and what utilities are toward: of a run's tokens and followed traces, and of scores.
const OF_RUN = { run: "Run", group: "Step", rank: "Weights", target: "the probe batch", more: "" };
const OF_SCORES = { run: "Trusted set", group: "Traces with", rank: "Utilities", target: "the trusted set", more: " Grey words are the prompt." };

// Control characters, and those that turn the direction of the text, could hide what is there.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const visible = (text) => text.replace(HIDDEN, "\ufffd").replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

const nameOf = ({ source, id }) => `${source}, ${id}`;

class Viewer {
  constructor(place, kind) {
    Object.assign(this, { place, kind, strips: [], names: kind === "scores" ? OF_SCORES : OF_RUN });
    this.state = { group: "", sequence: "", measure: "weight", show: "all", where: "all", kinds: new Set(), page: 0 };
    this.colours = document.head.appendChild(element("style"));
    this.kinds = element("fieldset");
    [this.controls, this.filters, this.pages] = [1, 2, 3].map(() => element("div", { class: "controls" }));
    const filter = element("details", {}, element("summary", {}, "Filter tokens"), this.filters, this.kinds);
    [this.meaning, this.count] = [element("p"), element("p", { class: "faint", role: "status" })];
    [this.scale, this.rows, this.list] = ["scale", "rows", null].map((name) => element("div", { class: name }));
    place.append(this.controls, filter, this.meaning, this.scale, this.rows, this.count, this.list, this.pages);
    this.followPointer();
  }

  async open(run) {
    const data = (this.data = await tokensOf(this.kind, run)), { state, kind } = this;
    Object.assign(state, { show: "all", where: "all", page: 0, kinds: new Set(data.kinds.keys()) });
    state.group = String(data.groups.at(kind === "scores" ? 0 : -1)[0]);
    // The weight, where it says something, unless the reader has chosen another measure that this run has.
    state.measure = this.measures().some(([key]) => key === this.picked) ? this.picked : data.isUniform ? "loss" : data.measures[0];
    state.sequence = kind === "scores" ? "" : nameOf(kind === "followed" ? data.sequences[0] : this.mostColoured());
    this.buildControls(run);
    this.draw();
  }

  // The measures that the tokens have, with their names.
  measures() {
    return Object.entries(MEASURES).filter(([key]) => key in this.data.codes || key === "probability");
  }

  // The codes of the tokens in the measure that is shown.
  codesOf() {
    return this.data.codes[this.state.measure === "probability" ? "loss" : this.state.measure];
  }

  // The levels of a measure that its codes stand for, in a group of traces.
  levelsOf(measure, group) {
    return measure === "utility" ? this.data.levels.utility[group] : this.data.levels[measure];
  }

  // Place of each code on the colour scale, from -1 to 1, whether the scale has two sides, and the names of its parts.
  scaleOf() {
    const { measure, group } = this.state, { levels } = this.data;
    if (measure === "weight") {
      const range = report.weightRange, [low, high] = [2 ** -range, 2 ** range].map((value) => number(value, 2));
      const places = levels.weight.map((weight) => Math.max(-1, Math.min(1, Math.log2(weight || 1e-9) / range)));
      return { isDiverging: true, places, names: [`${low}× or less`, "1× (uniform)", `${high}× or more`] };
    }
    if (measure === "utility") {
      const own = levels.utility[group], ends = own ? [own[0], own[255]].map((value) => number(value, 2)) : ["lowest of its step", "highest of its step"];
      return { isDiverging: true, places: Array.from({ length: 256 }, (_, code) => (code - 128) / 128), names: [ends[0], "0", ends[1]] };
    }
    if (measure === "probability") return { places: levels.loss.map((loss) => Math.exp(-loss)), names: ["0", "", "1"] };
    return { places: levels[measure].map((_, code) => code / 255), names: ["0", "", `${number(levels[measure][255], 2)} nats`] };
  }

  // Everything that is known of a token, by name.
  describe(sequence, i) {
    const { data } = this, { flags } = data;
    const place = ["place", `${count(i - sequence.start + 1)} of ${count(sequence.num_tokens)}`];
    if (flags[i] & PROMPT) return [["prompt", "not trained on"], place];
    const value = (measure) => this.levelsOf(measure, sequence.group)[data.codes[measure][i]];
    const facts = "weight" in data.codes ? [["weight", `${number(value("weight"))}×`]] : [];
    if (!data.isUniform) facts.push(["rank", `${count(data.rank[i] + 1)} of ${count(sequence.supervised)}`]);
    if (data.codes.utility) facts.push(["utility", number(value("utility"))]);
    facts.push(["loss", `${number(value("loss"))} nats`], ["probability", number(Math.exp(-value("loss")))]);
    if (data.codes.entropy) facts.push(["entropy", `${number(value("entropy"))} nats`]);
    return [...facts, ["kind", data.kinds[flags[i] & KIND] + (flags[i] & IN_ANSWER ? ", in the answer" : "")], place];
  }

  // The traces of the chosen group, or of all.
  tracesOfGroup() {
    return this.data.sequences.filter((one) => this.state.group === "" || String(one.group) === this.state.group);
  }

  // Of the group's traces, the one with the most colour on its first screen.
  mostColoured() {
    const { places } = this.scaleOf(), codes = this.codesOf();
    const colourOf = ({ start, end }) => codes.slice(start, Math.min(end, start + TOKENS_OF_SCREEN)).reduce((sum, code) => sum + Math.abs(places[code]), 0);
    return least(this.tracesOfGroup(), (trace) => -colourOf(trace));
  }

  buildControls(run) {
    const { data, state, names, kind } = this;
    const choose = (key) => (value) => this.choose({ [key]: value });
    const runs = report[kind].map((one, i) => [i, one.run]);
    const groups = [...(kind === "tokens" ? [["", "all"]] : []), ...data.groups];
    this.group = select(names.group, groups, state.group, choose("group"));
    this.sequence = select("Trace", [], "", choose("sequence"));
    this.sequence.classList.add("wide");
    this.controls.replaceChildren(
      ...(runs.length > 1 ? [select(names.run, runs, run, (value) => this.open(Number(value)))] : []),
      select("Colour by", this.measures(), state.measure, (value) => this.choose({ measure: (this.picked = value) })),
      this.group, this.sequence);
    this.filters.replaceChildren(
      select(names.rank, [["all", "all"], ["most", "top 5% of each trace"], ["least", "bottom 5% of each trace"]], state.show, choose("show")),
      select("Answer", [["all", "inside and outside"], ["inside", "inside \\boxed{}"], ["outside", "outside"]], state.where, choose("where")));
    const present = new Set([...new Set(data.flags)].map((flag) => flag & KIND));
    const boxes = data.kinds.flatMap((name, i) => {
      const toggle = (event) => this.choose({ kinds: event.target.checked ? state.kinds.add(i) : (state.kinds.delete(i), state.kinds) });
      return present.has(i) ? [element("label", {}, element("input", { type: "checkbox", checked: true, onchange: toggle }), ` ${name}`)] : [];
    });
    this.kinds.replaceChildren(element("legend", {}, "Kinds"), ...boxes);
  }

  // Change what is chosen, and draw it. The chosen trace stays where the group has it, too.
  choose(changes) {
    const { state, data } = this, isChosen = (one) => nameOf(one) === state.sequence;
    Object.assign(state, { page: 0 }, changes);
    if (state.sequence !== "" && !this.tracesOfGroup().some(isChosen)) {
      if ("sequence" in changes) state.group = String(data.sequences.findLast(isChosen).group);
      else state.sequence = nameOf(this.mostColoured());
    }
    this.draw();
  }

  // The traces of the chosen group, or of all where one is followed over them.
  listTraces() {
    const { data, state, kind } = this, isFollowed = kind === "followed";
    const traces = isFollowed ? data.sequences : this.tracesOfGroup();
    const options = [...new Map(traces.map((one) => [nameOf(one), `${one.name} (${nameOf(one)})`]))];
    if (kind === "tokens") options.sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
    if (!isFollowed) options.unshift(["", "all"]);
    this.sequence.control.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    [this.sequence.control.value, this.group.control.value] = [state.sequence, state.group];
  }

  matches(sequence, i) {
    const { data, state } = this, few = Math.ceil(EXTREME * sequence.supervised);
    return !(data.flags[i] & PROMPT) && state.kinds.has(data.flags[i] & KIND)
      && (state.where === "all" || (state.where === "inside") === Boolean(data.flags[i] & IN_ANSWER))
      && (state.show === "all" || (state.show === "most" ? data.rank[i] < few : data.rank[i] >= sequence.supervised - few));
  }

  countMatching(sequence) {
    let number = 0;
    for (let i = sequence.start; i < sequence.end; i++) number += this.matches(sequence, i);
    return number;
  }

  draw() {
    const { data, state, kind } = this, { places, isDiverging = false, names } = this.scaleOf();
    hideTip();
    this.codes = this.codesOf();
    this.listTraces();
    this.meaning.textContent = MEANINGS[state.measure].replace("TARGET", this.names.target) + this.names.more;
    this.colours.textContent = places.map((place, code) => `:where(#${this.place.id}) .c${code}{background:${colour(place, isDiverging)}}`).join("");
    const stops = Array.from({ length: 9 }, (_, i) => colour(isDiverging ? i / 4 - 1 : i / 8, isDiverging));
    const bar = element("div", { "aria-hidden": "true", style: `background: linear-gradient(to right, ${stops.join(", ")})` });
    this.scale.replaceChildren(bar, ...names.map((text) => element("span", {}, text)));
    if (kind === "followed") this.drawRows();
    const chosen = this.tracesOfGroup().filter((one) => state.sequence === "" || nameOf(one) === state.sequence);
    const numbers = chosen.map((one) => this.countMatching(one));
    const left = chosen.filter((_, i) => numbers[i]), matching = numbers.reduce((sum, number) => sum + number, 0);
    const missing = data.numRecorded > data.numTokens ? `; ${count(data.numRecorded - data.numTokens)} more are recorded and not in this file` : "";
    this.count.textContent = kind === "followed" && left.length ? left[0].note
      : `${count(matching)} of ${count(data.numTokens)} tokens, in ${count(left.length)} of ${count(data.sequences.length)} traces${missing}`;
    const pages = pagesOf(left);
    state.page = Math.min(state.page, pages.length - 1);
    this.list.replaceChildren(...pages[state.page].map((sequence) => this.trace(sequence)));
    for (const [canvas, sequence] of this.strips.splice(0)) this.drawStrip(canvas, sequence, places, isDiverging);
    const go = (by) => () => ((state.page += by), this.draw(), this.place.scrollIntoView());
    this.pages.replaceChildren(...(pages.length < 2 ? [] : [
      element("button", { type: "button", disabled: state.page === 0, onclick: go(-1) }, "Previous traces"),
      element("span", { class: "faint" }, `page ${state.page + 1} of ${pages.length}`),
      element("button", { type: "button", disabled: state.page === pages.length - 1, onclick: go(1) }, "Next traces"),
    ]));
  }

  // The chosen trace in every group, a row for each; a column is the same tokens in all of them.
  drawRows() {
    const { data, state } = this;
    this.rows.replaceChildren(...data.sequences.filter((one) => nameOf(one) === state.sequence).map((sequence) => {
      const group = String(sequence.group);
      const row = { class: group === state.group ? "shown" : null, onclick: () => this.choose({ group }) };
      return element("div", row, element("span", {}, `step ${group}`), this.strip(sequence));
    }));
  }

  trace(sequence) {
    const { data } = this, title = visible(sequence.title), prompt = data.prompts[sequence.prompt];
    const asked = prompt === "" ? [] : [element("div", { class: "prompt", role: "note", "aria-label": "Prompt" }, prompt.replace(HIDDEN, "\ufffd"))];
    const tokens = element("div", { class: "tokens", role: "listbox", "aria-label": `Tokens of ${title}` });
    for (let i = sequence.start; i < sequence.end; i++) {
      const text = data.texts[data.text[i]], flags = data.flags[i];
      const dim = this.matches(sequence, i) ? "" : " dim", gap = flags & AFTER_GAP && i > sequence.start ? " gap" : "";
      const span = document.createElement("span");
      span.className = flags & PROMPT ? "prompt" : `c${this.codes[i]}${dim}${gap}`;
      span.tabIndex = -1;
      span.setAttribute("role", "option");
      span.textContent = text === "" ? "·" : visible(text);
      Object.assign(span, { place: i, sequence });
      tokens.append(span);
    }
    (tokens.querySelector("span:not(.dim)") ?? tokens.firstChild).tabIndex = 0;
    const heading = element("h4", {}, title, element("small", {}, ` · ${sequence.facts.join(", ")}`));
    return element("article", { class: "trace" }, heading, ...asked, this.strip(sequence), tokens);
  }

  // A canvas for the entire trace, which is drawn once it is in the page.
  strip(sequence) {
    const canvas = element("canvas", { height: 1, width: Math.min(sequence.tokens, 1000), "aria-hidden": "true" });
    this.strips.push([canvas, sequence]);
    return canvas;
  }

  // The entire trace on one line: each pixel is the mean of its tokens.
  drawStrip(canvas, sequence, places, isDiverging) {
    const context = canvas.getContext("2d"), probe = this.place.appendChild(element("i"));
    for (let x = 0; x < canvas.width; x++) {
      const begin = sequence.start + Math.floor((x * sequence.tokens) / canvas.width);
      const end = Math.max(begin + 1, sequence.start + Math.floor(((x + 1) * sequence.tokens) / canvas.width));
      let sum = 0;
      for (let i = begin; i < end; i++) sum += places[this.codes[i]];
      context.fillStyle = stripColour(probe, Math.round((sum / (end - begin)) * 32) / 32, isDiverging);
      context.fillRect(x, 0, 1, 1);
    }
    probe.remove();
  }

  followPointer() {
    const isToken = (event) => event.target.place !== undefined;
    this.list.addEventListener("pointerover", (event) => (isToken(event) ? this.tell(event.target) : hideTip()));
    this.list.addEventListener("pointerleave", hideTip);
    this.list.addEventListener("focusin", (event) => isToken(event) && this.tell(event.target));
    this.list.addEventListener("focusout", hideTip);
    this.list.addEventListener("keydown", (event) => {
      if (!isToken(event)) return;
      if (event.key === "Escape") hideTip();
      const span = this.neighbour(event.target, event.key);
      if (!span) return;
      event.preventDefault();
      [event.target.tabIndex, span.tabIndex] = [-1, 0];
      span.focus();
    });
  }

  // The token that a key leads to, over those that the filters dim.
  neighbour(span, key) {
    const isForward = { ArrowRight: true, ArrowLeft: false, Home: true, End: false }[key];
    if (isForward === undefined) return null;
    const step = (node) => (isForward ? node?.nextElementSibling : node?.previousElementSibling);
    let next = key === "Home" ? span.parentNode.firstChild : key === "End" ? span.parentNode.lastChild : step(span);
    while (next?.classList.contains("dim")) next = step(next);
    return next;
  }

  tell(span) {
    const text = this.data.texts[this.data.text[span.place]], facts = this.describe(span.sequence, span.place);
    const title = text === "" ? "(part of the character before)" : JSON.stringify(text).replace(HIDDEN, "\ufffd");
    span.setAttribute("aria-label", `${title}: ${facts.map((pair) => pair.join(" ")).join(", ")}`);
    tip.replaceChildren(element("b", {}, title), element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
    tip.hidden = false;
    tipIsNear = span;
    placeTip();
  }
}

// Split traces into pages with a maximum number of tokens, at least one trace each.
function pagesOf(traces) {
  const pages = [[]];
  let numTokens = 0;
  for (const trace of traces) {
    if (numTokens && numTokens + trace.tokens > TOKENS_OF_PAGE) {
      pages.push([]);
      numTokens = 0;
    }
    pages.at(-1).push(trace);
    numTokens += trace.tokens;
  }
  return pages;
}

// What is known of the token that is pointed at.
const tip = document.getElementById("tip");
let tipIsNear = null;
function hideTip() {
  tip.hidden = true;
  tipIsNear = null;
}

function placeTip() {
  if (!tipIsNear) return;
  const box = tipIsNear.getClientRects()[0] ?? tipIsNear.getBoundingClientRect();
  const isBelow = box.bottom + 6 + tip.offsetHeight <= innerHeight;
  tip.style.top = `${Math.max(4, isBelow ? box.bottom + 6 : box.top - 6 - tip.offsetHeight)}px`;
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
}

addEventListener("scroll", placeTip, { passive: true });

// A canvas takes no variables, so the browser works the colour out on an element.
const shades = new Map();
function stripColour(probe, shade, isDiverging) {
  const key = `${shade} ${isDiverging}`;
  if (!shades.has(key)) {
    probe.style.color = colour(shade, isDiverging);
    shades.set(key, getComputedStyle(probe).color);
  }
  return shades.get(key);
}
