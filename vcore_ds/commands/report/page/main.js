// Draws the page. Curves first, which need nothing unpacked.

drawCharts();
const viewer = report.tokens.length ? new Viewer(document.getElementById("viewer")) : null;
const followed = report.followed.length ? new Followed(document.getElementById("followed")) : null;
const withUtilities = report.tokens.findIndex((run) => "utility" in run.levels);
const density = document.getElementById("density");
if (viewer) await viewer.open(Math.max(0, report.tokens.findIndex((run) => !run.isUniform)));
if (followed) await followed.open(0);
if (withUtilities >= 0) await new Density(density).open(withUtilities);
else density.append(element("p", {}, "No utilities were recorded: only `method.name: vcore` has them."));
performance.mark("drawn");
document.documentElement.dataset.ready = "true";
