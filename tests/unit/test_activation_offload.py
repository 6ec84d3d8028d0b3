"""Activation checkpoints in host memory, and layers that keep more than their input: the same gradients, and the memory
that is estimated."""

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers import tiny
from vcore_ds.models import causal_lm
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.attention_kernels import CpuFlash
from vcore_ds.models.causal_lm import TokenLossModel, checkpoint_activations
from vcore_ds.planning.known_models import parse_shape
from vcore_ds.planning.memory import estimate_memory
from vcore_ds.planning.settings import ActivationMemory, MemorySettings


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


KEPT = {
    "nothing": ActivationMemory(3),
    "attention": ActivationMemory(3, stores_attention=True),
    "a layer": ActivationMemory(3, 1),
    "attention and two layers": ActivationMemory(3, 2, stores_attention=True),
}


SINKS = dict(num_key_value_heads=2, head_dim=8, num_local_experts=4, layer_types=["full_attention"] * 3)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_what_is_kept_changes_no_number_and_takes_the_estimated_memory(
    with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is computed once where its output is kept, twice in other checkpointed layers."""
    batch, packs, calls = tiny.make_batch(1, 40), [], []
    compute, keep = CpuFlash.forward, causal_lm.keep_attention_outputs
    monkeypatch.setattr(CpuFlash, "forward", lambda *inputs: (calls.append(1), compute(*inputs))[1])
    monkeypatch.setattr(causal_lm, "keep_attention_outputs", lambda: (packs.append(keep()), packs[-1])[1])
    results, num_bytes = {}, {}
    for name, activations in KEPT.items():
        model = (
            tiny.token_loss_model(checkpointing=True, moe_kind="gpt_oss", num_hidden_layers=3, **SINKS)
            if with_sinks
            else tiny.token_loss_model(checkpointing=True, num_hidden_layers=3)
        )
        model.store_activations(activations)
        calls.clear(), packs.clear()
        kept: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor):
            losses = model(*tiny.inputs(batch))
        kept += [x for recording, _ in packs for pair in recording.outputs for x in pair]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        num_bytes[name] = sum(storages.values())
        for _ in range(2):  # a graph that is retained is recomputed in each backward
            gradients = torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True)
        recomputed = 0 if activations.stores_attention else 3 - activations.num_stored
        assert len(calls) == 3 + 2 * recomputed
        results[name] = [losses.detach(), *gradients]
        shape = parse_shape(model.base.config.to_dict())
        assert shape is not None
        settings = MemorySettings(1, 40, number_bytes=4, is_checkpointed=True, activations=activations, on_gpu=False)
        estimate = estimate_memory(shape, settings).phases["main"]["activation checkpoints"]
        num_bytes[name] -= estimate + (activations.num_stored > 0) * 2 * 40 * 8 * 4  # cosines and sines, of all layers
    for result in results.values():
        assert all(map(torch.equal, result, results["nothing"]))
    if not with_sinks:  # the differences are exact; the rest is the loss's
        assert len(set(num_bytes.values())) == 1, num_bytes
