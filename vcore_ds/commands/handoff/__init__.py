"""`vcore-ds handoff`: a result to continue from with reinforcement learning."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import positive

HELP = "continue from a run with reinforcement learning (verl, TRL)"
DESCRIPTION = (
    "Write a folder that verl or TRL starts from: the model (LoRA merged in) or, for TRL, the adapter; problems as "
    "parquet in the prompt of training; a reward that compares the last boxed answer by math-verify; launch.sh for "
    "GRPO and DAPO with the paper's settings; VERSIONS. docs/handoff.md explains them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (run.output_dir)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings in verl's names, with --to trl too (data.max_response_length=4096)",
    )
    parser.add_argument("--to", choices=["verl", "trl"], required=True, help="what will train")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="problems with answers: .jsonl, .json, .parquet, a folder, or a hub id; keys problem and answer, or alike",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument("--checkpoint", metavar="NAME", help="one of RUN/checkpoints (default: the newest)")
    parser.add_argument(
        "--from-base", action="store_true", help="hand over the model that the run began with, to compare with"
    )
    parser.add_argument(
        "--prompt",
        choices=["math", "plain"],
        default="math",
        help="put problems into the prompt of `vcore-ds prepare math` (default), or leave them as they are",
    )
    parser.add_argument(
        "--sample", type=positive, metavar="N", help="problems to learn from, at random (the paper: 16800; default all)"
    )
    parser.add_argument(
        "--held-out", type=positive, default=64, metavar="N", help="problems set apart for validation (default 64)"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the sample (default 42)")
    parser.add_argument("--split", default="train", help="split of hub data (default train)")
    parser.add_argument(
        "--faithful",
        action="store_true",
        help="keep the paper's lengths, whose prompts and answers together are longer than the model's",
    )


def main(arguments: argparse.Namespace) -> None:
    from vcore_ds.commands.handoff.settings import parse_overrides
    from vcore_ds.commands.handoff.write import HandoffRequest, hand_over

    hand_over(
        HandoffRequest(
            arguments.run,
            arguments.to,
            arguments.data,
            arguments.output,
            parse_overrides(arguments.overrides),
            checkpoint=arguments.checkpoint,
            from_base=arguments.from_base,
            faithful=arguments.faithful,
            prompt=arguments.prompt,
            sample=arguments.sample,
            held_out=arguments.held_out,
            seed=arguments.seed,
            split=arguments.split,
        )
    )
