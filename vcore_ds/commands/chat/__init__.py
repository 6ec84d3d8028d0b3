"""`vcore-ds chat`: talk to a result in the terminal."""

import argparse

from vcore_ds.commands.arguments import positive, share, temperature

HELP = "talk to a result, or any model, in the terminal"
DESCRIPTION = (
    "Talk to the result of a run, or to any model or adapter, in the terminal. Prompts are rendered as in training. "
    "Answers appear as they are generated. Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends. Standard "
    "input that is no terminal is read to its end as one prompt. Works without a GPU, slowly for large models."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="RUN|MODEL", help="a run's folder, the folder of an adapter or a model, or a hub id"
    )
    parser.add_argument("--base", action="store_true", help="also show the answer of the model before training, first")
    parser.add_argument(
        "--prompt",
        choices=["plain", "math", "code"],
        default="plain",
        help="put what you type into the prompt that `vcore-ds prepare math` or `code` trains with (default plain: as "
        "it is)",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=2048, metavar="N", help="longest answer, tokens (default 2048)"
    )
    parser.add_argument(
        "--temperature", type=temperature, metavar="T", help="0 for the likeliest token (default: the model's setting)"
    )
    parser.add_argument("--top-p", type=share, metavar="P", help="sample from this share of probability")
    parser.add_argument("--top-k", type=positive, metavar="K", help="sample from this many tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the samples (default: another one every time)")
    parser.add_argument(
        "--dtype", choices=["bf16", "fp32"], help="data type of the weights in memory (default: as they are stored)"
    )


def main(arguments: argparse.Namespace) -> None:
    try:
        from vcore_ds.commands.chat.models import load_voices
        from vcore_ds.commands.chat.session import Sampling, run_session
        from vcore_ds.models.named_model import find_named_model

        voices = load_voices(find_named_model(arguments.model), with_base=arguments.base, dtype=arguments.dtype)
        sampling = Sampling(
            arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.top_k, arguments.seed
        )
        run_session(voices, sampling, prompt=arguments.prompt, system=arguments.system)
    except KeyboardInterrupt:  # while the model is loaded, or where nobody could be asked to continue
        raise SystemExit(130) from None
