"""Weights of whole sequences by their utility (`method.scope: sequence_and_batch`), over all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vcore_ds.config.sections import MethodConfig
from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.method.objective import GlobalCounts, sequence_shares
from vcore_ds.method.weights import segment_sum
from vcore_ds.train.weighting import sequence_weights, token_weights


def sequence_factors(
    method: MethodConfig,
    counts: GlobalCounts,
    batches: Sequence[Batch],
    known: Sequence[tuple[Tensor, Tensor]],
) -> tuple[list[Tensor], dict[str, float]]:
    """What the share of each sequence in the global batch's loss is multiplied by. A collective.

    Args:
        counts: of the global batch.
        batches: this rank's micro-batches.
        known: losses and utilities `[N]` of each of them, before any backward.

    Returns:
        Factors `[num_sequences]` fp32 of each micro-batch, and what is measured: `batch_tau`, `batch_kl` in nats, and
        `batch_effective_sample_size` in sequences.
    """
    gains, shares = [], []
    for batch, (losses, utilities) in zip(batches, known, strict=True):
        tokens = batch.tokens(losses, utilities)
        q = token_weights(method, tokens).weights
        gains.append(segment_sum(q * utilities, tokens.sequence_index, tokens.num_sequences))
        shares.append(sequence_shares(tokens.num_tokens(), counts, method.normalization))
    own = torch.stack([torch.cat(gains), torch.cat(shares)]).double()
    k = batches[0].sequence_parallel
    # Ranks of a sequence-parallel group hold the same sequences: the first of them speaks.
    of_ranks = layout.gather_objects("shards", own.cpu() if layout.rank("sequence", k) == 0 else own[:, :0].cpu())
    all_gains, all_shares = torch.cat(of_ranks, 1)
    there = all_shares > 0  # an idle row has no tokens, and no share
    found = sequence_weights(method, all_gains[there], all_shares[there])
    factors = torch.zeros_like(all_shares)
    factors[there] = found.weights / all_shares[there]
    first_of_row = layout.rank("data", k) * k
    start = sum(part.shape[1] for part in of_ranks[:first_of_row])
    sizes = [len(part) for part in gains]
    mine = factors[start : start + sum(sizes)].float().to(own.device)
    measured = {
        "batch_tau": float(found.temperature),
        "batch_kl": float(found.kl),
        "batch_effective_sample_size": float(1.0 / found.weights.square().sum()),
    }
    return list(mine.split(sizes)), measured
