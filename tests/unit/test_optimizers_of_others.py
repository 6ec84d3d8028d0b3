"""`vcore_ds.probe_direction` and `VcoreLoss` with the optimizers of other trainers, against finite differences of a
copied optimizer's own step in fp64."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder.builder import OpBuilder
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

import vcore_ds
from tests.helpers import tiny
from tests.unit.test_vcore_loss import Model, compute_losses, make_batches, make_model

BATCHES = make_batches()


def split_parameters(model: Model) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Two groups: of adapters B and the others, else norms and the others."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    second = [parameter for name, parameter in named if "lora_B" in name or "norm" in name]
    return [parameter for _, parameter in named if not any(parameter is other for other in second)], second


def make_groups(model: Model, **second: Any) -> list[dict[str, Any]]:
    first, others = split_parameters(model)
    return [{"params": first}, {"params": others, **second}]


def take_step(model: Model, optimizer: Optimizer) -> None:
    parameters = dict(model.named_parameters())
    compute_losses(model, parameters, BATCHES[1]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def differentiate_step(model: Model, optimizer: Optimizer, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Central difference of what the next step subtracts from each parameter, along its gradient."""
    subtracted: list[dict[str, Tensor]] = []
    for factor in (1 + 1e-4, 1 - 1e-4):
        copied, its_optimizer = copy.deepcopy((model, optimizer))
        named = {name: p for name, p in copied.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in named.items()}
        for name, parameter in named.items():
            parameter.grad = factor * gradient[name]
        its_optimizer.step()
        subtracted.append({name: before[name] - p.detach() for name, p in named.items()})
    return {name: (larger - subtracted[1][name]) / 2e-4 for name, larger in subtracted[0].items()}


def add_group_later(model: Model) -> Optimizer:
    first, second = split_parameters(model)
    optimizer = AdamW(first, lr=1e-3)
    for _ in range(2):
        take_step(model, optimizer)
    optimizer.add_param_group({"params": second, "lr": 2e-3})
    return optimizer


OPTIMIZERS: dict[str, Callable[[Model], Optimizer]] = {
    "other rates": lambda model: AdamW(make_groups(model, lr=1.6e-2), lr=1e-3, foreach=True),
    "no rate": lambda model: AdamW(make_groups(model, lr=0.0), lr=1e-3),
    "other decay": lambda model: AdamW(make_groups(model, weight_decay=0.5), lr=1e-3),
    "other moments": lambda model: AdamW(make_groups(model, betas=(0.5, 0.9), eps=1e-4), lr=torch.tensor(1e-3)),
    "added later": add_group_later,
    "Adam": lambda model: Adam(make_groups(model, weight_decay=0.1, decoupled_weight_decay=True), lr=1e-3),
}


@pytest.mark.parametrize(("name", "kind"), [*((name, "full") for name in OPTIMIZERS), ("other rates", "lora")])
def test_a_direction_is_the_derivative_of_the_next_step(name: str, kind: str) -> None:
    model = make_model(kind)
    optimizer = OPTIMIZERS[name](model)
    for number_of_steps in (1, 2):
        if name != "added later" or number_of_steps == 2:
            take_step(model, optimizer)
        plain = dict(vcore_ds.probe_direction(model, BATCHES[:1]).gradient)
        exact = differentiate_step(model, optimizer, plain)
        direction = vcore_ds.probe_direction(model, BATCHES[:1], optimizer=optimizer).gradient
        largest_rate = max(float(group["lr"]) for group in optimizer.param_groups)
        wanted, found = (torch.cat([v[n].flatten() for n in plain]) for v in (exact, direction))
        torch.testing.assert_close(found, wanted / largest_rate, rtol=1e-5, atol=1e-7 * float(found.abs().max()))


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


REFUSED: dict[str, tuple[Callable[[Model], Optimizer], str]] = {
    "NAdam": (lambda model: NAdam(model.parameters()), "NAdam"),
    "RAdam": (lambda model: RAdam(model.parameters()), "RAdam"),
    "Adamax": (lambda model: Adamax(model.parameters()), "Adamax"),
    "SGD": (lambda model: SGD(model.parameters()), "SGD"),
    "own step": (lambda model: OwnStep(model.parameters()), "OwnStep"),
    "maximize": (lambda model: AdamW(make_groups(model, maximize=True)), "AdamW with maximize"),
    "amsgrad": (lambda model: AdamW(model.parameters(), amsgrad=True), "AdamW with amsgrad"),
    "coupled decay": (lambda model: Adam(make_groups(model, weight_decay=0.1)), "Adam with weight_decay 0.1"),
    "another model": (lambda model: AdamW(make_model("full").parameters()), "AdamW without model.embed_tokens.weight"),
    "a part": (lambda model: AdamW(split_parameters(model)[1]), "AdamW without model.embed_tokens.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_with_another_update_is_refused_by_name(name: str) -> None:
    model = make_model("full")
    make, found = REFUSED[name]
    optimizer = make(model)
    for _ in range(2):  # before the first step and after it
        with pytest.raises(vcore_ds.UserError, match=f"optimizer: found {found}"):
            vcore_ds.probe_direction(model, BATCHES[:1], optimizer=optimizer)
        if name not in ("another model", "a part"):
            take_step(model, optimizer)


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_deepspeeds_adam_has_the_direction_of_torchs(kind: Any) -> None:
    """Without its compiled step: the moments are torch's."""
    model = make_model("full")
    of_torch = AdamW(make_groups(model, lr=2e-3), lr=1e-3)
    take_step(model, of_torch)
    with patch.object(OpBuilder, "load"):
        optimizer = kind(make_groups(model, lr=2e-3), lr=1e-3, weight_decay=0.1)
    for parameter, state in of_torch.state.items():
        optimizer.state[parameter] = {**state, "step": int(state["step"])}
    expected, found = (
        vcore_ds.probe_direction(model, BATCHES[:1], optimizer=o).gradient for o in (of_torch, optimizer)
    )
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    optimizer.param_groups[0]["bias_correction"] = False
    with pytest.raises(vcore_ds.UserError, match=f"optimizer: found {kind.__name__} with bias_correction false"):
        vcore_ds.probe_direction(model, BATCHES[:1], optimizer=optimizer)
    optimizer.adam_w_mode = False
    with pytest.raises(vcore_ds.UserError, match=f"optimizer: found {kind.__name__} with weight_decay 0.1"):
        vcore_ds.probe_direction(model, BATCHES[:1], optimizer=optimizer)


def assert_direction_is_new(vcore: vcore_ds.VcoreLoss, model: Model, optimizer: Optimizer | None) -> None:
    """The call's direction must be that of a new object."""
    vcore(model, BATCHES[1], optimizer)
    assert vcore.direction is not None
    expected = vcore_ds.probe_direction(model, BATCHES[:1], optimizer=optimizer, clip=1.0).gradient
    assert expected.keys() == vcore.direction.gradient.keys()
    assert all(torch.equal(v, vcore.direction.gradient[name]) for name, v in expected.items())


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_another_training_begins_with_another_direction(has_optimizer: bool) -> None:
    vcore = vcore_ds.VcoreLoss(BATCHES[:1], every=4)
    for rate in (1e-3, 1e-2):
        model = tiny.qwen3().train()
        model.get_input_embeddings().weight.data.mul_(1 + 100 * rate)
        optimizer = AdamW(model.parameters(), lr=rate)
        assert_direction_is_new(vcore, model, optimizer if has_optimizer else None)
        direction = vcore.direction
        for _ in range(3):
            take_step(model, optimizer)
        vcore(model, BATCHES[1], optimizer if has_optimizer else None)
        assert vcore.direction is direction  # for four steps
    bad = nn.Linear(2, 2)
    with pytest.raises(vcore_ds.UserError, match="found a Linear"):
        vcore(bad, BATCHES[1])


def test_a_training_that_is_rolled_back_or_trains_other_parameters_has_another_direction() -> None:
    vcore, model = vcore_ds.VcoreLoss(BATCHES[:1], every=4), tiny.qwen3().train()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        take_step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(3):
        take_step(model, optimizer)
    vcore(model, BATCHES[1], optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_direction_is_new(vcore, model, optimizer)
    model.get_input_embeddings().requires_grad_(False)
    assert_direction_is_new(vcore, model, optimizer)
    assert_direction_is_new(vcore, model, AdamW(model.parameters(), lr=1e-2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_layers_that_are_compiled_one_by_one_change_nothing(backend: str) -> None:
    expected: list[Tensor] = []
    for is_compiled in (False, True):
        model, batch = tiny.qwen3().train(), BATCHES[0]
        if is_compiled:
            for layer in model.model.layers:
                layer.compile(backend=backend)
        probe = vcore_ds.probe_direction(model, BATCHES[1:])
        utilities = vcore_ds.token_utilities(model, batch, probe)
        loss = vcore_ds.VcoreLoss(BATCHES[1:])(model, batch)
        loss.backward()
        weight = model.model.layers[0].mlp.up_proj.weight
        results = [utilities, *probe.gradient.values(), loss.detach(), weight.grad]
        if is_compiled:
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
        expected = results
