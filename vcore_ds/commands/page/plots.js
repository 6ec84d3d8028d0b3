// Plots: curves, histograms, and utility against loss. The pointer and the arrow keys read them.

const WIDTH = 340, DIGIT = 6.5; // of a plot; about that of a digit in its labels
const MOST_DOTS = 16; // points of a curve that are marked
const BINS = 48; // of utility and of loss
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3", "10 4"];
const lineColour = (group) => `var(--line${(group % 6) + 1})`;
const dashes = (group) => DASHES[(group + Math.floor(group / 6)) % 6];
const signColour = (value) => lineColour(value > 0 ? 1 : 0);
const least = (items, cost) => items.reduce((best, one) => (cost(one) < cost(best) ? one : best));

// An axis: its ends, its ticks with their names, perhaps a title, and whether places are by the logarithm.
const axis = (low, high, values, more = {}) => ({ low, high, values, names: labels(values), ...more });

// An empty plot with axes. `x` and `y` of the result give the place of a value in the picture.
function makePlot(label, xAxis, yAxis, width = WIDTH, height = xAxis.title ? 210 : 190) {
  const left = Math.max(46, (yAxis.title ? 24 : 8) + DIGIT * Math.max(...yAxis.names.map((name) => name.length)));
  const [right, top, bottom] = [width - 8, 8, height - (xAxis.title ? 38 : 22)];
  const share = ({ low, high }, value) => (low === high ? 0.5 : (value - low) / (high - low));
  const x = (value) => left + share(xAxis, value) * (right - left);
  const y = (value) => bottom - share(yAxis, value) * (bottom - top);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": label });
  for (const [i, value] of yAxis.values.entries()) {
    svg.append(shape("line", { class: "axis", x1: left, x2: right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { class: "value", x: left - 5, y: y(value) + 4, "text-anchor": "end" }, yAxis.names[i]));
  }
  let end = 0; // of the last name: those that would overlap it are left out
  for (const [i, value] of xAxis.values.entries()) {
    const half = (DIGIT * xAxis.names[i].length) / 2, place = Math.min(x(value), width - half);
    if (place - half < end) continue;
    end = place + half + DIGIT;
    svg.append(shape("text", { class: "step", x: place, y: bottom + 16, "text-anchor": "middle" }, xAxis.names[i]));
  }
  const [middleX, middleY] = [(left + right) / 2, (top + bottom) / 2];
  if (xAxis.title) svg.append(shape("text", { x: middleX, y: height - 5, "text-anchor": "middle" }, xAxis.title));
  if (yAxis.title) svg.append(shape("text", { x: 12, y: middleY, transform: `rotate(-90 12 ${middleY})`, "text-anchor": "middle" }, yAxis.title));
  return { svg, x, y, left, right, top, bottom };
}

// Let the pointer and the arrow keys choose one of `points`, places in the picture in order of x, perhaps with y: `tell`
// gets its number, or null when none is chosen. `start`: where the keys begin.
function makeReadable(svg, readout, points, tell, start = null) {
  let here = start;
  const indices = [...points.keys()];
  const go = (place) => {
    here = place ?? start;
    tell(place);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    go(least(indices, (i) => (points[i].x - x) ** 2 + ((points[i].y ?? y) - y) ** 2));
  });
  svg.addEventListener("pointerleave", () => go(null));
  svg.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  svg.addEventListener("blur", () => (readout.removeAttribute("aria-live"), go(null)));
  svg.addEventListener("keydown", (event) => {
    const last = points.length - 1;
    const upwards = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    let target = { ArrowLeft: (here ?? last + 1) - 1, ArrowRight: (here ?? -1) + 1, Home: 0, End: last }[event.key];
    if (upwards) {
      const { x, y } = points[here ?? 0]; // the nearest point of the next row
      const rows = indices.filter((i) => (points[i].y - y) * upwards > 0);
      if (rows.length) target = least(rows, (i) => 1e3 * Math.abs(points[i].y - y) + Math.abs(points[i].x - x));
    }
    if (target === undefined) return;
    event.preventDefault();
    go(Math.max(0, Math.min(last, target)));
  });
  tell(null);
}

const makeFigure = (chart, svg, readout) =>
  element("figure", { "data-chart": chart.key }, element("figcaption", {}, chart.title + (chart.unit ? ` (${chart.unit})` : ""), element("small", {}, chart.note)), svg, readout);

function makeReadableFigure(chart, svg, points, describe) {
  const readout = element("p", { class: "readout" });
  makeReadable(svg, readout, points, (i) => (readout.textContent = i === null ? chart.readout : describe(i)));
  return makeFigure(chart, svg, readout);
}

// Curves of some groups, all with one cursor: `share` moves those of the other charts, too. The x axis counts steps, unless
// the chart has one: places, their names, and a title.
function drawCurves(chart, xs, share, groups = report.groups) {
  const numbers = chart.series.flatMap((one) => [one.values, ...one.bands.flat(), one.line?.values ?? []]).flat();
  let [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  [low, high] = [low >= 0 && low < margin * 2 ? 0 : low - margin, high + margin];
  const [first, last] = [xs[0], xs.at(-1)];
  const values = first === last ? [first] : ticks(first, last, 5).filter(Number.isInteger);
  const xAxis = { low: first, high: last, values, names: values.map(count), ...chart.axis };
  const nameOf = (place) => (chart.axis ? `${xAxis.title} ${xAxis.names[xAxis.values.indexOf(place)]}` : `step ${count(place)}`);
  const told = ({ steps }) => [...steps.keys()].filter((i) => chart.axis || i === 0 || i === steps.length - 1);
  const texts = chart.series.map((one) => `${groups[one.group]}: ${told(one).map((i) => `${number(one.values[i])} at ${nameOf(one.steps[i])}`).join(", ")}`);
  const label = `${chart.title}. ${texts.join("; ")}. Arrow keys read it.`;
  const { svg, x, y, top, bottom } = makePlot(label, xAxis, axis(low, high, ticks(low, high, 5)));
  for (const one of chart.series) {
    const { steps, values, bands, group } = one;
    const points = (numbers, places = steps) => numbers.map((value, i) => `${x(places[i]).toFixed(1)},${y(value).toFixed(1)}`);
    for (const [lower, upper] of bands) {
      svg.append(shape("polygon", { class: "band", fill: lineColour(group), points: [...points(lower), ...points(upper).reverse()].join(" ") }));
    }
    const line = one.line ?? one; // a fitted line, or one from point to point
    svg.append(shape("polyline", { class: "curve", stroke: lineColour(group), "stroke-dasharray": dashes(group), points: points(line.values, line.steps).join(" ") }));
    // Few enough to see which steps were measured.
    for (const i of steps.length <= MOST_DOTS ? steps.keys() : []) {
      svg.append(shape("circle", { cx: x(steps[i]), cy: y(values[i]), r: one.line ? 3 : 2, fill: lineColour(group) }));
    }
  }
  const cursor = svg.appendChild(shape("line", { class: "cursor", y1: top, y2: bottom }));
  const readout = element("p", { class: "readout" });
  const move = (place) => {
    const step = xs[place ?? xs.length - 1];
    for (const [name, value] of [["visibility", place === null ? "hidden" : "visible"], ["x1", x(step)], ["x2", x(step)]]) cursor.setAttribute(name, value);
    const series = chart.series.filter((one) => !chart.axis || one.steps.includes(step));
    readout.replaceChildren(`${nameOf(step)}: `, ...series.map((one) => readAt(one, step, groups)));
  };
  share.push(move);
  makeReadable(svg, readout, xs.map((step) => ({ x: x(step) })), (place) => share.forEach((other) => other(place)), xs.length - 1);
  return makeFigure(chart, svg, readout);
}

function readAt({ steps, values, bands, group }, step, groups) {
  const place = least([...steps.keys()], (i) => Math.abs(steps[i] - step));
  const [lower, upper] = bands[0] ?? [];
  const range = lower && lower[place] !== upper[place] ? ` [${number(lower[place])}, ${number(upper[place])}]` : "";
  const swatch = element("i", { style: `background: ${lineColour(group)}` });
  return element("span", {}, ...(groups.length > 1 ? [swatch] : []), number(values[place]) + range);
}

function drawHistogram(chart) {
  const { low, width, counts } = chart, high = low + width * counts.length, most = Math.max(...counts);
  const xAxis = axis(low, high, ticks(low, high, 4), { title: "utility" });
  const { svg, x, y, top, bottom } = makePlot(`${chart.title}: ${chart.readout}. Arrow keys read it bar by bar.`, xAxis, axis(0, most, ticks(0, most, 4).filter(Number.isInteger)));
  const edge = (i) => low + i * width;
  for (const [i, value] of counts.entries()) {
    svg.append(shape("rect", { class: "bar", fill: signColour(edge(i + 0.5)), x: x(edge(i)) + 0.3, y: y(value), width: x(edge(1)) - x(low) - 0.6, height: bottom - y(value) }));
  }
  svg.append(shape("line", { class: "zero", x1: x(0), x2: x(0), y1: top, y2: bottom }));
  const bars = [...counts.keys()].map((i) => ({ x: x(edge(i + 0.5)) }));
  return makeReadableFigure(chart, svg, bars, (i) => `${count(counts[i])} traces from ${number(edge(i))} to ${number(edge(i + 1))}`);
}

// Charts in rows, one for each of their sections.
function drawCharts(name, charts, draw) {
  for (const section of new Set(charts.map((chart) => chart.section))) {
    const figures = charts.filter((chart) => chart.section === section).map(draw);
    document.getElementById(name).append(element("h3", {}, section), element("div", { class: "charts" }, ...figures));
  }
}

function drawLegend(groups) {
  return element("div", { class: "legend" }, ...groups.map((label, group) => {
    const line = shape("line", { x1: 0, x2: 32, y1: 6, y2: 6, stroke: lineColour(group), "stroke-width": 3, "stroke-dasharray": dashes(group) });
    return element("span", {}, shape("svg", { viewBox: "0 0 32 12", "aria-hidden": "true" }, line), label);
  }));
}

// Utility against loss: how many tokens have which, and how they were weighted.
class Density {
  constructor(place) {
    this.state = { colour: "weight", step: "" };
    this.place = place;
  }

  async open(run) {
    this.data = await tokensOf("tokens", run);
    this.state.step = "";
    const set = (key) => (value) => ((this.state[key] = value), this.draw());
    const runs = report.tokens.flatMap((one, i) => (one.measures.includes("utility") ? [[i, one.run]] : []));
    this.controls = element("div", { class: "controls" },
      ...(report.tokens.length > 1 ? [select("Run", runs, run, (value) => this.open(Number(value)))] : []),
      select("Colour by", [["weight", "mean weight"], ["count", "number of tokens"]], this.state.colour, set("colour")),
      select("Step", [["", "all"], ...this.data.groups], "", set("step")));
    this.draw();
  }

  // Cells with tokens, row by row: each is some levels of loss and of utility. `axis`: utilities at the edges of the rows.
  fillCells(axis) {
    const { data, state } = this, cells = new Map();
    for (const sequence of data.sequences.filter((one) => state.step === "" || String(one.group) === state.step)) {
      const rows = rowsOf(data.levels.utility[sequence.group], axis);
      for (let i = sequence.start; i < sequence.end; i++) {
        const [x, y] = [(data.codes.loss[i] * BINS) >> 8, rows[data.codes.utility[i]]], key = y * BINS + x;
        if (!cells.has(key)) cells.set(key, { key, x, y, count: 0, weight: 0 });
        const cell = cells.get(key);
        cell.count += 1;
        cell.weight += data.levels.weight[data.codes.weight[i]];
      }
    }
    return [...cells.values()].sort((a, b) => a.key - b.key);
  }

  draw() {
    const { data, state } = this;
    const levels = { x: data.levels.loss, y: data.levels.utility[state.step] ?? data.utilityAxis };
    const cells = this.fillCells(levels.y), most = Math.max(...cells.map((cell) => cell.count));
    const total = cells.reduce((sum, cell) => sum + cell.count, 0);
    const label = `Utility against loss of ${count(total)} tokens. Arrow keys read it cell by cell.`;
    const xAxis = { low: 0, high: BINS, ...roundTicks(levels.x, 5), title: "loss (nats)" };
    const { svg, x, y, left, right, top, bottom } = makePlot(label, xAxis, { low: 0, high: BINS, ...roundTicks(levels.y, 3), title: "utility" }, 430, 390);
    svg.append(shape("rect", { x: left, y: top, width: right - left, height: bottom - top, fill: "none", stroke: "var(--line)" }));
    const rects = cells.map((cell) => {
      const share = state.colour === "count" ? 0.15 + (0.85 * Math.log(cell.count)) / Math.max(1, Math.log(most)) : Math.log2(cell.weight / cell.count || 1e-9) / report.weightRange;
      const style = `fill: ${colour(share, state.colour === "weight")}`;
      return shape("rect", { class: "cell", x: x(cell.x), y: y(cell.y + 1), width: x(1) - x(0), height: y(0) - y(1), style });
    });
    svg.append(...rects);
    const readout = element("p", { class: "readout" });
    const edge = (axis, bin) => number(levels[axis][Math.min(255, Math.round((bin * 256) / BINS))]);
    makeReadable(svg, readout, cells.map((cell) => ({ x: x(cell.x + 0.5), y: y(cell.y + 0.5) })), (place) => {
      for (const [i, rect] of rects.entries()) rect.classList.toggle("chosen", i === place);
      const cell = cells[place];
      readout.textContent = place === null
        ? "Both axes are finer around 0."
        : `loss ${edge("x", cell.x)} to ${edge("x", cell.x + 1)}, utility ${edge("y", cell.y)} to ${edge("y", cell.y + 1)}: ${count(cell.count)} tokens, mean weight ${number(cell.weight / cell.count)}×`;
    });
    this.place.replaceChildren(this.controls, element("figure", {}, svg), readout);
  }
}

// Round numbers on an axis of uneven levels: 0, then the largest, `apart` bins from each other.
function roundTicks(levels, apart) {
  const powers = Array.from({ length: 12 }, (_, i) => Math.floor(Math.log10(Math.max(levels[255], -levels[0]))) - i);
  const sizes = powers.flatMap((power) => [5, 2, 1].map((digit) => Number(`${digit}e${power}`)));
  const ticks = { values: [], names: [] };
  for (const value of [0, ...sizes.flatMap((size) => [size, -size])]) {
    if (value < levels[0] || value > levels[255]) continue;
    const above = Math.max(1, levels.findIndex((level) => level >= value));
    const bin = ((above - (levels[above] - value) / (levels[above] - levels[above - 1])) * BINS) / 256;
    if (ticks.values.some((other) => Math.abs(other - bin) < apart)) continue;
    ticks.values.push(bin);
    ticks.names.push(number(value));
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
