// Draws the page.

drawCharts();
if (report.traces.length) await new Traces(document.getElementById("viewer")).draw();
document.documentElement.dataset.ready = "true";
