"""Step time with each key that steers VCORE (`probe`, `method`, `data.trusted_share`), over an SFT step.

    python -m tests.benchmarks.steering_costs [--rounds 7] [--only NAME ...] [--output FILE.json]

Model, batches and loops are those of `overhead`: |B| = 32, two CPU ranks. A launch holds an SFT engine and two others,
since many engines in one process scatter more; they take turns over the same batches, and ratios are taken round by
round to the SFT step of the same launch.

Predicted before the first run, by counting matrix multiplications. With a forward over |B| as 1, its backward is 2 and
its tangents about 2; a probe is 3 |B'| / |B|, divided by `probe.every`. An SFT step is 3. `sequence_and_batch` needs a
separate forward for the utilities: 1. Trusted sequences make the batch larger: 40 instead of 32. Computing token
weights counts as 0.

    sft                              1       probe.loss dft                1.79
    vcore                            1.79    method.base_measure dft       1.79
    probe.batch_size all, of 32      2.67    method.scope                  2.12
    probe.every 5                    1.69    sft, data.trusted_share       1.25
    vcore, data.trusted_share        2.21    dft, data.trusted_share       1.25
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch

from tests.benchmarks.overhead import JVP, NUM_MAIN, NUM_PROBE, SFT, OurLoop, Variant, make_feed, ratio
from tests.helpers.ranks import run_ranks
from vcore_ds.common.random_streams import Stream
from vcore_ds.data.batches import StepBatches
from vcore_ds.data.dataset import RandomDraws

TRUSTED = 8
"""Sequences that `data.trusted_share` 0.2 adds to 32 of the training data."""


@dataclass(frozen=True)
class SteeringVariant:
    variant: Variant
    num_main: int = NUM_MAIN
    num_probe: int = NUM_PROBE
    """0 without a probe pass."""
    every: int = 1
    """Steps that share one probe."""

    @property
    def predicted(self) -> float:
        """Ratio to an SFT step on 32 sequences, counted as in the module's docstring."""
        method = self.variant.sections.get("method", {})
        forward, backward, tangents = 1, 2, 2
        step = forward + backward
        if method.get("name", "vcore") == "vcore":
            step += tangents + (forward if method.get("scope") == "sequence_and_batch" else 0)
        probe = (forward + backward) * self.num_probe / self.every
        return (step * self.num_main + probe) / ((forward + backward) * NUM_MAIN)


def make_vcore_variant(**sections: dict) -> Variant:
    return Variant(JVP | sections)


def make_method(**keys: object) -> dict:
    return {"kl_budget": 0.05, **keys}


VARIANTS = {
    "sft": SteeringVariant(Variant(SFT), num_probe=0),
    "vcore": SteeringVariant(make_vcore_variant()),
    "probe.batch_size all, of 32": SteeringVariant(make_vcore_variant(), num_probe=32),
    "probe.every 5": SteeringVariant(make_vcore_variant(probe={"every": 5}), every=5),
    "probe.loss dft": SteeringVariant(make_vcore_variant(probe={"loss": "dft"})),
    "method.base_measure dft": SteeringVariant(make_vcore_variant(method=make_method(base_measure="dft"))),
    "method.scope": SteeringVariant(
        Variant({"method": make_method(scope="sequence_and_batch", batch_kl_budget=0.1)})  # cannot be fused
    ),
    "sft, data.trusted_share": SteeringVariant(Variant(SFT), NUM_MAIN + TRUSTED, num_probe=0),
    "dft, data.trusted_share": SteeringVariant(Variant({"method": {"name": "dft"}}), NUM_MAIN + TRUSTED, num_probe=0),
    "vcore, data.trusted_share": SteeringVariant(make_vcore_variant(), NUM_MAIN + TRUSTED),
}
OTHERS_IN_A_LAUNCH = 2
"""Engines in addition to that of SFT."""


def measure(names: list[str], num_rounds: int) -> dict[str, list[float]]:
    """Name -> seconds of a step in each round. With `probe.every` the mean over the steps that share a probe."""
    feed = make_feed()
    trusted = RandomDraws(len(feed.dataset), TRUSTED, 0, Stream.TRUSTED)
    loops = {name: OurLoop(VARIANTS[name].variant) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(num_rounds + 1):
        turn = k % len(names)
        for name in names[turn:] + names[:turn]:
            what = VARIANTS[name]
            # A batch with trusted sequences begins with the 32 that the others have.
            main = feed.batches(feed.main_order.step(k) + trusted.step(k)[: what.num_main - NUM_MAIN], None)
            draws = RandomDraws(len(feed.dataset), what.num_probe, 0, Stream.PROBE)
            probe = feed.probe_batches(draws.step(k)) if what.num_probe else []
            step_seconds = measure_seconds(loops[name], StepBatches(main, probe))
            if what.every > 1:
                others = (what.every - 1) * measure_seconds(loops[name], StepBatches(main, []))
                step_seconds = (step_seconds + others) / what.every
            if k > 0:  # the first round allocates, and records ZeRO-3's trace
                seconds[name].append(step_seconds)
    return seconds


def measure_seconds(loop: OurLoop, batches: StepBatches) -> float:
    """Seconds of one step on all ranks."""
    torch.distributed.barrier()
    start = time.perf_counter()
    loop.step(batches)
    torch.distributed.barrier()
    return time.perf_counter() - start


def group_launches(names: list[str]) -> list[list[str]]:
    """Split names into groups of few engines, each with `sft`."""
    others = [name for name in names if name != "sft"]
    starts = range(0, len(others), OTHERS_IN_A_LAUNCH)
    return [["sft", *others[start : start + OTHERS_IN_A_LAUNCH]] for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of every launch")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="what to run, by name")
    parser.add_argument("--output", help="write the numbers as JSON")
    arguments = parser.parse_args()
    launches = []
    print(f"{'over an SFT step':28} {'min':>6} {'median':>7} {'max':>6} {'predicted':>10} {'s a step':>9}")
    for names in group_launches(arguments.only):
        seconds = run_ranks(measure, 2, names, arguments.rounds, timeout_seconds=3600)[0]
        ratios = {name: ratio(seconds[name], seconds["sft"]) for name in names[1:]}
        launches.append(dict(seconds=seconds, ratios=ratios))
        for name, statistic in ratios.items():
            print(
                f"{name:28} {statistic['min']:6.2f} {statistic['median']:7.2f} {statistic['max']:6.2f} "
                f"{VARIANTS[name].predicted:10.2f} {statistics.median(seconds[name]):9.2f}",
                flush=True,
            )
    if arguments.output:
        predicted = {name: what.predicted for name, what in VARIANTS.items()}
        with open(arguments.output, "w") as file:
            json.dump({"launches": launches, "predicted": predicted}, file, indent=2)


if __name__ == "__main__":
    main()
