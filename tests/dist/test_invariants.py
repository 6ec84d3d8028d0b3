"""Invariants: shards after a perturbation, frozen weights, the optimizer after a probe, results in any rank layout."""

import gc

import pytest
import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed import layout
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.followed import FollowedTraces, measure_followed
from vcore_ds.training.setup import build_engine
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import compute_jvp_utilities, perturb_parameters

pytestmark = pytest.mark.dist


def copy_shards(engine) -> bytes:
    """Bytes of this rank's shards of all parameters, frozen ones included."""
    shards = [p.ds_tensor.data.contiguous().view(torch.uint8) for p in engine.module.parameters()]
    return torch.cat([shard.flatten() for shard in shards]).numpy().tobytes()


def copy_optimizer_state(engine) -> bytes:
    """Bytes of master parameters, both moments, and step counters."""
    parts = []
    for _, parameter in engine.trainable:
        parts.append(safe_get_local_fp32_param(parameter).detach().numpy().tobytes())
        parts += [safe_get_local_optimizer_state(parameter, key).numpy().tobytes() for key in ("exp_avg", "exp_avg_sq")]
    steps = [state.get("step") for state in engine.optimizer.optimizer.state.values()]
    return b"".join(parts) + repr((steps, engine.deepspeed.global_steps, engine.deepspeed.micro_steps)).encode()


def make_batches(estimator, seed: int) -> StepBatches:
    main, probe = tiny.make_batch(8, seed=seed), tiny.make_batch(4, seed=seed + 100)
    return StepBatches(step_runs.deal(main, 2), step_runs.deal(probe, 2) if estimator.direction is not None else [])


def take_step(engine, recipe, estimator, seed: int = 7, learning_rate: float = 1e-3, **kwargs):
    batches = make_batches(estimator, seed)
    return step_runs.train_step(engine, recipe, batches, estimator, learning_rate=learning_rate, **kwargs)


def make_engine(folder: str | None, bf16: bool, lora: bool):
    """Make an engine for a model in memory, or for one loaded from `folder` as in a run (its adapters stay in fp32)."""
    model = {"path": folder or "none", "precision": "bf16" if bf16 else "fp32"}
    recipe = step_runs.make_recipe(model=model, lora={"rank": 4, "alpha": 8} if lora else None)
    if folder is not None:
        return recipe, build_engine(
            derive_plan_settings(recipe), tiny.deepspeed_config(bf16=bf16, persistence_threshold=500)
        )
    return recipe, step_runs.make_engine(tiny.token_loss_model(lora=lora), recipe, persistence_threshold=500)


PERTURBED = [(False, False, False), (False, True, True), (True, False, True), (True, True, False)]
"""Whether a model is loaded from a folder, in bf16, with adapters: every pair of settings."""


def check_perturbation(folder: str | None, bf16: bool, lora: bool) -> dict[str, object]:
    recipe, engine = make_engine(folder, bf16, lora)
    estimator = step_runs.make_estimator(recipe, engine)
    direction = estimator.direction
    take_step(engine, recipe, estimator)  # masters that are no longer values of the parameter dtype
    batch = step_runs.deal(tiny.make_batch(4), 2)[0]
    before = copy_shards(engine)
    with engine.without_gradient():
        losses_before = engine.token_losses(batch)
        with perturb_parameters(engine, direction, 0.5) as changed_fraction:
            losses_inside = engine.token_losses(batch)
            bytes_inside = copy_shards(engine)
        losses_after = engine.token_losses(batch)
    raised = False
    try:
        with perturb_parameters(engine, direction, 0.5):
            raise KeyError("the body fails")
    except KeyError:
        raised = True
    result = dict(
        restored=copy_shards(engine) == before,
        was_moved=bytes_inside != before and not torch.equal(losses_inside, losses_before),
        same_losses=torch.equal(losses_after, losses_before),
        raised=raised,
        changed_fraction=changed_fraction,
    )
    engine.close()
    return result


def check_probe_leaves_the_engine_alone() -> dict[str, bool]:
    """Compare the states of an engine with a probe and forward-mode passes in its steps with those of one without."""
    recipe = step_runs.make_recipe(method={"name": "sft"})
    results = {}
    for coalesce in (False, True):
        states = []
        for with_probe in (False, True):
            engine = step_runs.make_engine(tiny.token_loss_model(), recipe, coalesce=coalesce)
            direction = Direction(engine)
            for k in range(2):
                if with_probe:
                    probe = step_runs.deal(tiny.make_batch(4, seed=60 + k), 2)
                    before = copy_optimizer_state(engine) if k else b""
                    direction.compute(probe, normalization="sequence", clip=None)
                    compute_jvp_utilities(engine, direction, probe, 1)
                    with perturb_parameters(engine, direction, 1e-2), engine.without_gradient():
                        engine.token_losses(probe[0])
                    if k:
                        name = f"optimizer untouched, coalesce={coalesce}, step {k}"
                        results[name] = before == copy_optimizer_state(engine)
                take_step(engine, recipe, step_runs.make_estimator(recipe, engine), seed=k)
            states.append(copy_optimizer_state(engine) + copy_shards(engine))
            engine.close()
        results[f"same run with and without probe, coalesce={coalesce}"] = states[0] == states[1]
    return results


FOLLOWING: dict[str, dict] = {
    "sft": {"method": {"name": "sft"}},
    "jvp, fused": {"utility": {"fused": True}, "probe": {"direction": "adam"}},
    "finite difference": {
        "utility": {"estimator": "finite_difference", "epsilon": "auto", "rounding": "stochastic"},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.2},
        "model": {"path": "none", "precision": "bf16"},
    },
}


def check_following(name: str) -> dict[str, bool]:
    """Compare the states of a run that follows traces with those of one that does not; the last case has dropout."""
    recipe = step_runs.make_recipe(**FOLLOWING[name])
    is_bf16, has_lora = recipe.model.precision == "bf16", recipe.lora is not None
    states, directions = [], []
    for follows in (False, True):
        model = tiny.token_loss_model(
            lora=has_lora, dropout=0.2 if has_lora else 0.0, dtype=torch.bfloat16 if is_bf16 else torch.float32
        )
        engine = step_runs.make_engine(model, recipe)
        estimator = step_runs.make_estimator(recipe, engine)
        torch.manual_seed(5)
        traces = FollowedTraces(
            [("training data", i) for i in range(3)], step_runs.deal(tiny.make_batch(3, seed=90), 2)
        )
        for k in range(2):  # a finite difference searches for epsilon in the first step, and keeps it
            batches = make_batches(estimator, seed=k)
            options = dict(learning_rate=1e-3, measure_noise=k == 0 and "finite" in name, seed=k)
            metrics = step_runs.train_step(engine, recipe, batches, estimator, **options)
            if follows:
                assert measure_followed(engine, recipe.method, traces, estimator, seed=k)
        numbers = [value for key, value in metrics.values.items() if not key.startswith(("seconds", "peak", "superv"))]
        vector = [] if estimator.direction is None else [buffer.clone() for buffer in estimator.direction.buffers]
        states.append(
            (
                copy_optimizer_state(engine),
                copy_shards(engine),
                estimator.state(),
                torch.get_rng_state().tolist(),
                numbers,
            )
        )
        directions.append(vector)
        engine.close()
    same = [a == b for a, b in zip(*states, strict=True)]
    same += [torch.equal(a, b) for a, b in zip(*directions, strict=True)]
    return {f"{name}, {i}": ok for i, ok in enumerate(same)}


def check_lora_base(folder: str | None) -> dict[str, bool]:
    recipe, engine = make_engine(folder, bf16=True, lora=True)
    trained = {id(p) for _, p in engine.trainable}

    def split() -> tuple[list[bytes], list[bytes]]:
        halves: tuple[list[bytes], list[bytes]] = ([], [])
        for parameter in engine.module.parameters():
            halves[id(parameter) in trained].append(parameter.ds_tensor.data.view(torch.uint8).numpy().tobytes())
        return halves

    base_before, adapters_before = split()
    for k in range(2):
        take_step(engine, recipe, step_runs.make_estimator(recipe, engine), seed=k)
    base_after, adapters_after = split()
    engine.close()
    return dict(base_same=base_before == base_after, adapters_moved=adapters_before != adapters_after)


def check_zero_temperature_is_sft() -> dict[str, bool]:
    results = {}
    for normalization in ("sequence", "token"):
        states = []
        for method in ({"name": "sft"}, {"temperature": 0.0, "alpha": "none"}):
            recipe = step_runs.make_recipe(method={**method, "normalization": normalization})
            engine = step_runs.make_engine(tiny.token_loss_model(), recipe)
            estimator = step_runs.make_estimator(recipe, engine)
            losses = [take_step(engine, recipe, estimator, seed=k).values["loss"] for k in range(2)]
            states.append((copy_shards(engine), losses))
            engine.close()
        results[normalization] = states[0] == states[1]
    return results


class HookedByModule(TokenLossModel):
    """A model with ZeRO-3 hooks on every module instead of one pair per decoder layer: only so is an adapted layer
    all-gathered by itself."""

    layers = ()


def check_all_gathers_by_module() -> dict[str, float]:
    """Relative differences from decoder layers that are all-gathered as one. The hooks change the order in which bf16
    gradients are summed, and nothing else."""
    recipe = step_runs.make_recipe(model={"path": "none", "precision": "bf16"})
    measured = []
    for wrapper in (TokenLossModel, HookedByModule):
        engine = step_runs.make_engine(wrapper(tiny.with_lora(tiny.qwen3())).train(), recipe)
        direction = Direction(engine)
        batch = step_runs.deal(tiny.make_batch(4), 2)[0]
        direction.compute([batch], normalization="sequence", clip=None)
        gradient = torch.cat(step_runs.without_padding(engine, engine.shards.gradients()))
        (utilities,) = compute_jvp_utilities(engine, direction, [batch])
        with engine.without_gradient():
            losses = engine.token_losses(batch)
            with engine.without_adapters():
                base_losses = engine.token_losses(batch)
        measured.append({"losses": losses, "base": base_losses, "gradient": gradient, "utilities": utilities})
        engine.close()
    return {name: step_runs.relative_error(measured[1][name], value) for name, value in measured[0].items()}


def count_live_tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        if isinstance(candidate, torch.Tensor) and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def check_persistent_bytes(bf16: bool, rank: int | None = None) -> dict[str, int]:
    """Bytes that stay alive between steps: after two steps of SFT, then two of VCORE, on the same engine."""
    precision = {"path": "none", "precision": "bf16" if bf16 else "fp32"}
    sft = step_runs.make_recipe(model=precision, method={"name": "sft"})
    vcore = step_runs.make_recipe(model=precision, probe={"rank": rank})
    model = tiny.token_loss_model(hidden_size=64, intermediate_size=256)
    engine = step_runs.make_engine(model, sft)
    for k in range(2):
        take_step(engine, sft, step_runs.make_estimator(sft, engine), seed=k)
    sft_bytes = count_live_tensor_bytes()
    estimator = step_runs.make_estimator(vcore, engine)
    for k in range(2):
        take_step(engine, vcore, estimator, seed=k)
    vcore_bytes = count_live_tensor_bytes()
    shard = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for _, p in engine.trainable)
    result = dict(
        extra=vcore_bytes - sft_bytes, one_shard=shard, direction=estimator.direction.persistent_bytes, sft=sft_bytes
    )
    engine.close()
    return result


def check_everything(folder: str) -> dict[str, object]:
    return {
        "perturbation": {
            (is_loaded, bf16, lora): check_perturbation(folder if is_loaded else None, bf16, lora)
            for is_loaded, bf16, lora in PERTURBED
        },
        "probe": check_probe_leaves_the_engine_alone(),
        "following": {key: ok for name in FOLLOWING for key, ok in check_following(name).items()},
        "lora": {source is not None: check_lora_base(source) for source in (None, folder)},
        "all-gathers by module": check_all_gathers_by_module(),
        "zero_temperature": check_zero_temperature_is_sft(),
        "bytes": {bf16: check_persistent_bytes(bf16) for bf16 in (False, True)},
        "bytes with a low rank": check_persistent_bytes(True, rank=2),
    }


@pytest.fixture(scope="module")
def checks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("model")
    tiny.qwen3().save_pretrained(folder)
    return run_ranks(check_everything, 2, str(folder))


@pytest.mark.parametrize(("loaded", "bf16", "lora"), PERTURBED)
def test_a_perturbation_is_undone_bit_for_bit(checks, loaded, bf16, lora):
    for rank_checks in checks:
        measured = rank_checks["perturbation"][loaded, bf16, lora]
        assert measured["was_moved"] and measured["raised"]
        assert measured["restored"] and measured["same_losses"]
        assert 0.2 < measured["changed_fraction"] <= 1.0


def test_a_probe_touches_neither_optimizer_nor_counters_nor_the_next_gradient(checks):
    for rank_checks in checks:
        assert all(rank_checks["probe"].values()), rank_checks["probe"]


def test_followed_traces_change_no_bit_of_training(checks):
    for rank_checks in checks:
        assert len(rank_checks["following"]) >= 5 * len(FOLLOWING)
        assert all(rank_checks["following"].values()), rank_checks["following"]


def test_base_weights_are_the_same_bytes_after_a_lora_run(checks):
    for rank_checks in checks:
        for loaded in (False, True):
            assert rank_checks["lora"][loaded] == dict(base_same=True, adapters_moved=True)


def test_an_adapted_layer_computes_the_same_when_all_gathered_by_itself(checks):
    for rank_checks in checks:
        measured = rank_checks["all-gathers by module"]
        assert measured["losses"] == measured["base"] == 0.0
        assert measured["gradient"] < 0.02 and measured["utilities"] < 0.02, measured


def test_zero_temperature_without_alpha_is_sft_bit_for_bit(checks):
    for rank_checks in checks:
        assert rank_checks["zero_temperature"] == {"sequence": True, "token": True}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_vcore_keeps_at_most_one_shard_more_than_sft(checks, bf16):
    for rank, rank_checks in enumerate(checks):
        measured = rank_checks["bytes"][bf16]
        print(f"rank {rank}: {measured}")
        assert measured["direction"] <= measured["one_shard"]
        assert 0 < measured["extra"] <= measured["one_shard"]


def test_a_low_rank_direction_keeps_no_shard(checks):
    """Neither Python nor a view keeps the shard alive; the factors, which every rank has, are smaller."""
    for rank_checks in checks:
        measured = rank_checks["bytes with a low rank"]
        assert measured["direction"] < 0.5 * measured["one_shard"]
        assert 0 < measured["extra"] <= measured["direction"] + 0.05 * measured["one_shard"]


def train_in_layout(micro_batch_size: int) -> dict[str, torch.Tensor]:
    """Two VCORE steps over the same global batches of 4 sequences; returns the parameters."""
    recipe = step_runs.make_recipe(optimizer={"learning_rate": 1e-3})
    engine = step_runs.make_engine(tiny.token_loss_model(tied=True), recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    for k in range(2):
        main, probe = tiny.make_batch(4, seed=k), tiny.make_batch(4, seed=200 + k)
        batches = StepBatches(step_runs.deal(main, micro_batch_size), step_runs.deal(probe, micro_batch_size))
        assert len(batches.main) == 4 // layout.size("shards")
        step_runs.train_step(engine, recipe, batches, estimator, learning_rate=1e-4)
    parameters = step_runs.gather_parameters(engine)
    engine.close()
    return parameters


def test_parameters_do_not_depend_on_the_layout_of_a_global_batch():
    """1 rank x 4 micro-batches, 4 x 1; test_step_parity.py has two ranks."""
    one, four = (run_ranks(train_in_layout, world_size, 1)[0] for world_size in (1, 4))
    for name, parameter in four.items():
        deviation = float((parameter - one[name]).abs().max())
        assert deviation < 1e-6, f"{name} differs by {deviation}"
