// The recorded tokens of a run, each coloured by one of its measures.

const EXTREME = 0.05;
const TOKENS_OF_SCREEN = 300;
const MEASURES = {
  weight: "Weight", loss: "Loss", utility: "Utility", probability: "Probability", entropy: "Entropy",
};
// What the colours of a measure say.
const MEANINGS = {
  weight: "Orange: more weight in the loss than with uniform weights (plain SFT). Blue: less.",
  loss: "The more purple a token, the higher its loss.",
  utility: "Orange: learning the token lowers the loss on the probe batch. Blue: it raises that loss.",
  probability: "The more purple a token, the higher the probability that the model gave it.",
  entropy: "The more purple a token, the less certain the model was before it.",
};
const IN_ANSWER = 8, AFTER_GAP = 16, KIND = 7;

// What the codes of a measure stand for in a step.
const levelsOf = (data, measure, step) => (measure === "utility" ? data.levels.utility[step] : data.levels[measure]);

// Place of each code on the colour scale, from -1 to 1, and whether the scale has two sides.
function scaleOf(data, measure) {
  if (measure === "utility") return { isDiverging: true, places: Array.from({ length: 256 }, (_, code) => (code - 128) / 128) };
  const levels = data.levels[measure === "probability" ? "loss" : measure];
  if (measure === "weight") {
    const range = report.weightRange;
    return { isDiverging: true, places: levels.map((w) => Math.max(-1, Math.min(1, Math.log2(w || 1e-9) / range))) };
  }
  if (measure === "loss" || measure === "entropy") return { isDiverging: false, places: levels.map((_, code) => code / 255) };
  return { isDiverging: false, places: levels.map((loss) => Math.exp(-loss)) };
}

// What the ends and the middle of a scale are called.
function scaleLabels(data, measure, step) {
  if (measure === "weight") return [`${number(2 ** -report.weightRange, 2)}× or less`, "1× (uniform)", `${number(2 ** report.weightRange, 2)}× or more`];
  if (measure === "utility") {
    const levels = data.levels.utility[step];
    return levels ? [number(levels[0], 2), "0", number(levels[255], 2)] : ["lowest of its step", "0", "highest of its step"];
  }
  return measure === "probability" ? ["0", "", "1"] : ["0", "", `${number(data.levels[measure][255], 2)} nats`];
}

// Everything that is known of a token, by name.
function describe(data, sequence, i) {
  const value = (measure) => levelsOf(data, measure, sequence.step)[data.codes[measure][i]];
  const facts = [["weight", `${number(value("weight"))}×`]];
  if (!data.isUniform) facts.push(["rank", `${(data.rank[i] + 1).toLocaleString("en-US")} of ${sequence.tokens.toLocaleString("en-US")}`]);
  if (data.codes.utility) facts.push(["utility", number(value("utility"))]);
  facts.push(["loss", `${number(value("loss"))} nats`], ["probability", number(Math.exp(-value("loss")))]);
  if (data.codes.entropy) facts.push(["entropy", `${number(value("entropy"))} nats`]);
  facts.push(["kind", data.kinds[data.flags[i] & KIND] + (data.flags[i] & IN_ANSWER ? ", in the answer" : "")]);
  facts.push(["place", `${(i - sequence.start + 1).toLocaleString("en-US")} of ${sequence.tokens.toLocaleString("en-US")}`]);
  return facts;
}

const nameOf = ({ source, id }) => `${source}, ${id}`;
// A choice of traces: each by its first words.
const optionsOf = (sequences) => [...new Map(sequences.map((one) => [nameOf(one), `${one.name} (${nameOf(one)})`]))];

class Viewer {
  constructor(place) {
    this.place = place;
    this.state = { step: "", sequence: "", measure: "weight", show: "all", where: "all", kinds: new Set(), page: 0 };
    this.colours = document.head.appendChild(element("style"));
    this.controls = element("div", { class: "controls" });
    this.kinds = element("fieldset", {}, element("legend", {}, "Kinds"));
    this.filters = element("div", { class: "controls" });
    this.filter = element("details", {}, element("summary", {}, "Filter tokens"), this.filters, this.kinds);
    this.meaning = element("p");
    this.scale = element("div", { class: "scale" });
    this.count = element("p", { class: "faint", role: "status" });
    this.pages = element("div", { class: "controls" });
    this.list = element("div");
    place.append(this.controls, this.filter, this.meaning, this.scale, this.count, this.list, this.pages);
    this.followPointer();
  }

  async open(run) {
    this.data = await tokensOf(run);
    Object.assign(this.state, { show: "all", where: "all", page: 0, kinds: new Set(this.data.kinds.keys()) });
    this.chooseMeasure();
    this.state.step = String(this.data.sequences.at(-1).step);
    this.state.sequence = nameOf(this.mostColoured(this.state.step));
    this.begin(run);
  }

  begin(run) {
    this.chooseMeasure();
    this.buildControls(run);
    this.draw();
  }

  // What the measures are called that the tokens have.
  measures() {
    return Object.entries(MEASURES).filter(([key]) => key in this.data.codes || key === "probability");
  }

  // The weight, where it says something, unless the reader has chosen another measure that this run has.
  chooseMeasure() {
    const { state, data } = this;
    const has = this.measures().some(([key]) => key === this.picked);
    state.measure = has ? this.picked : data.isUniform ? "loss" : "weight";
  }

  // Of a step's traces, the one with the most colour on its first screen.
  mostColoured(step) {
    const { data } = this;
    const { places } = scaleOf(data, this.state.measure);
    const codes = this.codesOf();
    const colourOf = ({ start, end }) => {
      let sum = 0;
      for (let i = start; i < Math.min(end, start + TOKENS_OF_SCREEN); i++) sum += Math.abs(places[codes[i]]);
      return sum;
    };
    const traces = data.sequences.filter((one) => String(one.step) === step);
    const found = traces.map(colourOf);
    return traces[found.indexOf(Math.max(...found))];
  }

  // The codes of the tokens in the measure that is shown.
  codesOf() {
    const { measure } = this.state;
    return this.data.codes[measure === "probability" ? "loss" : measure];
  }

  // What changes a choice and draws what is chosen.
  set(key) {
    return (value) => (Object.assign(this.state, { [key]: value, page: 0 }), this.draw());
  }

  buildControls(run) {
    const { data, state } = this;
    const distinct = (values) => [...new Set(values)].map((value) => [value, value]);
    const measure = select("Colour by", this.measures(), (value) => this.set("measure")((this.picked = value)));
    const step = select("Step", [["", "all"], ...distinct(data.sequences.map((one) => one.step))], (value) => this.changeStep(value));
    const trace = select("Trace", [], this.set("sequence"));
    const controls = [measure, step, trace];
    trace[0].classList.add("wide");
    [measure[1].value, step[1].value, this.traceControl] = [state.measure, state.step, trace[1]];
    this.listTraces();
    this.filters.replaceChildren(...[
      select("Weights", [["all", "all"], ["most", "top 5% of each trace"], ["least", "bottom 5% of each trace"]], this.set("show")),
      select("Answer", [["all", "inside and outside"], ["inside", "inside \\boxed{}"], ["outside", "outside"]], this.set("where")),
    ].map(([label]) => label));
    if (report.tokens.length > 1) {
      const runs = select("Run", report.tokens.map((one, i) => [i, one.run]), (value) => this.open(Number(value)));
      runs[1].value = run;
      controls.unshift(runs);
    }
    this.controls.replaceChildren(...controls.map(([label]) => label));
    const present = new Set([...new Set(data.flags)].map((flag) => flag & KIND));
    this.kinds.replaceChildren(this.kinds.firstChild, ...data.kinds.flatMap((kind, i) => {
      const toggle = (event) => (event.target.checked ? state.kinds.add(i) : state.kinds.delete(i), (state.page = 0), this.draw());
      return present.has(i) ? [element("label", {}, element("input", { type: "checkbox", checked: true, onchange: toggle }), ` ${kind}`)] : [];
    }));
  }

  // The traces of the chosen step, or of all.
  tracesOfStep() {
    const { data, state } = this;
    return data.sequences.filter((one) => state.step === "" || String(one.step) === state.step);
  }

  listTraces() {
    const names = optionsOf(this.tracesOfStep()).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
    this.traceControl.replaceChildren(...[["", "all"], ...names].map(([value, text]) => element("option", { value }, text)));
    this.traceControl.value = this.state.sequence;
  }

  // The chosen trace stays where the step has it, too.
  changeStep(step) {
    const { state } = this;
    state.step = step;
    if (state.sequence !== "" && !this.tracesOfStep().some((one) => nameOf(one) === state.sequence)) state.sequence = nameOf(this.mostColoured(step));
    this.listTraces();
    this.set("step")(step);
  }

  matches(sequence, i) {
    const { data, state } = this;
    const few = Math.ceil(EXTREME * sequence.tokens);
    return state.kinds.has(data.flags[i] & KIND)
      && (state.where === "all" || (state.where === "inside") === Boolean(data.flags[i] & IN_ANSWER))
      && (state.show === "all" || (state.show === "most" ? data.rank[i] < few : data.rank[i] >= sequence.tokens - few));
  }

  // Traces that the filters leave, with the number of their tokens that match.
  chosen() {
    const { data, state } = this;
    const found = [];
    for (const sequence of data.sequences) {
      if (state.step !== "" && String(sequence.step) !== state.step) continue;
      if (state.sequence !== "" && nameOf(sequence) !== state.sequence) continue;
      let numMatching = 0;
      for (let i = sequence.start; i < sequence.end; i++) numMatching += this.matches(sequence, i);
      if (numMatching) found.push({ sequence, numMatching });
    }
    return found;
  }

  draw() {
    const { data, state } = this;
    hideTip();
    const { places, isDiverging } = scaleOf(data, state.measure);
    this.codes = this.codesOf();
    this.meaning.textContent = MEANINGS[state.measure];
    this.colours.textContent = places.map((place, code) => `:where(#${this.place.id}) .c${code}{background:${colour(place, isDiverging)}}`).join("");
    this.drawScale(isDiverging);
    const chosen = this.chosen();
    const pages = pagesOf(chosen);
    state.page = Math.min(state.page, pages.length - 1);
    this.count.textContent = this.summary(chosen);
    this.list.replaceChildren(...pages[state.page].map(({ sequence }) => this.trace(sequence)));
    for (const [canvas, sequence] of this.strips.splice(0)) this.drawStrip(canvas, sequence, places, isDiverging);
    this.drawPages(pages.length);
  }

  summary(chosen) {
    const { data } = this;
    const matching = chosen.reduce((sum, one) => sum + one.numMatching, 0);
    const total = data.sequences.length;
    const left = data.numRecorded > data.numTokens ? `; ${(data.numRecorded - data.numTokens).toLocaleString("en-US")} more are recorded and not in this file` : "";
    return `${matching.toLocaleString("en-US")} of ${data.numTokens.toLocaleString("en-US")} tokens, in ${chosen.length.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} traces${left}`;
  }

  strips = [];

  drawScale(isDiverging) {
    const stops = Array.from({ length: 9 }, (_, i) => colour(isDiverging ? i / 4 - 1 : i / 8, isDiverging));
    const bar = element("div", { "aria-hidden": "true" });
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    this.scale.replaceChildren(bar, ...scaleLabels(this.data, this.state.measure, this.state.step).map((text) => element("span", {}, text)));
  }

  trace(sequence) {
    const { data } = this;
    const title = `Step ${sequence.step}, ${sequence.source} ${sequence.id}`;
    const facts = [`${sequence.tokens.toLocaleString("en-US")} tokens`];
    if ("alpha" in sequence) facts.push(`alpha ${number(sequence.alpha)}`);
    if ("share" in sequence && sequence.share !== 1) facts.push(`${number(sequence.share)}× the uniform share of the batch`);
    const strip = this.strip(sequence);
    const prompt = data.prompts[sequence.prompt];
    const asked = prompt === "" ? [] : [element("div", { class: "prompt", role: "note", "aria-label": "Prompt" }, prompt.replace(HIDDEN, "\ufffd"))];
    const tokens = element("div", { class: "tokens", role: "listbox", "aria-label": `Tokens of ${title}` });
    for (let i = sequence.start; i < sequence.end; i++) {
      const span = document.createElement("span");
      const text = data.texts[data.text[i]];
      span.className = `c${this.codes[i]}${this.matches(sequence, i) ? "" : " dim"}${data.flags[i] & AFTER_GAP && i > sequence.start ? " gap" : ""}`;
      span.tabIndex = -1;
      span.setAttribute("role", "option");
      span.textContent = text === "" ? "·" : visible(text);
      span.place = i;
      span.sequence = sequence;
      tokens.append(span);
    }
    (tokens.querySelector("span:not(.dim)") ?? tokens.firstChild).tabIndex = 0;
    return element("article", { class: "trace" }, element("h4", {}, title, element("small", {}, ` · ${facts.join(", ")}`)), ...asked, strip, tokens);
  }

  // A canvas for the whole trace, which is drawn once it is in the page.
  strip(sequence) {
    const canvas = element("canvas", { height: 1, width: Math.min(sequence.tokens, 1000), "aria-hidden": "true" });
    this.strips.push([canvas, sequence]);
    return canvas;
  }

  // The whole trace on one line: each pixel is the mean of its tokens.
  drawStrip(canvas, sequence, places, isDiverging) {
    const context = canvas.getContext("2d");
    const probe = this.place.appendChild(element("i"));
    for (let x = 0; x < canvas.width; x++) {
      const begin = sequence.start + Math.floor((x * sequence.tokens) / canvas.width);
      const end = Math.max(begin + 1, sequence.start + Math.floor(((x + 1) * sequence.tokens) / canvas.width));
      let sum = 0;
      for (let i = begin; i < end; i++) sum += places[this.codes[i]];
      const shade = Math.round((sum / (end - begin)) * 32) / 32;
      context.fillStyle = stripColour(probe, shade, isDiverging);
      context.fillRect(x, 0, 1, 1);
    }
    probe.remove();
  }

  drawPages(number) {
    const go = (by) => () => {
      this.state.page += by;
      this.draw();
      this.place.scrollIntoView();
    };
    const { page } = this.state;
    this.pages.replaceChildren(...(number < 2 ? [] : [
      element("button", { type: "button", disabled: page === 0, onclick: go(-1) }, "Previous traces"),
      element("span", { class: "faint" }, `page ${page + 1} of ${number}`),
      element("button", { type: "button", disabled: page === number - 1, onclick: go(1) }, "Next traces"),
    ]));
  }

  followPointer() {
    const token = (event) => (event.target.place === undefined ? null : event.target);
    this.list.addEventListener("pointerover", (event) => (token(event) ? this.tell(event.target) : hideTip()));
    this.list.addEventListener("pointerleave", hideTip);
    this.list.addEventListener("focusin", (event) => token(event) && this.tell(event.target));
    this.list.addEventListener("focusout", hideTip);
    this.list.addEventListener("keydown", (event) => {
      if (!token(event)) return;
      if (event.key === "Escape") hideTip();
      const found = this.neighbour(event.target, event.key);
      if (!found) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      found.tabIndex = 0;
      found.focus();
    });
  }

  // The token that a key leads to, over those that the filters dim.
  neighbour(span, key) {
    const forward = { ArrowRight: true, ArrowLeft: false, Home: true, End: false }[key];
    if (forward === undefined) return null;
    const step = (node) => (forward ? node?.nextElementSibling : node?.previousElementSibling);
    let found = key === "Home" ? span.parentNode.firstChild : key === "End" ? span.parentNode.lastChild : step(span);
    while (found?.classList.contains("dim")) found = step(found);
    return found;
  }

  tell(span) {
    const { data } = this;
    const text = data.texts[data.text[span.place]];
    const facts = describe(data, span.sequence, span.place);
    const title = text === "" ? "(part of the character before)" : JSON.stringify(text).replace(HIDDEN, "\ufffd");
    span.setAttribute("aria-label", `${title}: ${facts.map((pair) => pair.join(" ")).join(", ")}`);
    showTip(span, element("b", {}, title), element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
  }
}

// A canvas takes no variables, so the browser works the colour out on an element.
const shades = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (shades.clear(), [viewer, followed].forEach((one) => one?.data && one.draw())));
function stripColour(probe, shade, isDiverging) {
  const key = `${shade} ${isDiverging}`;
  if (!shades.has(key)) {
    probe.style.color = colour(shade, isDiverging);
    shades.set(key, getComputedStyle(probe).color);
  }
  return shades.get(key);
}
