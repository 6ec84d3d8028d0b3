"""`python -m tests.models.gradient_precision`: errors of probe gradients in bf16, of the package and of transformers.

The error of one probe says little: in bf16 a few sensitive tokens decide it, and a change in the order of a sum moves
it by a factor of three. So each of many texts is a probe here, with its tokens at the experts of fp64
(`tests.models.routing`), and errors are compared text by text. Models are those of that script, kept in a folder.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor

from tests.helpers.ranks import run_ranks
from tests.models.measurement import as_sequence, relative_of
from tests.models.reference import Text, mean_gradient, plain_model
from tests.models.routing import FAMILIES, random_texts, recorded, traces, write
from vcore_ds.data.batches import pack
from vcore_ds.models.attention import RowLayout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.loading import load_causal_lm


def errors(folder: Path, texts: Sequence[Text]) -> Tensor:
    """Relative errors `[texts, 2]` of transformers' gradient and of ours; on one rank."""
    transformers.logging.set_verbosity_error()
    exact, plain = (plain_model(folder, rounded_to=torch.bfloat16) for _ in range(2))
    plain.bfloat16()
    ours = load_causal_lm(str(folder), dtype=torch.bfloat16, attention="auto", gradient_checkpointing=False).train()
    parameters = dict(ours.named_parameters())
    model = TokenLossModel(ours)
    found = []
    for text in texts:
        with recorded(exact) as choices:
            wanted = mean_gradient(exact, [text])
        with recorded(plain, choices):
            of_plain = mean_gradient(plain, [text])
        with recorded(model, choices):
            batch = pack([[as_sequence(0, text)]], 0, 1)
            layout = RowLayout.of(batch.sequence_lengths(), 1, torch.device("cpu"))
            loss = model(batch.input_ids, batch.targets(), batch.position_ids(), layout).mean()
        gradient = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), gradient, strict=True)
        own = {name: torch.zeros_like(p) if one is None else one for (name, p), one in pairs}
        found.append([relative_of(_wide(one), wanted) for one in (of_plain, own)])
    return torch.tensor(found)


def _wide(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.double() for name, one in gradient.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="/".join(FAMILIES), help="with slashes between them")
    parser.add_argument("--steps", type=int, default=0, help="of training on the addition task; 0: random models")
    parser.add_argument(
        "--models", type=Path, required=True, help="where they are kept, and made if they are not there"
    )
    parser.add_argument("--texts", type=int, default=32)
    parsed = parser.parse_args(arguments)
    print(
        "| model | transformers, median | ours | ours is further off | mean log of the ratio |\n|---|---|---|---|---|"
    )
    for name in parsed.families.split("/"):
        folder = parsed.models / f"{name}-0-{parsed.steps}"
        if not folder.exists():
            write(name, 0, parsed.steps, folder)
        texts = (traces if parsed.steps > 0 else random_texts)(9, parsed.texts)
        found = run_ranks(errors, 1, folder, texts)[0]
        ratio = (found[:, 1] / found[:, 0]).log()
        median = " | ".join(f"{x:.4f}" for x in found.median(0).values.tolist())
        further = f"{int((ratio > 0).sum())} of {len(texts)}"
        error = ratio.std().item() / len(texts) ** 0.5
        print(f"| {name} | {median} | {further} | {ratio.mean().item():+.2f} ± {error:.2f} |", flush=True)


if __name__ == "__main__":
    main()
