"""Peak memory of the per-token loss of one long sequence with a large vocabulary, compared with full logits.

    python -m tests.benchmarks.loss_memory [--tokens 16384] [--vocabulary 151936] [--hidden 64]

Counted tensor by tensor (`tests/helpers/allocations.py`), so the numbers are the same on every machine: the peak
beyond the hidden states and the weight, of loss and backward, without gradient, and with tangents. The gradients are
compared with those of full logits on as many tokens as fit (`--compare-tokens`).
"""

import argparse
import time

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.helpers.allocations import Allocations
from vcore_ds.models.token_loss import token_loss


def make_inputs(num_tokens: int, vocabulary: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = 0.1 * torch.randn(vocabulary, hidden_size, generator=generator)
    return hidden, weight, torch.randint(0, vocabulary, (num_tokens,), generator=generator)


def compute_loss_and_backward(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    token_loss(hidden, weight, targets).mean().backward()


def compute_without_gradient(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        token_loss(hidden, weight, targets)


def compute_with_tangents(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), x.detach()) for x in (hidden, weight)]
        token_loss(*duals, targets)


def find_worst_relative_error(num_tokens: int, vocabulary: int, hidden_size: int) -> float:
    """Error of the gradients of hidden states and weight against full logits, for random gradients of the tokens."""
    hidden, weight, targets = make_inputs(num_tokens, vocabulary, hidden_size)
    upstream, gradients = torch.rand(num_tokens), []
    for ours in (True, False):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if ours:
            losses = token_loss(*leaves, targets)
        else:
            losses = cross_entropy(leaves[0] @ leaves[1].t(), targets, reduction="none")
        gradients.append(torch.autograd.grad((upstream * losses).sum(), leaves))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=64, help="small, since it costs time but no memory of the loss")
    parser.add_argument("--compare-tokens", type=int, default=2_048)
    arguments = parser.parse_args()
    sizes = (arguments.vocabulary, arguments.hidden)
    gib = 2.0**30
    print(f"{arguments.tokens:,} tokens, vocabulary {sizes[0]:,}, hidden size {sizes[1]}, fp32")
    print(f"one copy of the full logits: {4 * arguments.tokens * sizes[0] / gib:.2f} GiB")
    hidden, weight, targets = make_inputs(arguments.tokens, *sizes)
    hidden.requires_grad_(), weight.requires_grad_()
    results = 4 * (hidden.numel() + weight.numel()) / gib  # the gradients that any backward returns
    for measured in (compute_loss_and_backward, compute_without_gradient, compute_with_tangents):
        start = time.perf_counter()
        with Allocations() as allocations:
            measured(hidden, weight, targets)
        name, seconds = measured.__name__.removeprefix("compute_").replace("_", " "), time.perf_counter() - start
        peak = allocations.peak_bytes / gib - (results if measured is compute_loss_and_backward else 0.0)
        print(f"{name}: peak {peak:.2f} GiB beyond hidden states, weight and their gradients ({seconds:.0f} s)")
    error = find_worst_relative_error(arguments.compare_tokens, *sizes)
    print(f"gradients against full logits, {arguments.compare_tokens:,} tokens: relative error at most {error:.1e}")


if __name__ == "__main__":
    main()
