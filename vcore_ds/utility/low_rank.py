"""A low-rank approximation of the probe direction, computed from ZeRO-3 shards.

The gradient of a few traces has nearly low rank. Each matrix `G` of the direction is approximated by `Q B`, with `Q`
`[out, r]` orthonormal and `B = Q^T G`: the projection of `G` onto the range of `G Omega` for a random `Omega` (Halko,
Martinsson and Tropp 2011, https://arxiv.org/abs/0909.4061, algorithm 4.1). A JVP pass then needs no all-gather of the
direction, and `dW x = Q (B x)` takes `r / out + r / in` of the FLOPs of `dW x`. No rank ever holds an unsharded
gradient: each rank multiplies the rows of its shard, and `G Omega` and `Q^T G` are summed over the ranks.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import FlatShards, PartitionedParameter, ShardGroup, find_shard_group, is_expert_block
from vcore_ds.models.dual_tensors import LowRank

MAX_DEPARTURE = 1e-4
"""Largest entry of `Q^T Q - I` accepted from Cholesky QR; above it, Householder QR is used."""


def has_low_rank(parameter: PartitionedParameter, rank: int) -> bool:
    """Whether the direction of a parameter is factorized: both dimensions of its matrices exceed the rank. A parameter
    with more than two dimensions, such as grouped expert weights `[E, out, in]`, is a stack of matrices."""
    shape = parameter.ds_shape
    return len(shape) >= 2 and min(shape[-2:]) > rank


def factorize(
    shards: FlatShards,
    vector: Sequence[Tensor],
    parameters: Sequence[PartitionedParameter],
    rank: int,
    seed: int,
    num_passes: int = 1,
) -> dict[int, LowRank]:
    """Factorize the direction of each parameter into the same factors `Q` and `B` on all its ranks, by `id(parameter)`,
    in the dtype of `vector`, the direction in the layout of `shards`. `has_low_rank` is true for the parameters;
    `rank`: number of columns of each `Q`; `seed`: of `Omega`, the same on all ranks.

    A collective: two all-reduces per pass for each axis over which some of the parameters are sharded. Each of the
    `num_passes` passes of subspace iteration after the first starts from `B^T` in place of `Omega` (Halko et al.,
    algorithm 4.4), which is closer to the leading singular vectors.
    """
    factors: dict[int, LowRank] = {}
    for with_experts in (False, True):
        matrices = [p for p in parameters if is_expert_block(p) == with_experts]
        if not matrices:
            continue
        group = find_shard_group(matrices[0])
        shard_rows = [_ShardRows(shards, vector, parameter, group.rank) for parameter in matrices]
        starts = [rows.draw_start(rank, seed) for rows in shard_rows]
        for _ in range(num_passes):
            sketches = [rows.sketch(start) for rows, start in zip(shard_rows, starts, strict=True)]
            bases = [orthonormalize(sketch) for sketch in _sum_over_shards(group, sketches)]
            projections = [rows.project(basis) for rows, basis in zip(shard_rows, bases, strict=True)]
            projections = _sum_over_shards(group, projections)
            starts = [projection.mT for projection in projections]
        for parameter, basis, projection in zip(matrices, bases, projections, strict=True):
            shape, dtype = parameter.ds_shape, vector[0].dtype
            # Contiguous like the factors that a resumed run reads: the layout may decide how a GEMM rounds. Copied,
            # because the projection is a view of the all-reduced tensor.
            left = basis.to(dtype).contiguous().view(*shape[:-1], rank)
            right = projection.to(dtype, copy=True).view(*shape[:-2], rank, shape[-1])
            factors[id(parameter)] = LowRank(left, right)
    return factors


class _ShardRows:
    """The rows of a parameter, a stack of `n` matrices `[out, in]`, that this rank's shard overlaps. A shard may begin
    and end in the middle of a row. Elements of such rows on other ranks are 0 in `rows`, so that sums over the ranks
    are right."""

    def __init__(self, shards: FlatShards, vector: Sequence[Tensor], parameter: PartitionedParameter, shard_rank: int):
        *stack, self.num_rows, self.num_columns = parameter.ds_shape
        self.num_matrices = torch.Size(stack).numel()
        shard = shards.shard(vector, parameter)
        first = shard_rank * len(shard)
        shard = shard[: shards.numel(parameter)]
        self.first_row, num_before = divmod(first, self.num_columns)
        num_after = -(num_before + len(shard)) % self.num_columns
        self.rows = torch.nn.functional.pad(shard.float(), (num_before, num_after)).view(-1, self.num_columns)
        if len(shard) == 0:
            self.first_row = 0

    def draw_start(self, rank: int, seed: int) -> Tensor:
        """Draw `Omega`, `[1, in, r]`. Matrices of equal width share it: it need only be independent of each matrix."""
        generator = torch.Generator(self.rows.device)
        generator.manual_seed(torch_seed(Stream.LOW_RANK_START, seed, self.num_columns))
        return torch.randn(1, self.num_columns, rank, generator=generator, device=self.rows.device)

    def sketch(self, start: Tensor) -> Tensor:
        """This rank's term of `G Omega`, `[n, out, r]`, for `Omega` `[n, in, r]`, or `[1, in, r]` for all matrices."""
        start = start.expand(self.num_matrices, -1, -1)
        sketch = self.rows.new_zeros(self.num_matrices, self.num_rows, start.shape[2])
        for matrix, in_matrix, in_shard in self._matrices():
            torch.mm(self.rows[in_shard], start[matrix], out=sketch[matrix, in_matrix])
        return sketch

    def project(self, basis: Tensor) -> Tensor:
        """This rank's term of `Q^T G`, `[n, r, in]`."""
        projection = self.rows.new_zeros(self.num_matrices, basis.shape[2], self.num_columns)
        for matrix, in_matrix, in_shard in self._matrices():
            torch.mm(basis[matrix, in_matrix].t(), self.rows[in_shard], out=projection[matrix])
        return projection

    def _matrices(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield, for each matrix with rows on this rank, its index, the rows' slice in it and their slice in `rows`."""
        end = self.first_row + len(self.rows)
        for matrix in range(self.first_row // self.num_rows, -(-end // self.num_rows)):
            offset = matrix * self.num_rows
            start, stop = max(self.first_row, offset), min(end, offset + self.num_rows)
            if stop > start:
                yield matrix, slice(start - offset, stop - offset), slice(start - self.first_row, stop - self.first_row)


def _sum_over_shards(group: ShardGroup, parts: Sequence[Tensor]) -> list[Tensor]:
    """Sum each tensor over the ranks of a group, by one all-reduce. A collective."""
    total = torch.cat([part.flatten() for part in parts])
    layout.add_over(group.axis, total)
    return [flat.view_as(part) for flat, part in zip(total.split([p.numel() for p in parts]), parts, strict=True)]


def orthonormalize(sketch: Tensor) -> Tensor:
    """An orthonormal basis of the range of each matrix, `[n, m, r]` with `m >= r`, in fp32.

    Three rounds of shifted Cholesky QR (Fukaya et al. 2020, https://arxiv.org/abs/1809.11085) only factorize the small
    matrices `Q^T Q`, and are accurate up to a condition number of 1e16 in fp64. Matrices for which the result is not
    orthonormal, such as zeros (experts without tokens), go through Householder QR, which cannot fail.
    """
    basis = sketch.double()
    identity = torch.eye(sketch.shape[2], dtype=basis.dtype, device=basis.device)
    for shift in (1e-13, 0.0, 0.0):
        gram = basis.mT @ basis
        scale = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        factor, _ = torch.linalg.cholesky_ex(gram + shift * scale * identity)
        basis = torch.linalg.solve_triangular(factor.mT, basis, upper=True, left=False)
    departure = (basis.mT @ basis - identity).abs().amax((1, 2))
    failed = ~(departure <= MAX_DEPARTURE)  # NaN too
    if bool(failed.any()):
        basis[failed] = torch.linalg.qr(sketch[failed].double()).Q
    return basis.float()


def squared_norm(tangent: Tensor | LowRank) -> Tensor:
    """Squared 2-norm of a tangent, in fp64. `Q` is orthonormal, so `Q B` has the norm of `B`."""
    tensor = tangent.right if isinstance(tangent, LowRank) else tangent
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()  # without a copy in fp64
