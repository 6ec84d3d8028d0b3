"""`vcore_ds.VcoreLoss` on replicas of a model (DDP) and on its shards (DeepSpeed): the step of one process on all
sequences."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import vcore_ds
from tests.helpers import tiny
from tests.helpers.collectives import list_collectives
from tests.helpers.ranks import run_ranks
from vcore_ds.distributed import layout

NUM_STEPS = 5


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40},
}


def take_steps(rank: int | None, world_size: int = 2, *, is_sharded: bool = False, lora: bool = False) -> list[Tensor]:
    """Train on this rank's sequences, in two parts per step; None for one process with all of them. Returns alpha, loss
    and the norm of the direction of each part, and at last the parameters.

    In the second step the second rank has no supervised token, in the fourth one of its two sequences has none. The
    second probe has no sequence for the second rank, the third one only one without supervised tokens.
    """
    model = (tiny.with_lora(tiny.qwen3()) if lora else tiny.qwen3()).train()
    # Several groups of parameters, as other trainers have for weight decay.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}], lr=1e-3)
    rows = slice(None) if rank is None else slice(rank, None, world_size)

    def take_rows(seed: int, without_tokens: Iterable[int] = ()) -> dict[str, Tensor]:
        batch = tiny.make_batch(4, seed=seed)
        batch.labels[[*without_tokens]] = -100
        return {"input_ids": batch.input_ids[rows], "labels": batch.labels[rows]}

    def iterate_probes() -> Iterator[list[dict[str, Tensor]]]:
        yield [take_rows(7)]
        yield [] if rank == 1 else [take_rows(8, (1, 3))]
        yield [take_rows(9, (1, 3))]

    vcore = vcore_ds.VcoreLoss(iterate_probes().__next__, kl_budget=0.5, every=2)
    replica: Any = model
    if is_sharded:
        if lora:  # peft leaves the inputs of the first layer without a gradient
            model.get_base_model().disable_input_require_grads()
        vcore_ds.prepare_zero3(model)
        config = copy.deepcopy(DEEPSPEED)
        if lora:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        replica, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    elif rank is not None:
        replica = DistributedDataParallel(model)
    results = []
    without_tokens = {1: (1, 3), 3: (3,)}
    for step in range(NUM_STEPS):
        for part in range(2):
            batch = take_rows(2 * step + part, without_tokens.get(step, ()))
            if is_sharded:
                before = replica(**take_rows(50)).logits
                if part == 1:  # a probe while DeepSpeed has the gradient of the first part
                    vcore_ds.VcoreLoss([take_rows(60)])(replica, batch)
                loss = vcore(replica, batch, replica.optimizer)
                assert torch.equal(before, replica(**take_rows(50)).logits)
                replica.backward(loss)
                replica.step()  # at the second part
            else:
                (vcore(replica, batch, optimizer) / 2).backward()
            assert vcore.direction is not None
            squares = torch.stack([v.double().square().sum() for v in vcore.direction.gradient.values()]).sum()
            if is_sharded:
                torch.distributed.all_reduce(squares)
            results.append(torch.stack([vcore.alpha, vcore.uniform_loss, squares.sqrt().float()]).detach())
        if not is_sharded:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(vcore_ds.UserError, match="batch: found no supervised token"):  # on all ranks alike
        vcore(replica, take_rows(0, range(4)), optimizer)
    assert vcore_ds.VcoreLoss([take_rows(7)])(replica, take_rows(1), optimizer).isfinite()
    with deepspeed.zero.GatheredParameters(parameters) if is_sharded else nullcontext():
        results.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    if is_sharded:
        replica.destroy()
    return results


def refuse() -> None:
    """Engines of DeepSpeed, and models without one, that have one message, before any collective."""
    rows = tiny.make_batch(2)
    batch = {"input_ids": rows.input_ids, "labels": rows.labels}

    def check(model: Any, message: str) -> None:
        before = len(list_collectives())
        with pytest.raises(vcore_ds.UserError, match=message):
            vcore_ds.VcoreLoss([batch])(model, batch, getattr(model, "optimizer", None))
        assert before and len(list_collectives()) == before

    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 40}
    cases: dict[str, dict[str, Any]] = {
        "zero_optimization.stage: found 1": {"zero_optimization": {"stage": 1}},
        "zero_optimization.stage: found 2": {"zero_optimization": {"stage": 2}},
        "fp16: found true": {"fp16": {"enabled": True, "initial_scale_power": 4}},
        "zero_optimization.offload_param: found": {"zero_optimization": zero | {"offload_param": {"device": "cpu"}}},
        "sequence_parallel_size: found 2": {"sequence_parallel_size": 2, "data_parallel_size": 1},
        "quantized weights .*bitsandbytes": {},
        "Call `vcore_ds.prepare_zero3": {},
    }
    for message, changes in cases.items():
        model: Any = tiny.qwen3().train()
        if "quantized" in message:
            model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
        if "prepare_zero3" not in message:
            vcore_ds.prepare_zero3(model)
        with patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):  # not on every CPU
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=AdamW(model.parameters()), config=DEEPSPEED | changes, dist_init_required=False
            )
        check(engine, message)
        if not changes:
            check(engine.module, "that DeepSpeed has sharded")
        engine.destroy()
        deepspeed.utils.groups.mesh_device = None
    check(fully_shard(tiny.qwen3().train()), "FSDP")


def take_steps_of_rank() -> list[list[Tensor]]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    with patch.object(layout, "_meshes", {}):  # as in another trainer's process group, which this project did not start
        rank = torch.distributed.get_rank()
        refuse()
        sharded = [take_steps(rank, is_sharded=True, lora=lora) for lora in (False, True)]
        return [take_steps(rank), *sharded]


def test_replicas_and_shards_take_the_steps_of_one_process() -> None:
    full, lora = take_steps(None), take_steps(None, lora=True)
    assert not torch.equal(full[0][2], full[4][2]) and torch.equal(full[0][2], full[3][2])
    for of_rank in run_ranks(take_steps_of_rank, 2):
        for steps, expected in zip(of_rank, (full, full, lora), strict=True):
            for step, wanted in zip(steps[:-1], expected[:-1], strict=True):
                torch.testing.assert_close(step, wanted, rtol=1e-5, atol=0)
            torch.testing.assert_close(steps[-1], expected[-1], rtol=0, atol=1e-5)
