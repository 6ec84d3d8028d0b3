"""The check of forward against reverse mode, on modes that lack the tangents of a few parameters."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import AdamW

import vcore_ds
from tests.helpers import tiny
from vcore_ds.utility.forward_mode import _TangentGatherer


@contextmanager
def without_tangents(monkeypatch: pytest.MonkeyPatch, modules: set[nn.Module]) -> Iterator[None]:
    """A forward mode in which the parameters of some modules count as dual but are not."""
    make_dual = _TangentGatherer._make_dual

    def skip(gatherer: Any, module: nn.Module) -> None:
        if module in modules:
            ids = {id(parameter) for parameter in module.parameters(recurse=False)}
            gatherer._dual_parameters |= ids
            gatherer._gathered = {key: tangent for key, tangent in gatherer._gathered.items() if key not in ids}
        make_dual(gatherer, module)

    with monkeypatch.context() as patch:
        patch.setattr(_TangentGatherer, "_make_dual", skip)
        yield


def make_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, tiny.VOCABULARY, (1, 48), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def assert_refused(monkeypatch: pytest.MonkeyPatch, model: nn.Module, modules: set[nn.Module]) -> None:
    before = copy.deepcopy(model.state_dict())
    vcore_ds.probe_direction(model, [make_batch()])
    refused = pytest.raises(vcore_ds.UserError, match="forward and reverse mode disagree")
    with without_tangents(monkeypatch, modules), refused:
        vcore_ds.probe_direction(model, [make_batch()])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_small_gradients_cannot_lose_its_tangents(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The gradient of a small input embedding, which the norms enlarge, hides that of the layers; Adam's direction,
    which has the same size everywhere, does not."""
    model, batch = tiny.qwen3(dtype=dtype), make_batch(1)
    model.get_input_embeddings().weight.data.mul_(1e-2)
    layer = set(model.model.layers[1].modules())
    optimizer = AdamW(model.parameters(), lr=1e-5)
    model(**batch).loss.backward()
    squares = {name: float(p.grad.double().square().sum()) for name, p in model.named_parameters()}
    share = sum(value for name, value in squares.items() if "layers.1." in name) / sum(squares.values())
    optimizer.step()
    optimizer.zero_grad()
    direction = vcore_ds.probe_direction(model, [make_batch()], optimizer=optimizer)
    exact = vcore_ds.token_utilities(model, batch, direction)
    with without_tangents(monkeypatch, layer):
        error = float((vcore_ds.token_utilities(model, batch, direction) - exact).norm() / exact.norm())
    print(f"share of the squared norm {share:.1e}, utilities along Adam's direction {error:.0%} off")
    assert share < 1e-4 and error > 0.02
    assert_refused(monkeypatch, model, layer)


def test_one_of_many_layers_cannot_lose_its_tangents_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.qwen3(dtype=torch.bfloat16, num_hidden_layers=28)
    assert_refused(monkeypatch, model, set(model.model.layers[20].modules()))


def test_adapters_that_begin_with_zero_cannot_lose_the_tangents_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_peft_model(tiny.qwen3(), LoraConfig(r=4, target_modules="all-linear"))
    adapters = {module for name, module in model.named_modules() if "layers.1" in name and "lora_A" in name}
    assert_refused(monkeypatch, model, adapters)
