"""A wrapper around `deepspeed.initialize` with ZeRO-3.

The caller scales losses by global counts before the first backward. So gradients are summed here: nothing is averaged
over micro-batches, and DeepSpeed's division by the world size is undone.

docs/zero3.md lists the DeepSpeed internals on which this package relies.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from vcore_ds.common.errors import RunFailed, UserError, first_line
from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.config.sections import OptimizerConfig
from vcore_ds.data.batches import IGNORED_LABEL, Batch, to_device
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.engine.deepspeed_start import TensorAxis, start_deepspeed
from vcore_ds.engine.flat_shards import (
    FlatShards,
    GradientSum,
    PartitionedParameter,
    SavedParameters,
    Streams,
    as_partitioned,
)
from vcore_ds.method.objective import GlobalCounts
from vcore_ds.models.attention import RowLayout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.dropout import TokenDropout, make_token_keys
from vcore_ds.models.experts import mark_padding, uses_our_experts
from vcore_ds.models.sequence_exchange import gather_losses, take_local_columns

# Errors for losses and gradients that are inf or nan, raised before an update and on all ranks alike.


class NonFiniteLoss(RunFailed):
    """A loss of the batch, or the probe, is inf or nan. The optimizer was not stepped."""


class NonFiniteGradient(RunFailed):
    """The gradient of the batch holds inf or nan. The optimizer was not stepped."""


def sequences_by_rank(own_sequence_ids: Sequence[int], sequence_parallel: int) -> str:
    """Sequence ids by rank, for a message; ranks without any are left out, and of a sequence- or tensor-parallel
    group all but the first. A collective.

    Args:
        sequence_parallel: degree of the pass that computed the sequences.
    """
    is_first = layout.rank("sequence", sequence_parallel) == layout.rank("tensor") == 0
    per_rank = layout.gather_objects("job", list(own_sequence_ids) if is_first else [])
    return "; ".join(f"rank {rank}: sequence ids {ids}" for rank, ids in enumerate(per_rank) if ids)


# The optimizer over the trainable parameters, built before DeepSpeed shards them.


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, or SGD without momentum, over the trainable parameters, with weight decay on matrices only.

    AdamW is fused, one kernel for all tensors: under ZeRO-3 it updates a few large shards.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if _num_axes(parameter) >= 2]
    vectors = [parameter for parameter in trainable if _num_axes(parameter) < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if parameters
    ]
    if config.weight_decay == 0.0:
        groups = [{"params": trainable, "weight_decay": 0.0}]  # one group, so fewer flat shards
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def make_moments(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
    """AdamW's moments of zeros and counters at 0, as its first step makes them where there are none.

    Made at the start, so that a run for which they are too large fails there and not after its first backward.

    Args:
        masters: the fp32 shards that the optimizer will update, each on the device where its moments are to be.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return  # SGD without momentum keeps nothing
    for master in masters:
        optimizer.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
        }


def _num_axes(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # a sharded parameter looks empty


if TYPE_CHECKING:  # megatron-core takes seconds
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


class Engine:
    """A model under ZeRO-3: per-token losses, backward, local shards, optimizer step.

    Attributes:
        module: the wrapped model.
        trainable: names and trained parameters, in the model's order, which is the same on every rank.
        shards: this rank's part of the trained parameters, their gradient and the optimizer's state.
        coalesces: whether gradients are reduced once a step.
    """

    def __init__(
        self,
        model: "TokenLossModel | ParallelTokenLossModel",
        optimizer: torch.optim.Optimizer,
        deepspeed_config: dict[str, Any],
        *,
        coalesce_gradient_reduction: bool = False,
    ):
        """Args:
        optimizer: over the model's trainable parameters; DeepSpeed replaces its tensors by fp32 shards.
        deepspeed_config: the complete configuration, from `vcore_ds.planning.deepspeed_json.deepspeed_config`.
        coalesce_gradient_reduction: reduce gradients once per optimizer step instead of once per micro-batch, at
            the cost of unsharded gradients on each rank (`unsharded_gradient_bytes`).
        """
        start_deepspeed()
        layers = model.layers
        if layers:
            # One gather, one release and one pair of hooks per decoder layer instead of per weight: hooks and small
            # collectives take a large part of a pass. And ranks take part in the same gathers whichever experts their
            # tokens reach.
            set_z3_leaf_modules(model, list({type(layer): None for layer in layers}))
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config,
            mpu=TensorAxis.if_shared(),
            dist_init_required=False,
        )
        make_moments(self.optimizer.optimizer, self.optimizer.fp32_partitioned_groups_flat)
        self.module: TokenLossModel | ParallelTokenLossModel = model
        self.trainable: list[tuple[str, PartitionedParameter]] = [
            (name, as_partitioned(parameter)) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._saved_parameters = SavedParameters(model)
        self._streams = Streams(self.optimizer)
        self.shards = FlatShards(self.optimizer, self._streams, [parameter for _, parameter in self.trainable])
        self.device = device()
        self.coalesces = coalesce_gradient_reduction
        self._gradient_sum = GradientSum([p for _, p in self.trainable if p.dtype != torch.float32])
        self._num_backwards_left = 0
        self._dropouts = [m for m in model.modules() if isinstance(m, TokenDropout)]
        self._dropout_seed = 0
        self._experts = [m for m in model.modules() if uses_our_experts(m)]

    # ---- passes over the model -------------------------------------------------------------------------------------

    def token_losses(self, batch: Batch) -> Tensor:
        """Loss in nats of each supervised token of `batch`, fp32 `[N]`, row-major; with a graph unless under no_grad.

        Ranks that share the batch each compute a part of its columns, and all get all of its losses; the gradient of
        what they make of them is, on each rank, that of its own part.

        A collective: every rank must call it as often as the others, with an idle batch if it has no data.
        """
        supervised = batch.targets() != IGNORED_LABEL
        return gather_losses(self._forward(batch), supervised, batch.sequence_parallel)

    def losses_and_entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same losses, and the entropy in nats of each supervised token's prediction, both `[N]`; for passes
        without a gradient. A collective, as `token_losses`."""
        supervised, k = batch.targets() != IGNORED_LABEL, batch.sequence_parallel
        losses, entropies = self._forward(batch, with_entropies=True)
        return gather_losses(losses, supervised, k), gather_losses(entropies, supervised, k)

    def own_logits(self, batch: Batch) -> Tensor:
        """Logits `[b, T, V]` of the architecture's own forward, fp32 unless it changes that; of a batch that is not
        shared, on a Hugging Face model. A collective, as `token_losses`."""
        return self._forward(batch, own_logits=True)

    def _forward(self, batch: Batch, **options: bool) -> Any:
        """What the model gives for this rank's columns."""
        k, positions = batch.sequence_parallel, batch.position_ids()
        if self._dropouts and self._dropouts[0].training:
            keys = make_token_keys(self._dropout_seed, batch.token_sequence_ids(), positions)
            own_keys = to_device(take_local_columns(keys, k), self.device)
            for dropout in self._dropouts:
                # Kept until the next forward: layers that are recomputed in the backward draw their masks again.
                dropout.token_keys = own_keys
        if self._experts:
            mark_padding(self._experts, to_device(take_local_columns(batch.is_token(), k), self.device))
        with self._saved_parameters.as_references():
            return self.deepspeed(
                input_ids=to_device(take_local_columns(batch.input_ids, k), self.device),
                targets=take_local_columns(batch.targets(), k),
                position_ids=to_device(take_local_columns(positions, k), self.device),
                row_layout=RowLayout.from_lengths(batch.sequence_lengths(), k, self.device),
                **options,
            )

    def seed_dropout(self, seed: int) -> None:
        """Makes the masks of the next forwards a function of the token and of `seed`, the same on all ranks."""
        self._dropout_seed = torch_seed(Stream.DROPOUT, seed)

    @contextmanager
    def accumulation(self, num_backwards: int) -> Iterator[None]:
        """The context of all `backward` calls of one gradient: the first overwrites the shards, the others add to them.

        DeepSpeed counts micro-steps itself, and a probe within a step would disturb that count. So the boundary is set
        explicitly here, and the counter that decides between overwriting and adding is reset.
        """
        self.optimizer.zero_grad()
        self._num_backwards_left = num_backwards
        with self.deepspeed.coalesce_grad_reduction() if self.coalesces else nullcontext():
            try:
                yield
            except BaseException:
                # DeepSpeed would reduce what there is, after an error too. Where ranks share layers and one of them is
                # lost, the other ranks of that reduction are not in it: gloo aborts the process, NCCL waits.
                for _, parameter in self.trainable:
                    parameter.grad = None
                raise
            self._gradient_sum.give_back()
        if any(parameter.grad is not None for _, parameter in self.trainable):
            # ZeRO-3 takes the gradients of a layer when that of its input is there, zeros for what is missing, and one
            # that comes later would be lost.
            raise RuntimeError("a gradient was computed after ZeRO-3 had reduced those of its layer")
        self.shards.add_up_replicas()
        self.deepspeed.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss` to the accumulation; gradients of ranks are summed, not averaged.

        A collective; a rank without tokens passes the sum of its empty losses, a zero that keeps the graph.

        Raises:
            UserError: on this rank, where a layer that is recomputed has sent its tokens to other experts.
        """
        self._num_backwards_left -= 1
        self.deepspeed.set_gradient_accumulation_boundary(self._num_backwards_left == 0)
        try:
            self.deepspeed.backward(loss * layout.size("shards"), scale_wrt_gas=False)
        except CheckpointError as error:
            if layout.size("expert") == 1:  # then shapes do not depend on which experts a token has
                raise
            raise UserError(
                "model.gradient_checkpointing: a layer that was recomputed has got another number of tokens for its "
                "experts than in the forward; expected the same. A router whose scores are about equal may choose "
                "another expert where the device does not round twice alike. Set model.gradient_checkpointing=false or "
                f"parallel.expert=1; a run may be resumed with either. PyTorch says: {first_line(error)}"
            ) from error
        if self.coalesces and self._num_backwards_left > 0:
            self._gradient_sum.take()

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """A context without graph, dropout or activation checkpointing, for passes that only measure."""
        was_training = self.module.training
        self.module.eval()
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

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """A context in which LoRA adapters are disabled: the reference model of a run, without a second copy."""
        with self.module.without_adapters():
            yield

    @property
    def has_dropout(self) -> bool:
        """Whether any layer drops activations in training."""
        return bool(self._dropouts)

    # ---- this rank's shards ----------------------------------------------------------------------------------------

    @property
    def num_updates(self) -> int:
        """Number of steps that the optimizer has taken, by its own count."""
        states = list(self.optimizer.optimizer.state.values())
        return int(states[0]["step"]) if states and "step" in states[0] else 0

    def local_numel(self, parameter: nn.Parameter) -> int:
        """Elements of a trained parameter in this rank's shard, without padding."""
        return self.shards.numel(parameter)

    def gradient_norm(self) -> float:
        """Global L2 norm of the gradient in the shards. A collective."""
        return self.shards.norm(self.shards.gradients())

    def parameter_norm(self) -> float:
        """Global L2 norm of the trained parameters, in fp32. A collective."""
        return self.shards.norm(self.shards.masters())

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the reduced gradient in the shards, before it is clipped."""
        self.shards.scale_gradient(factor)

    @contextmanager
    def changing_shards(self) -> Iterator[None]:
        """The context of every change of a parameter's shard outside `step`: the next forward computes with it.

        ZeRO-3 keeps gathered parameters alive between passes (small ones always, others within the reuse distance), and
        a forward would silently read the old values, so they are dropped. Gathers on a stream of their own are ordered
        around the change. DeepSpeed's own `engine.empty_partition_cache()` would also run Python's garbage collector
        (half a second) and empty the accelerator's memory cache, twice a step.
        """
        self._streams.wait_for_gathers()
        try:
            yield
        finally:
            self.optimizer.empty_partition_cache()
            # Hierarchical partitioning (zero_hpz_partition_size) gathers from a second copy of the shards that lives
            # until the next step: a changed shard would not be seen, and utilities would be exactly 0. Emptying the
            # cache makes such copies of the gathered parameters, so they are dropped last.
            self.optimizer.invalidate_secondary_tensor()
            self._streams.let_gathers_wait()

    # ---- the update ------------------------------------------------------------------------------------------------

    def step(self, learning_rate: float) -> float:
        """Clips the gradient, updates the parameters and returns the gradient norm before clipping. A collective.

        Raises:
            NonFiniteGradient: on all ranks alike, with nothing updated.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        self._streams.let_gathers_wait()
        # DeepSpeed skips an update whose global norm is not finite, in fp32 and bf16 without a message.
        if self.optimizer.overflow:
            raise NonFiniteGradient("the gradient is not finite")
        return float(self.deepspeed.get_global_grad_norm())

    def close(self) -> None:
        """Releases what DeepSpeed attached to the model; required before a second engine in one process."""
        self.deepspeed.destroy()


# The numbers of sequences and tokens of a global batch, by which its losses are divided.


def count_globally(batches: Sequence[Batch], *, kept_only: bool = False) -> GlobalCounts:
    """Counts sequences and supervised tokens over all ranks; needed before the first backward. A collective.

    Args:
        batches: this rank's micro-batches, at least one, all of one degree of sequence parallelism.
        kept_only: count only tokens that the batch's mask keeps (`Batch.kept`).
    """
    num_tokens = torch.cat([b.num_kept_tokens() if kept_only else b.num_supervised_tokens() for b in batches])
    own = [float((num_tokens > 0).sum()), float(num_tokens.sum())]
    sequences, tokens = layout.sum_over("data", own, batches[0].sequence_parallel)
    return GlobalCounts(num_sequences_global=int(sequences), num_supervised_tokens_global=int(tokens))
