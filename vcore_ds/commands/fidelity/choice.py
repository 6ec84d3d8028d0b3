"""The fidelity command's options and output folder, and the sequences that it measures on."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import check_folder, writing
from vcore_ds.common.random_streams import Stream, generator

JSON_NAME = "fidelity.json"
MAX_DRAWS = 4
"""Disjoint probes of one size; their agreement with the large probe is averaged."""


@dataclass(frozen=True)
class FidelityOptions:
    """Requested measurements; sizes count sequences over all ranks."""

    num_sequences: int = 4
    epsilons: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    probe_sizes: tuple[int, ...] = (1, 4, 8, 32)
    large_probe_size: int = 64
    """0: neither probe sizes nor stale directions are measured."""
    stale_steps: tuple[int, ...] = (1, 2, 4, 8)
    after_steps: int = 0
    """Optimizer steps to train before anything is measured."""
    output: Path | None = None


@dataclass(frozen=True)
class Choice:
    """Disjoint sets of sequences."""

    measured: list[int]
    """Positions in the training data; those of the probes are in the recipe's probe data."""
    small_probes: list[int]
    """The recipe's probe and all small ones are taken from its start."""
    recipe_probe_size: int
    probe_sizes: list[int]
    large_probe: list[int]
    notes: list[str]
    """Differences from the options."""


def check_options(options: FidelityOptions) -> None:
    """Raises UserError for numbers that nothing can be measured with."""
    wrong = [f"--epsilons {epsilon:g}" for epsilon in options.epsilons if not 0 < epsilon < math.inf]
    wrong += [f"--probe-sizes {size}" for size in options.probe_sizes if size < 0]
    wrong += [f"--stale-steps {steps}" for steps in options.stale_steps if steps < 0]
    single = {"--large-probe": options.large_probe_size, "--after-steps": options.after_steps}
    wrong += [f"{option} {number}" for option, number in single.items() if number < 0]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: expected positive numbers, or 0 to leave a part out")
    if options.num_sequences < 1:
        raise UserError(f"--sequences {options.num_sequences}: expected at least 1")


def prepare_output(folder: Path) -> None:
    """Makes `folder`. Raises UserError where it cannot be made or written, and where it holds a result already."""
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)  # so that no rank's check removes it while another one looks
        check_folder(folder)
        if (folder / JSON_NAME).exists():
            raise UserError(
                f"--output: {folder}: holds a {JSON_NAME} already; expected a folder without a result, which is never "
                "overwritten. Name another one, or remove it"
            )


def within_the_recipe(options: FidelityOptions, num_steps: int) -> tuple[FidelityOptions, list[str]]:
    """Leaves out kept directions that would need training beyond the recipe's end, and notes them.

    Raises UserError where `after_steps` does.
    """
    if options.after_steps > num_steps:
        raise UserError(
            f"--after-steps {options.after_steps}: found more than the recipe's {num_steps} steps; expected at most "
            "these. Lower it, or raise schedule.num_steps"
        )
    possible = tuple(steps for steps in options.stale_steps if options.after_steps + steps <= num_steps)
    notes = []
    if possible != options.stale_steps and options.large_probe_size:
        left_out = ", ".join(str(steps) for steps in options.stale_steps if steps not in possible)
        notes.append(f"the recipe ends after {num_steps} steps, so a direction cannot be kept for {left_out}")
    return replace(options, stale_steps=possible), notes


def choose_sequences(
    num_training: int, num_trusted: int | None, probe_size: int, options: FidelityOptions, seed: int
) -> Choice:
    """Draws the measured sequences from the training data and the probes from the rest of it, or from the sequences of
    `data.probe_path` (`num_trusted`, None without). Where data is short, the probes become smaller.

    Raises UserError unless there is a sequence for each purpose.
    """
    drawn, notes = generator(Stream.FIDELITY, seed), []
    order = drawn.permutation(num_training).tolist()
    num_measured = min(options.num_sequences, num_training if num_trusted is not None else num_training - 2)
    measured, others = order[: max(0, num_measured)], order[max(0, num_measured) :]
    if num_trusted is not None:
        others = drawn.permutation(num_trusted).tolist()
    if not measured or len(others) < 2:
        key, expected = ("train_path", 3) if num_trusted is None else ("probe_path", 2)
        found = num_training if num_trusted is None else num_trusted
        raise UserError(
            f"data.{key}: found {found} sequence(s) within data.cutoff_length; expected at least {expected}: "
            + ("one to measure, " if num_trusted is None else "")
            + "one as probe, one as the probe that this is compared with"
        )
    if num_measured < options.num_sequences:
        notes.append(f"{num_measured} instead of {options.num_sequences} sequences are measured: there are no more")
    sizes = sorted({*options.probe_sizes, probe_size})
    num_large = min(options.large_probe_size, max(len(others) - sizes[-1], len(others) // 2))
    small, large = others[: min(sizes[-1], len(others) - num_large)], others[len(others) - num_large :]
    if num_large < options.large_probe_size:
        notes.append(f"the large probe has {num_large} instead of {options.large_probe_size} sequences")
    fitting = [size for size in sizes if size <= len(small)]
    if fitting != sizes:
        left_out = ", ".join(str(size) for size in sizes if size not in fitting)
        notes.append(f"{len(small)} sequences remain for small probes, so |B'| {left_out} cannot be measured")
    return Choice(measured, small, min(probe_size, len(small)), fitting, large, notes)


def num_draws(choice: Choice, size: int) -> int:
    """Disjoint probes of a size."""
    return min(MAX_DRAWS, len(choice.small_probes) // size)
