"""The training engine: a wrapper around `deepspeed.initialize` with ZeRO-3.

Gradients are summed over micro-batches and ranks, not averaged (DeepSpeed's division by the world size is undone):
callers divide losses by global counts before the first backward.

docs/zero3.md lists the DeepSpeed internals on which this package relies.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from vcore_ds.common.errors import RunFailed, UserError, first_line
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.config.sections import OptimizerConfig
from vcore_ds.data.batches import IGNORED_LABEL, Batch, to_device
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.engine.deepspeed_start import find_tensor_axis, start_deepspeed
from vcore_ds.engine.flat_shards import (
    FlatShards,
    GradientSum,
    PartitionedParameter,
    SavedParameters,
    Streams,
    as_partitioned,
    unsharded_shape,
)
from vcore_ds.engine.muon import Muon, ShardedMatrix, find_hidden_matrices, find_matrices
from vcore_ds.method.objective import GlobalCounts
from vcore_ds.method.optimizers import AdamStep
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.dropout import TokenDropout, make_token_keys
from vcore_ds.models.experts import mark_padding, uses_our_experts
from vcore_ds.models.sequence_exchange import gather_losses, take_local_columns
from vcore_ds.models.token_loss import PredictionStatistic

if TYPE_CHECKING:  # megatron-core takes seconds to import
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


class NonFiniteLoss(RunFailed):
    """A loss of the batch or of the probe is inf or NaN. Raised on all ranks alike, before the optimizer's step."""


class NonFiniteGradient(RunFailed):
    """The gradient of the batch contains inf or NaN. Raised on all ranks alike; the update was skipped."""


def describe_sequences(sequence_ids: Sequence[int], sequence_parallel: int) -> str:
    """List sequence ids by rank, for a message; each sequence- or tensor-parallel group once. A collective.
    `sequence_parallel`: the sequence-parallel size of the pass."""
    is_first = layout.rank("sequence", sequence_parallel) == layout.rank("tensor") == 0
    per_rank = layout.gather_objects("job", list(sequence_ids) if is_first else [])
    return "; ".join(f"rank {rank}: sequence ids {ids}" for rank, ids in enumerate(per_rank) if ids)


def build_optimizer(model: "TokenLossModel | ParallelTokenLossModel", config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW (PyTorch's fused one: under ZeRO-3 it updates a few large shards), SGD without momentum, or Muon,
    over the trainable parameters, with weight decay on matrices only. Raises UserError if Muon would have nothing to
    update."""
    hidden = find_hidden_matrices(model, model.layers) if config.name == "muon" else []
    hidden_ids = {id(parameter) for parameter in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in hidden_ids]
    decay, parts = config.weight_decay, [(hidden, 0.0), (rest, 0.0)]  # fewer groups and flat shards without decay
    if decay != 0.0:
        matrices = [p for p in rest if len(unsharded_shape(p)) >= 2]
        vectors = [p for p in rest if len(unsharded_shape(p)) < 2]
        parts = [(hidden, decay), (matrices, decay), (vectors, 0.0)]
    groups: list[dict[str, Any]] = [{"params": params, "weight_decay": value} for params, value in parts if params]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    if config.name == "muon":
        for group in groups:
            group |= {"muon": group["params"] is hidden, "momentum": config.momentum}
        return Muon(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def initialize_moments(zero: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Allocate the moments and step counters of AdamW and Muon, all 0, as the first step would, so that a run without
    memory for them fails at its start instead of after its first backward."""
    optimizer = zero.optimizer
    if not isinstance(optimizer, torch.optim.AdamW):
        return  # SGD without momentum has no state
    for sub_group, master in enumerate(zero.fp32_partitioned_groups_flat):
        is_muon = optimizer.param_groups[zero.sub_group_to_group_id[sub_group]].get("muon", False)
        keys = ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq")
        moments = {key: torch.zeros_like(master, requires_grad=False) for key in keys}
        optimizer.state[master] = {"step": torch.zeros((), dtype=torch.float32, device=master.device), **moments}


class Engine:
    """A model (`module`) under ZeRO-3: per-token losses, backward, optimizer step. `trainable`: names and trained
    parameters, in the model's order, the same on all ranks. `shards`: this rank's shards of these, their gradient and
    the optimizer's state. `matrices`: the matrices that Muon updates, by sub-group of the shards; empty with other
    optimizers. `coalesces`: whether gradients are reduced once per step."""

    def __init__(
        self,
        model: "TokenLossModel | ParallelTokenLossModel",
        optimizer: torch.optim.Optimizer,
        deepspeed_config: dict[str, Any],
        *,
        coalesce_gradient_reduction: bool = False,
    ):
        """`optimizer`: over the trainable parameters; DeepSpeed replaces its tensors by fp32 shards.
        `coalesce_gradient_reduction`: reduce gradients once per step instead of once per micro-batch, at the cost of
        unsharded gradients on each rank (`unsharded_gradient_bytes`)."""
        start_deepspeed()
        layers = model.layers
        if layers:
            # One all-gather, release and pair of hooks per decoder layer instead of per weight: hooks and small
            # collectives take much of a pass's time. And all ranks make the same all-gathers, whichever experts their
            # tokens are routed to.
            set_z3_leaf_modules(model, list({type(layer): None for layer in layers}))
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config, mpu=find_tensor_axis(), dist_init_required=False
        )
        initialize_moments(self.optimizer)
        self._attach(model)
        if isinstance(self.optimizer.optimizer, Muon):
            self.matrices = self._find_muon_matrices(self.optimizer.optimizer)
        self.coalesces = coalesce_gradient_reduction

    def _attach(self, model: "TokenLossModel | ParallelTokenLossModel") -> None:
        """Set what belongs to `model`, which `deepspeed` runs and `optimizer` has sharded."""
        self.module: TokenLossModel | ParallelTokenLossModel = model
        self.trainable: list[tuple[str, PartitionedParameter]] = [
            (name, as_partitioned(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._saved_parameters = SavedParameters(model)
        self._streams = Streams(self.optimizer)
        self.shards = FlatShards(self.optimizer, self._streams, [parameter for _, parameter in self.trainable])
        self.matrices = {}
        self.device = device()
        self.coalesces = False
        self._gradient_sum = GradientSum([p for _, p in self.trainable if p.dtype != torch.float32])
        self._num_backwards_left = 0
        self._dropouts = [m for m in model.modules() if isinstance(m, TokenDropout)]
        self._dropout_seed = 0
        self._experts = [m for m in model.modules() if uses_our_experts(m)]

    def _find_muon_matrices(self, muon: Muon) -> dict[int, list[ShardedMatrix]]:
        """Find the matrices in the shards, for Muon and for the probe direction."""
        groups, group_of = muon.param_groups, self.optimizer.sub_group_to_group_id
        parameters = [p for _, p in self.trainable if groups[group_of[self.shards.position(p).sub_group]]["muon"]]
        matrices = find_matrices(self.shards, parameters)
        masters = self.optimizer.fp32_partitioned_groups_flat
        muon.matrices = {masters[sub_group]: in_group for sub_group, in_group in matrices.items()}
        muon.dtype = parameters[0].dtype
        return matrices

    def token_losses(self, batch: Batch) -> Tensor:
        """Loss in nats of each supervised token of `batch`, fp32 `[N]`, row-major; with a graph unless under no_grad.
        Each rank of a sequence-parallel group computes a slice of the columns, and differentiates it in the backward;
        all get all losses. A collective; ranks without data pass an idle batch."""
        supervised = batch.targets() != IGNORED_LABEL
        return gather_losses(self._forward(batch), supervised, batch.sequence_parallel)

    def losses_and_statistics(self, batch: Batch, statistic: PredictionStatistic) -> tuple[Tensor, Tensor]:
        """Losses as in `token_losses`, and a statistic of each supervised token's prediction, without a graph, both
        `[N]`. A collective."""
        return self._forward_pair(batch, statistic=statistic)

    def losses_and_divergences(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses as in `token_losses`, and `KL(base || model)` in nats of each supervised token's prediction, also with
        a graph, both `[N]`. Runs the base model, without adapters, dropout and graph, then the model. A collective."""
        with self.without_gradient(), self.without_adapters():
            base_hidden = self._forward(batch, hidden_only=True)
        return self._forward_pair(batch, reference_hidden=base_hidden)

    def _forward_pair(self, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute losses and another value per supervised token, all-gathered over the sequence-parallel group."""
        supervised, k = batch.targets() != IGNORED_LABEL, batch.sequence_parallel
        losses, others = self._forward(batch, **options)
        return gather_losses(losses, supervised, k), gather_losses(others, supervised, k)

    def original_logits(self, batch: Batch) -> Tensor:
        """Logits `[b, T, V]` of the Hugging Face forward, usually fp32; without sequence or tensor parallelism only. A
        collective."""
        return self._forward(batch, original_logits=True)

    def _forward(self, batch: Batch, **options: Any) -> Any:
        """Compute the model's output for this rank's columns."""
        k, positions = batch.sequence_parallel, batch.position_ids()
        if self._dropouts and self._dropouts[0].training:
            keys = make_token_keys(self._dropout_seed, batch.token_sequence_ids(), positions)
            local_keys = to_device(take_local_columns(keys, k), self.device)
            for dropout in self._dropouts:
                # Kept until the next forward: recomputed layers need the same masks in the backward.
                dropout.token_keys = local_keys
        if self._experts:
            mark_padding(self._experts, to_device(take_local_columns(batch.is_token(), k), self.device))
        return self._call_model(
            input_ids=to_device(take_local_columns(batch.input_ids, k), self.device),
            targets=take_local_columns(batch.targets(), k),
            position_ids=to_device(take_local_columns(positions, k), self.device),
            sequence_layout=SequenceLayout.from_lengths(batch.sequence_lengths(), k, self.device),
            **options,
        )

    def _call_model(self, **inputs: Any) -> Any:
        with self._saved_parameters.as_references():
            return self.deepspeed(**inputs)

    def seed_dropout(self, seed: int) -> None:
        """Seed the dropout masks of the next forwards, which depend only on token and seed; the same on all ranks."""
        self._dropout_seed = torch_seed(Stream.DROPOUT, seed)

    @contextmanager
    def accumulation(self, num_backwards: int) -> Iterator[None]:
        """A context for the `backward` calls of one gradient: the first overwrites the gradient shards, the others add
        to them. Boundary and counter are set here, because a probe within a step would disturb DeepSpeed's count of
        micro-steps."""
        self.optimizer.zero_grad()
        self._num_backwards_left = num_backwards
        with self.deepspeed.coalesce_grad_reduction() if self.coalesces else nullcontext():
            try:
                yield
            except BaseException:
                # DeepSpeed would reduce the gradients even after an error. If only some ranks raised, the others do not
                # join that reduction: gloo aborts the process, NCCL hangs.
                for _, parameter in self.trainable:
                    parameter.grad = None
                raise
            self._gradient_sum.write_back()
        if any(parameter.grad is not None for _, parameter in self.trainable):
            # ZeRO-3 reduces a layer's gradients once its input's gradient is computed, with zeros for missing ones: a
            # later gradient would be lost.
            raise RuntimeError("a gradient was computed after ZeRO-3 had reduced its layer's gradients")
        self.shards.sum_replicated_gradients()
        self.deepspeed.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`, summed over ranks, not averaged. A collective: a rank without tokens
        passes the sum of its empty losses. Raises UserError, on this rank only, if a recomputed layer has routed tokens
        to other experts than in the forward."""
        self._num_backwards_left -= 1
        self.deepspeed.set_gradient_accumulation_boundary(self._num_backwards_left == 0)
        try:
            self.deepspeed.backward(loss * layout.size("shards"), scale_wrt_gas=False)
        except CheckpointError as error:
            if layout.size("expert") == 1:  # then no shape depends on the routing
                raise
            raise UserError(
                "model.gradient_checkpointing: found a layer whose recomputation routed another number of tokens to "
                "its experts than its forward, since router scores are almost equal; expected the same number. Set it "
                f"to false, or parallel.expert to 1, and resume the run. PyTorch says: {first_line(error)}"
            ) from error
        if self.coalesces and self._num_backwards_left > 0:
            self._gradient_sum.add()

    @contextmanager
    def without_gradient(self, *, keep_dropout: bool = False) -> Iterator[None]:
        """A context for evaluation passes: no graph, dropout (but with `keep_dropout`) or activation checkpointing."""
        was_training = self.module.training
        self.module.eval()
        for dropout in self._dropouts:
            dropout.train(keep_dropout)
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """A context with dropout off in training mode, so that activation checkpointing stays on."""
        for dropout in self._dropouts:
            dropout.eval()
        try:
            yield
        finally:
            for dropout in self._dropouts:
                dropout.train(self.module.training)

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are trained; parallel layers have none."""
        return isinstance(self.module, TokenLossModel) and self.module.has_adapters

    def without_adapters(self) -> AbstractContextManager[None]:
        """A context with LoRA adapters disabled, so that the model is the run's reference model."""
        assert isinstance(self.module, TokenLossModel)
        return self.module.without_adapters()

    @property
    def has_dropout(self) -> bool:
        """Whether any layer has dropout."""
        return bool(self._dropouts)

    @property
    def num_updates(self) -> int:
        """Number of the optimizer's steps, from its state."""
        states = list(self.optimizer.optimizer.state.values())
        return int(states[0]["step"]) if states and "step" in states[0] else 0

    def adam_steps(self, sub_groups: Sequence[int]) -> list[AdamStep]:
        """The optimizer's upcoming update of each of these flat tensors: the same for all."""
        group = self.optimizer.param_groups[0]
        return [AdamStep(self.num_updates + 1, group["betas"], group["eps"])] * len(sub_groups)

    def gradient_norm(self) -> float:
        """Global L2 norm of the gradient in the shards. A collective."""
        return self.shards.norm(self.shards.gradients())

    @property
    def num_summed_ranks(self) -> int:
        """Number of ranks over which `backward` sums gradients."""
        return layout.size("shards")

    def sum_over_data(self, values: list[float], sequence_parallel: int = 1) -> list[float]:
        """Element-wise sum over the ranks with other sequences, in fp64. A collective."""
        return layout.sum_over("data", values, sequence_parallel)

    def is_true_everywhere(self, condition: bool) -> bool:
        """Whether a condition holds on all ranks with other sequences, so that all of them raise or none. A
        collective."""
        return self.sum_over_data([float(not condition)]) == [0.0]

    def count_globally(self, batches: Sequence[Batch], *, kept_only: bool = False) -> GlobalCounts:
        """Count the sequences and supervised tokens of a batch over all ranks, by which losses are divided. A
        collective. `batches`: this rank's, with one sequence-parallel size. `kept_only`: count only tokens kept by the
        batch's mask."""
        num_tokens = torch.cat([b.num_kept_tokens() if kept_only else b.num_supervised_tokens() for b in batches])
        counts = [float((num_tokens > 0).sum()), float(num_tokens.sum())]
        sequences, tokens = self.sum_over_data(counts, batches[0].sequence_parallel)
        return GlobalCounts(num_sequences_global=int(sequences), num_supervised_tokens_global=int(tokens))

    def mean_over_replicas(self, values: Tensor) -> float:
        """Mean of values that are the same on all ranks: ZeRO-3's ranks share one model."""
        return float(values.double().mean())

    @contextmanager
    def changing_shards(self) -> Iterator[None]:
        """A context for changes of parameter shards outside `step`: the next forward reads the changed values. ZeRO-3
        keeps gathered parameters alive between passes, and a forward would silently read the old values; so they are
        dropped, and all-gathers on the side stream are ordered around the change. DeepSpeed's
        `engine.empty_partition_cache()` would also run Python's garbage collector (half a second) and empty the
        accelerator's memory cache, twice per step."""
        self._streams.wait_for_gathers()
        try:
            yield
        finally:
            self.optimizer.empty_partition_cache()
            # Hierarchical partitioning (zero_hpz_partition_size) all-gathers from a second copy of the shards that
            # lives until the next step: the change would be ignored, and utilities would be exactly 0. Emptying the
            # cache makes such copies of gathered parameters, so they are dropped last.
            self.optimizer.invalidate_secondary_tensor()
            self._streams.let_gathers_wait()

    def step(self, learning_rate: float) -> float:
        """Clip the gradient and update the parameters; return the gradient norm before clipping. A collective. Raises
        NonFiniteGradient on all ranks alike, without an update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        self._streams.let_gathers_wait()
        # DeepSpeed silently skips an update whose global norm is not finite.
        if self.optimizer.overflow:
            raise NonFiniteGradient("the gradient is not finite")
        return float(self.deepspeed.get_global_grad_norm())

    def close(self) -> None:
        """Remove DeepSpeed's hooks from the model; required before a second engine in one process."""
        self.deepspeed.destroy()
