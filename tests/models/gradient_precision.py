"""`python -m tests.models.gradient_precision`: errors of probe gradients in bf16, of the package and of transformers.

The error of one probe says little: in bf16 a few sensitive tokens decide it, and a change in the order of a sum moves
it by a factor of three. So each of many texts is a probe here, with its tokens at the experts of fp64
(`tests.models.routing`), and errors are compared text by text. Models are those of that script, kept in a folder.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from tests.helpers.ranks import run_ranks
from tests.models.measurement import as_sequence, rank_correlation, relative
from tests.models.reference import Text, mean_gradient, plain_model, token_losses
from tests.models.routing import FAMILIES, random_texts, recorded, traces, write
from vcore_ds.data.batches import pack
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.loading import load_causal_lm


def errors(folder: Path, probes: Sequence[Text], main: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Of transformers' gradient and of ours, `[probes, 2]`: relative errors, and Spearman's correlation of the main
    texts' utilities along it with those along the gradient in fp64, all in fp64. On one rank."""
    transformers.logging.set_verbosity_error()
    exact, plain = (plain_model(folder, rounded_to=torch.bfloat16) for _ in range(2))
    plain.bfloat16()
    ours = load_causal_lm(str(folder), dtype=torch.bfloat16, attention="auto", gradient_checkpointing=False).train()
    parameters = dict(ours.named_parameters())
    model = TokenLossModel(ours)
    of_tokens = torch.stack([_flat(gradient) for text in main for gradient in _gradients(exact, text)])
    found, ranks = [], []
    for text in probes:
        with recorded(exact) as choices:
            wanted = mean_gradient(exact, [text])
        with recorded(plain, choices):
            of_plain = mean_gradient(plain, [text])
        with recorded(model, choices):
            batch = pack([[as_sequence(0, text)]], 0, 1)
            layout = SequenceLayout.from_lengths(batch.sequence_lengths(), 1, torch.device("cpu"))
            loss = model(batch.input_ids, batch.targets(), batch.position_ids(), layout).mean()
        gradient = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), gradient, strict=True)
        own = {name: torch.zeros_like(p) if one is None else one for (name, p), one in pairs}
        assert own.keys() == of_plain.keys() == wanted.keys()
        right = _flat(wanted)
        both = [_flat({name: one[name] for name in wanted}) for one in (of_plain, own)]
        found.append([relative(one, right) for one in both])
        ranks.append([rank_correlation(of_tokens @ one, of_tokens @ right) for one in both])
    return torch.tensor(found), torch.tensor(ranks)


def _gradients(model: nn.Module, text: Text) -> Iterator[dict[str, Tensor]]:
    """Of each token's loss."""
    parameters = dict(model.named_parameters())
    for loss in token_losses(model, text):
        gradient = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
        yield dict(zip(parameters, gradient, strict=True))


def _flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([one.double().flatten() for one in gradient.values()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="/".join(FAMILIES), help="with slashes between them")
    parser.add_argument("--steps", type=int, default=0, help="of training on the addition task; 0: random models")
    parser.add_argument(
        "--models", type=Path, required=True, help="where they are kept, and made if they are not there"
    )
    parser.add_argument("--texts", type=int, default=32)
    parsed = parser.parse_args(arguments)
    columns = ["model", "error, median: transformers", "ours", "ours is further off", "mean log of the ratio"]
    columns += ["Spearman, median and least: transformers", "ours"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in parsed.families.split("/"):
        folder = parsed.models / f"{name}-0-{parsed.steps}"
        if not folder.exists():
            write(name, 0, parsed.steps, folder)
        draw = traces if parsed.steps > 0 else random_texts
        found, ranks = run_ranks(errors, 1, folder, draw(9, parsed.texts), draw(1, 4))[0]
        ratio = (found[:, 1] / found[:, 0]).log()
        median = " | ".join(f"{x:.3f}" for x in found.median(0).values.tolist())
        further = f"{int((ratio > 0).sum())} of {len(ratio)}"
        uncertainty = ratio.std().item() / len(ratio) ** 0.5
        spearman = [f"{of_one.median():.3f}, {of_one.min():.3f}" for of_one in ranks.T]
        values = [name, median, further, f"{ratio.mean().item():+.2f} ± {uncertainty:.2f}", *spearman]
        print(f"| {' | '.join(values)} |", flush=True)


if __name__ == "__main__":
    main()
