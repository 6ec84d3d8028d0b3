"""Time of tracking in a step on rank 0: rates, the line of metrics.jsonl, and passing it to trackers.

    python -m tests.benchmarks.tracking [--lines 500] [--trackers tensorboard ...]

A step waits for the seconds of the run's thread. The CPU seconds of other threads are the trackers' work, which
competes with the step for Python's lock and for cores. Both are compared with `--step-seconds`."""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.helpers.commands import METRICS
from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.memory import MemorySettings
from vcore_ds.planning.model_shape import QWEN3_32B
from vcore_ds.planning.run_plan import derive_needed_passes
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.train.console import Console
from vcore_ds.train.loop import Throughput
from vcore_ds.train.metrics_log import MetricsLog
from vcore_ds.train.run_folder import RECIPE
from vcore_ds.train.trackers import start_trackers

NUM_SEQUENCES = 32
PAUSE_SECONDS = 0.02
"""Pause between two lines, in which trackers work while the run's thread does something else, as in a step."""


def measure(num_lines: int, trackers: list[str]) -> tuple[float, float]:
    """Median seconds of the run's thread for a line, and mean CPU seconds of all other threads."""
    with TemporaryDirectory() as folder:
        recipe = smallest_recipe()
        recipe["run"]["output_dir"], recipe["track"] = folder, {"trackers": trackers}
        checked = Recipe.model_validate(recipe)
        settings = MemorySettings(num_ranks=8, main_tokens=8192, probe_tokens=8192, estimator="jvp", is_fused=True)
        rates = Throughput(
            QWEN3_32B, derive_needed_passes(derive_plan_settings(checked), settings), peak_flops=8 * 989e12
        )
        console = Console(enabled=True)
        run = Path(folder)
        (run / RECIPE).write_text(dump_recipe(checked))
        log = MetricsLog(run, console, start_trackers(run, checked.track, flat_values(checked), 0, console))
        log.write({"step": 1})
        time.sleep(3)  # let trackers import and open their files
        lengths, spent = list(range(1000, 1000 + NUM_SEQUENCES)), []
        cpu = time.process_time() - time.thread_time()
        for step in range(2, num_lines + 2):
            started = time.perf_counter()
            values = rates.compute_rates(lengths, lengths, seconds=1.0)
            log.write({**dict.fromkeys(sorted(METRICS), 1.0 / step), **values, "step": step})
            spent.append(time.perf_counter() - started)
            time.sleep(PAUSE_SECONDS)
        log.close()
        cpu = time.process_time() - time.thread_time() - cpu
    return statistics.median(spent), cpu / num_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--trackers", nargs="*", default=["tensorboard"])
    parser.add_argument("--step-seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    for trackers in ([], arguments.trackers):
        waited, beside = measure(arguments.lines, trackers)
        share = (waited + beside) / arguments.step_seconds
        print(
            f"{', '.join(trackers) or 'metrics.jsonl alone':<24} a step waits {1000 * waited:.2f} ms; other threads "
            f"{1000 * beside:.2f} ms of CPU time; both together {share:.2%} of a step of {arguments.step_seconds:g} s"
        )


if __name__ == "__main__":
    main()
