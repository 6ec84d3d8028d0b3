// Followed traces: one trace at all recorded steps, a row each, and its tokens at one of them.

class Followed extends Viewer {
  constructor(place) {
    super(place);
    this.filter.remove();
    this.rows = element("div", { class: "rows" });
    this.scale.after(this.rows);
  }

  async open(run) {
    this.data = await tokensOf(run, "followed");
    const { data, state } = this;
    state.kinds = new Set(data.kinds.keys());
    state.sequence = nameOf(data.sequences[0]);
    state.step = String(data.sequences.at(-1).step);
    this.begin(run);
  }

  buildControls(run) {
    const { data, state } = this;
    const distinct = (values) => [...new Set(values)].map((value) => [value, value]);
    const controls = [
      select("Colour by", this.measures(), (value) => this.set("measure")((this.picked = value))),
      select("Trace", optionsOf(data.sequences), this.set("sequence")),
      select("Step", distinct(data.sequences.map((one) => one.step)), this.set("step")),
    ];
    controls[0][1].value = state.measure;
    controls[1][0].classList.add("wide");
    this.step = controls[2][1];
    if (report.followed.length > 1) {
      const runs = select("Run", report.followed.map((one, i) => [i, one.run]), (value) => this.open(Number(value)));
      runs[1].value = run;
      controls.unshift(runs);
    }
    this.controls.replaceChildren(...controls.map(([label]) => label));
  }

  // A row for each step of the trace; a column is the same tokens in all of them.
  draw() {
    const { data, state } = this;
    const own = data.sequences.filter((one) => nameOf(one) === state.sequence);
    if (!own.some((one) => String(one.step) === state.step)) state.step = String(own.at(-1).step);
    this.step.value = state.step;
    this.rows.replaceChildren(...own.map((sequence) => {
      const step = String(sequence.step);
      const row = { class: step === state.step ? "shown" : null, onclick: () => this.set("step")(step) };
      return element("div", row, element("span", {}, `step ${step}`), this.strip(sequence));
    }));
    super.draw();
  }

  summary([{ sequence }]) {
    const [here, whole] = [sequence.tokens, sequence.wholeTokens].map((n) => n.toLocaleString("en-US"));
    const origin = sequence.isHeldOut ? "Held out, not trained on" : "Training data";
    return `${origin}: ${here === whole ? "all" : `the first ${here}`} of ${whole} tokens`;
  }
}
