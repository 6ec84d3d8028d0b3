"""`vcore-ds fidelity`: accuracy of a recipe's utilities."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vcore_ds.commands.arguments import add_recipe, take_numbers
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import check_folder, writing
from vcore_ds.common.text import count
from vcore_ds.config.load import load_recipe

HELP = "measure how accurate the utilities are"
DESCRIPTION = (
    "Compare the utilities of jvp and of finite differences with a reference in higher precision, and those of small "
    "probes and stale directions with those of a large probe, on the recipe's model, data, precision and parallelism. "
    "Lists are numbers separated by spaces; 0 leaves a part out. Example: vcore-ds fidelity RECIPE.yaml --large-probe 0"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    numbers: dict[str, Any] = dict(nargs="+", metavar="N")
    add("--output", type=Path, metavar="DIR", help="write fidelity.json there")
    add("--sequences", type=int, default=4, metavar="N", help="training sequences to measure on (default 4)")
    add("--epsilons", **numbers, default="1 1e-1 1e-2 1e-3 1e-4 1e-5".split(), help="step sizes (default 1 ... 1e-5)")
    add(
        "--ranks",
        **numbers,
        default=["16", "64", "128"],
        help="values of probe.rank (default 16 64 128; not with LoRA)",
    )
    add("--probe-sizes", **numbers, default=["1", "4", "8", "32"], help="sizes of small probes (default 1 4 8 32)")
    add("--large-probe", type=int, default=64, metavar="N", help="size of the probe to compare with (default 64)")
    add("--stale-steps", **numbers, default=["1", "2", "4", "8"], help="ages of directions in steps (default 1 2 4 8)")
    add("--after-steps", type=int, default=0, metavar="N", help="train N steps before measuring (default 0)")


def main(arguments: argparse.Namespace) -> None:
    kinds = {"epsilons": float, "ranks": int, "probe_sizes": int, "stale_steps": int}
    lists = {name: take_numbers(arguments, name, kind) for name, kind in kinds.items()}
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    options = FidelityOptions(
        arguments.sequences,
        large_probe_size=arguments.large_probe,
        after_steps=arguments.after_steps,
        output=arguments.output,
        **lists,
    )
    check_options(options)
    if options.output is not None:
        prepare_output(options.output)
    with lasting_imports():
        from vcore_ds.commands.fidelity.measure import measure_fidelity

    measure_fidelity(recipe, options)


JSON_NAME = "fidelity.json"
MAX_DRAWS = 4  # disjoint probes of a size, whose agreement with the large probe is averaged


@dataclass(frozen=True)
class FidelityOptions:
    """Requested measurements; sizes are sequences over all ranks."""

    num_sequences: int = 4
    epsilons: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    ranks: tuple[int, ...] = (16, 64, 128)
    """Values of `probe.rank`; not measured with LoRA, whose matrices have low rank already."""
    probe_sizes: tuple[int, ...] = (1, 4, 8, 32)
    large_probe_size: int = 64  # 0: neither probe sizes nor stale directions are measured
    stale_steps: tuple[int, ...] = (1, 2, 4, 8)
    after_steps: int = 0  # optimizer steps before the first measurement
    output: Path | None = None


@dataclass(frozen=True)
class Choice:
    """Disjoint lists of sequences."""

    measured: list[int]  # indices into the training data; those of the probes are into the recipe's probe data
    small_probes: list[int]
    recipe_probe_size: int
    probe_sizes: list[int]
    large_probe: list[int]
    notes: list[str]  # differences from the options

    def draws(self, size: int) -> list[list[int]]:
        """Disjoint small probes of `size` sequences, at most `MAX_DRAWS`."""
        count = min(MAX_DRAWS, len(self.small_probes) // size)
        return [self.small_probes[i * size : (i + 1) * size] for i in range(count)]


def check_options(options: FidelityOptions) -> None:
    """Raise UserError for numbers out of range."""
    numbers = {
        "--ranks": options.ranks,
        "--probe-sizes": options.probe_sizes,
        "--stale-steps": options.stale_steps,
        "--large-probe": [options.large_probe_size],
        "--after-steps": [options.after_steps],
    }
    wrong = [f"--epsilons {epsilon:g}" for epsilon in options.epsilons if not 0 < epsilon < math.inf]
    wrong += [f"{name} {number}" for name, values in numbers.items() for number in values if number < 0]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: expected positive numbers, or 0 to leave a part out")
    if options.num_sequences < 1:
        raise UserError(f"--sequences {options.num_sequences}: expected at least 1")


def prepare_output(folder: Path) -> None:
    """Create `folder`. Raises UserError where it cannot be written or holds a result."""
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)  # check_folder would remove one that it made, under other ranks
        check_folder(folder)
        if (folder / JSON_NAME).exists():
            raise UserError(
                f"--output: {folder}: holds a {JSON_NAME} already; expected a folder without a result. Name another "
                "one, or remove it"
            )


def limit_to_recipe(options: FidelityOptions, num_steps: int) -> tuple[FidelityOptions, list[str]]:
    """Drop stale steps beyond the recipe's end, with a note. Raises UserError where `after_steps` is beyond it."""
    if options.after_steps > num_steps:
        raise UserError(
            f"--after-steps {options.after_steps}: found more than the recipe's {num_steps} steps; expected at most "
            "that many. Lower it, or raise schedule.num_steps"
        )
    possible = tuple(steps for steps in options.stale_steps if options.after_steps + steps <= num_steps)
    notes = []
    if possible != options.stale_steps and options.large_probe_size:
        left_out = ", ".join(str(steps) for steps in options.stale_steps if steps not in possible)
        notes.append(f"the recipe ends after {num_steps} steps, so a direction cannot be kept for {left_out}")
    return replace(options, stale_steps=possible), notes


def choose_sequences(
    training: tuple[Sequence[int], Sequence[float]],
    num_trusted: int | None,
    probe_size: int,
    options: FidelityOptions,
    seed: int,
) -> Choice:
    """Draw the measured sequences from the training data (sizes and weights of its files), and the probes from the rest
    of it or from `data.probe_path` (`num_trusted` sequences; None without it). Too few sequences make the probes
    smaller. Raises UserError unless there is a sequence for each purpose."""
    from vcore_ds.common.random_streams import Stream, generator  # imports numpy
    from vcore_ds.data.dataset import shuffle_by_share

    drawn, notes = generator(Stream.FIDELITY, seed), []
    order = shuffle_by_share(*training, drawn).tolist()
    num_training = len(order)
    num_measured = max(0, min(options.num_sequences, num_training if num_trusted is not None else num_training - 2))
    measured, others = order[:num_measured], order[num_measured:]
    if num_trusted is not None:
        others = drawn.permutation(num_trusted).tolist()
    if not measured or len(others) < 2:
        key, expected = ("train_path", "3: one to measure,") if num_trusted is None else ("probe_path", "2:")
        found = count(num_training if num_trusted is None else num_trusted, "sequence")
        raise UserError(
            f"data.{key}: found {found} within data.cutoff_length; expected at least {expected} one as probe, one as "
            "the probe that this is compared with"
        )
    if num_measured < options.num_sequences:
        notes.append(f"{num_measured} instead of {options.num_sequences} sequences are measured: there are no more")
    sizes = sorted({*options.probe_sizes, probe_size})
    num_large = min(options.large_probe_size, max(len(others) - sizes[-1], len(others) // 2))
    num_small = min(sizes[-1], len(others) - num_large)
    small, large = others[:num_small], others[num_small : num_small + num_large]
    if num_large < options.large_probe_size:
        notes.append(f"the large probe has {num_large} instead of {options.large_probe_size} sequences")
    fitting = [size for size in sizes if size <= len(small)]
    if fitting != sizes:
        left_out = ", ".join(str(size) for size in sizes if size not in fitting)
        notes.append(f"{len(small)} sequences remain for small probes, so |B'| {left_out} cannot be measured")
    return Choice(measured, small, min(probe_size, len(small)), fitting, large, notes)
