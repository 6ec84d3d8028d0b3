"""`vcore-ds score` against explicit inner products of gradients of single traces, in fp64 and plain PyTorch.

On one, two and four ranks, which share sequences or not, packed or not, for all parameters and for adapters, in both
providers, at base models and at checkpoints. A scoring that was killed and resumed writes the same files.
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
from vcore_ds.commands.score import compute, read_inputs
from vcore_ds.commands.score.output import ScoringPass
from vcore_ds.common.errors import UserError
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.data.scores_folder import read_scores, read_tokens, read_traces
from vcore_ds.data.store import TokenStore
from vcore_ds.distributed import layout
from vcore_ds.engine.export_shards import PREFIX
from vcore_ds.planning.hardware import Cluster, Gpu
from vcore_ds.training import run, start_checks
from vcore_ds.training.checkpoint_read import verify_step

pytestmark = pytest.mark.dist

DEEPSPEED_CONFIG = Path(__file__).resolve().parents[2] / "ds_configs" / "zero3_fp32.json"
LORA = {"rank": 4, "alpha": 8}
SEQUENCE_PARALLEL = ["batch.sequence_parallel=2", "probe.sequence_parallel=2"]
LARGE_EPS = {"learning_rate": 1e-3, "eps": 1e-4}
"""Adam's Jacobian divides by a root of second moments, of which fp32 keeps few digits where they are tiny."""
SMALL_CHUNKS = 64


class Killed(Exception):
    pass


@dataclass(frozen=True)
class Case:
    """A scoring, and the model whose gradients it is compared with."""

    target: str
    """Recipe or run, in the test's folder."""
    overrides: tuple[str, ...] = ()
    sets: tuple[str, ...] = ("trusted",)
    checkpoint: str | None = None
    steps: tuple[int, ...] = ()
    """Steps of the checkpoints that are summed over."""
    model: str = "model"
    """Folder of the base model."""
    rank: int | None = None
    """Of an approximate direction, whose utilities only resemble those of the reference."""


SETS = ("trusted", "other")
CASES: dict[int, dict[str, Case]] = {
    1: {
        "packed": Case("full.yaml", sets=SETS),
        "unpacked": Case("full.yaml", ("batch.micro_batch_size_per_rank=2",)),
        "adam": Case("runs/lora", ("probe.direction=adam",), checkpoint="step_00000002", steps=(2,)),
        "low rank": Case("full.yaml", ("probe.rank=8",), rank=8),
    },
    2: {
        "packed": Case("full.yaml", sets=SETS),
        "sequence-parallel": Case("full.yaml", tuple(SEQUENCE_PARALLEL)),
        "checkpoints": Case("runs/lora", checkpoint="all", steps=(2, 4)),
        "divided experts": Case("full.yaml", ("parallel.expert=2",), model="moe_model"),
        "megatron": Case("full.yaml", ("model.provider=megatron", "parallel.tensor=2")),
    },
    4: {
        "sequence-parallel, packed": Case(
            "full.yaml", ("batch.pack_tokens_per_rank=128", *SEQUENCE_PARALLEL), sets=SETS
        )
    },
}
"""By world size."""


def make_recipe(folder: Path, name: str, **sections: Any) -> Recipe:
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
    """A model, training data in two files, two trusted sets, a recipe and a run with adapters."""
    root = tmp_path_factory.mktemp("score")
    tokenizer = make_tokenizer()
    tiny.qwen3(vocab_size=len(tokenizer) + len(tokenizer) % 2).save_pretrained(root / "model")
    tiny.moe_model(vocab_size=len(tokenizer)).save_pretrained(root / "moe_model")
    for name in ("model", "moe_model"):
        tokenizer.save_pretrained(root / name)
    (root / "train").mkdir()
    write_conversations(root / "train" / "a.jsonl", sums(range(17)))
    write_conversations(root / "train" / "b.jsonl", sums(range(30, 43)))
    write_conversations(root / "trusted.jsonl", sums(range(50, 53)))
    write_conversations(root / "other.jsonl", sums(range(61, 66)))
    (root / "full.yaml").write_text(dump_recipe(make_recipe(root, "full", probe={"rank": 2, "rank_passes": 2})))
    run_ranks(train_adapters, 2, root)
    return root


def train_adapters(folder: Path) -> None:
    with resumed_runs.saving_after([2], stop=False):
        run.train(make_recipe(folder, "lora", lora=LORA))


def read_case(folder: Path, case: Case, output: Path):
    sets = [f"{name}={folder / name}.jsonl" for name in case.sets] if len(case.sets) > 1 else []
    overrides = (*case.overrides, f"model.path={folder / case.model}")
    return read_inputs(str(folder / case.target), overrides, sets, case.checkpoint, output)


def find_output(folder: Path, world_size: int, name: str) -> Path:
    return folder / "scores" / f"{world_size} {name}"


def score_cases(folder: Path) -> None:
    world_size = layout.size("job")
    warnings: list[str] = []
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    for name, case in CASES[world_size].items():
        compute.score(read_case(folder, case, find_output(folder, world_size, name)))
        assert layout.size("expert") == (2 if case.model == "moe_model" else 1)
    if world_size == 1:
        refuse_rewritten_checkpoint(folder)
        refuse_too_little_memory(folder)
        kill_and_resume(folder)
    assert warnings == [], "DeepSpeed warned, which no user can act on"


def refuse_rewritten_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint that is replaced between its listing and its reading, hours later with `all`."""
    inputs = read_case(folder, CASES[1]["adam"], folder / "scores" / "refused")
    (scored,) = inputs.checkpoints
    checkpoints = Path(inputs.recipe.run.output_dir) / "checkpoints"
    assert verify_step(checkpoints, scored.step, scored.digest, print)[1].step == scored.step
    with pytest.raises(UserError, match="it was rewritten after this command had started"):
        verify_step(checkpoints, scored.step, "digest of what was there", print)


def refuse_too_little_memory(folder: Path) -> None:
    """Refuse before a model is loaded, by the micro-batches of the trusted set: only their passes keep a graph."""
    unfinished = folder / "refused"
    unfinished.mkdir()
    write_conversations(folder / "short.jsonl", sums([50]))
    case = replace(
        CASES[1]["unpacked"], overrides=(*CASES[1]["unpacked"].overrides, f"data.probe_path={folder}/short.jsonl")
    )
    inputs = read_case(folder, case, folder / "scores" / "refused")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start_checks, "available_memory_bytes", lambda: 2**10)
        patched.delattr(compute, "build_engine")
        scoring = compute.Scoring(inputs, unfinished)
        with pytest.raises(UserError, match=r"memory: found .* GiB of host memory for each rank") as caught:
            scoring.run()  # `score` would end this rank
    (num_tokens,) = re.findall(r"([\d,]+) tokens in a micro-batch", str(caught.value))
    assert int(num_tokens) < max(scoring.store.lengths)


def kill_and_resume(folder: Path) -> None:
    """Score in small chunks without an interruption, and with a kill in the second set, after which the same command
    names its sets in another order."""
    case, add, build_engine, engines = CASES[1]["packed"], ScoringPass.add, compute.build_engine, []
    written: list[int] = []

    def add_and_raise(self: ScoringPass, sequences: list) -> None:
        add(self, sequences)
        written.append(len(sequences))
        if len(written) == 5:
            raise Killed

    def build(*arguments: Any) -> Any:
        engines.append(build_engine(*arguments))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compute, "CHUNK_TOKENS_PER_RANK", SMALL_CHUNKS)
        with patched.context() as slow:
            check_predicted_seconds(folder, case, slow)
        patched.setattr(compute, "build_engine", build)
        patched.setattr(ScoringPass, "add", add_and_raise)
        interrupted = read_case(folder, replace(case, sets=case.sets[::-1]), folder / "scores" / "interrupted")
        with pytest.raises(Killed):
            compute.score(interrupted)
        engines[0].close()
        assert not interrupted.output.exists()
        compute.score(read_case(folder, case, interrupted.output))
    assert sum(written) == 2 * 30, "a sequence was scored twice"


def check_predicted_seconds(folder: Path, case: Case, patched: pytest.MonkeyPatch) -> None:
    """Score on a device whose time is that of matrix multiplications alone: each of the 6 passes over a token's linear
    layers (forward and two JVP products; forward and backward) takes 2 FLOP a weight, and a gradient's backward
    computes the logits again."""
    said: list[str] = []
    speed, fast = 0.76e6, 1e15
    patched.setattr(compute, "_find_cluster", lambda _: Cluster(Gpu("slow", 0, 1e6, fast, fast, fast, fast), 1))
    patched.setattr(compute.console, "say", said.append)
    compute.score(read_case(folder, case, folder / "scores" / "straight"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    head = model.get_output_embeddings().weight.numel()
    weights = head + sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    (predicted,) = (line for line in said if line.startswith("Predicted"))
    data, *sets = (int(n.replace(",", "")) for line in said for n in re.findall(r"sequences, ([\d,]+) tokens", line))
    minutes, seconds = re.search(r"; (\d+)m(\d+)s \(", predicted).groups()
    flops = 6 * weights * (2 * data + sum(sets)) + 2 * head * sum(sets)
    assert 60 * int(minutes) + int(seconds) == pytest.approx(flops / speed, rel=0.02)


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

    def compute_losses(self, sequence: Any) -> Tensor:
        """Losses `[n]`, nats, of the supervised tokens."""
        tokens = torch.from_numpy(sequence.input_ids).long()
        losses = cross_entropy(self.model(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        return losses[torch.from_numpy(sequence.supervised[1:])]

    def compute_gradient(self, loss: Tensor) -> Tensor:
        """Flat gradient of all trained parameters."""
        gradients = torch.autograd.grad(loss, list(self.trained.values()), retain_graph=True)
        return torch.cat([part.flatten() for part in gradients])

    def compute_direction(self, trusted: TokenStore) -> tuple[float, Tensor]:
        """Norm of the probe gradient (of the mean over traces of their mean losses), and the direction made from it."""
        losses = map(self.compute_losses, trusted)
        along = gradient = sum(self.compute_gradient(one.mean()) for one in losses) / len(trusted)
        if "probe.direction=adam" in self.case.overrides:
            along = self.compute_adam_jacobian(gradient) * gradient
        return float(gradient.norm()), along

    def compute_adam_jacobian(self, gradient: Tensor) -> Tensor:
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


def open_stores(folder: Path) -> dict[str, TokenStore]:
    """Open the stores of the training data and of the trusted sets, by file name."""
    return {
        path.parent.name.rpartition("-")[0]: TokenStore(path.parent)
        for path in (folder / "cache").glob("*/manifest.json")
    }


@pytest.fixture(scope="module")
def references() -> dict[Any, Mapping[str, Any]]:
    return {}


def compute_expected(folder: Path, case: Case, known: dict[Any, Any]) -> Mapping[str, Any]:
    """Losses `[n]` of the traces; for each set their utility sums, and the token utilities of two traces."""
    key = (case.target if case.steps else case.model, case.steps, "probe.direction=adam" in case.overrides)
    if key in known:
        return known[key]
    stores = open_stores(folder)
    result: dict[str, Any] = {}
    rates = {2: 0.0, 4: 0.0}
    if len(case.steps) > 1:
        lines = {line["step"]: line for line in resumed_runs.read_deterministic_metrics(folder / case.target)}
        rates = {k: np.mean([lines[i]["learning_rate"] for i in (k - 1, k)]) for k in case.steps}
    for step in case.steps or (None,):
        reference, weight = Reference(folder, case, step), rates[step] if len(case.steps) > 1 else 1.0
        losses = [reference.compute_losses(sequence) for sequence in stores["train"]]
        gradients = [reference.compute_gradient(trace_losses.sum()) for trace_losses in losses]
        token_gradients = [[reference.compute_gradient(loss) for loss in losses[i]] for i in (0, 29)]
        result["loss"] = np.array([trace_losses.mean().item() for trace_losses in losses])
        for name in SETS:
            norm, along = reference.compute_direction(stores[name])
            result[f"norm.{name}"] = norm
            total = np.array([float(gradient @ along) for gradient in gradients])
            result[f"sum.{name}"] = result.get(f"sum.{name}", 0.0) + weight * total
            tokens = [[float(gradient @ along) for gradient in trace_gradients] for trace_gradients in token_gradients]
            before = result.get(f"tokens.{name}", [0.0, 0.0])
            result[f"tokens.{name}"] = [b + weight * np.array(t) for b, t in zip(before, tokens, strict=True)]
    known[key] = result
    return result


@pytest.mark.parametrize("world_size", CASES)
def test_utilities_are_inner_products_of_gradients(folder, references, world_size):
    run_ranks(score_cases, world_size, folder)
    store = open_stores(folder)["train"]
    for label, case in CASES[world_size].items():
        output, oracle = find_output(folder, world_size, label), compute_expected(folder, case, references)
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
            exact, measured = oracle[f"sum.{name}"], traces[f"utility_sum.{name}"]
            error = np.linalg.norm(measured - exact) / np.linalg.norm(exact)
            assert scores.probe_rank == case.rank
            if case.rank is not None:
                assert 1e-3 < error < 0.5 and spearmanr(measured, exact).statistic > 0.9, error
                continue
            assert error < 1e-5, (label, name, error)
            assert np.abs(measured - exact).max() < 1e-5 * np.abs(exact).max(), (label, name)
            mean = exact / traces["num_supervised_tokens"]
            assert traces[f"utility_mean.{name}"] == pytest.approx(mean, abs=1e-5 * np.abs(mean).max())
            best_first = np.argsort(-traces[f"utility_mean.{name}"], kind="stable")
            assert traces[f"rank.{name}"][best_first].tolist() == [*range(1, 31)]
            assert sorted(traces[f"percentile.{name}"]) == pytest.approx(np.linspace(0, 100, 30))
            assert scores.sets[name].gradient_norm == pytest.approx(oracle[f"norm.{name}"], rel=1e-5)
            correlation = spearmanr(traces["num_supervised_tokens"], measured).statistic
            assert scores.sets[name].length_correlation_sum == pytest.approx(correlation)
            for position, exact_tokens in zip((0, 29), oracle[f"tokens.{name}"], strict=True):
                row, sequence = shown[name, position], store[position]
                assert row["tokens"] == sequence.input_ids.tolist()
                assert row["supervised"] == sequence.supervised.tolist()
                assert row["utilities"] == pytest.approx(exact_tokens, abs=1e-5 * np.abs(exact_tokens).max())
        if case.steps:
            assert [checkpoint.step for checkpoint in scores.checkpoints] == list(case.steps)
            assert scores.direction == ("adam" if "probe.direction=adam" in case.overrides else "sgd")
    if world_size == 1:
        straight, interrupted = folder / "scores" / "straight", folder / "scores" / "interrupted"
        for name in ("scores.parquet", "tokens.parquet"):
            assert (straight / name).read_bytes() == (interrupted / name).read_bytes()
        assert not list((folder / "scores").glob("*.unfinished"))
