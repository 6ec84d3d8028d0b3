// Utility against loss: how many tokens have which, and how they were weighted.

const BINS = 48;

class Density {
  constructor(place) {
    this.state = { colour: "weight", step: "" };
    this.controls = element("div", { class: "controls" });
    this.figure = element("figure");
    this.readout = element("p", { class: "readout" });
    place.append(this.controls, this.figure, this.readout);
  }

  async open(run) {
    this.data = await tokensOf(run);
    this.state.step = "";
    const set = (key) => (value) => ((this.state[key] = value), this.draw());
    const steps = [...new Set(this.data.sequences.map((one) => one.step))].map((step) => [step, step]);
    const controls = [
      select("Colour by", [["weight", "mean weight"], ["count", "number of tokens"]], set("colour")),
      select("Step", [["", "all"], ...steps], set("step")),
    ];
    controls[0][1].value = this.state.colour;
    if (report.tokens.length > 1) {
      const runs = select("Run", report.tokens.flatMap((one, i) => ("utility" in one.levels ? [[i, one.run]] : [])), (value) => this.open(Number(value)));
      runs[1].value = run;
      controls.unshift(runs);
    }
    this.controls.replaceChildren(...controls.map(([label]) => label));
    this.draw();
  }

  // Utilities at the edges of the rows, finer than these: those of the step, or of all.
  axis() {
    return this.data.levels.utility[this.state.step] ?? this.data.levels.utilityAxis;
  }

  // Tokens and the sum of their weights in each cell; a cell is some levels of loss and of utility.
  count() {
    const { data, state } = this;
    const axis = this.axis();
    const counts = new Uint32Array(BINS * BINS), weights = new Float64Array(BINS * BINS);
    for (const sequence of data.sequences) {
      if (state.step !== "" && String(sequence.step) !== state.step) continue;
      const rows = rowsOf(data.levels.utility[sequence.step], axis);
      for (let i = sequence.start; i < sequence.end; i++) {
        const cell = rows[data.codes.utility[i]] * BINS + ((data.codes.loss[i] * BINS) >> 8);
        counts[cell] += 1;
        weights[cell] += data.levels.weight[data.codes.weight[i]];
      }
    }
    const cells = [...counts.keys()].filter((cell) => counts[cell]);
    return cells.map((cell) => ({ x: cell % BINS, y: Math.floor(cell / BINS), count: counts[cell], weight: weights[cell] }));
  }

  draw() {
    const { data, state } = this;
    const [left, top, size] = [64, 8, 7];
    const side = size * BINS;
    const svg = shape("svg", { viewBox: `0 0 ${left + side + 30} ${top + side + 40}`, role: "img", tabindex: 0 });
    const edge = (levels, bin) => levels[Math.min(255, Math.round((bin * 256) / BINS))];
    const cells = this.count();
    const most = Math.max(...cells.map((cell) => cell.count));
    const correlation = data.spearman === null ? "Utility or loss is constant" : `Rank correlation of utility and loss: ${number(data.spearman)} in the mean over steps`;
    const total = cells.reduce((sum, cell) => sum + cell.count, 0);
    svg.setAttribute("aria-label", `Utility against loss of ${total.toLocaleString("en-US")} tokens. ${correlation}. Arrow keys read it cell by cell.`);
    for (const { bin, value } of roundTicks(data.levels.loss, 5)) {
      svg.append(shape("text", { x: left + bin * size, y: top + side + 16, "text-anchor": "middle" }, number(value)));
    }
    for (const { bin, value } of roundTicks(this.axis(), 3)) {
      svg.append(shape("text", { x: left - 6, y: top + side - bin * size + 4, "text-anchor": "end" }, number(value)));
    }
    svg.append(shape("text", { x: left + side / 2, y: top + side + 34, "text-anchor": "middle" }, "loss (nats)"));
    svg.append(shape("text", { x: 12, y: top + side / 2, transform: `rotate(-90 12 ${top + side / 2})`, "text-anchor": "middle" }, "utility"));
    svg.append(shape("rect", { x: left, y: top, width: side, height: side, fill: "none", stroke: "var(--line)" }));
    svg.append(shape("line", { class: "axis", x1: left, x2: left + side, y1: top + side / 2, y2: top + side / 2 }));
    const rects = cells.map((cell) => {
      const shown = state.colour === "count"
        ? colour(0.15 + (0.85 * Math.log(cell.count)) / Math.max(1, Math.log(most)), false)
        : colour(Math.log2(cell.weight / cell.count || 1e-9) / report.weightRange, true);
      const rect = shape("rect", { x: left + cell.x * size, y: top + side - (cell.y + 1) * size, width: size, height: size, stroke: "var(--line)", "stroke-width": 0.4 });
      rect.style.fill = shown;
      rect.cell = cell;
      return rect;
    });
    svg.append(...rects);

    const tell = (rect) => {
      for (const one of rects) one.setAttribute("stroke", one === rect ? "var(--text)" : "var(--line)");
      const range = (levels, bin) => `${number(edge(levels, bin))} to ${number(edge(levels, bin + 1))}`;
      this.readout.textContent = rect
        ? `loss ${range(data.levels.loss, rect.cell.x)}, utility ${range(this.axis(), rect.cell.y)}: ${rect.cell.count.toLocaleString("en-US")} tokens, mean weight ${number(rect.cell.weight / rect.cell.count)}×`
        : `${correlation}. Both axes are finer around 0.`;
    };
    let here = -1;
    svg.addEventListener("pointerover", (event) => tell(event.target.cell ? event.target : null));
    svg.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    svg.addEventListener("blur", () => (this.readout.removeAttribute("aria-live"), tell(null)));
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      if (event.key.endsWith("t")) here = Math.max(0, Math.min(cells.length - 1, here + by));
      else here = this.otherRow(cells, here, by);
      tell(rects[here]);
    });
    tell(null);
    this.figure.replaceChildren(svg);
  }

  // The cell of the next row up or down that is nearest to a cell.
  otherRow(cells, here, by) {
    const { x, y } = cells[Math.max(0, here)];
    const rows = cells.map((cell) => cell.y).filter((row) => (row - y) * by > 0);
    if (!rows.length) return Math.max(0, here);
    const row = by > 0 ? Math.min(...rows) : Math.max(...rows);
    const distance = (i) => Math.abs(cells[i].x - x);
    return [...cells.keys()].filter((i) => cells[i].y === row).reduce((best, i) => (distance(i) < distance(best) ? i : best));
  }
}

// Round numbers on an axis of uneven levels, in bins from its low end: 0, then the largest, `apart` bins from each other.
function roundTicks(levels, apart) {
  const powers = Array.from({ length: 12 }, (_, i) => Math.floor(Math.log10(Math.max(levels[255], -levels[0]))) - i);
  const sizes = powers.flatMap((power) => [5, 2, 1].map((digit) => Number(`${digit}e${power}`)));
  const ticks = [];
  for (const value of [0, ...sizes.flatMap((size) => [size, -size])]) {
    if (value < levels[0] || value > levels[255]) continue;
    const above = Math.max(1, levels.findIndex((level) => level >= value));
    const bin = ((above - (levels[above] - value) / (levels[above] - levels[above - 1])) * BINS) / 256;
    if (ticks.every((tick) => Math.abs(tick.bin - bin) >= apart)) ticks.push({ bin, value });
  }
  return ticks;
}

// The row of each code of a step's utilities.
function rowsOf(levels, axis) {
  let place = 0;
  return levels.map((value) => {
    while (place < 255 && Math.abs(axis[place + 1] - value) <= Math.abs(axis[place] - value)) place += 1;
    return (place * BINS) >> 8;
  });
}
