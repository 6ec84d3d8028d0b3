"""`vcore-ds score` against explicit inner products of gradients of single traces, in fp64 and plain PyTorch.

On one, two and four ranks, which have rows of their own or share them, packed or not, for all parameters and for
adapters, in both providers, at base models and at checkpoints. And a scoring that was killed and goes on ends in the
same files.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils import logger
from peft import PeftModel
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.helpers import resumed_runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import sums, write_conversations
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.export.write import export_run
from vcore_ds.commands.score import compute
from vcore_ds.commands.score.request import make_request
from vcore_ds.commands.score.result import PassFiles
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.data.scores_folder import read_scores, read_tokens, read_traces
from vcore_ds.data.store import TokenStore
from vcore_ds.distributed import layout
from vcore_ds.engine.export_shards import PREFIX
from vcore_ds.train import run
from vcore_ds.train import start_checks as memory_check
from vcore_ds.train.checkpoints import Checkpoints
from vcore_ds.train.console import Console

pytestmark = pytest.mark.dist

DEEPSPEED_CONFIG = Path(__file__).resolve().parents[2] / "ds_configs" / "zero3_fp32.json"
LORA = {"rank": 4, "alpha": 8}
MEGATRON = {"path": "model", "provider": "megatron"}
SHARED_ROWS = ["batch.sequence_parallel=2", "probe.sequence_parallel=2"]
LARGE_EPS = {"learning_rate": 1e-3, "eps": 1e-4}
"""Adam's Jacobian divides by a root of second moments, of which fp32 keeps few digits where they are tiny."""
SMALL_CHUNKS = 64


class Killed(Exception):
    pass


@dataclass(frozen=True)
class Case:
    """A scoring, and what it has to agree with."""

    target: str
    """Recipe or run, in the folder of the test."""
    overrides: tuple[str, ...] = ()
    sets: tuple[str, ...] = ("trusted",)
    checkpoint: str | None = None
    steps: tuple[int, ...] = ()
    """Of the checkpoints that are summed over."""
    model: str = "model"
    """Folder of the base model."""


SETS = ("trusted", "other")
CASES: dict[int, dict[str, Case]] = {
    1: {
        "packed": Case("full.yaml", sets=SETS),
        "rows": Case("full.yaml", ("batch.micro_batch_size_per_rank=2",)),
        "adam": Case("runs/lora", ("probe.direction=adam",), checkpoint="step_00000002", steps=(2,)),
    },
    2: {
        "packed": Case("full.yaml", sets=SETS),
        "shared rows": Case("full.yaml", tuple(SHARED_ROWS)),
        "checkpoints": Case("runs/lora", checkpoint="all", steps=(2, 4)),
        "divided experts": Case("full.yaml", ("parallel.expert=2",), model="mixture"),
        "megatron": Case("full.yaml", ("model.provider=megatron", "parallel.tensor=2")),
        "megatron, LoRA": Case("runs/megatron", checkpoint="step_00000004", steps=(4,)),
    },
    4: {"shared rows, packed": Case("full.yaml", ("batch.pack_tokens_per_rank=128", *SHARED_ROWS), sets=SETS)},
}
"""By world size."""


def recipe(folder: Path, name: str, **sections: Any) -> Recipe:
    return Recipe(
        model={"path": str(folder / "model"), "precision": "fp32", **sections.pop("model", {})},
        method={"name": "sft"},
        data={
            "train_path": str(folder / "train"),
            "probe_path": str(folder / "trusted.jsonl"),
            "cache_dir": str(folder / "cache"),
            "cutoff_length": 128,
        },
        batch={"global_size": 4},
        optimizer=LARGE_EPS,
        schedule={"num_steps": 4},
        run={"output_dir": str(folder / "runs" / name), "num_followed_traces": 0},
        engine={"deepspeed_config": str(DEEPSPEED_CONFIG)},
        **sections,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, training data in two files, two trusted sets, a recipe and two runs with adapters."""
    root = tmp_path_factory.mktemp("score")
    tokenizer = make_tokenizer()
    tiny.qwen3(vocab_size=len(tokenizer) + len(tokenizer) % 2).save_pretrained(root / "model")
    tiny.moe_model(vocab_size=len(tokenizer)).save_pretrained(root / "mixture")
    for name in ("model", "mixture"):
        tokenizer.save_pretrained(root / name)
    (root / "train").mkdir()
    write_conversations(root / "train" / "a.jsonl", sums(range(17)))
    write_conversations(root / "train" / "b.jsonl", sums(range(30, 43)))
    write_conversations(root / "trusted.jsonl", sums(range(50, 53)))
    write_conversations(root / "other.jsonl", sums(range(61, 66)))
    (root / "full.yaml").write_text(dump_recipe(recipe(root, "full")))
    run_ranks(train_adapters, 2, root)
    return root


def train_adapters(folder: Path) -> None:
    for name, sections in (("lora", {}), ("megatron", {"model": MEGATRON | {"path": str(folder / "model")}})):
        with resumed_runs.saving_after([2], stop=False):
            run.train(recipe(folder, name, lora=LORA, **sections))


def request(folder: Path, case: Case, output: Path):
    sets = [f"{name}={folder / name}.jsonl" for name in case.sets] if len(case.sets) > 1 else []
    overrides = (*case.overrides, f"model.path={folder / case.model}")
    return make_request(str(folder / case.target), overrides, sets, case.checkpoint, output)


def output_of(folder: Path, world_size: int, name: str) -> Path:
    return folder / "scores" / f"{world_size} {name}"


def score_cases(folder: Path) -> None:
    world_size = layout.size("job")
    warnings: list[str] = []
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    for name, case in CASES[world_size].items():
        compute.score(request(folder, case, output_of(folder, world_size, name)))
        assert layout.size("expert") == (2 if case.model == "mixture" else 1)
    if world_size == 1:
        refuse_a_checkpoint_that_was_written_anew(folder)
        refuse_what_does_not_fit(folder)
        kill_and_resume(folder)
    assert warnings == [], "of DeepSpeed, which no user can heed"


def refuse_a_checkpoint_that_was_written_anew(folder: Path) -> None:
    """Between the command's first look and the time when it is read, hours later with `all`."""
    found = request(folder, CASES[1]["adam"], folder / "scores" / "refused")
    (scored,) = found.checkpoints
    checkpoints = Checkpoints(found.recipe, Console(enabled=False))
    assert checkpoints.verify_step(scored.step, scored.digest)[1].step == scored.step
    with pytest.raises(UserError, match="it was written anew after this command had begun"):
        checkpoints.verify_step(scored.step, "digest of what was there")


def refuse_what_does_not_fit(folder: Path) -> None:
    """Before a model is loaded, by the rows of a scoring: those with a graph are of the trusted set, not the data."""
    unfinished = folder / "refused"
    unfinished.mkdir()
    write_conversations(folder / "short.jsonl", sums([50]))
    rows = replace(CASES[1]["rows"], overrides=(*CASES[1]["rows"].overrides, f"data.probe_path={folder}/short.jsonl"))
    found = request(folder, rows, folder / "scores" / "refused")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory_check, "available_memory_bytes", lambda: 2**10)
        patched.delattr(compute, "build_engine")
        scoring = compute.Scoring(found, Console(enabled=False), unfinished, SMALL_CHUNKS)
        with pytest.raises(UserError, match=r"memory: found .* GiB of host memory for each rank") as caught:
            scoring.run()  # `score` would end this rank
    (num_tokens,) = re.findall(r"([\d,]+) tokens in a micro-batch", str(caught.value))
    assert int(num_tokens) < max(scoring.store.lengths)


def kill_and_resume(folder: Path) -> None:
    """Scores in small chunks without an interruption, and with one in the second set, after which the same command
    names its sets in another order."""
    case, add, build_engine, engines = CASES[1]["packed"], PassFiles.add, compute.build_engine, []
    compute.score(request(folder, case, folder / "scores" / "straight"), chunk_tokens_per_rank=SMALL_CHUNKS)
    written: list[int] = []

    def add_and_die(self: PassFiles, sequences: list) -> None:
        add(self, sequences)
        written.append(len(sequences))
        if len(written) == 5:
            raise Killed

    def build(*arguments: Any) -> Any:
        engines.append(build_engine(*arguments))
        return engines[-1]

    compute.build_engine, PassFiles.add = build, add_and_die
    interrupted = request(folder, replace(case, sets=case.sets[::-1]), folder / "scores" / "interrupted")
    try:
        with pytest.raises(Killed):
            compute.score(interrupted, chunk_tokens_per_rank=SMALL_CHUNKS)
        engines[0].close()
        assert not interrupted.output.exists()
        compute.score(request(folder, case, interrupted.output), chunk_tokens_per_rank=SMALL_CHUNKS)
    finally:
        compute.build_engine, PassFiles.add = build_engine, add
    assert sum(written) == 2 * 30, "a sequence was scored twice"


class Reference:
    """Gradients in fp64, one at a time."""

    def __init__(self, folder: Path, case: Case, step: int | None):
        """`step`: of the checkpoint, None for the base model."""
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder / case.model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        if step is not None:
            name = f"step_{step:08d}"
            adapter = folder / "adapters" / f"{Path(case.target).name}_{name}"
            if not adapter.exists():
                export_run(folder / case.target, checkpoint=name, output=adapter)
            model = PeftModel.from_pretrained(model, adapter, is_trainable=True).double()
        self.model, self.folder, self.case, self.step = model.eval(), folder, case, step
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def losses(self, sequence: Any) -> Tensor:
        """`[n]`, nats, of the supervised tokens."""
        tokens = torch.from_numpy(sequence.input_ids).long()
        of_all = cross_entropy(self.model(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        return of_all[torch.from_numpy(sequence.supervised[1:])]

    def gradient(self, loss: Tensor) -> Tensor:
        """Flat, of all trained parameters."""
        found = torch.autograd.grad(loss, list(self.trained.values()), retain_graph=True)
        return torch.cat([part.flatten() for part in found])

    def direction(self, trusted: TokenStore) -> tuple[float, Tensor]:
        """Norm of the gradient of the mean over the traces of their mean losses, and the direction made of it."""
        gradient = sum(self.gradient(self.losses(sequence).mean()) for sequence in trusted) / len(trusted)
        along = gradient
        if "probe.direction=adam" in self.case.overrides:
            along = self.adam_jacobian(gradient) * gradient
        return float(gradient.norm()), along

    def adam_jacobian(self, gradient: Tensor) -> Tensor:
        """The diagonal Jacobian of Adam's next update, by differentiating that update."""
        state = resumed_runs.load_checkpoint_tensors(self.folder / self.case.target, self.step)
        m, v = (
            torch.cat([state[f"{key}.{PREFIX}{name}"].double() for name in self.trained])
            for key in ("exp_avg", "exp_avg_sq")
        )
        g, k = gradient.clone().requires_grad_(), self.step + 1
        first, second = (0.9 * m + 0.1 * g) / (1 - 0.9**k), (0.999 * v + 0.001 * g * g) / (1 - 0.999**k)
        (diagonal,) = torch.autograd.grad((first / (second.sqrt() + LARGE_EPS["eps"])).sum(), g)
        return torch.where(gradient == 0, 0.0, diagonal)


def stores(folder: Path) -> dict[str, TokenStore]:
    """Stores of the training data and of the trusted sets, by file name."""
    return {
        path.parent.name.rpartition("-")[0]: TokenStore(path.parent)
        for path in (folder / "cache").glob("*/manifest.json")
    }


@pytest.fixture(scope="module")
def references() -> dict[Any, Mapping[str, Any]]:
    return {}


def expected(folder: Path, case: Case, known: dict[Any, Any]) -> Mapping[str, Any]:
    """Losses `[n]`, for each set the sum of the utilities of each trace, and the utilities of two traces' tokens."""
    key = (case.target if case.steps else case.model, case.steps, "probe.direction=adam" in case.overrides)
    if key in known:
        return known[key]
    found = stores(folder)
    result: dict[str, Any] = {}
    rates = {2: 0.0, 4: 0.0}
    if len(case.steps) > 1:
        lines = {line["step"]: line for line in resumed_runs.read_deterministic_metrics(folder / case.target)}
        rates = {k: np.mean([lines[i]["learning_rate"] for i in (k - 1, k)]) for k in case.steps}
    for step in case.steps or (None,):
        reference, weight = Reference(folder, case, step), rates[step] if len(case.steps) > 1 else 1.0
        losses = [reference.losses(sequence) for sequence in found["train"]]
        gradients = [reference.gradient(of_trace.sum()) for of_trace in losses]
        of_tokens = [[reference.gradient(loss) for loss in losses[i]] for i in (0, 29)]
        result["loss"] = np.array([of_trace.mean().item() for of_trace in losses])
        for name in SETS:
            norm, along = reference.direction(found[name])
            result[f"norm.{name}"] = norm
            total = np.array([float(gradient @ along) for gradient in gradients])
            result[f"sum.{name}"] = result.get(f"sum.{name}", 0.0) + weight * total
            tokens = [[float(gradient @ along) for gradient in of_trace] for of_trace in of_tokens]
            before = result.get(f"tokens.{name}", [0.0, 0.0])
            result[f"tokens.{name}"] = [b + weight * np.array(t) for b, t in zip(before, tokens, strict=True)]
    known[key] = result
    return result


@pytest.mark.parametrize("world_size", CASES)
def test_utilities_are_inner_products_of_gradients(folder, references, world_size):
    run_ranks(score_cases, world_size, folder)
    store = stores(folder)["train"]
    for label, case in CASES[world_size].items():
        output, oracle = output_of(folder, world_size, label), expected(folder, case, references)
        scores, columns = read_scores(output), ["num_supervised_tokens", "loss", "source", "row"]
        columns += [
            f"{kind}.{name}" for name in case.sets for kind in ("utility_sum", "utility_mean", "rank", "percentile")
        ]
        traces = read_traces(output, columns)
        assert traces["loss"] == pytest.approx(oracle["loss"], rel=1e-5), label
        assert [Path(source).name for source in traces["source"]] == ["a.jsonl"] * 17 + ["b.jsonl"] * 13
        assert traces["row"].tolist() == [*range(17), *range(13)]
        assert list(scores.sets) == list(case.sets)
        shown = {(row["set"], row["sequence"]): row for row in read_tokens(output)}
        for name in case.sets:
            exact, found = oracle[f"sum.{name}"], traces[f"utility_sum.{name}"]
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
            assert error < 1e-5, (label, name, error)
            assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max(), (label, name)
            mean = exact / traces["num_supervised_tokens"]
            assert traces[f"utility_mean.{name}"] == pytest.approx(mean, abs=1e-5 * np.abs(mean).max())
            assert traces[f"rank.{name}"][np.argsort(-traces[f"utility_mean.{name}"], kind="stable")].tolist() == list(
                range(1, 31)
            )
            assert sorted(traces[f"percentile.{name}"]) == pytest.approx(np.linspace(0, 100, 30))
            assert scores.sets[name].gradient_norm == pytest.approx(oracle[f"norm.{name}"], rel=1e-5)
            correlation = spearmanr(traces["num_supervised_tokens"], found).statistic
            assert scores.sets[name].length_correlation_sum == pytest.approx(correlation)
            for position, exact_tokens in zip((0, 29), oracle[f"tokens.{name}"], strict=True):
                row, sequence = shown[name, position], store[position]
                assert (
                    row["tokens"] == sequence.input_ids.tolist() and row["supervised"] == sequence.supervised.tolist()
                )
                assert row["utilities"] == pytest.approx(exact_tokens, abs=1e-5 * np.abs(exact_tokens).max())
        if case.steps:
            assert [checkpoint.step for checkpoint in scores.checkpoints] == list(case.steps)
            assert scores.direction == ("adam" if "probe.direction=adam" in case.overrides else "sgd")
    if world_size == 1:
        straight, interrupted = folder / "scores" / "straight", folder / "scores" / "interrupted"
        for name in ("scores.parquet", "tokens.parquet"):
            assert (straight / name).read_bytes() == (interrupted / name).read_bytes()
        assert not list((folder / "scores").glob("*.unfinished"))
