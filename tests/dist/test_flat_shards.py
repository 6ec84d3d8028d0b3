"""Operations on flat shards against the same on one parameter at a time, through DeepSpeed's public functions.

Odd sizes give the last ranks padding, weight decay gives two parameter groups, and small sub-groups divide those.
"""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
)
from torch import Tensor

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout
from vcore_ds.engine import flat_shards
from vcore_ds.engine.flat_shards import iterate_chunks
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.method.optimizers import AdamStep, adam_direction, blend_momentum, muon_direction, muon_update
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import perturb_parameters

pytestmark = pytest.mark.dist

CLIP = 0.01
OFFLOADS = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
CASES = [
    (False, False, "none", "adamw", False),
    (False, True, "none", "adamw", True),
    (True, True, "none", "adamw", False),
    (True, False, "optimizer", "adamw", False),
    (False, True, "optimizer", "adamw", True),
    (False, True, "all", "adamw", False),
    (False, False, "none", "sgd", False),
    (False, True, "none", "muon", True),
    (False, False, "optimizer", "muon", False),
]
"""(LoRA, bf16, offloaded states, optimizer, coalesced reduction)"""


def make_engine(lora: bool, bf16: bool, offload: str, optimizer: str, coalesce: bool) -> Engine:
    recipe = step_runs.make_recipe(
        model={"path": "none", "precision": "bf16" if bf16 else "fp32"},
        optimizer={"name": optimizer, "learning_rate": 1e-2, "weight_decay": 0.1},
    )
    model = tiny.token_loss_model(lora=lora, hidden_size=31, intermediate_size=65)
    config = tiny.deepspeed_config(bf16=bf16, gradient_clipping=0.05, persistence_threshold=500)
    config["zero_force_ds_cpu_optimizer"] = False
    config["zero_optimization"] |= {"sub_group_size": 3000, **{key: {"device": "cpu"} for key in OFFLOADS[offload]}}
    if (
        optimizer == "muon"
    ):  # DeepSpeed's Muon was silently inactive on a model built without zero.Init, whose parameters have no shape
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return Engine(model, build_optimizer(model, recipe.optimizer), config, coalesce_gradient_reduction=coalesce)


def accumulate(engine: Engine, seed: int) -> None:
    """Run two micro-batches forward and backward on each rank."""
    batches = step_runs.deal(tiny.make_batch(2 * layout.size("shards"), seed=seed), 1)
    with engine.accumulation(len(batches)):
        for batch in batches:
            engine.backward(engine.token_losses(batch).mean())


class OneByOne:
    """The same quantities parameter by parameter, each without padding."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def _without_padding(self, shards: dict[int, Tensor]) -> list[Tensor]:
        parameters = [parameter for _, parameter in self._engine.trainable]
        measured = []
        for parameter in parameters:
            start = layout.rank("shards") * parameter.ds_tensor.numel()
            measured.append(shards[id(parameter)].detach().view(-1)[: max(0, parameter.ds_numel - start)])
        return measured

    def get(self, getter, *arguments: Any) -> list[Tensor]:
        return self._without_padding({id(p): getter(p, *arguments) for _, p in self._engine.trainable})

    def norm(self, tensors: list[Tensor]) -> float:
        square = sum(float(tensor.double().square().sum()) for tensor in tensors)
        return layout.sum_over("shards", [square])[0] ** 0.5

    def direction(self, optimizer: str) -> list[Tensor]:
        """Direction of the gradient in the shards, clipped."""
        engine, gradients = self._engine, self.get(safe_get_local_grad)
        factor = min(1.0, CLIP / self.norm(gradients))
        dtype = engine.trainable[0][1].dtype
        if optimizer == "sgd":
            return [(gradient * factor).to(dtype) for gradient in gradients]
        settings = engine.optimizer.param_groups[0]
        step, betas, eps, beta = engine.num_updates + 1, settings["betas"], settings["eps"], settings.get("momentum")
        shards = {}
        for name, parameter in engine.trainable:
            if optimizer == "muon" and is_hidden_matrix(name):
                g, m = (get(parameter, *key).float() for get, *key in GRADIENT_AND_MOMENTUM)
                blend = blend_momentum(g * factor, m, beta).to(dtype)
                shards[id(parameter)] = take_shard(parameter, muon_direction(blend, (g * factor).to(dtype), beta))
                continue
            g, m, v = (get(parameter, *key) for get, *key in LOCAL_GRADIENT_AND_MOMENTS)
            shards[id(parameter)] = adam_direction(g * factor, m, v, AdamStep(step, betas, eps)).to(dtype)
        return self._without_padding(shards)

    def muon_update(self) -> dict[str, Tensor]:
        """Gathered hidden matrices after a step with the gradients in the shards, by name. A collective."""
        engine = self._engine
        dtype, group = engine.trainable[0][1].dtype, engine.optimizer.param_groups[0]
        factor = 1 / max(1.0, (self.norm(self.get(safe_get_local_grad)) + 1e-6) / 0.05)  # the clipping of the engine
        expected = {}
        for name, parameter in filter(lambda item: is_hidden_matrix(item[0]), engine.trainable):
            g, m = (get(parameter, *key).float() for get, *key in GRADIENT_AND_MOMENTUM)
            update = muon_update(blend_momentum(g * factor, m, group["momentum"]).to(dtype)).float()
            master = safe_get_full_fp32_param(parameter)
            expected[name] = master * (1 - 1e-2 * 0.1) - 1e-2 * update
        return expected

    def gather_masters(self) -> dict[str, Tensor]:
        """Gather the hidden matrices' masters, by name. A collective."""
        return {n: safe_get_full_fp32_param(p).clone() for n, p in self._engine.trainable if is_hidden_matrix(n)}

    def shards(self) -> list[Tensor]:
        """Copies of the parameters in the parameter dtype."""
        return self._without_padding({id(p): p.ds_tensor.data.clone() for _, p in self._engine.trainable})


GRADIENT_AND_MOMENTUM = ((safe_get_full_grad,), (safe_get_full_optimizer_state, "momentum_buffer"))
LOCAL_GRADIENT_AND_MOMENTS = (
    (safe_get_local_grad,),
    (safe_get_local_optimizer_state, "exp_avg"),
    (safe_get_local_optimizer_state, "exp_avg_sq"),
)


def is_hidden_matrix(name: str) -> bool:
    return ".layers." in name and name.endswith("_proj.weight")


def take_shard(parameter: torch.nn.Parameter, unsharded: Tensor) -> Tensor:
    """Take this rank's shard of an unsharded tensor."""
    numel = parameter.ds_tensor.numel()
    return unsharded.reshape(-1)[layout.rank("shards") * numel :][:numel]


def compute_error(measured: list[Tensor], expected: list[Tensor]) -> float:
    assert [tensor.shape for tensor in measured] == [tensor.shape for tensor in expected]
    return step_runs.relative_error(torch.cat(measured), torch.cat(expected))


def check_case(lora: bool, bf16: bool, offload: str, optimizer: str, coalesce: bool) -> dict[str, Any]:
    engine = make_engine(lora, bf16, offload, optimizer, coalesce)
    one_by_one, shards = OneByOne(engine), engine.shards
    accumulate(engine, seed=0)
    engine.step(1e-2)  # masters that are no longer values of the parameter dtype, and moments
    probe = step_runs.deal(tiny.make_batch(4, seed=9), 2)
    direction, errors = Direction(engine), {}
    for name in ("sgd", *{"adamw": ["adam"], "muon": ["muon"]}.get(optimizer, [])):
        direction.compute(probe, normalization="sequence", clip=CLIP, optimizer=name)
        errors[f"direction, {name}"] = compute_error(
            step_runs.without_padding(engine, direction.buffers), one_by_one.direction(name)
        )
        expected = one_by_one.norm(one_by_one.direction(name))
        errors[f"direction's norm, {name}"] = abs(direction.norm / expected - 1)

    before, v = one_by_one.shards(), step_runs.without_padding(engine, direction.buffers)
    masters = one_by_one.get(safe_get_local_fp32_param)
    epsilon = 0.3 * one_by_one.norm(masters) / direction.norm
    with perturb_parameters(engine, direction, epsilon) as changed_fraction:
        shifted = [m.sub(d.float(), alpha=epsilon).to(b.dtype) for m, d, b in zip(masters, v, before, strict=True)]
        errors["perturbed"] = compute_error(one_by_one.shards(), shifted)
        counts = [float(sum(map(torch.count_nonzero, map(torch.ne, one_by_one.shards(), before))))]
    counts.append(float(sum(tensor.numel() for tensor in before)))
    changed, total = layout.sum_over("shards", counts)
    restored = all(map(torch.equal, one_by_one.shards(), before))

    accumulate(engine, seed=1)
    gradients = one_by_one.get(safe_get_local_grad)
    errors["gradient"] = compute_error(step_runs.without_padding(engine, shards.gradients()), gradients)
    errors["gradient's norm"] = abs(engine.gradient_norm() / one_by_one.norm(gradients) - 1)
    errors["parameters' norm"] = abs(engine.shards.norm(engine.shards.masters()) / one_by_one.norm(masters) - 1)
    expected_gradients = [gradient * 0.7 for gradient in gradients]
    engine.shards.scale_gradient(0.7)
    errors["scaled gradient"] = compute_error(one_by_one.get(safe_get_local_grad), expected_gradients)
    vectors = [shards.parameters(), shards.masters(), shards.gradients(), direction.buffers]
    if optimizer == "adamw":
        vectors += [shards.optimizer_state(key) for key in ("exp_avg", "exp_avg_sq")]
    with_padding = [sum(map(torch.count_nonzero, vector)) for vector in vectors]
    without_padding = [sum(map(torch.count_nonzero, step_runs.without_padding(engine, vector))) for vector in vectors]
    if optimizer == "muon":
        before_step, expected_after = one_by_one.gather_masters(), one_by_one.muon_update()
    norm_clipped_with = engine.step(1e-2)
    if optimizer == "muon":
        after = one_by_one.gather_masters()
        errors["moved matrices"] = compute_error(
            [matrix.flatten() for matrix in after.values()], [matrix.flatten() for matrix in expected_after.values()]
        )
        assert len(after) == 14 and not any(torch.allclose(after[name], before_step[name]) for name in after)
    result = dict(
        errors=errors,
        norm_of_step=abs(norm_clipped_with / one_by_one.norm(expected_gradients) - 1),
        changed_fraction=(changed_fraction, changed / total),
        restored=restored,
        padding_nonzero=[int(a - b) for a, b in zip(with_padding, without_padding, strict=True)],
        num_padding=sum(p.ds_tensor.numel() - engine.shards.numel(p) for _, p in engine.trainable),
        num_sub_groups=len(shards.parameters()),
        parameters_are_views=all(
            shards.shard(shards.parameters(), p).data_ptr() == p.ds_tensor.data_ptr() for _, p in engine.trainable
        ),
        masters_are_copies=all(
            a.data_ptr() != b.data_ptr() for a, b in zip(shards.parameters(), shards.masters(), strict=True)
        ),
    )
    engine.close()
    return result


def check_all() -> dict[tuple, dict[str, Any]]:
    return {case: check_case(*case) for case in CASES}


@pytest.fixture(scope="module", params=[1, 4])
def checked(request: pytest.FixtureRequest) -> list[dict[tuple, dict[str, Any]]]:
    return run_ranks(check_all, request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flat_shards_give_the_results_of_single_parameters(checked, case) -> None:
    for result in checked:
        measured = result[case]
        rounded = ("perturbed", "moved matrices")
        exact = {
            name: value for name, value in measured["errors"].items() if "norm" not in name and name not in rounded
        }
        assert set(exact.values()) == {0.0}, exact
        norms = {name: value for name, value in measured["errors"].items() if "norm" in name}
        assert max(norms.values()) < 1e-12, norms
        # A shift may be rounded once (fused multiply-add) or twice, depending on an element's place in a vector
        # register; in bf16 a bit of fp32 decides between two neighbours only at a tie.
        assert measured["errors"]["perturbed"] < (1e-4 if case[1] else 1e-7)
        assert measured["errors"].get("moved matrices", 0.0) < 1e-6  # the norm that clips is in fp32
        assert measured["norm_of_step"] < 1e-6  # DeepSpeed returns it in fp32
        reported, counted = measured["changed_fraction"]
        assert reported == pytest.approx(counted, abs=1e-4) and 0 < reported <= 1
        assert measured["restored"] and measured["parameters_are_views"] and measured["masters_are_copies"]
        assert measured["num_sub_groups"] > 2 or case[0]  # adapters fit into one sub-group for each parameter group


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_is_zero(checked, case) -> None:
    measured = [result[case] for result in checked]
    num_padding = sum(result["num_padding"] for result in measured)
    # Adapters of rank 4 have a multiple of 4 elements, which any of these numbers of ranks divides.
    assert (num_padding > 0) == (len(measured) > 1 and not case[0])
    assert not any(number for result in measured for number in result["padding_nonzero"])


def test_chunks_cover_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flat_shards.CHUNK_NUMEL, "cpu", 4)
    first = [torch.arange(10.0), torch.arange(3.0)]
    second = [torch.zeros(10), torch.zeros(3)]
    sizes = []
    for part, copy in iterate_chunks(first, second):
        copy.copy_(part)
        sizes.append(len(part))
    assert sizes == [4, 4, 2, 3]
    assert all(map(torch.equal, first, second))
