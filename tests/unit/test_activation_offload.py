"""Activation checkpoints in host memory: the same gradients, and no layer's input stays where it was computed."""

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers import tiny
from vcore_ds.models import causal_lm
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel, checkpoint_activations


def copy_saved_tensors(pin_memory: bool) -> saved_tensors_hooks:
    """Copy as `save_on_cpu` does for a GPU's tensor; for a CPU's it would return the tensor itself."""
    return saved_tensors_hooks(torch.clone, lambda copy: copy)


def run_layers(*, activation_offload: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """Gradients, and for each layer's input whether its memory is in use between forward and backward."""
    plain = tiny.qwen3(num_hidden_layers=4)
    checkpoint_activations(plain)
    plain.set_attn_implementation(TRAINING_ATTENTION)
    model = TokenLossModel(plain, activation_offload=activation_offload)
    model.train()
    inputs: list[StorageWeakRef] = []

    def remember(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(arguments[0].untyped_storage()))

    handles = [layer.register_forward_pre_hook(remember) for layer in model.layers]
    copies: AbstractContextManager = mock.patch.object(causal_lm, "save_on_cpu", copy_saved_tensors)
    with copies if activation_offload else nullcontext():
        losses = model(*tiny.inputs(tiny.make_batch(3)))
    kept = [not storage.expired() for storage in inputs]
    for handle in handles:
        handle.remove()
    return list(torch.autograd.grad(losses.sum(), list(model.parameters()))), kept


def test_offloaded_checkpoints_free_layer_inputs_and_keep_gradients() -> None:
    expected, kept = run_layers(activation_offload=False)
    assert kept == [True] * 4
    gradients, kept = run_layers(activation_offload=True)
    assert kept == [False] * 4
    for plain, offloaded in zip(expected, gradients, strict=True):
        assert torch.equal(plain, offloaded)
