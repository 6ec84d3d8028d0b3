"""`vcore_ds.VcoreLoss` in transformers' Trainer under DeepSpeed's ZeRO-3: the steps of a run, and of plain PyTorch."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import vcore_ds
from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.distributed import layout
from vcore_ds.models.causal_lm import TokenLossModel

pytestmark = pytest.mark.dist

NUM_STEPS = 3
RATE, EPS, KL_BUDGET = 1e-3, 1e-4, 0.05  # see `make_method_case` in test_step_parity.py for eps
BATCHES = [tiny.make_batch(4, seed=20 + i) for i in range(2 * NUM_STEPS)]
PROBE = tiny.make_batch(4, seed=40)
JSON = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 40,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": 500_000,
    },
}
QUANTITIES = ("loss", "alpha", "grad_norm", "probe_loss", "probe_grad_norm", "direction_norm")

Steps = list[dict[str, float]]


def make_recipe(precision: str, *, lora: bool) -> Any:
    return step_runs.make_recipe(
        model={"path": "none", "precision": precision},
        method={"kl_budget": KL_BUDGET, "alpha_cap": 1.0},
        probe={"direction": "adam", "clip": 1.0},
        optimizer={"learning_rate": RATE, "eps": EPS, "weight_decay": 0.0, "gradient_clipping": 1.0},
        **({"lora": {"rank": 4, "alpha": 8}} if lora else {}),
    )


def make_model(precision: str = "fp32", *, lora: bool = False) -> PreTrainedModel:
    """A tiny model; adapters are as at their start, with B = 0."""
    model = tiny.qwen3(dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    # A run trains the padding token's embedding as any other.
    model.get_input_embeddings().padding_idx = model.config.pad_token_id = None
    if lora:
        model = tiny.with_lora(model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(parameter)
    return model


def take_steps_of_run(precision: str, *, lora: bool = False) -> tuple[Steps, dict[str, Tensor]]:
    """Take steps with this project's engine, on ranks that are arranged."""
    recipe, model = make_recipe(precision, lora=lora), TokenLossModel(make_model(precision, lora=lora))
    engine = step_runs.make_engine(model.train(), recipe)
    estimator, steps = step_runs.make_estimator(recipe, engine), []
    for main in BATCHES[:NUM_STEPS]:
        batches = StepBatches(step_runs.deal(main, 2), step_runs.deal(PROBE, 2))
        metrics = step_runs.train_step(engine, recipe, batches, estimator, learning_rate=RATE).values
        steps.append({name: float(metrics[name] or 0.0) for name in QUANTITIES})
    parameters = step_runs.gather_parameters(engine)
    engine.close()
    return steps, parameters


def take_steps_of_oracle(num_parts: int, *, lora: bool = False) -> tuple[Steps, dict[str, Tensor]]:
    """Take steps in plain PyTorch and fp64; each of `num_parts` of a step has its own alpha."""
    recipe = make_recipe("fp32", lora=lora)
    reference, steps = step_runs.make_reference(make_model(lora=lora).double(), recipe), []
    lengths = (PROBE.labels[:, 1:] != -100).sum(1).double()
    for first in range(0, num_parts * NUM_STEPS, num_parts):
        parts = BATCHES[first : first + num_parts]
        main = Batch(
            list(range(4 * num_parts)), *(torch.cat([getattr(p, n) for p in parts]) for n in ("input_ids", "labels"))
        )
        weights = [torch.ones(int(n), dtype=torch.float64) / n for n in lengths]
        probe_gradient = reference.gradient(PROBE, weights, [0.25] * 4)
        probe_losses = [float(losses.detach().mean()) for losses in reference.losses(PROBE)]
        groups = [range(4 * i, 4 * i + 4) for i in range(num_parts)]
        done = reference.step(main, PROBE, **step_runs.reference_options(recipe), groups=groups)
        norms = [
            math.sqrt(sum(float(v.square().sum()) for v in vector.values()))
            for vector in (done["gradient"], probe_gradient, reference.direction)
        ]
        values = (done["loss"], done["alpha"], norms[0], sum(probe_losses) / 4, *norms[1:])
        steps.append(dict(zip(QUANTITIES, values, strict=True)))
    return steps, {name: parameter.detach() for name, parameter in reference.trained.items()}


class SpyingTrainer(Trainer):
    """Trainer with its own loss, which computes VCORE's too and throws it away."""

    vcore: vcore_ds.VcoreLoss

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self.vcore(model, inputs)  # without an optimizer every call has a new probe, between parts too
        return super().compute_loss(model, inputs, *arguments, **options)


class VcoreTrainer(Trainer):
    """Trainer with VCORE's loss."""

    loss_is_scaled_for_ga = False
    vcore: vcore_ds.VcoreLoss
    parts: Steps

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        loss, direction = self.vcore(model, inputs, self.optimizer), self.vcore.direction
        assert direction is not None
        sums = torch.stack([v.double().square().sum() for v in direction.gradient.values()]).sum()
        sums = torch.stack([sums, loss.detach().double() / torch.distributed.get_world_size()])
        torch.distributed.all_reduce(sums)
        values = {"loss": self.vcore.uniform_loss, "weighted": sums[1] / self.vcore.alpha, "scaled": sums[1]}
        values |= {"probe_loss": direction.loss, "probe_grad_norm": direction.gradient_norm}
        values |= {"direction_norm": sums[0].sqrt()}
        self.parts.append({name: float(value) for name, value in values.items()})
        return loss

    def steps(self) -> Steps:
        """Metrics of the steps, of all parts of each."""
        norms = [line["grad_norm"] for line in self.state.log_history if "grad_norm" in line]
        num_parts, steps = self.args.gradient_accumulation_steps, []
        for i, norm in enumerate(norms[-len(self.parts) // num_parts :]):
            parts = self.parts[i * num_parts : (i + 1) * num_parts]
            mean = {name: sum(part[name] for part in parts) / num_parts for name in parts[0]}
            mean["alpha"] = mean["scaled"] / mean["weighted"]
            steps.append({name: mean[name] for name in QUANTITIES if name in mean} | {"grad_norm": float(norm)})
        return steps


def train(
    folder: str, kind: type[Trainer], precision: str = "fp32", *, lora: bool = False, num_parts: int = 1,
    resumes: bool = False,
) -> tuple[Any, dict[str, Tensor]]:  # fmt: skip
    """Train with the Trainer; return it and the parameters. A resumed model is made in shards, as `from_pretrained`
    makes it."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    unset_hf_deepspeed_config()
    model = None if resumes else make_model(precision, lora=lora)
    arguments = TrainingArguments(
        folder, max_steps=NUM_STEPS, per_device_train_batch_size=4 // num_ranks, gradient_accumulation_steps=num_parts,
        learning_rate=RATE, lr_scheduler_type="constant", adam_epsilon=EPS, max_grad_norm=1.0, optim="adamw_torch",
        save_strategy="steps", save_steps=2, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=precision == "bf16", train_sampling_strategy="sequential", deepspeed=JSON,
    )  # fmt: skip
    model = make_model(precision, lora=lora) if model is None else model
    rows = [{"input_ids": i, "labels": n} for b in BATCHES for i, n in zip(b.input_ids, b.labels, strict=True)]
    trainer: Any = kind(model, arguments, train_dataset=rows)
    if kind is not Trainer:
        probe = {"input_ids": PROBE.input_ids[rank::num_ranks], "labels": PROBE.labels[rank::num_ranks]}
        trainer.vcore, trainer.parts = vcore_ds.VcoreLoss([probe], kl_budget=KL_BUDGET), []
    vcore_ds.prepare_zero3(trainer.model)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
    named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return trainer, {name: parameter.detach().float().clone() for name, parameter in named.items()}


def train_with_vcore(*arguments: Any, **options: Any) -> tuple[Steps, dict[str, Tensor]]:
    trainer, parameters = train(arguments[0], VcoreTrainer, *arguments[1:], **options)
    if not options:  # DeepSpeed prefetches by a complete record of the trainer's modules
        assert trainer.model_wrapped.optimizer.parameter_offload.param_coordinator.is_complete_trace()
    return trainer.steps(), parameters


def train_on_two_ranks(folder: str) -> dict[str, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    results: dict[str, Any] = {f"run, {precision}": take_steps_of_run(precision) for precision in ("fp32", "bf16")}
    with patch.object(layout, "_meshes", {}):  # another trainer has started the process group
        results["fp32"] = train_with_vcore(folder)
        results["resumed"] = train_with_vcore(folder, resumes=True)
        results["parts"] = train_with_vcore(folder + "/parts", num_parts=2)
        results["bf16"] = train_with_vcore(folder + "/bf16", "bf16")
        for name, kind in (("plain", Trainer), ("spying", SpyingTrainer)):
            trainer, parameters = train(folder + "/" + name, kind, num_parts=2)
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            results[name] = losses, parameters
    return results


def train_on_four_ranks(folder: str) -> dict[str, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    results: dict[str, Any] = {"run, lora": take_steps_of_run("fp32", lora=True)}
    with patch.object(layout, "_meshes", {}):  # another trainer has started the process group
        results["fp32"] = train_with_vcore(folder)
        results["lora"] = train_with_vcore(folder + "/lora", lora=True)
    return results


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_on_two_ranks, 2, str(tmp_path_factory.mktemp("two")))


def assert_equal(measured: Any, expected: Any, tolerance: float) -> None:
    """Assert that all quantities, relatively, and all parameters differ by less than `tolerance`."""
    (steps, parameters), (wanted, wanted_parameters) = measured, expected
    differences = {
        name: max(abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(steps, wanted, strict=True))
        for name in QUANTITIES
    }
    differences["parameters"] = max(float((parameters[n] - p).abs().max()) for n, p in wanted_parameters.items())
    print(differences)
    assert max(differences.values()) < tolerance, differences


def test_two_ranks_take_the_steps_of_a_run_and_of_plain_pytorch(on_two: list[dict[str, Any]]) -> None:
    whole, in_parts = take_steps_of_oracle(1), take_steps_of_oracle(2)
    for of_rank in on_two:
        assert_equal(of_rank["fp32"], of_rank["run, fp32"], 1e-6)
        assert_equal(of_rank["fp32"], whole, 1e-6)
        assert_equal(of_rank["parts"], in_parts, 1e-6)  # alpha is that of a part
        for name in ("bf16", "run, bf16"):  # which has 8 bits
            assert_equal(of_rank[name], whole, 2**-8)
        assert_equal(of_rank["bf16"], of_rank["run, bf16"], 2**-8)


def test_a_resumed_training_takes_the_step_of_an_uninterrupted_one(on_two: list[dict[str, Any]]) -> None:
    for of_rank in on_two:
        (steps, parameters), (whole, expected) = of_rank["resumed"], of_rank["fp32"]
        assert steps == whole[2:] and len(steps) == 1
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())


def test_the_trainers_own_steps_do_not_change(on_two: list[dict[str, Any]]) -> None:
    for of_rank in on_two:
        (losses, parameters), (expected_losses, expected) = of_rank["spying"], of_rank["plain"]
        assert losses == expected_losses and len(losses) == NUM_STEPS
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())


def test_four_ranks_take_the_same_steps_also_of_adapters_that_are_zero(tmp_path: Path) -> None:
    full, lora = take_steps_of_oracle(1), take_steps_of_oracle(1, lora=True)
    for of_rank in run_ranks(train_on_four_ranks, 4, str(tmp_path)):
        assert_equal(of_rank["fp32"], full, 1e-6)
        assert_equal(of_rank["lora"], of_rank["run, lora"], 1e-6)
        assert_equal(of_rank["lora"], lora, 1e-6)
