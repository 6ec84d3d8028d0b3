"""What the keys that steer VCORE (`probe`, `method`, `data.trusted_share`) cost a step, over an SFT step.

    python -m tests.benchmarks.steering_costs [--rounds 7] [--only NAME ...] [--output FILE.json]

Model, batches and loops are those of `overhead`: |B| = 32, two CPU ranks. A launch holds an SFT engine and two others,
since many engines in one process scatter more; they take turns over the same batches, and ratios are taken round by
round to the SFT step of the same launch.

Predicted before the first run, by counting products. With a forward over |B| as 1, its backward is 2 and its tangents
about 2; a probe is 3 |B'| / |B|, divided by `probe.every`. An SFT step is 3. Utilities of a forward of their own, which
`sequence_and_batch` needs, take that forward too: 1. Trusted sequences make the batch larger: 40 instead of 32. Token
weights count as nothing.

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
        """Ratio to an SFT step on 32 sequences, by the products that the module's docstring counts."""
        method = self.variant.sections.get("method", {})
        forward, backward, tangents = 1, 2, 2
        step = forward + backward
        if method.get("name", "vcore") == "vcore":
            step += tangents + (forward if method.get("scope") == "sequence_and_batch" else 0)
        probe = (forward + backward) * self.num_probe / self.every
        return (step * self.num_main + probe) / ((forward + backward) * NUM_MAIN)


def vcore(**sections: dict) -> Variant:
    return Variant(JVP | sections)


def weighted(**keys: object) -> dict:
    return {"kl_budget": 0.05, **keys}


VARIANTS = {
    "sft": SteeringVariant(Variant(SFT), num_probe=0),
    "vcore": SteeringVariant(vcore()),
    "probe.batch_size all, of 32": SteeringVariant(vcore(), num_probe=32),
    "probe.every 5": SteeringVariant(vcore(probe={"every": 5}), every=5),
    "probe.loss dft": SteeringVariant(vcore(probe={"loss": "dft"})),
    "method.base_measure dft": SteeringVariant(vcore(method=weighted(base_measure="dft"))),
    "method.scope": SteeringVariant(
        Variant({"method": weighted(scope="sequence_and_batch", batch_kl_budget=0.1)})  # nothing to fuse
    ),
    "sft, data.trusted_share": SteeringVariant(Variant(SFT), NUM_MAIN + TRUSTED, num_probe=0),
    "dft, data.trusted_share": SteeringVariant(Variant({"method": {"name": "dft"}}), NUM_MAIN + TRUSTED, num_probe=0),
    "vcore, data.trusted_share": SteeringVariant(vcore(), NUM_MAIN + TRUSTED),
}
OTHERS_IN_A_LAUNCH = 2
"""Engines beside that of SFT."""


def measure(names: list[str], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, by name and round. With `probe.every` the mean over its steps, of which one takes a probe."""
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
            found = timed(loops[name], StepBatches(main, probe))
            if what.every > 1:
                found = (found + (what.every - 1) * timed(loops[name], StepBatches(main, []))) / what.every
            if k > 0:  # the first round allocates, and records ZeRO-3's trace
                seconds[name].append(found)
    return seconds


def timed(loop: OurLoop, batches: StepBatches) -> float:
    """Seconds of one step on all ranks."""
    torch.distributed.barrier()
    start = time.perf_counter()
    loop.step(batches)
    torch.distributed.barrier()
    return time.perf_counter() - start


def launches(names: list[str]) -> list[list[str]]:
    """Names in groups of few engines, each with `sft`."""
    others = [name for name in names if name != "sft"]
    starts = range(0, len(others), OTHERS_IN_A_LAUNCH)
    return [["sft", *others[start : start + OTHERS_IN_A_LAUNCH]] for start in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of every launch")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="what to run, by name")
    parser.add_argument("--output", help="write the numbers as JSON")
    arguments = parser.parse_args()
    found = []
    print(f"{'over an SFT step':28} {'min':>6} {'median':>7} {'max':>6} {'predicted':>10} {'s a step':>9}")
    for names in launches(arguments.only):
        seconds = run_ranks(measure, 2, names, arguments.rounds, timeout_seconds=3600)[0]
        ratios = {name: ratio(seconds[name], seconds["sft"]) for name in names[1:]}
        found.append(dict(seconds=seconds, ratios=ratios))
        for name, of_sft in ratios.items():
            print(
                f"{name:28} {of_sft['min']:6.2f} {of_sft['median']:7.2f} {of_sft['max']:6.2f} "
                f"{VARIANTS[name].predicted:10.2f} {statistics.median(seconds[name]):9.2f}",
                flush=True,
            )
    if arguments.output:
        predicted = {name: what.predicted for name, what in VARIANTS.items()}
        with open(arguments.output, "w") as file:
            json.dump({"launches": found, "predicted": predicted}, file, indent=2)


if __name__ == "__main__":
    main()
