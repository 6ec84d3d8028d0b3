"""Training with every shipped file of ds_configs/ against the plain one: where shards lie changes no result."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import groups

from tests.gpu.node import steps
from tests.gpu.node.loopback import GRACE_SECONDS, make_variables
from tests.gpu.node.steps import read_files
from tests.gpu.parts import RESULTS
from tests.helpers import step_runs, tiny
from tests.helpers.commands import REPOSITORY, command_environment, free_port, wait_until
from tests.helpers.jobs import become_rank
from tests.helpers.ranks import forkserver, run_ranks
from tests.helpers.soak import IS_SOAK
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
CASES = {
    "bf16": [("jvp", False)],
    "fp32": [("finite_difference", True), *([("jvp", False)] if IS_SOAK else [])],
}
"""Estimators by precision, and whether adapters are trained."""
BF16_ALONE = ("zero3_bf16", "zero3_bf16_large", "zero3_bf16_sequential")
"""Files that put shards where the plain file does: training them in fp32 would show nothing more."""
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
    return {
        (name, precision, estimator, lora): train_two_steps(model, json_file, precision, estimator, lora)
        for (name, precision), json_file in json_files.items()
        for estimator, lora in CASES[precision]
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
    ("name", "precision"),
    [
        *((name, "bf16") for name in FILES if name != PLAIN["fp32"]),
        *((name, "fp32") for name in FILES if name not in BF16_ALONE),
    ],
)
def test_every_file_trains_as_the_plain_one_does(outcomes, name, precision):
    cases = [case for case in outcomes if case[:2] == (name, precision)]
    assert len(cases) == len(CASES[precision])
    for _, _, *case in cases:
        assert_same(outcomes[name, precision, *case], outcomes[PLAIN[precision], precision, *case], precision)


@pytest.mark.parametrize(("estimator", "lora"), CASES["bf16"])
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


ALONE_IN_SOAK = {"zero3_bf16, zero3_bf16_large", "zero3_bf16_offload_optimizer", "zero3_fp32"}
"""Files whose settings others have too: `zero3_bf16_sequential` all but one of the first, and `zero3_bf16_offload_all`
those of the second."""
CASES_ON_NODES = [
    *("Ulysses 2", "tensor 2", "expert 2"),
    *(name for name in read_files() if IS_SOAK or name not in ALONE_IN_SOAK),
]
"""Cases of `tests.gpu.node.steps`: every kind of parallelism, every file."""

FIRST, SECOND = (0, 3), (1, 2)
"""The four ranks by the process that forks them: no two of a communicator of two come from the same one."""
SECOND_PROCESS = """
import multiprocessing, sys
import tests.helpers.imports
from tests.dist.test_ds_configs import GRACE_SECONDS, SECOND, fork_nodes
nodes = fork_nodes(multiprocessing.get_context("fork"), SECOND, int(sys.argv[1]), sys.argv[2])
while any(node.exitcode is None for node in nodes) and not any(node.exitcode for node in nodes):
    multiprocessing.connection.wait([node.sentinel for node in nodes if node.exitcode is None])
for node in nodes:
    node.join(GRACE_SECONDS)
sys.exit(max(node.exitcode or 0 for node in nodes))
"""


def fork_nodes(context: Any, ranks: Sequence[int], port: int, folder: str) -> list[Any]:
    """Start some of four ranks, which are a node each and take the steps of all cases."""
    environment = command_environment() | {RESULTS: folder}
    nodes = [
        context.Process(
            target=become_rank,
            args=(steps.main, ["--only", *CASES_ON_NODES], f"{folder}/{rank}.log"),
            kwargs={"environment": environment | make_variables(rank, 4, port)},
            daemon=True,
        )
        for rank in ranks
    ]
    for node in nodes:
        node.start()
    return nodes


@pytest.fixture(scope="module")
def on_four_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by case of steps on four ranks, forked from two processes: those of one have the same memory addresses
    and hash seeds, by which Python orders its sets."""
    folder, port = tmp_path_factory.mktemp("nodes"), free_port()
    for rank in range(4):
        (folder / f"{rank}.log").touch()
    words = [sys.executable, "-c", SECOND_PROCESS, str(port), str(folder)]
    second = subprocess.Popen(words, cwd=REPOSITORY, env=command_environment())
    first = fork_nodes(forkserver(), FIRST, port, str(folder))

    def codes() -> list[int | None]:
        return [second.poll(), *(node.exitcode for node in first)]

    try:
        wait_until(lambda: None not in codes() or any(codes()), "end of the steps")
        with suppress(AssertionError):
            wait_until(lambda: None not in codes(), "end of the other ranks", GRACE_SECONDS)
        logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
        assert set(codes()) <= {0, 1} and (folder / "steps_4").is_dir(), logs
    finally:
        for process in (second, *first):
            process.kill()
    return {row["case"]: row for row in json.loads((folder / "steps_4" / "results.json").read_text())["rows"]}


def test_all_ranks_start_their_collectives_in_one_order(on_four_nodes):
    """On all communicators together, which NCCL demands and gloo does not."""
    assert {name: row["in another order"] for name, row in on_four_nodes.items()} == dict.fromkeys(CASES_ON_NODES, 0)
    assert all(row["collectives"] > 100 for row in on_four_nodes.values())


@pytest.mark.parametrize("name", CASES_ON_NODES)
def test_steps_on_four_nodes_equal_the_oracles(on_four_nodes, name):
    assert on_four_nodes[name]["result"] == "passed", on_four_nodes[name]
