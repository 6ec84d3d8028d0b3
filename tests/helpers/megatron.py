"""Tiny models in megatron-core's parallel layers, and weights assembled from the ranks of a tensor group."""

from collections.abc import Mapping

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.helpers import step_runs, tiny
from tests.helpers.step_cases import CASES
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed import layout
from vcore_ds.models.attention import FORWARD_MODE_ATTENTION
from vcore_ds.models.megatron.model import ParallelTokenLossModel
from vcore_ds.models.megatron.weight_slices import copy_to_weight, weight_slices
from vcore_ds.utility.estimators import perturb_parameters


def make_parallel_model(
    plain: PreTrainedModel, *, checkpointing: bool = False, activation_offload: bool = False
) -> ParallelTokenLossModel:
    """This rank's part of a Hugging Face model in parallel layers."""
    config = type(plain.config)(**plain.config.to_dict())
    options = dict(gradient_checkpointing=checkpointing, activation_offload=activation_offload)
    model = ParallelTokenLossModel("tiny", config, dtype=plain.dtype, **options)
    place = dict(rank=layout.rank("tensor"), size=layout.size("tensor"))
    weights = plain.state_dict()
    with torch.no_grad():
        for name, piece in weight_slices(config, **place).items():
            parameter = model.get_parameter(name)
            parameter[: piece.num_rows].copy_(piece.take(weights[piece.name]))
            parameter[piece.num_rows :].zero_()  # padding rows of the vocabulary
    model.train()
    return model


def assemble(model: ParallelTokenLossModel, plain: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the tensors (parameters or gradients) of all ranks of the tensor group, under the parameter names of the
    Hugging Face model."""
    assembled = {
        name: torch.full_like(p.detach(), torch.nan) for name, p in plain.named_parameters() if p.requires_grad
    }
    by_rank = layout.gather_objects("tensor", dict(tensors))
    for rank, tensors_of_rank in enumerate(by_rank):
        for name, piece in weight_slices(model.config, rank=rank, size=len(by_rank)).items():
            copy_to_weight(assembled, tensors_of_rank[name].detach(), piece)
    return assembled


def measure_drift(model: ParallelTokenLossModel, tensors: Mapping[str, Tensor]) -> float:
    """Largest difference between the ranks of a tensor group in replicated parameters."""
    names = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not getattr(p, "tensor_model_parallel", False)
    ]
    by_rank = layout.gather_objects("tensor", {name: tensors[name] for name in names})
    return max(float((replica[name] - by_rank[0][name]).abs().max()) for replica in by_rank for name in names)


def compare_with_hugging_face(config: PretrainedConfig, **options: bool) -> dict[str, float]:
    """Deviations of the losses, and of the gradient of their weighted sum, from those of the Hugging Face model.
    `options`: options of `make_parallel_model`."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):  # initialized to zero
            torch.nn.init.normal_(parameter, std=0.1)
    batch = tiny.make_batch(3, vocabulary=config.vocab_size)
    targets = batch.targets()
    supervised = targets != -100
    logits = plain(input_ids=batch.input_ids).logits
    expected = cross_entropy(logits[supervised], targets[supervised], reduction="none")
    upstream = torch.linspace(-1, 1, len(expected))
    (upstream * expected).sum().backward()

    model = make_parallel_model(plain, **options)
    losses = model(*tiny.inputs(batch))
    (upstream * losses).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            layout.add_over("tensor", gradients[name])
    expected_gradients = {name: p.grad for name, p in plain.named_parameters()}
    assembled = assemble(model, plain, gradients)
    return {
        "losses": float((losses - expected).detach().abs().max()),
        "gradient": max(
            step_runs.relative_error(assembled[name], expected_gradients[name]) for name in expected_gradients
        ),
    }


def measure_stochastic_rounding() -> dict[str, float]:
    """Differences between replicas after two bf16 steps with stochastically rounded finite differences: in their master
    weights, in a perturbation, and in the losses under it. Also how much the perturbation changes."""
    recipe = step_runs.make_recipe(**CASES["vcore, finite difference, stochastic rounding, bf16"])
    model = make_parallel_model(tiny.qwen3(dtype=torch.bfloat16))
    engine = step_runs.make_engine(model, recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    batches = StepBatches(step_runs.deal(tiny.make_batch(8), 2), step_runs.deal(tiny.make_batch(4, seed=9), 2))
    for seed in range(2):
        step_runs.train_step(engine, recipe, batches, estimator, seed=seed)
    before = {name: p.ds_tensor.clone() for name, p in model.named_parameters()}
    masters = measure_drift(model, step_runs.gather_parameters(engine))
    with perturb_parameters(engine, estimator.direction, 1.0, stochastic_rounding_seed=3) as changed_fraction:
        shifted = {name: p.ds_tensor.clone() for name, p in model.named_parameters()}
        with engine.without_gradient():
            losses = engine.token_losses(batches.main[0])
    by_rank = layout.gather_objects("tensor", losses)
    replicas = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not getattr(p, "tensor_model_parallel", False) and before[name].numel() > 0
    ]
    measured = {
        "masters": masters,
        "perturbed": measure_drift(model, shifted),
        "losses": max(float((replica - by_rank[0]).abs().max()) for replica in by_rank),
        "changed": changed_fraction,
        "changed replicas": sum(float((shifted[name] != before[name]).sum()) for name in replicas),
    }
    engine.close()
    return measured


def count_exchanged_elements(*, checkpointing: bool = False) -> tuple[dict[str, list[int]], int, int]:
    """Number of elements of every collective over the tensor axis, by pass of the tiny Qwen3 (`forward`, `backward`,
    and `tangents` for the JVP pass); number of elements of all tokens' hidden states; number of layers."""
    model, batch = make_parallel_model(tiny.qwen3(), checkpointing=checkpointing), tiny.make_batch(3)
    gather, scatter, seen = layout.all_gather, layout.reduce_scatter, []

    def count_and_gather(axis: str, part: Tensor, *others: int) -> Tensor:
        gathered = gather(axis, part, *others)
        seen.append(gathered.numel())
        return gathered

    def count_and_scatter(axis: str, parts: Tensor) -> Tensor:
        seen.append(parts.numel())
        return scatter(axis, parts)

    numels = {}
    layout.all_gather, layout.reduce_scatter = count_and_gather, count_and_scatter
    try:
        losses = model(*tiny.inputs(batch))
        numels["forward"] = list(seen)
        seen.clear()
        losses.sum().backward()
        numels["backward"] = list(seen)
        seen.clear()
        model.config._attn_implementation = FORWARD_MODE_ATTENTION
        for layer in model.layers:
            layer.gradient_checkpointing = False  # without gradients; torch 2.11's has no forward mode
        with torch.no_grad(), forward_ad.dual_level():
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module.__dict__[name] = forward_ad.make_dual(parameter.detach(), torch.ones_like(parameter))
            model(*tiny.inputs(batch))
        numels["tangents"] = list(seen)
    finally:
        layout.all_gather, layout.reduce_scatter = gather, scatter
    return numels, batch.input_ids.numel() * model.config.hidden_size, len(model.layers)
