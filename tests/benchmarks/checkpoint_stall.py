"""Time for which steps wait for a checkpoint, written synchronously or asynchronously (`checkpoint.async`).

    python -m tests.benchmarks.checkpoint_stall [--rounds 5] [--folder FOLDER]

One run on two ranks saves every fourth step, alternating between the two ways, so that other load on the machine
affects both. fp32 AdamW on a Qwen3 of 29.9M parameters. Prints median, minimum and maximum over the rounds: of the
seconds that a save delays the steps, of the four steps after it (which share the cores with an asynchronous write), and
of both together.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.config.schema import Recipe
from vcore_ds.train.checkpoints import Checkpoints
from vcore_ds.train.run import train

EVERY = 4
WAYS = ("at once", "beside the steps")


def make_recipe(folder: Path, rounds: int) -> Recipe:
    """Recipe of a run with a save for each way and round, two more to warm up, and the last one."""
    tokenizer = make_tokenizer()
    model = tiny.qwen3(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        head_dim=64,
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_conversations(folder / "train.jsonl", sums(range(64)))
    config = tiny.deepspeed_config(bf16=False)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        del config[key]  # the recipe sets them
    (folder / "zero3.json").write_text(json.dumps(config))
    return Recipe(
        method={"name": "sft"},
        model={"path": str(folder / "model"), "precision": "fp32"},
        data={"train_path": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache")},
        batch={"global_size": 16},
        optimizer={"learning_rate": 1e-4},
        schedule={"num_steps": EVERY * (2 * rounds + 3)},
        run={"output_dir": str(folder / "run"), "num_followed_traces": 0, "num_token_records": 0},
        checkpoint={"every_steps": EVERY, "every_minutes": None},
        engine={"deepspeed_config": str(folder / "zero3.json")},
    )


def save_in_turns(recipe: Recipe) -> None:
    """Train with saves that alternate between the two ways."""
    save = Checkpoints.save

    def save_in_turn(self: Checkpoints, step: int, *rest, **options):
        chosen = recipe.checkpoint.model_copy(update={"async_": WAYS[step // EVERY % 2] == WAYS[1]})
        self._recipe = recipe.model_copy(update={"checkpoint": chosen})
        return save(self, step, *rest, **options)

    Checkpoints.save = save_in_turn
    train(recipe)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        recipe = make_recipe(Path(name), arguments.rounds)
        run_ranks(save_in_turns, 2, recipe)
        lines = [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines}
    print(f"\n{next(line['checkpoint_bytes'] for line in lines if 'checkpoint_bytes' in line) / 1e6:.0f} MB")
    for number, way in enumerate(WAYS):
        saved = [step for step in by_step if step % EVERY == 0 and step // EVERY % 2 == number][
            1 : arguments.rounds + 1
        ]
        stalls = [by_step[step + 1]["seconds_checkpoint"] for step in saved]
        steps = [sum(by_step[step + k]["seconds"] for k in range(1, EVERY + 1)) for step in saved]
        both = [stall + seconds for stall, seconds in zip(stalls, steps, strict=True)]
        for title, values in (("save", stalls), (f"{EVERY} steps after it", steps), ("both", both)):
            print(f"{way:17} {title:18} {statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
