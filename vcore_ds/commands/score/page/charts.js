// Histograms of utilities, and utilities against the length of traces.

const WIDTH = 340, HEIGHT = 210, LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 38;
const BY = { mean: "Mean over the tokens", sum: "Sum over the tokens" };

// An empty picture with axes: x and y give the place of a value, names what stands at which value.
function frame(label, xName, xs, ys, x, y) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": label });
  const [xNames, yNames] = [labels(xs), labels(ys)];
  for (const [i, value] of ys.entries()) {
    svg.append(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { class: "value", x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, yNames[i]));
  }
  for (const [i, value] of xs.entries()) {
    svg.append(shape("text", { class: "step", x: Math.min(x(value), WIDTH - RIGHT - 8), y: HEIGHT - 22, "text-anchor": "middle" }, xNames[i]));
  }
  svg.append(shape("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, xName));
  return svg;
}

function titled(set, by, ...content) {
  const title = report.sets.length > 1 ? `${BY[by]}, ${set.name}` : BY[by];
  return element("figure", { "data-chart": `${by}-${set.name}` }, element("figcaption", {}, title), ...content);
}

function drawHistogram(set, by) {
  const { low, width, counts, numPositive } = set.histograms[by];
  const high = low + width * counts.length, most = Math.max(...counts);
  const x = (value) => LEFT + ((value - low) / (high - low)) * (WIDTH - LEFT - RIGHT);
  const y = (count) => HEIGHT - BOTTOM - (count / most) * (HEIGHT - TOP - BOTTOM);
  const total = counts.reduce((sum, count) => sum + count, 0);
  const summary = `${numPositive.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} traces have a positive utility`;
  const svg = frame(`${BY[by]}: ${summary}. Arrow keys read it bar by bar.`, "utility", ticks(low, high, 4), ticks(0, most, 4).filter(Number.isInteger), x, y);
  for (const [i, count] of counts.entries()) {
    const side = low + (i + 0.5) * width > 0 ? "positive" : "negative";
    svg.append(shape("rect", { class: `bar ${side}`, x: x(low + i * width) + 0.3, y: y(count), width: (WIDTH - LEFT - RIGHT) / counts.length - 0.6, height: y(0) - y(count) }));
  }
  svg.append(shape("line", { class: "zero", x1: x(0), x2: x(0), y1: TOP, y2: HEIGHT - BOTTOM }));
  const readout = element("p", { class: "readout" }, summary);
  let here = null;
  const read = (bin) => {
    here = bin;
    if (bin === null) return void (readout.textContent = summary);
    readout.textContent = `${counts[bin].toLocaleString("en-US")} traces from ${number(low + bin * width)} to ${number(low + (bin + 1) * width)}`;
  };
  const last = counts.length - 1;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    read(Math.max(0, Math.min(last, Math.floor(share * counts.length))));
  });
  svg.addEventListener("pointerleave", () => read(null));
  svg.addEventListener("blur", () => read(null));
  svg.addEventListener("keydown", (event) => {
    const bin = { ArrowLeft: (here ?? last + 1) - 1, ArrowRight: (here ?? -1) + 1, Home: 0, End: last }[event.key];
    if (bin === undefined) return;
    event.preventDefault();
    readout.setAttribute("aria-live", "polite");
    read(Math.max(0, Math.min(last, bin)));
  });
  return titled(set, by, svg, readout);
}

function drawLengths(set, by) {
  const { tokens } = set.lengths, values = set.lengths[by];
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))] ?? 0;
  const [bottom, top] = [Math.min(0, at(0.005)), Math.max(0, at(0.995))];
  const margin = (top - bottom) * 0.05 || 1;
  const [low, high] = [bottom - margin, top + margin];
  // Lengths by their logarithm.
  const [shortest, longest] = [Math.min(...tokens), Math.max(...tokens)];
  const span = Math.log(longest / shortest) || 1;
  const x = (length) => LEFT + 6 + (Math.log(length / shortest) / span) * (WIDTH - LEFT - RIGHT - 12);
  const y = (value) => TOP + ((high - Math.max(low, Math.min(high, value))) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const lengths = [...new Set([0, 1 / 3, 2 / 3, 1].map((share) => Math.round(shortest * Math.exp(share * Math.log(longest / shortest)))))];
  const svg = frame(`${BY[by]} against the number of supervised tokens of ${tokens.length.toLocaleString("en-US")} traces.`, "supervised tokens", lengths, ticks(low, high, 4), x, y);
  for (const [i, length] of tokens.entries()) {
    svg.append(shape("circle", { class: `dot ${values[i] > 0 ? "positive" : "negative"}`, cx: x(length).toFixed(1), cy: y(values[i]).toFixed(1), r: 2 }));
  }
  svg.append(shape("line", { class: "zero", x1: LEFT, x2: WIDTH - RIGHT, y1: y(0), y2: y(0) }));
  return titled(set, by, svg, element("p", { class: "readout" }, `${tokens.length.toLocaleString("en-US")} traces`));
}

function drawCharts() {
  for (const [id, draw] of [["histograms", drawHistogram], ["lengths", drawLengths]]) {
    const rows = Object.keys(BY).map((by) => element("div", { class: "charts" }, ...report.sets.map((set) => draw(set, by))));
    document.getElementById(id).append(...rows);
  }
}
