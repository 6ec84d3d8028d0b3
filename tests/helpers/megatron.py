"""Steps of a model of parallel layers against the oracle on the Hugging Face model; called through `run_ranks`."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.helpers import step_runs, tiny
from tests.helpers.parity import Case, make_batch
from vcore_ds.data import Batch, StepBatches
from vcore_ds.distributed import layout
from vcore_ds.models.megatron.model import ParallelTokenLossModel
from vcore_ds.models.megatron.weights import fill, pieces, put_together


def parallel_model(plain: PreTrainedModel, *, checkpointing: bool = False) -> ParallelTokenLossModel:
    """The Hugging Face model's weights in parallel layers, this rank's part."""
    config = type(plain.config)(**plain.config.to_dict())
    model = ParallelTokenLossModel("tiny", config, dtype=plain.dtype, gradient_checkpointing=checkpointing)
    weights = plain.state_dict()
    own = pieces(config, rank=layout.rank("tensor"), size=layout.size("tensor"))
    fill(model, own, lambda piece: piece.of(weights[piece.name]))
    model.train()
    return model


def whole(plain: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank's tensor group has of each parameter, under the Hugging Face model's names."""
    found = {name: torch.full_like(p, torch.nan) for name, p in plain.named_parameters()}
    put_together(found, plain.config, layout.gather_objects("tensor", dict(tensors)))
    return found


def drift(model: ParallelTokenLossModel, tensors: Mapping[str, torch.Tensor]) -> float:
    """Largest difference between the ranks of a tensor group in what all of them have."""
    names = [name for name, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)]
    of_ranks = layout.gather_objects("tensor", {name: tensors[name] for name in names})
    return max(float((own[name] - of_ranks[0][name]).abs().max()) for own in of_ranks for name in names)


def run_parallel_case(case: Case, **sizes: Any) -> dict[str, float]:
    """Worst deviation of each quantity over 3 steps, and the drift of replicas."""
    recipe = step_runs.recipe(**case.sections)
    plain = tiny.qwen3(tied=case.tied, num_key_value_heads=case.num_kv_heads, **sizes)
    reference = step_runs.reference_of(plain, recipe)
    model = parallel_model(plain, checkpointing=case.checkpointing)
    engine = step_runs.make_engine(model, recipe, coalesce=case.coalesce)
    estimator = step_runs.make_estimator(recipe, engine, case.batches_per_utility_pass)
    worst = dict.fromkeys(("utilities", "weights", "alpha", "gradient", "parameters", "loss", "norm", "first"), 0.0)
    worst["drift"] = 0.0

    def note(quantity: str, deviation: float) -> None:
        assert deviation == deviation, f"{quantity} is nan"
        worst[quantity] = max(worst[quantity], deviation)

    for k in range(3):
        main, probe = make_batch(case, 10 + k), tiny.rows(case.num_probe, seed=50 + k)
        for batch in (main, probe):
            _keep_within(batch, plain.config.vocab_size)
        if recipe.method.name != "vcore":
            probe = None
        k_main, k_probe = case.sequence_parallel
        dealt_probe = [] if probe is None else step_runs.deal(probe, 2, k_probe, packed=case.packed)
        dealt = StepBatches(step_runs.deal(main, 2, k_main, packed=case.packed), dealt_probe)
        recorded = step_runs.Recorder(engine)
        metrics = step_runs.train_step(engine, recipe, dealt, estimator, recorded)
        expected = reference.step(main, probe, **step_runs.reference_options(recipe))
        for i, (utilities, weights) in recorded.by_sequence(dealt.main).items():
            if len(weights) == 0:
                continue
            note("weights", step_runs.relative_error(weights, expected["weights"][i]))
            if expected["utilities"] is not None:
                note("utilities", step_runs.relative_error(utilities, expected["utilities"][i]))
        note("alpha", abs(metrics.values["alpha"] - expected["alpha"]))
        note("loss", abs(metrics.values["loss"] - expected["loss"]))
        wanted = torch.cat([g.flatten() for g in expected["gradient"].values()])
        gradient = whole(plain, recorded.gradient)
        note(
            "gradient",
            step_runs.relative_error(torch.cat([gradient[name].flatten() for name in expected["gradient"]]), wanted),
        )
        note("norm", abs(metrics.values["grad_norm"] / float(wanted.norm()) - 1))
        own = step_runs.whole_parameters(engine)
        for name, parameter in whole(plain, own).items():
            note("parameters", float((parameter - reference.trained[name]).abs().max()))
        note("drift", drift(model, own))
        if k == 0:
            worst["first"] = max(worst.values())
    engine.close()
    return worst


def _keep_within(batch: Batch, vocabulary: int) -> None:
    """Token ids below the vocabulary's size, in place."""
    batch.input_ids %= vocabulary
    batch.labels = torch.where(batch.labels < 0, batch.labels, batch.labels % vocabulary)
