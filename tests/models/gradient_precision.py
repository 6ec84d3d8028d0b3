"""`python -m tests.models.gradient_precision`: errors of bf16 probe gradients, of the package and of transformers.

The error of one probe says little: in bf16 a few sensitive tokens decide it, and a change in the order of a sum moves
it by a factor of three. So each of many texts is a probe here, with its tokens routed to the experts of fp64
(`tests.models.routing`), and errors are compared text by text. The models are those of that script, kept in a folder.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from tests.helpers.ranks import run_ranks
from tests.models.measurement import as_sequence, rank_correlation, relative_error
from tests.models.reference import Text, compute_gradient, compute_token_losses, load_plain_model
from tests.models.routing import FAMILIES, draw_random_texts, draw_traces, recording_routing, write_model
from vcore_ds.data.batches import pack
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.loading import load_causal_lm


def measure_errors(folder: Path, probes: Sequence[Text], main: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Relative errors `[probes, 2]` of transformers' gradient and of ours, and Spearman correlations of the main texts'
    utilities along them with those along the fp64 gradient, all computed in fp64. On one rank."""
    transformers.logging.set_verbosity_error()
    exact, plain = (load_plain_model(folder, rounded_to=torch.bfloat16) for _ in range(2))
    plain.bfloat16()
    ours = load_causal_lm(str(folder), dtype=torch.bfloat16, attention="auto", gradient_checkpointing=False).train()
    parameters = dict(ours.named_parameters())
    model = TokenLossModel(ours)
    token_gradients = torch.stack([_flatten(gradient) for text in main for gradient in _iterate_gradients(exact, text)])
    errors, ranks = [], []
    for text in probes:
        with recording_routing(exact) as choices:
            wanted = compute_gradient(exact, [text])
        with recording_routing(plain, choices):
            plain_gradient = compute_gradient(plain, [text])
        with recording_routing(model, choices):
            batch = pack([[as_sequence(0, text)]], 0, 1)
            layout = SequenceLayout.from_lengths(batch.sequence_lengths(), 1, torch.device("cpu"))
            loss = model(batch.input_ids, batch.targets(), batch.position_ids(), layout).mean()
        gradient = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), gradient, strict=True)
        our_gradient = {name: torch.zeros_like(p) if one is None else one for (name, p), one in pairs}
        assert our_gradient.keys() == plain_gradient.keys() == wanted.keys()
        exact_gradient = _flatten(wanted)
        both = [_flatten({name: one[name] for name in wanted}) for one in (plain_gradient, our_gradient)]
        errors.append([relative_error(one, exact_gradient) for one in both])
        ranks.append([rank_correlation(token_gradients @ one, token_gradients @ exact_gradient) for one in both])
    return torch.tensor(errors), torch.tensor(ranks)


def _iterate_gradients(model: nn.Module, text: Text) -> Iterator[dict[str, Tensor]]:
    """Yield the gradient of each token's loss."""
    parameters = dict(model.named_parameters())
    for loss in compute_token_losses(model, text):
        gradient = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, materialize_grads=True)
        yield dict(zip(parameters, gradient, strict=True))


def _flatten(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([one.double().flatten() for one in gradient.values()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="/".join(FAMILIES), help="separated by slashes")
    parser.add_argument("--steps", type=int, default=0, help="training steps on the addition task; 0: random models")
    parser.add_argument("--models", type=Path, required=True, help="folder of the models; missing ones are made")
    parser.add_argument("--texts", type=int, default=32)
    parsed = parser.parse_args(arguments)
    columns = ["model", "error, median: transformers", "ours", "ours is further off", "mean log of the ratio"]
    columns += ["Spearman, median and least: transformers", "ours"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in parsed.families.split("/"):
        folder = parsed.models / f"{name}-0-{parsed.steps}"
        if not folder.exists():
            write_model(name, 0, parsed.steps, folder)
        draw = draw_traces if parsed.steps > 0 else draw_random_texts
        errors, ranks = run_ranks(measure_errors, 1, folder, draw(9, parsed.texts), draw(1, 4))[0]
        ratio = (errors[:, 1] / errors[:, 0]).log()
        median = " | ".join(f"{x:.3f}" for x in errors.median(0).values.tolist())
        further = f"{int((ratio > 0).sum())} of {len(ratio)}"
        uncertainty = ratio.std().item() / len(ratio) ** 0.5
        spearman = [f"{correlations.median():.3f}, {correlations.min():.3f}" for correlations in ranks.T]
        values = [name, median, further, f"{ratio.mean().item():+.2f} ± {uncertainty:.2f}", *spearman]
        print(f"| {' | '.join(values)} |", flush=True)


if __name__ == "__main__":
    main()
