"""One wrapper over `deepspeed.initialize` with ZeRO-3.

The gradient accounting is kept in our hands: the caller divides by global counts before the first backward, so here
nothing is averaged over micro-batches, and DeepSpeed's division by the number of ranks is undone.

docs/zero3.md lists the DeepSpeed internals this package relies on.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from vcore_ds.data import Batch
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.engine.deepspeed_start import start_deepspeed
from vcore_ds.engine.flat_shards import FlatShards
from vcore_ds.engine.non_finite import NonFiniteGradient
from vcore_ds.models import TokenLossModel


class Engine:
    """A model under ZeRO-3: per-token losses, backward, local shards, optimizer step.

    Attributes:
        module: the wrapped `TokenLossModel`.
        trainable: name and parameter of everything that is trained, in the model's order (the same on every rank).
        shards: this rank's part of the trained parameters, their gradient and the optimizer's state.
    """

    def __init__(
        self,
        model: TokenLossModel,
        optimizer: torch.optim.Optimizer,
        deepspeed_config: dict[str, Any],
        *,
        coalesce_gradient_reduction: bool = False,
    ):
        """Args:
        optimizer: over the model's trainable parameters; DeepSpeed replaces its tensors by fp32 shards.
        deepspeed_config: resolved (`vcore_ds.config.deepspeed_config`).
        coalesce_gradient_reduction: reduce gradients once per optimizer step instead of once per
            micro-batch. Costs one unsharded gradient buffer per rank.
        """
        start_deepspeed()
        layers = model.layers
        if layers:
            # One gather, one release and one pair of hooks per decoder layer instead of per weight: hooks and small
            # collectives are a good part of a pass.
            set_z3_leaf_modules(model, [type(layers[0])])
        self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config, dist_init_required=False
        )
        self.module: TokenLossModel = model
        self.trainable: list[tuple[str, nn.Parameter]] = [
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self.shards = FlatShards(self.optimizer, [parameter for _, parameter in self.trainable])
        self.device = device()
        self._coalesce = coalesce_gradient_reduction
        self._num_backwards_left = 0
        self._dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]

    # ---- passes over the model -------------------------------------------------------------------------------------

    def token_losses(self, batch: Batch) -> Tensor:
        """Loss in nats of each supervised token of `batch`, fp32 `[N]`, row-major; with a graph unless under no_grad.

        A collective: every rank must call it as often as the others, with an idle batch if it has nothing.
        """
        positions = batch.position_ids()
        return self.deepspeed(
            input_ids=batch.input_ids.to(self.device),
            labels=batch.labels.to(self.device),
            position_ids=None if positions is None else positions.to(self.device),
        )

    @contextmanager
    def accumulation(self, num_backwards: int) -> Iterator[None]:
        """Around all `backward` calls of one gradient: the first overwrites what the shards hold, the others add.

        DeepSpeed counts micro-steps by itself, and a probe inside a step would put that count wrong: the
        boundary is set by hand here, and the counter behind "overwrite or add" is put back to its start.
        """
        self.optimizer.zero_grad()
        self._num_backwards_left = num_backwards
        with self.deepspeed.coalesce_grad_reduction() if self._coalesce else nullcontext():
            yield
        self.deepspeed.set_gradient_accumulation_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's `loss` to the accumulation: ranks' gradients are summed, not averaged.

        A collective; a rank without tokens passes the (zero) sum of its empty losses, which keeps the graph.
        """
        self._num_backwards_left -= 1
        self.deepspeed.set_gradient_accumulation_boundary(self._num_backwards_left == 0)
        self.deepspeed.backward(loss * layout.size("shards"), scale_wrt_gas=False)

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """No graph, no dropout, no activation checkpointing: for passes that only measure."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Training mode, so that activation checkpointing stays on, but with dropout off."""
        for dropout in self._dropouts:
            dropout.eval()
        try:
            yield
        finally:
            for dropout in self._dropouts:
                dropout.train(self.module.training)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The model that the adapters were added to: the reference of a LoRA run, with no second copy."""
        with self.module.causal_lm.disable_adapter():
            yield

    @property
    def has_dropout(self) -> bool:
        return bool(self._dropouts)

    # ---- this rank's shards ----------------------------------------------------------------------------------------

    @property
    def num_updates(self) -> int:
        """Steps the optimizer has taken, by its own count."""
        states = list(self.optimizer.optimizer.state.values())
        return int(states[0]["step"]) if states and "step" in states[0] else 0

    def local_numel(self, parameter: nn.Parameter) -> int:
        """Elements of a trained parameter that are this rank's; the last rank's shard may be filled up with padding."""
        return self.shards.numel(parameter)

    def gradient_norm(self) -> float:
        """Global L2 norm of the gradient in the shards. A collective."""
        return layout.norm_over("shards", self.shards.without_padding(self.shards.gradients()))

    def parameter_norm(self) -> float:
        """Global L2 norm of the trained parameters, in fp32. A collective."""
        return layout.norm_over("shards", self.shards.without_padding(self.shards.masters()))

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the reduced gradient in the shards, before it is clipped."""
        self.shards.scale_gradient(factor)

    def forget_gathered_parameters(self) -> None:
        """Must follow every change of a shard: ZeRO-3 keeps gathered parameters alive between passes (small
        ones always, others within the reuse distance), and a forward would silently read the old values.

        Not `engine.empty_partition_cache()`: that also runs Python's garbage collector (half a second) and
        empties the accelerator's memory cache, twice a step.
        """
        self.optimizer.empty_partition_cache()
        # Hierarchical partitioning (zero_hpz_partition_size) gathers from a second copy of the shards that lives until
        # the next step: a changed shard would not be seen, and utilities would be exactly 0. Emptying the cache makes
        # such copies of what is gathered, so they go last.
        self.optimizer.invalidate_secondary_tensor()

    # ---- the update ------------------------------------------------------------------------------------------------

    def step(self, learning_rate: float) -> float:
        """Clips, updates the parameters and returns the gradient norm before clipping.

        Raises:
            NonFiniteGradient: on all ranks alike; nothing was updated.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        # DeepSpeed skips the update where the global norm is not finite; it does not say so in fp32 and bf16.
        if self.optimizer.overflow:
            raise NonFiniteGradient("the gradient is not finite")
        return float(self.deepspeed.get_global_grad_norm())

    def close(self) -> None:
        """Frees what DeepSpeed attached to the model; a second engine in one process needs it."""
        self.deepspeed.destroy()
