"""Steps of SFT and VCORE on one device or several: speed, memory, phases, attention alone, and fidelity in bf16.

    python -m tests.benchmarks.gpu --shape 1.7b [--layers N] [--rounds 5] [--output FOLDER]
    torchrun --nproc_per_node 8 -m tests.benchmarks.gpu --shape 8b --output FOLDER

Random weights of the shape of a Qwen3, all parameters trained, bf16, activation checkpoints, packs.
The methods take turns on one engine, step by step over the same batches, so that all are
measured in the same state of the machine. Shapes that do not fit the device are skipped with a message; `--layers` cuts
them. `--output` receives gpu.md and gpu.json. The tiny shape runs on a CPU, which only shows that this file works.
"""

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.benchmarks.gpu_attention import measure_attention
from tests.benchmarks.gpu_plan import (
    choose_activations_of,
    count_needed_flops,
    estimate_peak_bytes,
    pack_lengths,
    predict_seconds,
    read_zero_section,
)
from tests.gpu.results import command_line, describe_devices
from tests.helpers import step_runs, tiny
from vcore_ds.data.batches import Batch, StepBatches, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import available_memory_bytes, device
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel, checkpoint_activations
from vcore_ds.planning.hardware import peak_flops
from vcore_ds.training.run_folder import describe_environment
from vcore_ds.training.step import take_direction
from vcore_ds.training.step_metrics import StepMetrics
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator, FiniteDifference, ForwardMode, NoUtilities
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

GIB = 2**30
HEADS = dict(num_key_value_heads=8, head_dim=128, vocab_size=151936)
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True, **HEADS,
    ),
    "1.7b": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True, **HEADS,
    ),
    "8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False, **HEADS,
    ),
    "32b": dict(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        tie_word_embeddings=False, **HEADS,
    ),
    "tiny": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=128, tie_word_embeddings=True,
    ),
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "sft": dict(method={"name": "sft"}),
    "jvp": dict(method={"kl_budget": 0.05}),
    "jvp, fused": dict(method={"kl_budget": 0.05}, utility={"fused": True}),
    "finite difference": dict(
        method={"kl_budget": 0.05}, utility={"estimator": "finite_difference", "epsilon": 1e-2}
    ),
}  # fmt: skip
LOW_RANK = {f"jvp, fused, rank {rank}": METHODS["jvp, fused"] | {"probe": {"rank": rank}} for rank in (8, 32)}
"""Methods that run only if `--methods` names them."""


def make_pack(num_tokens: int, vocabulary: int, seed: int) -> Batch:
    """A pack of four sequences; an eighth of each is its prompt."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for i, length in enumerate(pack_lengths(num_tokens)):
        ids = torch.randint(0, vocabulary, (length,), generator=generator).int().numpy()
        sequences.append(TokenizedSequence(i, ids, torch.arange(length).ge(length // 8).numpy()))
    return pack([sequences], pad_token_id=0)


def build_engine(sizes: dict[str, Any], deepspeed_config: str = "zero3_bf16.json") -> Engine:
    torch.manual_seed(0)
    with torch.device(device()):
        config = Qwen3Config(**sizes, use_cache=False, max_position_embeddings=131072)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_attn_implementation(TRAINING_ATTENTION)
    checkpoint_activations(model)
    wrapped = TokenLossModel(model)
    wrapped.train()
    config = tiny.deepspeed_config(bf16=True, gradient_clipping=1.0)
    config["zero_optimization"] = read_zero_section(deepspeed_config)
    return Engine(wrapped, build_optimizer(wrapped, make_recipe("sft").optimizer), config)


def make_recipe(method: str):
    return step_runs.make_recipe(model={"path": "none", "precision": "bf16"}, **(METHODS | LOW_RANK)[method])


def make_estimator(method: str, engine: Engine, direction: Direction) -> Estimator:
    """A method's estimator. All methods along the full-rank direction share it, so that there is one copy of its
    shards."""
    if method == "sft":
        return NoUtilities(engine)
    if method in LOW_RANK:
        return ForwardMode(engine, Direction(engine, LOW_RANK[method]["probe"]["rank"]), fused=True)
    if method == "finite difference":
        return FiniteDifference(engine, direction, epsilon=METHODS[method]["utility"]["epsilon"])
    return ForwardMode(engine, direction, fused=method == "jvp, fused")


def measure_steps(
    sizes: dict[str, Any],
    num_tokens: int,
    num_rounds: int,
    num_packs: int,
    chosen: Sequence[str] = tuple(METHODS),
    deepspeed_config: str = "zero3_bf16.json",
    profiles: Path | None = None,
) -> tuple[dict, dict]:
    """Measure steps of the chosen methods, and fidelity. `profiles`: folder for a profile of one more step of each
    method."""
    room = available_memory_bytes()
    needed = {name: estimate_peak_bytes(name, sizes, num_tokens, deepspeed_config) for name in chosen}
    measured: dict[str, Any] = {
        name: {"skipped": f"needs {num_bytes / GIB:.1f} GiB by the estimate, {room / GIB:.1f} are there"}
        for name, num_bytes in needed.items()
        if num_bytes > room
    }
    methods = [name for name in chosen if name not in measured]
    if not methods:
        return measured, {"skipped": "no method has room"}
    engine = build_engine(sizes, deepspeed_config)
    # The same for all methods, which take turns on one engine: what the largest has room for.
    largest = max(methods, key=lambda name: needed[name])
    activations = choose_activations_of(largest, sizes, num_tokens, room, deepspeed_config)
    engine.module.store_activations(activations)
    needed = {name: estimate_peak_bytes(name, sizes, num_tokens, deepspeed_config, activations) for name in methods}
    direction = Direction(engine)
    estimators = {name: make_estimator(name, engine, direction) for name in methods}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}

    def train(name: str, batches: StepBatches) -> StepMetrics:
        batches = StepBatches(batches.main, [] if name == "sft" else batches.probe)
        return step_runs.train_step(engine, make_recipe(name), batches, estimators[name])

    for k in range(num_rounds + 1):
        # Packs differ between ranks, but not between methods.
        seed = 1000 * k + 10 * layout.rank("shards")
        main = [make_pack(num_tokens, sizes["vocab_size"], seed + i) for i in range(num_packs)]
        probe = [make_pack(num_tokens, sizes["vocab_size"], seed + 9)]
        for name in methods[k % len(methods) :] + methods[: k % len(methods)]:
            if "skipped" in measured.get(name, {}):
                continue
            try:
                values = train(name, StepBatches(main, probe)).values
            except torch.OutOfMemoryError as error:  # only this method: others may need less
                measured[name] = {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
                gc.collect()
                torch.cuda.empty_cache()
                continue
            if k > 0:  # the first round allocates, compiles, and records ZeRO-3's trace
                lines[name].append(dict(values))
    sequences = pack_lengths(num_tokens)
    for name in methods:
        if lines[name] and name not in measured:
            flops = count_needed_flops(name, sizes, num_tokens, num_packs)
            others = {id(x): x for x in (direction, *(e.direction for e in estimators.values())) if x is not None}
            others.pop(id(estimators[name].direction), None)
            kept = sum(other.persistent_bytes for other in others.values())
            measured[name] = summarize(lines[name], sum(sequences) * num_packs, flops, needed[name], kept)
            measured[name]["predicted_seconds"] = predict_seconds(name, sizes, num_tokens, num_packs, deepspeed_config)
            if "sft" in methods and len(lines["sft"]) == len(lines[name]):
                pairs = zip(lines[name], lines["sft"], strict=True)
                measured[name]["over_sft"] = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    if profiles is not None:
        for name in methods:  # before the profiles, which may take minutes
            print(name, {key: value for key, value in measured[name].items() if key != "predicted_seconds"}, flush=True)
        batches = StepBatches(main, probe)
        for name in methods:
            if "skipped" not in measured[name]:
                file = profiles / (re.sub(r"\W+", "_", f"{name} {deepspeed_config}") + ".txt")
                write_profile(file, lambda name=name: train(name, batches))
    fidelity = measure_fidelity_in_bf16(engine, direction, make_pack(min(num_tokens, 4096), sizes["vocab_size"], 7))
    engine.close()
    return {name: measured[name] for name in chosen}, fidelity


def summarize(lines: list[dict], num_tokens: int, flops: float, estimate: int, not_needed: int) -> dict[str, Any]:
    """Medians over rounds. `not_needed`: bytes that are allocated only for other methods."""
    seconds = statistics.median(line["seconds"] for line in lines)
    peak = peak_flops(torch.cuda.get_device_name()) if device().type == "cuda" else None
    phases = ("probe", "utility", "main", "step")
    peaks = [line[f"peak_memory_bytes_{phase}"] for line in lines for phase in phases]
    return {
        "seconds": seconds,
        "tokens_per_second_per_rank": num_tokens / seconds,
        "mfu": None if peak is None else flops / seconds / peak,
        **{
            f"peak_memory_bytes_{phase}": max(line[f"peak_memory_bytes_{phase}"] or 0 for line in lines)
            for phase in phases
        },
        "peak_memory_bytes": max([peak for peak in peaks if peak is not None], default=not_needed) - not_needed,
        "estimated_peak_memory_bytes": estimate,
        **{f"seconds_{part}": statistics.median(line[f"seconds_{part}"] for line in lines) for part in phases},
    }


def measure_fidelity_in_bf16(engine: Engine, direction: Direction, batch: Batch) -> dict[str, Any]:
    """Compare utilities in the training precision with those in fp32, for the same weights and direction."""
    try:
        take_direction(direction, make_recipe("jvp").method, make_recipe("jvp").probe, [batch])
        utilities = []
        for precision in (None, torch.float32):
            with forward_mode(engine, direction, precision):
                utilities.append(compute_losses_and_utilities(engine, batch)[1].double().cpu())
    except torch.OutOfMemoryError as error:
        return {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
    measured, exact = utilities
    return {
        "num_tokens": len(exact),
        "spearman": float(spearmanr(measured, exact).statistic),
        "relative_error": float((measured - exact).norm() / exact.norm()),
    }


def write_profile(file: Path, work: Callable[[], object]) -> None:
    """Profile one call: the first rank writes the slowest operators and kernels, and a trace for a viewer
    (perfetto.dev) beside it."""
    if not layout.is_first():
        work()
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        work()
    # Garbage collection would traverse everything imported again and again while 1e5 events are made: over a minute.
    gc.disable()
    order = "self_device_time_total" if torch.version.cuda is not None else "self_cpu_time_total"
    file.write_text(profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80))
    profile.export_chrome_trace(str(file.with_suffix(".json.gz")))
    gc.enable()


def measure_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call."""

    def now() -> float:
        if device().type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    work()
    seconds = []
    for _ in range(repeats):
        start = now()
        work()
        seconds.append(now() - start)
    return statistics.median(seconds)


def markdown(results: dict[str, Any]) -> str:
    """A heading with device, command and versions, and a table for each kind of number."""
    phases = ("probe", "utility", "main", "step")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"## Qwen3-{results['shape']}, {results['sizes']['num_hidden_layers']} layers, on {results['device']}\n",
        f"{results['date']}; `{results['command']}`; {versions}; commit {results['commit']}. Random weights, all "
        f"parameters trained, bf16, activation checkpoints, {results['packs']} pack(s) of "
        f"{results['tokens_of_a_pack']:,} tokens a rank and step; medians of {results['rounds']} round(s) in turns.\n",
        "| method | over SFT | tokens/s a rank | MFU | peak GiB (estimated) | s: total, probe, utility, main, update "
        "| by the plan |",
        "|" + "---|" * 7,
    ]
    for name, row in results["steps"].items():
        if "skipped" in row:
            lines.append(f"| {name} | skipped: {row['skipped']} |" + " |" * 5)
            continue
        measured = [row["seconds"], *(row[f"seconds_{phase}"] for phase in phases)]
        plan = row["predicted_seconds"]
        predicted = [] if plan is None else [sum(plan.values()), *(plan[phase] for phase in phases)]
        seconds = (", ".join(f"{value:.3f}" for value in values) for values in (measured, predicted))
        memory = f"{row['peak_memory_bytes'] / GIB:.2f} ({row['estimated_peak_memory_bytes'] / GIB:.2f})"
        cells = (row.get("over_sft"), row["tokens_per_second_per_rank"], row["mfu"])
        numbers = ("-" if cell is None else f"{cell:,.3g}" for cell in cells)
        lines.append(f"| {' | '.join([name, *numbers, memory, *seconds])} |")
    lines += ["", "| attention of one layer, one pack | ms |", "|---|---|"]
    for name, value in results["attention"].items():
        lines.append(f"| {name} | {value if isinstance(value, str) else f'{1e3 * value:.3f}'} |")
    return "\n".join(
        [*lines, "", f"Utilities in bf16 against fp32, same weights and direction: {results['fidelity_in_bf16']}"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int, help="fewer decoder layers, for what fits")
    parser.add_argument("--tokens", type=int, help="tokens of a pack (default 16,384; 64 for tiny), a multiple of 128")
    parser.add_argument("--packs", type=int, default=2, help="main packs of a rank in a step")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of all methods")
    parser.add_argument("--methods", nargs="+", choices=METHODS | LOW_RANK, default=list(METHODS), metavar="METHOD")
    parser.add_argument(
        "--deepspeed-config",
        nargs="+",
        default=["zero3_bf16.json"],
        metavar="FILE",
        help="to compare: an engine for each; FILE:KEY=VALUE changes a number of zero_optimization",
    )
    parser.add_argument("--profile", action="store_true", help="profile a step of each method; needs --output")
    parser.add_argument("--attention-only", action="store_true", help="no steps")
    parser.add_argument("--output", type=Path, help="folder for gpu.md and gpu.json")
    arguments = parser.parse_args()
    if arguments.profile and arguments.output is None:
        parser.error("--profile needs --output")
    start_process_group(timeout_minutes=30)
    sizes = dict(SHAPES[arguments.shape])
    if arguments.layers is not None:
        sizes["num_hidden_layers"] = min(arguments.layers, sizes["num_hidden_layers"])
    num_tokens = arguments.tokens or (128 if arguments.shape == "tiny" else 16_384)
    where = describe_environment(layout.size("job"))
    steps, fidelity = {}, {"skipped": "attention only"}
    if not arguments.attention_only:
        for file in arguments.deepspeed_config:
            file_steps, fidelity = measure_steps(
                sizes,
                num_tokens,
                arguments.rounds,
                arguments.packs,
                arguments.methods,
                file,
                arguments.output if arguments.profile else None,
            )
            is_alone = len(arguments.deepspeed_config) == 1
            steps |= {name if is_alone else f"{name}, {file}": row for name, row in file_steps.items()}
            gc.collect()
    results = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": describe_devices(where["world_size"]),
        "ranks": where["world_size"],
        "command": command_line(),
        "versions": {"python": where["python"], "CUDA": torch.version.cuda, **where["packages"]},
        "commit": where["git_commit"],
        "shape": arguments.shape,
        "sizes": sizes,
        "tokens_of_a_pack": num_tokens,
        "packs": arguments.packs,
        "rounds": arguments.rounds,
        "steps": steps,
        "fidelity_in_bf16": fidelity,
        "attention": measure_attention(sizes, pack_lengths(num_tokens), measure_seconds),
    }
    if not layout.is_first():
        return
    text = markdown(results)
    print(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "gpu.md").write_text(text)
        (arguments.output / "gpu.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
