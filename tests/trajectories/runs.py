"""Steps of every method with fixed parameters and tokens, on two ranks in fp32.

Parameters and tokens are drawn by numpy's `RandomState`, whose streams are frozen, so that only arithmetic can differ
from one version of a library to the next. No dropout and no stochastic rounding for the same reason.
"""

from typing import Any

import numpy as np
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import IS_SOAK
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.data.batches import Batch, StepBatches
from vcore_ds.method.baselines import random_mask
from vcore_ds.training.weighting import compute_log_probabilities

NUM_STEPS, NUM_RANKS = 4, 2
NUM_COMPARED = NUM_STEPS if IS_SOAK else 3
"""Steps that the tests take, of those on record: the losses of the third show the second update, the first whose
moments depend on an earlier step."""
NUM_MAIN, NUM_PROBE, MICRO_BATCH_SIZE = 8, 4, 2
"""Numbers of sequences."""
NUM_TOKENS = 24
"""Length of the longest sequence."""
LEARNING_RATE = 1e-3
QUANTITIES = (
    "loss weighted_loss alpha total_weight effective_sample_size kl tau utility_mean utility_std "
    "probe_loss probe_grad_norm grad_norm"
).split()
METHODS: dict[str, dict[str, Any]] = {
    "sft": dict(method={"name": "sft"}),
    "dft": dict(method={"name": "dft"}),
    "iw_sft": dict(method={"name": "iw_sft"}),
    "random": dict(method={"name": "random"}),
    "asft": dict(method={"name": "asft"}),
    "eaft": dict(method={"name": "eaft"}),
    "deft": dict(method={"name": "deft"}),
    # The model is nearly uniform: the usual bound would leave no token.
    "profit": dict(method={"name": "profit", "min_probability": 0.006}),
    "vcore, jvp": dict(method={"kl_budget": 0.1}, probe={"direction": "adam", "clip": 1.0}),
    "vcore, finite difference": dict(
        # 0.1 of a gradient of norm 1: a smaller one would show the rounding of losses more than anything else.
        method={"kl_budget": 0.1, "alpha": "effective_sample_size"},
        probe={"clip": 1.0},
        utility={"estimator": "finite_difference", "epsilon": 0.1},
    ),
}

CASES = {
    f"{name}, {'lora' if lora else 'full'}": (name, lora)
    for name in METHODS
    for lora in (False, True)
    if lora or name != "asft"
}

Trajectory = list[dict[str, float | None]]


def draw_parameters(model: torch.nn.Module) -> None:
    """Overwrite all parameters, adapters included, in the order of the model."""
    random = np.random.RandomState(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.from_numpy(random.standard_normal(parameter.shape))
            # Vectors are the norms' scales.
            parameter.copy_(1.0 + 0.1 * values if parameter.dim() == 1 else 0.1 * values)


def draw_rows(num_rows: int, seed: int) -> Batch:
    random = np.random.RandomState(seed)
    input_ids = torch.from_numpy(random.randint(1, tiny.VOCABULARY, (num_rows, NUM_TOKENS)))
    labels = input_ids.clone()
    for row in range(num_rows):
        length = NUM_TOKENS - row * 3 % 11
        input_ids[row, length:] = 0
        labels[row, length:] = labels[row, : 3 + row % 4] = -100
    return Batch(list(range(num_rows)), input_ids, labels)


def keep_some(batch: Batch) -> None:
    """Draw the mask of the `random` method."""
    batch.kept = torch.zeros_like(batch.labels, dtype=torch.bool)
    for row in range(batch.num_sequences):
        targets = batch.labels[row] != -100
        in_answer = np.arange(int(targets.sum())) < 2
        batch.kept[row, targets] = torch.from_numpy(random_mask(in_answer, 0.4, generator(Stream.RANDOM_MASK, 5, row)))


def run_method(name: str, lora: bool, num_steps: int) -> Trajectory:
    data = {"train_path": "none"}
    if name == "iw_sft" and not lora:
        data["reference_log_probabilities"] = "none"
    recipe = step_runs.make_recipe(
        **METHODS[name],
        data=data,
        lora={"rank": 4, "alpha": 8} if lora else None,
        # With the usual 1e-8, an entry whose gradient is about as small moves by its rounding.
        optimizer={"learning_rate": LEARNING_RATE, "eps": 1e-6},
    )
    model = tiny.token_loss_model(lora=lora)
    draw_parameters(model)
    engine = step_runs.make_engine(model, recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    mains = [draw_rows(NUM_MAIN, seed=1 + k) for k in range(num_steps)]
    for main in mains:
        if name == "random":
            keep_some(main)
        if "reference_log_probabilities" in data:
            rows = [tiny.take_rows(main, [row]) for row in range(NUM_MAIN)]
            main.reference_log_probability = torch.cat(compute_log_probabilities(engine, rows))
    trajectory = []
    for k, main in enumerate(mains):
        probe = draw_rows(NUM_PROBE, seed=101 + k) if estimator.direction is not None else None
        batches = StepBatches(
            step_runs.deal(main, MICRO_BATCH_SIZE), [] if probe is None else step_runs.deal(probe, MICRO_BATCH_SIZE)
        )
        values = step_runs.train_step(engine, recipe, batches, estimator, learning_rate=LEARNING_RATE).values
        trajectory.append({quantity: values[quantity] for quantity in QUANTITIES})
    engine.close()
    return trajectory


def _run_methods(num_steps: int) -> dict[str, Trajectory]:
    torch.set_num_threads(1)
    return {case: run_method(*parts, num_steps) for case, parts in CASES.items()}


def run_all(num_steps: int = NUM_STEPS) -> dict[str, Trajectory]:
    """Run every case in one launch, since starting two ranks takes longer than the steps."""
    return run_ranks(_run_methods, NUM_RANKS, num_steps)[0]
