// The traces with the highest and the lowest mean utility, each token coloured by its utility or its loss.

const SUPERVISED = 1;
const MEANINGS = {
  utility: "Orange: learning the token lowers the loss of the trusted set. Blue: it raises that loss. Grey words are the prompt.",
  loss: "The more purple a token, the higher its loss. Grey words are the prompt.",
};

class Traces {
  constructor(place) {
    this.state = { set: 0, end: "highest", measure: "utility", page: 0 };
    this.place = place;
    this.colours = document.head.appendChild(element("style"));
    this.meaning = element("p");
    this.scale = element("div", { class: "scale" });
    this.list = element("div");
    this.pages = element("div", { class: "controls" });
    const set = (key) => (value) => (Object.assign(this.state, { page: 0, [key]: value }), this.draw());
    const controls = [
      select("Traces with", [["highest", "the highest mean utility"], ["lowest", "the lowest mean utility"]], set("end")),
      select("Colour by", [["utility", "Utility"], ["loss", "Loss"]], set("measure")),
    ];
    if (report.traces.length > 1) controls.unshift(select("Trusted set", report.traces.map((one, i) => [i, one.name]), set("set")));
    place.append(element("div", { class: "controls" }, ...controls.map(([label]) => label)), this.meaning, this.scale, this.list, this.pages);
    this.list.addEventListener("pointerover", (event) => (event.target.place === undefined ? hideTip() : this.tell(event.target)));
    this.list.addEventListener("pointerleave", hideTip);
    this.list.addEventListener("focusin", (event) => event.target.place !== undefined && this.tell(event.target));
    this.list.addEventListener("focusout", hideTip);
    this.list.addEventListener("keydown", (event) => this.move(event));
  }

  async draw() {
    hideTip();
    const { state } = this;
    const data = (this.data = await tokensOf(Number(state.set), "traces"));
    const isDiverging = state.measure === "utility";
    const placeOf = (code) => (isDiverging ? (code - 128) / 128 : code / 255);
    this.colours.textContent = Array.from({ length: 256 }, (_, code) => `.c${code}{background:${colour(placeOf(code), isDiverging)}}`).join("");
    this.meaning.textContent = MEANINGS[state.measure];
    const stops = Array.from({ length: 9 }, (_, i) => colour(isDiverging ? i / 4 - 1 : i / 8, isDiverging));
    const bar = element("div", { "aria-hidden": "true" });
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const levels = data.levels[state.measure];
    const ends = isDiverging ? [number(levels[0], 2), "0", number(levels[255], 2)] : ["0", "", `${number(levels[255], 2)} nats`];
    this.scale.replaceChildren(bar, ...ends.map((text) => element("span", {}, text)));
    const chosen = this.chosen();
    const pages = pagesOf(chosen.map((sequence) => ({ sequence })));
    this.list.replaceChildren(...pages[state.page].map(({ sequence }) => this.trace(sequence)));
    this.drawPages(pages.length);
  }

  // Traces of one end, the most extreme one first. Few traces stand at both ends.
  chosen() {
    const { sequences, numScored } = this.data;
    const half = Math.min(20, sequences.length);
    return this.state.end === "highest" ? sequences.slice(0, half) : sequences.slice(-half).reverse();
  }

  trace(sequence) {
    const { data } = this;
    const codes = data.codes[this.state.measure];
    const facts = [
      `rank ${sequence.rank.toLocaleString("en-US")} of ${data.numScored.toLocaleString("en-US")}`, `mean ${number(sequence.mean)}`,
      `sum ${number(sequence.sum)}`, `loss ${number(sequence.loss)} nats`,
    ];
    if (sequence.wholeTokens > sequence.tokens) facts.push(`the first ${sequence.tokens.toLocaleString("en-US")} of ${sequence.wholeTokens.toLocaleString("en-US")} tokens`);
    const title = visible(sequence.title);
    const tokens = element("div", { class: "tokens", role: "listbox", "aria-label": `Tokens of ${title}` });
    for (let i = sequence.start; i < sequence.end; i++) {
      const text = data.texts[data.text[i]];
      const span = element("span", { class: data.flags[i] & SUPERVISED ? `c${codes[i]}` : "prompt", role: "option", tabindex: -1 }, text === "" ? "·" : visible(text));
      [span.place, span.sequence] = [i, sequence];
      tokens.append(span);
    }
    tokens.firstChild.tabIndex = 0;
    return element("article", { class: "trace" }, element("h4", {}, title, element("small", {}, ` · ${facts.join(", ")}`)), tokens);
  }

  drawPages(number) {
    const { page } = this.state;
    const go = (by) => () => ((this.state.page += by), this.draw(), this.place.scrollIntoView());
    this.pages.replaceChildren(...(number < 2 ? [] : [
      element("button", { type: "button", disabled: page === 0, onclick: go(-1) }, "Previous traces"),
      element("span", { class: "faint" }, `page ${page + 1} of ${number}`),
      element("button", { type: "button", disabled: page === number - 1, onclick: go(1) }, "Next traces"),
    ]));
  }

  move(event) {
    if (event.target.place === undefined) return;
    if (event.key === "Escape") hideTip();
    const { target } = event;
    const found = { ArrowRight: target.nextSibling, ArrowLeft: target.previousSibling, Home: target.parentNode.firstChild, End: target.parentNode.lastChild }[event.key];
    if (!found) return;
    event.preventDefault();
    target.tabIndex = -1;
    found.tabIndex = 0;
    found.focus();
  }

  tell(span) {
    const { data } = this;
    const text = data.texts[data.text[span.place]];
    const value = (measure) => number(data.levels[measure][data.codes[measure][span.place]]);
    const facts = data.flags[span.place] & SUPERVISED ? [["utility", value("utility")], ["loss", `${value("loss")} nats`]] : [["prompt", "not trained on"]];
    facts.push(["place", `${(span.place - span.sequence.start + 1).toLocaleString("en-US")} of ${span.sequence.wholeTokens.toLocaleString("en-US")}`]);
    const title = text === "" ? "(part of the character before)" : JSON.stringify(text).replace(HIDDEN, "\ufffd");
    span.setAttribute("aria-label", `${title}: ${facts.map((pair) => pair.join(" ")).join(", ")}`);
    showTip(span, element("b", {}, title), element("dl", {}, ...facts.flatMap(([name, found]) => [element("dt", {}, name), element("dd", {}, found)])));
  }
}
