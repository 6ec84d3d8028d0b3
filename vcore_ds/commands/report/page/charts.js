// Curves over optimizer steps, with one cursor for all of them.

const WIDTH = 340, HEIGHT = 190, RIGHT = 8, TOP = 8, BOTTOM = 22;
const LEAST_LEFT = 46, DIGIT = 6.5; // room for labels, and about the width of a digit in them
const MOST_DOTS = 16;
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3", "10 4"];
const lineColour = (group) => `var(--line${(group % 6) + 1})`;
const moveCursors = [];
const allSteps = [...new Set(report.charts.flatMap((chart) => chart.series.flatMap((one) => one.steps)))].sort((a, b) => a - b);

function moveCursor(step) {
  for (const move of moveCursors) move(step);
}

// Place of the step in `steps` that is nearest to `step`.
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

function drawChart(chart) {
  const numbers = chart.series.flatMap((one) => [one.values, ...one.bands.flat()]).flat();
  let [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  [low, high] = [low >= 0 && low < margin * 2 ? 0 : low - margin, high + margin];
  const [first, last] = [allSteps[0], allSteps[allSteps.length - 1]];
  const values = ticks(low, high, 5), names = labels(values);
  const left = Math.max(LEAST_LEFT, 8 + DIGIT * Math.max(...names.map((name) => name.length)));
  const x = (step) => (first === last ? (left + WIDTH - RIGHT) / 2 : left + ((step - first) / (last - first)) * (WIDTH - left - RIGHT));
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);

  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": summary(chart) });
  for (const [i, value] of values.entries()) {
    svg.append(shape("line", { class: "axis", x1: left, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { class: "value", x: left - 5, y: y(value) + 4, "text-anchor": "end" }, names[i]));
  }
  for (const step of first === last ? [first] : ticks(first, last, 5).filter(Number.isInteger)) {
    const name = step.toLocaleString("en-US");
    const place = Math.min(x(step), WIDTH - (DIGIT * name.length) / 2);
    svg.append(shape("text", { class: "step", x: place, y: HEIGHT - 6, "text-anchor": "middle" }, name));
  }
  for (const one of chart.series) {
    const points = (numbers) => numbers.map((value, i) => `${x(one.steps[i]).toFixed(1)},${y(value).toFixed(1)}`);
    for (const [lower, upper] of one.bands) {
      svg.append(shape("polygon", { class: "band", fill: lineColour(one.group), points: [...points(lower), ...points(upper).reverse()].join(" ") }));
    }
    svg.append(shape("polyline", {
      class: "curve", stroke: lineColour(one.group), "stroke-dasharray": DASHES[one.group % 6], points: points(one.values).join(" "),
    }));
    // Few enough to see which steps were measured.
    for (const i of one.steps.length <= MOST_DOTS ? one.steps.keys() : []) {
      svg.append(shape("circle", { cx: x(one.steps[i]), cy: y(one.values[i]), r: 2, fill: lineColour(one.group) }));
    }
  }
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);

  const readout = element("p", { class: "readout" });
  let here = last;
  function move(step) {
    here = step ?? last;
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    cursor.setAttribute("x1", x(here));
    cursor.setAttribute("x2", x(here));
    readout.replaceChildren(`step ${here.toLocaleString("en-US")}: `, ...chart.series.map((one) => readAt(one, here)));
  }
  moveCursors.push(move);
  move(null);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * WIDTH - left) / (WIDTH - left - RIGHT);
    moveCursor(allSteps[nearest(allSteps, first + share * (last - first))]);
  });
  svg.addEventListener("pointerleave", () => moveCursor(null));
  svg.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  svg.addEventListener("blur", () => (readout.removeAttribute("aria-live"), moveCursor(null)));
  svg.addEventListener("keydown", (event) => {
    const place = nearest(allSteps, here);
    const target = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: allSteps.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    moveCursor(allSteps[Math.max(0, Math.min(allSteps.length - 1, target))]);
  });
  const title = chart.title + (chart.unit && ` (${chart.unit})`);
  return element("figure", { "data-chart": chart.key }, element("figcaption", {}, title, element("small", {}, chart.note)), svg, readout);
}

function readAt(one, step) {
  const place = nearest(one.steps, step);
  const [lower, upper] = one.bands[0] ?? [];
  const text = number(one.values[place]) + (lower && lower[place] !== upper[place] ? ` [${number(lower[place])}, ${number(upper[place])}]` : "");
  const swatch = element("i");
  swatch.style.background = lineColour(one.group);
  return report.groups.length > 1 ? element("span", {}, swatch, text) : element("span", {}, text);
}

function summary(chart) {
  const ends = chart.series.map((one) => `${report.groups[one.group]}: ${number(one.values[0])} at first, ${number(one.values.at(-1))} at last`);
  return `${chart.title}. ${ends.join("; ")}. Arrow keys read it step by step.`;
}

function drawCharts() {
  const place = document.getElementById("charts");
  for (const section of new Set(report.charts.map((chart) => chart.section))) {
    const charts = report.charts.filter((chart) => chart.section === section);
    place.append(element("h3", {}, section), element("div", { class: "charts" }, ...charts.map(drawChart)));
  }
  if (report.groups.length < 2) return;
  document.getElementById("legend").append(...report.groups.map((label, group) => {
    const line = shape("line", { x1: 0, x2: 32, y1: 6, y2: 6, stroke: lineColour(group), "stroke-width": 3, "stroke-dasharray": DASHES[group % 6] });
    return element("span", {}, shape("svg", { viewBox: "0 0 32 12", "aria-hidden": "true" }, line), label);
  }));
}
