// Draws the page. Plots first, which need nothing unpacked.

const shared = [];
const xs = [...new Set(report.curves.flatMap((chart) => chart.series.flatMap((one) => one.steps)))].sort((a, b) => a - b);
const drawShared = (chart) => drawCurves(chart, xs, shared), isLoss = (chart) => chart.section === "Losses";
if (report.groups.length > 1) for (const place of ["losses", "curves"]) document.getElementById(place).prepend(drawLegend(report.groups));
drawCharts("losses-charts", report.curves.filter(isLoss), drawShared);
drawCharts("charts", report.curves.filter((chart) => !isLoss(chart)), drawShared);
const { lines, charts } = report.sweep; // one line needs no legend
if (lines.length > 1) document.getElementById("sweep-charts").append(drawLegend(lines));
drawCharts("sweep-charts", charts, (chart) => drawCurves(chart, chart.axis.values, [], lines));
drawCharts("histograms", report.histograms, drawHistogram);
const viewers = [["tokens", "viewer"], ["followed", "followed"], ["scores", "viewer"]].flatMap(([kind, place]) =>
  (report[kind].length ? [new Viewer(document.getElementById(place), kind)] : []));
for (const viewer of viewers) await viewer.open(Math.max(0, report[viewer.kind].findIndex((run) => !run.isUniform)));
const withUtilities = report.tokens.findIndex((run) => run.measures.includes("utility"));
if (withUtilities >= 0) await new Density(document.getElementById("density")).open(withUtilities);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (shades.clear(), viewers.forEach((one) => one.draw())));
performance.mark("drawn");
document.documentElement.dataset.ready = "true";
