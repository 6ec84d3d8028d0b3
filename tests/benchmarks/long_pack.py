"""Memory of a training step on a pack of 16,384 tokens with the 151,936-token vocabulary, on one CPU rank.

    python -m tests.benchmarks.long_pack

The model has Qwen3's vocabulary and two small layers, so that nearly all memory is that of the loss. Counted tensor by
tensor (`tests/helpers/allocations.py`): the peak of a step beyond the tensors that persist between steps. Full logits
would need two to three copies of 9.27 GiB.
"""

import gc
import time

import numpy as np

from tests.helpers import step_runs, tiny
from tests.helpers.allocations import Allocations
from vcore_ds.data.batches import Batch, StepBatches, pack
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.engine.zero3 import Engine, build_optimizer

NUM_TOKENS, VOCABULARY, HIDDEN = 16_384, 151_936, 64
METHODS = {
    "sft": dict(method={"name": "sft"}),
    "vcore, jvp": dict(method={"kl_budget": 0.05}, utility={"estimator": "jvp"}),
    "vcore, finite difference": dict(
        method={"kl_budget": 0.05}, utility={"estimator": "finite_difference", "epsilon": 0.1}
    ),
}


def make_pack() -> Batch:
    """A pack of four sequences, supervised from their 201st token on."""
    generator = np.random.default_rng(0)
    sequences = [
        TokenizedSequence(i, generator.integers(0, VOCABULARY, n).astype(np.int32), np.arange(n) >= 200)
        for i, n in enumerate((8192, 4096, 3072, 1024))
    ]
    assert sum(map(len, sequences)) == NUM_TOKENS
    return pack([sequences], pad_token_id=0)


def main() -> None:
    start_process_group(timeout_minutes=30)
    batch = make_pack()
    for name, sections in METHODS.items():
        recipe = step_runs.make_recipe(model={"path": "none", "precision": "fp32"}, **sections)
        model = tiny.token_loss_model(
            tied=True, checkpointing=True, vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN
        )
        engine = Engine(model, build_optimizer(model, recipe.optimizer), tiny.deepspeed_config())
        estimator = step_runs.make_estimator(recipe, engine)
        batches = StepBatches([batch], [batch] if estimator.direction is not None else [])
        step_runs.train_step(engine, recipe, batches, estimator)  # ZeRO-3 records its trace
        gc.collect()
        started = time.perf_counter()
        with Allocations() as allocations:
            values = step_runs.train_step(engine, recipe, batches, estimator).values
        weight_gib = VOCABULARY * HIDDEN * 4 / 2**30
        print(
            f"{name:<26} {allocations.peak_bytes / 2**30:5.2f} GiB, of which {weight_gib:.2f} for each copy of the "
            f"embedding's gradient; loss {values['loss']:.4f}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        engine.close()


if __name__ == "__main__":
    main()
