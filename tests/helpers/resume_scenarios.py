"""Runs that are stopped, damaged, resumed, branched and lengthened in many ways, on the ranks that call them."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch.distributed.checkpoint.staging import DefaultStager

from tests.helpers import resumed_runs, tiny
from tests.helpers.resumed_runs import NUM_STEPS, make_run_state
from tests.helpers.scores import write_scores_folder
from tests.helpers.setups import sums, write_conversations, write_deepspeed_config
from tests.helpers.soak import IS_SOAK, soak
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.fidelity.measure import train_steps
from vcore_ds.commands.reference import write_reference_log_probabilities
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import ProfileConfig
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.signals import Stops
from vcore_ds.engine import checkpoint_shards
from vcore_ds.engine.checkpoint_shards import CheckpointFailed
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training import checkpoints as checkpoint_writing
from vcore_ds.training import console, loop
from vcore_ds.training.checkpoints import Checkpoints
from vcore_ds.training.feed import DataReader, build_feed
from vcore_ds.training.run_folder import begin
from vcore_ds.training.schedule import derive_schedule
from vcore_ds.training.setup import build_engine, plan_ranks

KILLED_AFTER = 2
"""Step after which the runs are killed."""
STOPPED_TWICE = "vcore_jvp_lora"
"""Case that is resumed for one step, stopped and resumed again."""
PROFILE = {"steps": (3, 4), "ranks": (0, 1)}
"""Steps of the resumed part of that run that are profiled, which changes no number."""
FINITE_DIFFERENCE = {"estimator": "finite_difference", "epsilon": "auto"}
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.05}
VCORE = {"name": "vcore", "kl_budget": 0.05}

MUON = {"name": "muon", "learning_rate": 1e-3, "weight_decay": 0.1}

KEEP = {"scores": "scores", "top": 0.5}
"""A selection of traces that a resumed run makes again, in cases that wrap or extend the training data."""
KEPT = {0, 2, 3, 5, 8, 11}
"""Traces that it keeps."""

FOLLOWING = {"num_followed_traces": 2}
"""Followed traces, in some cases only: on these models a pass over two traces takes as long as a step."""

SEVERAL_FILES = {
    "train_path": [{"path": "train.jsonl", "weight": 3.0}, {"path": "other.jsonl", "weight": 1.0}],
    "probe_path": "trusted.jsonl",
}
"""Two files, both with the trusted trace, which the run leaves out of training."""

CASES: dict[str, dict[str, Any]] = {
    "vcore_jvp_lora": {"method": VCORE, "lora": LORA, "run": FOLLOWING},
    # Equal bit for bit after resuming at the same size: the ranks have the same experts again.
    "expert_parallel_full": {"method": VCORE, "model": {"path": "moe_model"}, "parallel": {"expert": 2}},
    # Every 3: the first step after the kill takes the stored direction.
    "vcore_adam_lora": {"method": VCORE, "probe": {"direction": "adam", "batch_size": 2, "every": 3}, "lora": LORA},
    "vcore_trusted_full": {
        "method": VCORE | {"scope": "sequence_and_batch", "batch_kl_budget": 0.1, "base_measure": "dft"},
        "probe": {"every": 3, "batch_size": "all", "loss": "dft"},
        "batch": {"global_size": 4},
        "data": {"probe_path": "pool.jsonl", "trusted_share": 0.25, "keep": KEEP},
    },
    "sft_lora": {"method": {"name": "sft"}, "lora": LORA, "run": FOLLOWING, "data": SEVERAL_FILES},
    "iw_sft_full": {
        "method": {"name": "iw_sft"},
        "data": {"keep": KEEP},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    },
    "random_full": {"method": {"name": "random"}, "data": {"keep": KEEP}, "optimizer": MUON},
    "bf16": {
        "method": VCORE,
        "utility": FINITE_DIFFERENCE | {"rounding": "stochastic"},
        "probe": {"every": 3, "batch_size": 2},
        "model": {"precision": "bf16"},
    },
    # Five steps, since the time of an asynchronous save is on the line after the step during which it ended.
    "bf16_offload_all": {
        "method": VCORE,
        "model": {"precision": "bf16", "path": "two_layers"},
        "probe": {"rank": 4, "every": 3, "batch_size": 2},
        "schedule": {"num_steps": 5},
    },
} | soak(
    {
        "muon_full": {"method": VCORE, "probe": {"direction": "muon", "every": 3, "batch_size": 2}, "optimizer": MUON},
        "bf16_offload_optimizer": {"method": VCORE, "model": {"precision": "bf16"}},
    }
)
OFFLOADED = {"offload_optimizer": ["offload_optimizer"], "offload_all": ["offload_optimizer", "offload_param"]}
DRAWN_IN_STEPS: dict[str, dict[str, Any]] = {
    "dropout": {"method": VCORE, "utility": FINITE_DIFFERENCE, "lora": LORA | {"dropout": 0.2}},
    **soak({"stochastic_rounding": CASES["bf16"]}),
}
ACROSS_WORLD_SIZES = {
    "method": VCORE,
    "batch": {"global_size": 4},
    "probe": {"direction": "muon", "batch_size": 4, "every": 2},
    "optimizer": MUON,
    "schedule": {"num_steps": 3},
}
"""Step 2 takes the direction of step 1, step 3 probes. Muon's state has AdamW's moments too, of the embeddings."""
ACROSS_STOP = 1
ACROSS_SIZES = {
    "across_2_to_4": [(4, 2)] * 2,
    **soak({"across_4_to_4": [(2, 4)] * ACROSS_STOP + [(4, 1)] * 2}),
}
"""Sequence-parallel sizes of the main batch and of the probe in the last steps of runs on four ranks."""


def make_recipe(folder: Path, name: str, sections: dict[str, Any]) -> Recipe:
    """Make the recipe of a run in `folder / name`."""
    sections = {
        "lora": None,
        "batch": {"global_size": 2},
        "probe": {"batch_size": 2},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"num_steps": NUM_STEPS},
        **sections,
    }
    model = {"path": "model", "precision": "fp32", **sections.get("model", {})}
    sections["model"] = {**model, "path": str(folder / model["path"])}
    data = {
        key: str(folder / value) if isinstance(value, str) and key.endswith("path") else value
        for key, value in sections.get("data", {}).items()
    }
    if "train_path" in data:
        data["train_path"] = [file | {"path": str(folder / file["path"])} for file in data["train_path"]]
    if "keep" in data:
        data["keep"] = data["keep"] | {"scores": str(folder / "scores")}
    run_section = sections.pop("run", {})
    sections["data"] = {"train_path": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache"), **data}
    if sections["method"]["name"] == "iw_sft" and sections["lora"] is None:
        sections["data"]["reference_log_probabilities"] = str(folder / "reference.npz")
    precision = sections["model"]["precision"]
    kind = next((kind for kind in OFFLOADED if name.startswith(f"{precision}_{kind}")), precision)
    return Recipe(
        **sections,
        run={"output_dir": str(folder / name), "num_followed_traces": 0} | run_section,
        engine={"deepspeed_config": str(folder / f"{kind}.json")},
    )


def write_setup(folder: Path) -> None:
    """Write models, data and configurations of all runs."""
    tokenizer = make_tokenizer()
    for name, num_layers in (("model", 1), ("two_layers", 2)):
        # Sizes that no number of ranks divides: shards with padding, and empty ones at 4 ranks.
        sizes = dict(num_hidden_layers=num_layers, hidden_size=33, head_dim=6)
        tiny.qwen3(vocab_size=len(tokenizer), **sizes).save_pretrained(folder / name)
    tiny.moe_model(vocab_size=len(tokenizer)).save_pretrained(folder / "moe_model")
    for name in ("model", "two_layers", "moe_model"):
        tokenizer.save_pretrained(folder / name)
    write_conversations(folder / "train.jsonl", sums(range(12)))
    write_conversations(folder / "other.jsonl", sums(range(1, 13)))
    write_conversations(folder / "pool.jsonl", sums(range(20, 23)))
    write_conversations(folder / "trusted.jsonl", sums([3]))
    store = find_or_make_store(
        str(folder / "train.jsonl"),
        load_tokenizer(str(folder / "model")),
        DataConfig(train_path="train.jsonl", cache_dir=str(folder / "cache")),
    )
    means = {"right": [1.0 + i if i in KEPT else -1.0 for i in range(12)]}
    write_scores_folder(folder / "scores", TokenStore(store), folder / "model", means)
    for kind in ("fp32", "bf16", *OFFLOADED):
        write_deepspeed_config(folder / f"{kind}.json", bf16=kind != "fp32", offloaded=OFFLOADED.get(kind, ()))


@contextmanager
def recording_console() -> Iterator[list[str]]:
    """Record the console lines of runs inside the block, without printing them."""
    lines: list[str] = []
    with patch.object(console, "say", lines.append):
        yield lines


def catch_message(error_class: type[Exception], function: Callable[..., Any], *arguments: Any) -> str:
    """Message of the error that a call raises; "no error" where it raises none."""
    try:
        function(*arguments)
    except error_class as error:
        return str(error)
    return "no error"


def list_checkpoints(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


def run_case(folder: Path, name: str) -> list[str]:
    """Differences between an uninterrupted run and one that was killed and resumed."""
    straight, stopped = (make_recipe(folder, f"{name}_{kind}", CASES[name]) for kind in ("straight", "stopped"))
    expected = resumed_runs.run_and_copy_after(straight, KILLED_AFTER, Path(stopped.run.output_dir))
    if name == "sft_lora":
        copy_on_first_rank(Path(stopped.run.output_dir), folder / "killed")
    if name == STOPPED_TWICE:
        profiled = stopped.run.model_copy(update={"profile": ProfileConfig(**PROFILE)})
        stopped = stopped.model_copy(update={"run": profiled})
        resumed_runs.run_until(stopped, KILLED_AFTER + 1)
    resumed_runs.run_to_end(stopped)
    return find_differences(Path(stopped.run.output_dir), expected, count_steps(name))


def count_steps(name: str) -> int:
    return CASES[name].get("schedule", {}).get("num_steps", NUM_STEPS)


def find_differences(folder: Path, expected: Path, num_steps: int = NUM_STEPS) -> list[str]:
    """Differences between two runs, on the first rank; the others would read the same files."""
    return resumed_runs.find_differences(folder, expected, num_steps) if layout.is_first() else []


def copy_on_first_rank(folder: Path, copy: Path) -> None:
    if layout.is_first():
        shutil.copytree(folder, copy)
    layout.gather_objects("job", None)


def copy_killed_run(folder: Path, name: str) -> Recipe:
    """Copy the folder that a kill of `sft_lora` after step 2 leaves; returns the recipe that resumes it."""
    copy_on_first_rank(folder / "killed", folder / name)
    return make_recipe(folder, name, CASES["sft_lora"])


@contextmanager
def blocking_last_rank(step: int) -> Iterator[None]:
    """The last rank cannot write its file of the checkpoint after `step`, since a folder has its name."""
    write_state = checkpoint_writing.write_state

    def write(tensors, state: Path, group) -> None:
        if f"{step:08d}" in str(state) and layout.rank("shards") == layout.size("shards") - 1:
            (state / f"__{layout.rank('shards')}_0.distcp").mkdir()
        write_state(tensors, state, group)

    with patch.object(checkpoint_writing, "write_state", write):
        yield


def save_where_one_rank_cannot_write(folder: Path) -> dict[str, Any]:
    stopped = copy_killed_run(folder, "failing")
    run_folder = Path(stopped.run.output_dir)
    with blocking_last_rank(3):
        message = catch_message(CheckpointFailed, resumed_runs.run_until, stopped, 3)
    checkpoints = list_checkpoints(run_folder)
    resumed_runs.run_to_end(stopped)
    differing = find_differences(run_folder, folder / "sft_lora_straight")
    return {"message": message, "checkpoints": checkpoints, "differing": differing}


def save_asynchronously(folder: Path) -> dict[str, Any]:
    """Checkpoints that threads write: that of step 2 is held until step 3 has changed the state, when the folder is
    copied as a kill would leave it. The copy is resumed, and writes that checkpoint without threads."""
    name = "bf16_offload_all_beside"
    sections = CASES["bf16_offload_all"] | {"checkpoint": {"async": True, "keep_last": 9}}
    recipe, killed = make_recipe(folder, name, sections), folder / f"{name}_killed"
    write_state, collect, is_released = checkpoint_writing.write_state, Checkpoints.collect, Event()
    in_flight: list[bool] = []

    def write(tensors, state: Path, group) -> None:
        if "00000002" in str(state) and group is not None:
            assert is_released.wait(300.0)
        write_state(tensors, state, group)

    def copy_and_release(self: Checkpoints) -> None:
        collect(self)
        in_flight.append(self._writing is not None)
        if len(in_flight) == 3:
            copy_on_first_rank(Path(recipe.run.output_dir), killed)
            is_released.set()

    with (
        patch.object(checkpoint_writing, "write_state", write),
        patch.object(Checkpoints, "collect", copy_and_release),
        recording_console() as lines,
    ):
        finished = resumed_runs.run_to_end(recipe, 1, 2, 4)
        checkpoints = list_checkpoints(killed)
        layout.gather_objects("job", None)
        resumed_runs.run_to_end(make_recipe(folder, killed.name, CASES["bf16_offload_all"]), 2)
    held, direct = (resumed_runs.load_checkpoint_tensors(path, 2) for path in (finished, killed))
    straight = folder / "bf16_offload_all_straight"
    return {
        "in flight": in_flight,
        "lines": lines,
        "checkpoints": checkpoints,
        "held": [key for key in held.keys() | direct.keys() if not torch.equal(held[key], direct[key])],
        "finished": find_differences(finished, straight, count_steps("bf16_offload_all")),
        "killed": find_differences(killed, straight, count_steps("bf16_offload_all")),
        "metrics": [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()],
    }


class ClosingStager(DefaultStager):
    """As that of torch 2.11 and 2.12, which can copy only once."""

    def _stage(self, state_dict: dict, **options: Any) -> dict:
        try:
            return super()._stage(state_dict, **options)
        finally:
            self._state_dict_stager.close()


def save_asynchronously_where_one_rank_cannot_write(folder: Path) -> dict[str, Any]:
    """As `save_where_one_rank_cannot_write`, but threads write the checkpoint of step 2; step 3 waits until they have
    failed. Staging is that of torch 2.11."""
    recipe = make_recipe(folder, "failing_beside", CASES["sft_lora"] | {"checkpoint": {"async": True}})
    collect, num_steps = Checkpoints.collect, 0

    def wait_and_collect(self: Checkpoints) -> None:
        nonlocal num_steps
        num_steps += 1
        if self._writing is not None:
            self._writing.exception(timeout=300.0)
        collect(self)

    with (
        blocking_last_rank(2),
        patch.object(Checkpoints, "collect", wait_and_collect),
        patch.object(checkpoint_shards, "DefaultStager", ClosingStager),
        patch.object(checkpoint_shards, "STAGER_IS_REUSABLE", False),
    ):
        message = catch_message(CheckpointFailed, resumed_runs.run_to_end, recipe, 1, 2)
    return {"message": message, "checkpoints": list_checkpoints(Path(recipe.run.output_dir)), "steps": num_steps}


def save_without_room(folder: Path) -> str:
    """Message where the disk has not enough room for a checkpoint."""
    stopped = make_recipe(folder, "no_room", CASES["sft_lora"])
    with patch.object(checkpoint_writing, "MARGIN_BYTES", 10**18):
        return catch_message(CheckpointFailed, resumed_runs.run_until, stopped, 1)


def resume_damaged(folder: Path) -> dict[str, Any]:
    """Resume where the newest checkpoint has a flipped bit in the second rank's file; then where all are damaged."""
    stopped = copy_killed_run(folder, "damaged")
    run_folder = resumed_runs.run_until(stopped, 4)
    if layout.is_first():
        flip_a_bit(run_folder / "checkpoints/step_00000004/state/__1_0.distcp")
    layout.gather_objects("job", None)
    with recording_console() as lines:
        resumed_runs.run_until(stopped, 4)
    if layout.is_first():
        for step in (2, 4):
            flip_a_bit(run_folder / f"checkpoints/step_0000000{step}/state/__0_0.distcp")
    layout.gather_objects("job", None)
    refusal = catch_message(UserError, resumed_runs.run_to_end, stopped)
    lost = (run_folder / "metrics_lost.jsonl").read_text().splitlines()
    return {
        "lines": lines,
        "refusal": refusal,
        "lost": [json.loads(line)["step"] for line in lost],
        "steps": [line["step"] for line in resumed_runs.read_deterministic_metrics(run_folder)],
        "records": resumed_runs.read_token_records(run_folder),
        "lost_records": resumed_runs.read_token_records(run_folder, "tokens_lost"),
    }


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resume_unfinished(folder: Path) -> list[str]:
    """Lines and checkpoints of the next attempt after a kill between renaming and marking the first checkpoint."""
    stopped = copy_killed_run(folder, "unfinished")
    run_folder = Path(stopped.run.output_dir)
    if layout.is_first():
        (run_folder / "checkpoints" / "step_00000002" / "COMPLETE").unlink()
        (run_folder / "checkpoints" / "step_00000003.unfinished").mkdir()
    layout.gather_objects("job", None)
    with recording_console() as lines:
        resumed_runs.run_until(stopped, 1)
    return [*lines, *list_checkpoints(run_folder)]


def start_in_separate_folders(folder: Path) -> str:
    """Message where a run has begun in the first rank's folder, and the other rank sees another folder."""
    recipe = make_recipe(folder, f"node_{layout.rank('job')}", CASES["sft_lora"])
    if layout.is_first():
        begin(Path(recipe.run.output_dir), dump_recipe(recipe), world_size=2, num_done=0)
    return catch_message(CheckpointFailed, resumed_runs.run_until, recipe, 1)


def ask_whether_save_is_due(folder: Path) -> list[bool]:
    """Whether a checkpoint is due: at the start, with the last rank's clock an hour on, with all clocks an hour on."""
    recipe = make_recipe(folder, "minutes", CASES["sft_lora"] | {"checkpoint": {"every_minutes": 30.0}})
    checkpoints = Checkpoints(folder / "minutes", recipe.checkpoint, "", make_run_state())
    is_last = layout.rank("shards") == layout.size("shards") - 1
    outcomes = [checkpoints.is_due(1, NUM_STEPS)]
    checkpoints._last_end -= 3600.0 * is_last
    outcomes.append(checkpoints.is_due(1, NUM_STEPS))
    checkpoints._last_end -= 3600.0 * (not is_last)
    return [*outcomes, checkpoints.is_due(1, NUM_STEPS)]


def resume_with_other_data(folder: Path) -> str:
    """Message where the run is resumed with another training file."""
    stopped = copy_killed_run(folder, "other_data")
    other = stopped.data.model_copy(update={"train_path": str(folder / "other.jsonl")})
    return catch_message(UserError, resumed_runs.run_to_end, stopped.model_copy(update={"data": other}))


def resume_on_other_base(folder: Path) -> list[str]:
    """Resume adapters where a weight of their model has changed; then where it is restored. Returns both messages."""
    stopped = make_recipe(folder, "other_data", CASES["sft_lora"])
    weights = folder / "model" / "model.safetensors"
    before = weights.read_bytes()
    messages = []
    for content in (bytes([*before[:-1], before[-1] ^ 1]), before):
        layout.gather_objects("job", None)
        if layout.is_first():
            weights.write_bytes(content)
        layout.gather_objects("job", None)
        messages.append(catch_message(UserError, resumed_runs.run_until, stopped, 3))
    return messages


def lengthen_and_branch(folder: Path) -> dict[str, Any]:
    """Train a run with a decay over the last 2 of 7 steps, and one over 6 steps whose decay begins after 4; then, with
    the schedule of the first, a branch from there and the second run made longer."""
    sections = CASES["sft_lora"]
    shared: dict[str, Any] = {"kind": "wsd", "warmup_steps": 2, "min_ratio": 0.1}
    long = {**sections, "schedule": {"num_steps": 7, "decay_ratio": 2 / 7, **shared}}
    short = {**sections, "schedule": {"num_steps": 6, "decay_ratio": 1 / 3, **shared}}
    expected = resumed_runs.run_to_end(make_recipe(folder, "long", long))
    resumed_runs.train(make_recipe(folder, "short", short))
    checkpoint = folder / "short" / "checkpoints" / "step_00000004"
    branch = {**long, "checkpoint": {"branch_from": str(checkpoint)}}
    messages = {}
    for name, wrong in {
        "cosine": {"schedule": {"num_steps": 20}},
        "warmup": {"schedule": {"num_steps": 20, "kind": "constant", "warmup_ratio": 0.2}},
        "batch": {"batch": {"global_size": 4}},
    }.items():
        wrong_recipe = make_recipe(folder, f"branch_{name}" if name == "batch" else "short", {**branch, **wrong})
        messages[name] = catch_message(UserError, resumed_runs.train, wrong_recipe)
    files = sorted(path.name for path in (folder / "short").iterdir())
    resumed_runs.run_to_end(make_recipe(folder, "branch", branch))
    longer = resumed_runs.run_to_end(make_recipe(folder, "short", long))
    return {
        "messages": messages,
        "finished": files,
        "branch": find_differences(folder / "branch", expected, 7),
        "longer": find_differences(longer, expected, 7),
        "set aside": sorted(path.name for path in longer.glob("*_step_*")),
        "lost": [path.name for path in (folder / "branch").glob("*lost*")],
        "rates": [line["learning_rate"] for line in resumed_runs.read_deterministic_metrics(expected)],
    }


def keep_best_checkpoints(folder: Path) -> dict[str, Any]:
    """Train a run that is resumed after step 2, and evaluates and saves each step. Its best two steps are not both
    after the resume."""
    sections = CASES["sft_lora"] | {
        "optimizer": {"learning_rate": 0.05},
        "checkpoint": {"keep_last": 1, "keep_best": 2, "every_steps": 1},
        "data": {"validation_path": "pool.jsonl"},
        "run": {"validate_every": 1},
    }
    recipe = make_recipe(folder, "best", sections)
    resumed_runs.run_until(recipe, 1, 2)
    with recording_console() as lines:
        path = resumed_runs.run_to_end(recipe, 3)
    losses = {line["step"]: line["validation_loss"] for line in resumed_runs.read_deterministic_metrics(path)}
    assert losses[NUM_STEPS] == json.loads((path / "held_out.json").read_text())["after"][""]
    return {"losses": losses, "lines": lines, "checkpoints": list_checkpoints(path)}


def train_on_full_disk(folder: Path, disk: Path) -> dict[str, Any]:
    """Train on a disk that is full from the first checkpoint on, up to the page that metrics.jsonl ends in."""
    stopped = make_recipe(folder, "full_disk", CASES["sft_lora"])
    stopped = stopped.model_copy(update={"run": stopped.run.model_copy(update={"output_dir": str(disk / "run")})})
    filler = disk / "filler"
    record_save = Stops.record_save

    def record_and_fill(self: Stops, *seconds: float | None) -> None:
        record_save(self, *seconds)
        if layout.is_first():
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**20))

    with patch.object(Stops, "record_save", record_and_fill):
        message = catch_message(UserError, resumed_runs.run_to_end, stopped, 2)
    steps = [line["step"] for line in resumed_runs.read_deterministic_metrics(disk / "run")]
    layout.gather_objects("job", None)
    filler.unlink(missing_ok=True)
    layout.gather_objects("job", None)
    resumed_runs.run_to_end(stopped)
    differing = find_differences(disk / "run", folder / "sft_lora_straight")
    return {"message": message, "steps": steps, "differing": differing}


def train_by_fidelity_command(folder: Path, name: str) -> list[str]:
    """Train as the fidelity command does; returns names of parameters that differ in any bit from those of a run."""
    recipe = make_recipe(folder, name, DRAWN_IN_STEPS[name])
    with patch.object(loop, "MEASURE_NOISE_EVERY", 4):
        expected = resumed_runs.load_checkpoint_tensors(resumed_runs.run_to_end(recipe))
        settings = derive_plan_settings(recipe)
        plan = plan_ranks(settings)
        reader = DataReader(recipe.data, recipe.model.path, load_tokenizer(recipe.model.path))
        training = reader.read_training_data(recipe.method, recipe.run.seed)
        feed = build_feed(recipe.method, recipe.probe, plan, training, reader.pad_token_id, seed=recipe.run.seed)
        engine = build_engine(settings, deepspeed_config(settings, plan))
        schedule = derive_schedule(recipe.schedule, recipe.optimizer.learning_rate, len(training), 1)
        steps = train_steps(engine, recipe, feed, schedule)
        assert len(list(islice(steps, NUM_STEPS))) == NUM_STEPS
        outcomes = {name: safe_get_full_fp32_param(parameter).flatten() for name, parameter in engine.trainable}
        engine.close()
    return [name for name, values in outcomes.items() if not torch.equal(values, expected[f"master.{name}"])]


def run_on_two_ranks(folder: Path, disk: Path | None) -> dict[str, Any]:
    reference = make_recipe(folder, "reference", CASES["iw_sft_full"])
    write_reference_log_probabilities(reference, folder / "reference.npz")
    outcomes: dict[str, Any] = {name: run_case(folder, name) for name in CASES}
    outcomes |= {
        check.__name__: check(folder)
        for check in (
            save_where_one_rank_cannot_write,
            save_asynchronously,
            save_asynchronously_where_one_rank_cannot_write,
            save_without_room,
            resume_damaged,
            resume_unfinished,
            start_in_separate_folders,
            ask_whether_save_is_due,
            resume_with_other_data,
            resume_on_other_base,
            lengthen_and_branch,
            keep_best_checkpoints,
        )
    }
    outcomes["train_on_full_disk"] = None if disk is None else train_on_full_disk(folder, disk)
    outcomes["fidelity"] = {name: train_by_fidelity_command(folder, name) for name in DRAWN_IN_STEPS}
    resumed_runs.run_and_copy_after(
        make_recipe_across_world_sizes(folder, "across_straight", 1, 1), ACROSS_STOP, folder / "across_2"
    )
    return outcomes


def make_recipe_across_world_sizes(
    folder: Path, name: str, main: int | str = "auto", probe: int | str = "auto"
) -> Recipe:
    """`main`, `probe`: sequence-parallel sizes of the main batch and of the probe."""
    sizes = {"batch": main, "probe": probe}
    sections = {key: ACROSS_WORLD_SIZES[key] | {"sequence_parallel": size} for key, size in sizes.items()}
    return make_recipe(folder, name, ACROSS_WORLD_SIZES | sections)


def resume_copy(folder: Path, name: str, *sizes: int) -> None:
    """Resume, at this world size, a copy of a run that was stopped at another."""
    resumed_name = f"{name}_to_{layout.size('shards')}"
    copy_on_first_rank(folder / name, folder / resumed_name)
    resumed_runs.run_to_end(make_recipe_across_world_sizes(folder, resumed_name, *sizes))


def run_on_four_ranks(folder: Path) -> None:
    resume_copy(folder, "across_2", 4, 2)
    resumed_runs.run_until(make_recipe_across_world_sizes(folder, "across_4", 2, 4), ACROSS_STOP)
    if IS_SOAK:
        resume_copy(folder, "across_4", 4, 1)


def run_on_one_rank(folder: Path) -> None:
    for name in ("across_2", "across_4"):
        resume_copy(folder, name)
