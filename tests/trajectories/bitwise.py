"""`python -m tests.trajectories.bitwise FILE [EARLIER]`: compare every method, estimator and provider bit for bit.

For a change that must change no number: give FILE before it, FILE and EARLIER after it, on one machine with one set of
packages. It trains complete runs from recipes, so only `vcore_ds.training.run.train` and the recipe have to keep names.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.helpers import resumed_runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.reference import write_reference_log_probabilities
from vcore_ds.config.schema import Recipe
from vcore_ds.training.run_folder import describe_environment

DEEPSPEED_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
NUM_RANKS, NUM_STEPS = 2, 3
NUM_SHOWN = 10
"""Differences of each run that are printed."""

METHODS: dict[str, dict[str, Any]] = {
    "sft": dict(method={"name": "sft"}),
    "dft": dict(method={"name": "dft"}),
    "iw_sft": dict(method={"name": "iw_sft"}),
    "random": dict(method={"name": "random"}),
    "vcore, jvp fused": dict(method={"kl_budget": 0.05}, utility={"fused": True}, probe={"clip": 1.0}),
    "vcore, jvp separate": dict(
        method={"temperature": 0.1, "alpha": "variance", "alpha_cap": None},
        utility={"fused": False},
        probe={"direction": "adam", "every": 2},
    ),
    "vcore, finite difference": dict(
        method={"kl_budget": 0.05, "alpha": "effective_sample_size"},
        utility={"estimator": "finite_difference", "epsilon": "auto"},
    ),
}
PROVIDERS: dict[str, dict[str, Any]] = {
    "huggingface": {},
    "megatron, tensor 2": dict(model={"provider": "megatron"}, parallel={"tensor": 2}),
}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.1}

Run = list[dict[str, Any]]
"""Metrics of each step, then hashes of the run's files; numbers as `float.hex` writes them."""


def list_cases() -> Iterator[tuple[str, tuple[str, str, str, bool]]]:
    for method, provider, precision, lora in product(METHODS, PROVIDERS, ("fp32", "bf16"), (False, True)):
        if lora and PROVIDERS[provider]:
            continue  # parallel layers have no adapters
        yield f"{method}, {provider}, {precision}, {'lora' if lora else 'full'}", (method, provider, precision, lora)


def make_recipe(folder: Path, number: int, method: str, provider: str, precision: str, lora: bool) -> Recipe:
    sections = {**METHODS[method], **PROVIDERS[provider]}
    data = {"train_path": str(folder / "train.jsonl"), "validation_path": str(folder / "validation.jsonl")}
    if method == "iw_sft" and not lora:
        data["reference_log_probabilities"] = str(folder / f"reference_{number}.npz")
    return Recipe(
        model={"path": str(folder / "model"), "precision": precision, **sections.pop("model", {})},
        data={**data, "cache_dir": str(folder / "cache")},
        lora=LORA if lora else None,
        batch={"global_size": 4, "micro_batch_size_per_rank": 1},
        probe={"batch_size": 2, **sections.pop("probe", {})},
        optimizer={"learning_rate": 1e-3},
        schedule={"num_steps": NUM_STEPS},
        run={"output_dir": str(folder / f"run_{number}"), "num_followed_traces": 2},
        engine={"deepspeed_config": str(DEEPSPEED_CONFIGS / f"zero3_{precision}.json")},
        **sections,
    )


def write_exactly(value: Any) -> Any:
    """A JSON value whose numbers are text with every bit."""
    if isinstance(value, dict):
        return {key: write_exactly(inner) for key, inner in value.items()}
    return value.hex() if isinstance(value, float) else value


def read(folder: Path) -> Run:
    """Read what a run measured and wrote, without metrics that depend on the machine's speed and memory."""
    # The weights of these small models are one file in model/ or adapter/.
    files = [*sorted((folder / "tokens").iterdir()), *folder.glob("[ma]*/*.safetensors")]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    held_out = json.loads((folder / "held_out.json").read_text())
    return [
        *(write_exactly(line) for line in resumed_runs.read_deterministic_metrics(folder)),
        hashes,
        write_exactly(held_out),
    ]


def run_cases(folder: Path, provider: str) -> dict[str, Run]:
    torch.set_num_threads(1)
    runs = {}
    for number, (name, parts) in enumerate(list_cases()):
        if provider not in parts:
            continue
        recipe = make_recipe(folder, number, *parts)
        with redirect_stdout(StringIO()):
            if recipe.data.reference_log_probabilities is not None:
                write_reference_log_probabilities(recipe, Path(recipe.data.reference_log_probabilities))
            runs[name] = read(resumed_runs.run_to_end(recipe))
    return runs


def run_all() -> dict[str, Run]:
    """Run every case, in one launch per provider, since a process has one tensor-parallel size."""
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory(prefix="bitwise_") as temporary:
        folder = Path(temporary)
        tiny.qwen3(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        write_conversations(folder / "train.jsonl", sums(range(13)))
        write_conversations(folder / "validation.jsonl", sums(range(20, 23)))
        return {
            name: run
            for provider in PROVIDERS
            for name, run in run_ranks(run_cases, NUM_RANKS, folder, provider)[0].items()
        }


def find_differences(run: Run, earlier: Run) -> list[str]:
    """List differences in the order of the steps, so that the first line shows where they began."""
    parts = [f"step {k}" for k in range(1, NUM_STEPS + 1)] + ["file", "held_out.json"]
    if not len(run) == len(earlier) == len(parts):
        return [f"{len(run)} parts, {len(earlier)} earlier; expected {len(parts)}"]
    return [
        f"{part}: {key} is {here.get(key)}, was {there.get(key)}"
        for part, here, there in zip(parts, run, earlier, strict=True)
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]


def compare(runs: Mapping[str, Run], earlier: Mapping[str, Run]) -> int:
    """Print differences; returns the number of runs that differ, including runs that only one of the two has."""
    differing = 0
    for name in sorted(runs.keys() | earlier.keys()):
        changed = find_differences(runs.get(name, []), earlier.get(name, []))
        differing += bool(changed)
        if changed:
            print(f"{name}: {len(changed)} differ")
            print(*(f"  {line}" for line in changed[:NUM_SHOWN]), sep="\n")
    print(f"{len(runs)} runs, {len(earlier)} earlier: {differing} differ")
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON to write; an existing file is read, and nothing runs")
    parser.add_argument("earlier", type=Path, nargs="?", help="JSON to compare with")
    arguments = parser.parse_args()
    if not arguments.file.exists():
        result = {"packages": describe_environment(NUM_RANKS)["packages"], "runs": run_all()}
        arguments.file.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.earlier is not None:
        result, earlier = (json.loads(path.read_text()) for path in (arguments.file, arguments.earlier))
        if result["packages"] != earlier["packages"]:
            print(f"packages: {result['packages']}, earlier {earlier['packages']}")
        raise SystemExit(compare(result["runs"], earlier["runs"]) > 0)


if __name__ == "__main__":
    main()
