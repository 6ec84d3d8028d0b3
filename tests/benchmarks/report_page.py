"""Time to open a report of 200 traces of 3,000 tokens in a real browser.

    python -m tests.benchmarks.report_page [--traces 200] [--tokens 3000] [--repeats 5]

Prints seconds from the navigation to the drawn page (curves, the selected trace, utility against loss), and from
selecting all traces, switching the measure, filtering and turning the page to the next frame. Tokens are drawn by
Zipf's law from the 2,600 of a byte-level tokenizer, so they compress worse than real traces."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.helpers.browser import find_missing_requirement, open_page, started_browser
from tests.helpers.report_runs import random_sequence, step_line, write_run
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.report import write_report

NUM_STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    missing = find_missing_requirement()
    if missing:
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as folder:
        run = _write(Path(folder) / "run", arguments.traces, arguments.tokens)
        started = time.perf_counter()
        (page,) = write_report([run])
        print(f"written in {time.perf_counter() - started:.1f} s, {page.stat().st_size / 1e6:.1f} MB")
        with started_browser() as browser:
            _measure(browser, page, arguments.repeats)


def _measure(browser, path: Path, repeats: int) -> None:
    seconds: dict[str, list[float]] = {}

    def measure(name: str, page, script: str) -> None:
        # Wait until the next frame has been painted.
        done = f"async () => {{ const t = performance.now(); {script}; " + (
            "await new Promise(r => requestAnimationFrame(() => setTimeout(r))); return performance.now() - t; }"
        )
        seconds.setdefault(name, []).append(page.evaluate(done) / 1000)

    for _ in range(repeats):
        with open_page(browser, path) as page:
            drawn = page.evaluate("performance.getEntriesByName('drawn')[0].startTime")
            seconds.setdefault("open", []).append(drawn / 1000)
            choose = "const s = document.querySelectorAll('#viewer select')[{}]; s.value = '{}'; "
            changed = "s.dispatchEvent(new Event('change'))"
            every = f"for (const i of [1, 2]) {{ {choose.format('i', '')}{changed} }}"  # steps, traces
            measure("show all traces", page, every)
            measure("switch the measure", page, choose.format(0, "loss") + changed)
            measure("filter the most weighted", page, choose.format(3, "most") + changed)
            measure("next traces", page, "[...document.querySelectorAll('#viewer button')].at(-1).click()")
    for name, values in seconds.items():
        print(f"{name:26} median {statistics.median(values):.2f} s, slowest {max(values):.2f} s of {len(values)}")


def _write(folder: Path, num_traces: int, num_tokens: int) -> Path:
    letters = "abcdefghijklmnopqrst"
    tokenizer = make_tokenizer(
        merges=[(a, b) for a in letters for b in letters]
        + [(a + b, c) for a in letters for b in letters for c in "aeiou"]
    )
    generator = np.random.default_rng(0)
    records: dict[int, list] = {}
    for i in range(num_traces):
        # Zipf's law, as in text.
        ids = np.minimum(generator.zipf(1.2, num_tokens), 1 << 40) % (len(tokenizer) - 3)
        records.setdefault(1 + i % NUM_STEPS, []).append(random_sequence(ids.tolist(), i, seed=i))
    lines = [step_line(step) for step in range(1, NUM_STEPS + 1)]
    return write_run(folder, tokenizer, lines, records)


if __name__ == "__main__":
    main()
