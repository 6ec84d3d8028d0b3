"""Steps on several ranks against the oracle in plain PyTorch, for each way to divide model, batch and optimizer and
each file of ds_configs; and whether all ranks start their collectives in the same order, which NCCL demands.

    python -m torch.distributed.run --standalone --nproc-per-node 8 -m tests.gpu.node.steps [--only NAME ...]

The models are tiny, the collectives those of a run. The oracle computes on the first rank's CPU, in fp32.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups

from tests.gpu.results import is_real_gpu, is_simulated, write_results
from tests.helpers.collectives import count_disagreements, list_collectives, list_timeout_minutes
from tests.helpers.commands import REPOSITORY
from tests.helpers.parity import Case, run_case
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.distributed.process_group import start_process_group

QUANTITIES = ("utilities", "weights", "alpha", "gradient", "loss", "parameters")
BF16 = {"model": {"path": "none", "precision": "bf16"}}
SEPARATE = {"utility": {"fused": False}}
SGD = {"optimizer": {"learning_rate": 0.1, "name": "sgd"}}
"""In parallel layers Adam would move a parameter whose gradient is near zero by the sign of its rounding."""
EXPERTS: dict[str, Any] = {"expert": 2, "moe_kind": "qwen3_moe", "checkpointing": True}
SMALL = {"reduce_bucket_size": 9_000, "stage3_prefetch_bucket_size": 9_000, "stage3_param_persistence_threshold": 100}
"""Sizes in elements that these models exceed, so that there are as many all-gathers and reductions as in a real one."""
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}


def make_cases(num_ranks: int) -> dict[str, Case]:
    """Cases by name; sequence-parallel sizes up to the number of ranks."""
    # One sequence on each data-parallel rank, two on some.
    batch = {"num_main": num_ranks + num_ranks // 2, "num_probe": num_ranks}
    cases = {
        "ZeRO-3, LoRA, separate passes": Case(**batch, lora=True, checkpointing=True, sections=SEPARATE),
        "ZeRO-3, bf16": Case(**batch, checkpointing=True, sections=BF16),
    }
    for size in (2, 4, 8):
        if size <= num_ranks:
            options = dict(sequence_parallel=(size, size), num_heads=8, num_kv_heads=2, checkpointing=True)
            cases[f"Ulysses {size}"] = Case(**options)
            cases[f"Ulysses {size}, bf16, packed"] = Case(**options, packed=True, sections=BF16)
    if num_ranks >= 4:
        cases[f"Ulysses 2, probe {num_ranks}"] = Case(sequence_parallel=(2, num_ranks), num_heads=8)
    cases |= {
        "tensor 2": Case(**batch, tensor=2, checkpointing=True, sections=SGD),
        # Enough layers that sets of their parameters, in the order of addresses, begin otherwise on two ranks.
        "expert 2": Case(**batch, **EXPERTS, num_layers=6),
        "expert 2, bf16": Case(**batch, **EXPERTS, sections=BF16),
    }
    cases = {name: replace(case, config=SMALL) for name, case in cases.items()}
    for name, config in read_files().items():
        if "zero_hpz_partition_size" in config:
            # Two groups hold the whole model each, and a second copy that a perturbation must reach.
            options = dict(sequence_parallel=(2, num_ranks), num_heads=8, sections=FINITE_DIFFERENCE)
            cases[name] = Case(**options, config=config | {"zero_hpz_partition_size": max(2, num_ranks // 2)})
        else:
            cases[name] = Case(**batch, config=config)
    return cases


def read_files() -> dict[str, dict[str, Any]]:
    """ZeRO's section of each file of ds_configs, in small sizes; one name for files that differ in sizes alone."""
    names: dict[str, str] = {}
    for path in sorted((REPOSITORY / "ds_configs").glob("*.json")):
        config = json.loads(path.read_text())["zero_optimization"] | SMALL
        for section in config.keys() & {"offload_optimizer", "offload_param"}:
            config[section]["pin_memory"] = uses_gpu()
        text = json.dumps(config)
        names[text] = f"{names[text]}, {path.stem}" if text in names else path.stem
    return {name: json.loads(text) for text, name in names.items()}


def choose_bound(case: Case) -> float:
    """Largest relative deviation: in fp32 on a CPU or on a GPU, which sums in another order, and in bf16."""
    if case.sections.get("model", {}).get("precision") == "bf16":
        return 0.06
    return 1e-3 if is_real_gpu() else 1e-5


def measure(only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A row for each case with its largest deviations over all ranks."""
    rows = []
    for name, case in make_cases(layout.size("job")).items():
        if only and name not in only:
            continue
        worst, num_before = {}, len(list_collectives())
        for deviations in layout.gather_objects("job", run_case(case)):
            worst = {q: max(deviations[q], worst.get(q, 0.0)) for q in QUANTITIES}
        orders = layout.gather_objects("job", list_collectives(num_before))
        if (size := case.config.get("zero_hpz_partition_size")) is not None:
            # Without these groups, DeepSpeed would shard over all ranks, with the same result.
            assert dist.get_world_size(groups._get_zero_param_intra_parallel_group()) == size
        # The deviation of parameters is absolute and bounded by the learning rate, so it is shown but not compared.
        passed = all(worst[quantity] < choose_bound(case) for quantity in QUANTITIES[:-1])
        order = {"collectives": len(orders[0]), "in another order": count_disagreements(orders)}
        passed = passed and order["in another order"] == 0
        result = {"bound": choose_bound(case), **order, "result": "passed" if passed else "FAILED"}
        rows.append({"case": name, **worst, **result})
        if layout.is_first():
            print(f"{name}: {rows[-1]}", flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), metavar="CASE")
    arguments = parser.parse_args(words)
    start_process_group(timeout_minutes=10)
    rows, num_ranks = measure(tuple(arguments.only)), layout.size("job")
    if not is_simulated():  # whose groups have no options
        assert set(list_timeout_minutes().values()) == {10.0}, "a group has PyTorch's timeout"
    if layout.is_first():
        title = f"Deviations of a step on {num_ranks} ranks from the oracle."
        write_results(f"steps_{num_ranks}", num_ranks, title, rows)
    return 0 if all(row["result"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
