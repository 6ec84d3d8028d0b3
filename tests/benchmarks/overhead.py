"""Step time of VCORE over SFT, and of SFT over a bare DeepSpeed loop.

    python -m tests.benchmarks.overhead [--rounds 7] [--only NAME ...] [--output FILE.json]

Each ratio is measured in two new processes with only the two engines that it needs: with all engines in two processes,
a step's time depended on which engine had run before it. The two take turns, step by step over the same batches, so
that other load affects both. The numbers to quote are the ratios, taken round by round. |B| = 32, |B'| = 4, a Qwen3 of
16.9M parameters, bf16. A run's feed and plan make the batches, with default keys.

The bare loop is `deepspeed.initialize` around the Hugging Face model, tuned like ours: the same ZeRO-3
buckets, the same fused AdamW, one gradient reduction per step, the loss over the supervised tokens of the whole batch.
Its micro-batches hold sequences of similar lengths, since packs would need a mask.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch.nn.functional import cross_entropy

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.common.random_streams import Stream
from vcore_ds.data.batches import Batch, StepBatches, collate, idle_batch
from vcore_ds.data.dataset import MainOrder, RandomDraws
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.planning.batch_layout import MicroBatchLimit, lay_out_batch
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.model_shape import ModelShape, layer_parameters
from vcore_ds.planning.passes import CPU
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.feed import Feed

MODEL = dict(
    vocab_size=8192, hidden_size=384, intermediate_size=1152, num_hidden_layers=8, num_attention_heads=6, head_dim=64
)
EXPERTS = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=288, mlp_only_layers=[])
NUM_MAIN, NUM_PROBE, NUM_SEQUENCES = 32, 4, 1024
BUCKET_NUMEL = 50_000_000
SHAPE = ModelShape(
    MODEL["num_hidden_layers"],
    MODEL["num_attention_heads"],
    2,
    MODEL["head_dim"],
    layer_parameters(
        MODEL["hidden_size"], MODEL["num_attention_heads"], 2, MODEL["head_dim"], MODEL["intermediate_size"]
    ),
)
"""For the time model; key/value heads as `tiny.qwen3` has them."""


@dataclass(frozen=True)
class Variant:
    sections: dict[str, Any]
    lora: bool = False
    checkpointing: bool = False
    moe_kind: str | None = None
    """Kind of an MoE model, see `tiny.moe_model`. A token activates as many parameters as in the dense model."""


SFT, JVP = {"method": {"name": "sft"}}, {"utility": {"fused": True}}
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 1e-2}}
VARIANTS = {
    "sft": Variant(SFT),
    "finite difference": Variant(FINITE_DIFFERENCE),
    "jvp": Variant(JVP),
    "sft, lora": Variant(SFT, lora=True),
    "jvp, rank 16": Variant({**JVP, "probe": {"rank": 16}}),
    "jvp, lora": Variant(JVP, lora=True),
    "sft, checkpointed": Variant(SFT, checkpointing=True),
    "finite difference, checkpointed": Variant(FINITE_DIFFERENCE, checkpointing=True),
    "jvp, checkpointed": Variant(JVP, checkpointing=True),
    "jvp, rank 16, checkpointed": Variant({**JVP, "probe": {"rank": 16}}, checkpointing=True),
    "sft, lora, checkpointed": Variant(SFT, lora=True, checkpointing=True),
    "jvp, lora, checkpointed": Variant(JVP, lora=True, checkpointing=True),
    "sft, MoE": Variant(SFT, moe_kind="qwen3_moe"),
    "jvp, MoE": Variant(JVP, moe_kind="qwen3_moe"),
    "sft, MoE, checkpointed": Variant(SFT, moe_kind="qwen3_moe", checkpointing=True),
    "jvp, MoE, checkpointed": Variant(JVP, moe_kind="qwen3_moe", checkpointing=True),
}
BOUNDS = {
    ("sft", "bare"): 1.05,
    ("finite difference", "sft"): 1.45,
    ("jvp", "sft"): 1.85,
    ("jvp, rank 16", "sft"): 1.60,
    ("jvp, lora", "sft, lora"): 1.65,
    ("finite difference, checkpointed", "sft, checkpointed"): 1.40,
    ("jvp, checkpointed", "sft, checkpointed"): 1.65,
    ("jvp, rank 16, checkpointed", "sft, checkpointed"): 1.45,
    ("jvp, lora, checkpointed", "sft, lora, checkpointed"): 1.50,
    ("jvp, MoE", "sft, MoE"): 1.85,
    ("jvp, MoE, checkpointed", "sft, MoE, checkpointed"): 1.65,
}
"""Upper bounds of the median ratio of two step times."""


class Sequences(list[TokenizedSequence]):
    """Lengths as long-tailed as reasoning traces are (median 200, up to 512 tokens); a fifth of each is the prompt."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = (200 * torch.exp(0.5 * torch.randn(NUM_SEQUENCES, generator=generator))).clamp(32, 512).int()
        for i, length in enumerate(self.lengths.tolist()):
            ids = torch.randint(0, MODEL["vocab_size"], (length,), generator=generator).int().numpy()
            self.append(TokenizedSequence(i, ids, torch.arange(length).ge(length // 5).numpy()))


def make_feed(num_main: int = NUM_MAIN, num_probe: int = NUM_PROBE) -> Feed:
    """A run's feed on these ranks. A collective."""
    recipe = step_runs.make_recipe(
        model={"path": "none", "precision": "bf16"},
        batch={"global_size": num_main},
        probe={"batch_size": num_probe},
        data={"train_path": "none", "cutoff_length": 512},
    )
    plan = plan_batch(derive_plan_settings(recipe), layout.size("shards"), SHAPE, machine=CPU)
    layout.make_sequence_groups(plan.sequence_parallel_sizes)
    data = Sequences()
    main, probe = MainOrder([len(data)], num_main, 0), RandomDraws([len(data)], num_probe, 0, Stream.PROBE)
    return Feed(data, plan, main, probe, data, None, data, pad_token_id=0, probe_every=1)


def make_unpacked_batches(feed: Feed, k: int) -> list[Batch]:
    """This rank's main micro-batches of step k, unpacked."""
    ids = feed.main_order.step(k)
    lengths = [len(feed.dataset[i]) for i in ids]
    limit = MicroBatchLimit(num_sequences=None)
    assignment = lay_out_batch(ids, lengths, parallel_sizes=[1], limit=limit, time_model=feed.plan.time_model)
    micro_batches = assignment.list_group_ids(layout.rank("shards"))
    return [collate([feed.dataset[i] for i in ids], 0) if ids else idle_batch(0) for ids in micro_batches]


def deepspeed_config() -> dict:
    config = tiny.deepspeed_config(bf16=True, gradient_clipping=1.0, persistence_threshold=100_000)
    config["zero_optimization"] |= dict(reduce_bucket_size=BUCKET_NUMEL, stage3_prefetch_bucket_size=BUCKET_NUMEL)
    return config


class BareLoop:
    """The training loop that a careful user of DeepSpeed would write: small parameters stay gathered, and one reduction
    a step."""

    def __init__(self, model: torch.nn.Module, config: dict):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, main: list[Batch]) -> None:
        tokens = sum(int(batch.num_supervised_tokens().sum()) for batch in main)
        num_tokens_global = layout.sum_over("shards", [tokens])[0]
        self.engine.set_gradient_accumulation_boundary(True)
        with self.engine.coalesce_grad_reduction():
            for batch in main:
                positions = None if batch.segments is None else batch.position_ids()
                logits = self.engine(input_ids=batch.input_ids, position_ids=positions, use_cache=False).logits[:, :-1]
                losses = cross_entropy(logits.flatten(0, 1).float(), batch.labels[:, 1:].flatten(), reduction="sum")
                self.engine.backward(losses / num_tokens_global * layout.size("shards"), scale_wrt_gas=False)
        self.engine.step()


class OurLoop:
    def __init__(self, variant: Variant):
        self.recipe = step_runs.make_recipe(model={"path": "none", "precision": "bf16"}, **variant.sections)
        options = dict(lora=variant.lora, checkpointing=variant.checkpointing, moe_kind=variant.moe_kind)
        sizes = MODEL if variant.moe_kind is None else MODEL | EXPERTS
        model = tiny.token_loss_model(tied=True, dtype=torch.bfloat16, **options, **sizes)
        optimizer = build_optimizer(model, self.recipe.optimizer)
        self.engine = Engine(model, optimizer, deepspeed_config(), coalesce_gradient_reduction=True)
        self.estimator = step_runs.make_estimator(self.recipe, self.engine)

    def step(self, batches: StepBatches) -> dict:
        return step_runs.train_step(self.engine, self.recipe, batches, self.estimator).values


def measure(names: tuple[str, str], num_rounds: int) -> dict:
    """Seconds of each step of two loops, and of the step's parts, by name."""
    feed = make_feed()
    loops: dict[str, Any] = {
        name: BareLoop(tiny.qwen3(tied=True, **MODEL), deepspeed_config())
        if name == "bare"
        else OurLoop(VARIANTS[name])
        for name in names
    }
    seconds, parts = ({name: [] for name in names} for _ in range(2))
    for k in range(num_rounds + 1):
        batches, unpacked = feed.step(k), make_unpacked_batches(feed, k)
        for name in names if k % 2 else names[::-1]:
            torch.distributed.barrier()
            start = time.perf_counter()
            values = loops[name].step(unpacked if name == "bare" else batches)
            torch.distributed.barrier()
            if k > 0:  # the first round allocates, and records ZeRO-3's trace
                seconds[name].append(time.perf_counter() - start)
                if values:
                    parts[name].append({key: values[key] for key in values if key.startswith("seconds_")})
    return dict(seconds=seconds, parts=parts)


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return dict(min=ratios[0], median=statistics.median(ratios), max=ratios[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each ratio's two loops")
    names = ["bare", *VARIANTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="only ratios between these loops")
    parser.add_argument("--output", help="write the numbers as JSON")
    arguments = parser.parse_args()
    results = {}
    for pair, bound in BOUNDS.items():
        if not {*pair} <= {*arguments.only}:
            continue
        measured = run_ranks(measure, 2, pair, arguments.rounds, timeout_seconds=3600)[0]
        ratios = ratio(*(measured["seconds"][name] for name in pair)) | {"bound": bound}
        results[" / ".join(pair)] = {**measured, "ratio": ratios}
        print(f"{' / '.join(pair):54}", *(f"{name} {value:.3f}" for name, value in ratios.items()), flush=True)
        for name in pair:
            parts = measured["parts"][name] or [{}]
            medians = {key: statistics.median(step[key] for step in parts) for key in parts[0]}
            median = statistics.median(measured["seconds"][name])
            print(f"  {name:32} {median:6.2f} s a step", *(f"{k} {v:.2f}" for k, v in medians.items()), flush=True)
    if not results:
        parser.error(f"no ratio between only these loops; ratios: {', '.join(map(' / '.join, BOUNDS))}")
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
