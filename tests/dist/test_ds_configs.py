"""Training with every shipped file of ds_configs/ against the plain one: where shards lie changes no result."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import groups

from tests.gpu.node.steps import read_files
from tests.gpu.parts import RESULTS, STEPS
from tests.helpers import step_runs, tiny
from tests.helpers.commands import run_command
from tests.helpers.ranks import run_ranks
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.setup import build_engine

pytestmark = pytest.mark.dist

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
PLAIN = {"bf16": "zero3_bf16", "fp32": "zero3_fp32"}
ESTIMATORS = {"jvp": {}, "finite_difference": {"estimator": "finite_difference", "epsilon": 5.0}}
CASES = [("jvp", False), ("finite_difference", True)]
"""Estimator, and whether adapters are trained."""
BF16_ALONE = ("zero3_bf16", "zero3_bf16_large", "zero3_bf16_sequential")
"""Files that put shards where the plain file does: training them in fp32 would show nothing more."""
BF16_CASES = CASES[:1]
SIZES = dict(hidden_size=128, intermediate_size=1024, vocab_size=1024)
"""Matrices above and below `stage3_param_persistence_threshold`: the large ones are all-gathered and released."""


@dataclass
class Outcome:
    losses: list[float]
    gradient_norms: list[float]
    utilities: torch.Tensor
    parameters: dict[str, torch.Tensor]
    offloads: tuple[str, str]
    """Devices of optimizer and parameters that DeepSpeed uses."""
    num_persistent: int
    num_trainable: int
    num_coalesced: int
    """All-gathers of several parameters, which DeepSpeed copies out of the gathered buffer in Python."""


def make_recipe(model: str, json_file: str, precision: str, estimator: str, lora: bool) -> Recipe:
    return step_runs.make_recipe(
        model={"path": model, "precision": precision},
        engine={"deepspeed_config": json_file},
        batch={"global_size": 8, "micro_batch_size_per_rank": 2},
        # Clipping that is in effect: with an offloaded optimizer DeepSpeed clips by norms that alpha must change too.
        optimizer={"learning_rate": step_runs.LEARNING_RATE, "gradient_clipping": 0.05},
        probe={"direction": "adam"},  # reads the optimizer's moments
        utility=ESTIMATORS[estimator],
        lora={"rank": 4, "alpha": 8, "dropout": 0.0} if lora else None,
    )


def train_two_steps(model: str, json_file: str, precision: str, estimator: str, lora: bool) -> Outcome:
    recipe = make_recipe(model, json_file, precision, estimator, lora)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed makes it once a process, which here starts many engines
    settings = derive_plan_settings(recipe)
    config = deepspeed_config(settings, plan_batch(settings, layout.size("shards"), QWEN3_32B))
    engine = build_engine(derive_plan_settings(recipe), config)
    estimator = step_runs.make_estimator(recipe, engine)
    losses, norms, utilities = [], [], []
    handle = partition_parameters.AllGatherCoalescedHandle
    with patch.object(handle, "wait", autospec=True, side_effect=handle.wait) as waits:
        for k in range(2):
            main, probe = tiny.make_batch(8, seed=k), tiny.make_batch(4, seed=50 + k)
            batches = StepBatches(step_runs.deal(main, 2), step_runs.deal(probe, 2))
            recorded = step_runs.Recorder(engine)
            metrics = step_runs.train_step(engine, recipe, batches, estimator, recorded)
            losses.append(metrics.values["loss"])
            norms.append(metrics.values["grad_norm"])
            utilities += [result.tokens.utilities for result in recorded.results]
    outcome = Outcome(
        losses,
        norms,
        torch.cat(utilities),
        step_runs.gather_parameters(engine),
        find_offload_devices(engine),
        sum(parameter.ds_persist for _, parameter in engine.trainable),
        len(engine.trainable),
        waits.call_count,
    )
    engine.close()
    return outcome


def find_offload_devices(engine: Engine) -> tuple[str, str]:
    sections = (engine.deepspeed.zero_offload_optimizer(), engine.deepspeed.zero_offload_param())
    return tuple("none" if section is None else OffloadDeviceEnum(section.device).value for section in sections)


def train_with_every_file(model: str, json_files: dict[tuple[str, str], str]) -> dict[tuple, Outcome]:
    """Train in every case; in bf16 in one of them, as fp32 has the others and shows more."""
    return {
        (name, precision, estimator, lora): train_two_steps(model, json_file, precision, estimator, lora)
        for (name, precision), json_file in json_files.items()
        for estimator, lora in (BF16_CASES if precision == "bf16" else CASES)
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.qwen3(**SIZES).save_pretrained(folder)
    return str(folder)


def list_files(folder: Path) -> dict[tuple[str, str], str]:
    """(name, precision) -> file: every file as shipped, and those that put shards elsewhere also in fp32, where
    differences cannot drown in rounding."""
    files = {}
    for name in FILES:
        path = FOLDER / f"{name}.json"
        content = json.loads(path.read_text())
        precision = "bf16" if content["bf16"]["enabled"] else "fp32"
        files[name, precision] = str(path)
        if precision == "bf16" and name not in BF16_ALONE:
            del content["bf16"]
            (folder / path.name).write_text(json.dumps(content))
            files[name, "fp32"] = str(folder / path.name)
    return files


@pytest.fixture(scope="module")
def outcomes(model, tmp_path_factory) -> dict[tuple, Outcome]:
    files = list_files(tmp_path_factory.mktemp("json"))
    return run_ranks(train_with_every_file, 2, model, files)[0]


def assert_same(outcome: Outcome, plain: Outcome, precision: str) -> None:
    """Compare with the plain file's outcome.

    The arithmetic is the same, but for norms: with an offloaded optimizer DeepSpeed sums them in another order, and
    the clipping factor's last bit changes. Adam's first update is nearly the gradient's sign, so where a gradient is
    near zero the parameter moves by more than a bit. A copy that a perturbation did not reach gives utilities that are
    0, a norm that alpha did not reach another update: deviations of 0.1 and more.
    """
    tolerance = {"fp32": 2e-3, "bf16": 1e-2}[precision]
    assert float(plain.utilities.abs().max()) > 0.1
    deviations = {
        "losses": max(abs(a / b - 1) for a, b in zip(outcome.losses, plain.losses, strict=True)),
        "gradient norms": max(
            abs(a / b - 1) for a, b in zip(outcome.gradient_norms, plain.gradient_norms, strict=True)
        ),
        "utilities": step_runs.relative_error(outcome.utilities, plain.utilities),
        "parameters": max(step_runs.relative_error(outcome.parameters[n], p) for n, p in plain.parameters.items()),
    }
    print({quantity: f"{deviation:.1e}" for quantity, deviation in deviations.items()})
    assert max(deviations.values()) < tolerance, deviations


@pytest.mark.parametrize(
    ("name", "estimator", "lora"),
    [(name, *case) for name in FILES for case in (BF16_CASES if name in BF16_ALONE else CASES)],
)
def test_every_file_trains_as_the_plain_one_does(outcomes, name, estimator, lora):
    precisions = [precision for precision in PLAIN if (name, precision, estimator, lora) in outcomes]
    assert precisions
    for precision in precisions:
        plain = outcomes[PLAIN[precision], precision, estimator, lora]
        assert_same(outcomes[name, precision, estimator, lora], plain, precision)


@pytest.mark.parametrize(("estimator", "lora"), BF16_CASES)
def test_sequential_all_gathers_change_no_bit(outcomes, estimator, lora):
    sequential, plain = (outcomes[f"zero3_bf16_{name}", "bf16", estimator, lora] for name in ("sequential", "large"))
    assert sequential.num_coalesced == 0 < plain.num_coalesced
    assert (sequential.losses, sequential.gradient_norms) == (plain.losses, plain.gradient_norms)
    assert torch.equal(sequential.utilities, plain.utilities)
    assert sequential.parameters.keys() == plain.parameters.keys()
    assert all(torch.equal(sequential.parameters[name], parameter) for name, parameter in plain.parameters.items())


@pytest.mark.parametrize(
    ("name", "optimizer", "parameters"),
    [
        ("zero3_bf16", "none", "none"),
        ("zero3_bf16_offload_optimizer", "cpu", "none"),
        ("zero3_bf16_offload_all", "cpu", "cpu"),
    ],
)
def test_offloading_is_in_effect(outcomes, name, optimizer, parameters):
    outcome = outcomes[name, "bf16", "jvp", False]
    assert outcome.offloads == (optimizer, parameters)
    assert 0 < outcome.num_persistent < outcome.num_trainable
    assert min(outcome.gradient_norms) > 0.05  # clipped


CASES_ON_NODES = ("Ulysses 2", "tensor 2", "expert 2", *read_files())
"""Cases of `tests.gpu.node.steps`: every kind of parallelism, every file."""


@pytest.fixture(scope="module")
def on_four_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by case of steps on four ranks, which are a node each and started separately: those that are forked from
    one process have the same memory addresses, by which Python orders its sets."""
    folder = tmp_path_factory.mktemp("nodes")
    cases = shlex.join(CASES_ON_NODES)
    done = run_command(f"env {RESULTS}={folder} python -m tests.gpu.node.loopback 4 -m {STEPS} --only {cases}")
    assert done.returncode in (0, 1) and (folder / "steps_4").is_dir(), done.stdout
    return {row["case"]: row for row in json.loads((folder / "steps_4" / "results.json").read_text())["rows"]}


def test_all_ranks_start_their_collectives_in_one_order(on_four_nodes):
    """On all communicators together, which NCCL demands and gloo does not."""
    assert {name: row["in another order"] for name, row in on_four_nodes.items()} == dict.fromkeys(CASES_ON_NODES, 0)
    assert all(row["collectives"] > 100 for row in on_four_nodes.values())


@pytest.mark.parametrize("name", CASES_ON_NODES)
def test_steps_on_four_nodes_equal_the_oracles(on_four_nodes, name):
    assert on_four_nodes[name]["result"] == "passed", on_four_nodes[name]
