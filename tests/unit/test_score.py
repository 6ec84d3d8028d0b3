"""`vcore-ds score` without a model: refusals, sums over passes, and files."""

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from tests.helpers.recipes import smallest_recipe
from tests.helpers.tokenizer import make_tokenizer
from tests.unit.test_store import make_sequences
from vcore_ds.commands.score import ScoreInputs, read_inputs
from vcore_ds.commands.score.compute import describe_inputs
from vcore_ds.commands.score.output import ENDS, ScoredSequence, ScoringPass, ShownTokens, encode_scored, write_results
from vcore_ds.commands.tokens import TokenTexts
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import describe_differences
from vcore_ds.config.schema import flat_values
from vcore_ds.data.scores_folder import (
    ScoredCheckpoint,
    ScoredData,
    Scores,
    read_scores,
    read_tokens,
    read_traces,
    utility_columns,
)
from vcore_ds.data.store import TokenStore, write_store

# ---- inputs --------------------------------------------------------------------------------------------------------

TRUSTED = ["data.probe_path=trusted.jsonl"]
DIFFERENCES = ["utility.estimator=finite_difference", "utility.epsilon=0.01"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path, values = tmp_path / "mine.yaml", smallest_recipe()
    values["engine"]["deepspeed_config"] = "ds_configs/zero3_fp32.json"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


@pytest.fixture
def run(tmp_path: Path, recipe: Path) -> Path:
    """Five steps, with checkpoints after 2, 4 and 5, of which the last was not finished."""
    folder = tmp_path / "run"
    for step in (2, 4, 5):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        if step != 5:
            (folder / "checkpoints" / f"step_{step:08d}" / "COMPLETE").write_text("")
    (folder / "recipe.yaml").write_text(recipe.read_text())
    lines = [json.dumps({"step": k, "learning_rate": k / 8}) for k in range(1, 6)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def read(target: Path, *overrides: str, sets: tuple[str, ...] = (), checkpoint: str | None = None) -> ScoreInputs:
    return read_inputs(str(target), [*TRUSTED, *overrides], sets, checkpoint, None)


@pytest.mark.parametrize(
    ("target", "overrides", "sets", "checkpoint", "message"),
    [
        ("mine.yaml", ["data.probe_path=null"], [], None, "data.probe_path: found null"),
        ("mine.yaml", [], ["trusted.jsonl"], None, "--set: found trusted.jsonl; expected NAME=PATH"),
        ("mine.yaml", [], ["a b=trusted.jsonl"], None, "--set: found a b=trusted.jsonl"),
        ("mine.yaml", [], ["a="], None, "--set: found a=;"),
        ("mine.yaml", [], ["a=x.jsonl", "a=y.jsonl"], None, "--set: found a=y.jsonl"),
        ("mine.yaml", [], [], "step_00000002", "--checkpoint: found step_00000002 without a run"),
        ("run", [], [], "step_00000005", "expected step_00000005; found step_00000002, step_00000004"),
        ("run", [], [], "all", "RUN: run: found no learning rate of step 2"),
        ("run/checkpoints", [], [], None, "run/checkpoints: found no recipe.yaml"),
    ],
)
def test_a_request_that_cannot_be_scored_is_refused(
    target: str,
    overrides: list[str],
    sets: list[str],
    checkpoint: str | None,
    message: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]))
    with pytest.raises(UserError) as caught:
        read_inputs(target, [*TRUSTED, *overrides], sets, checkpoint, None)
    assert message in str(caught.value)


def test_a_model_is_scored_without_a_recipe(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for model in ("owner/name", "a model: #1"):
        inputs = read_inputs(model, ["probe.rank=16"], ["good=trusted.jsonl"], None, None, data="pool.jsonl")
        assert inputs.sets == {"good": "trusted.jsonl"} and inputs.checkpoints == []
        assert inputs.output == Path("runs/scores", Path(model).name)
        recipe = inputs.recipe
        assert (recipe.model.path, recipe.data.train_path) == (model, "pool.jsonl")
        assert recipe.lora is None and recipe.probe.rank == 16 and recipe.probe.direction == "sgd"
    # Instead of the traces of a run.
    assert read_inputs("run", [], ["good=trusted.jsonl"], None, None, data="pool.jsonl").recipe.data.train_path == (
        "pool.jsonl"
    )


def test_an_existing_output_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--output: {tmp_path}: is there already"):
        read_inputs(str(recipe), TRUSTED, [], None, tmp_path)


def test_named_sets_replace_the_trusted_set_of_the_recipe(recipe: Path) -> None:
    unnamed = read(recipe)
    assert unnamed.sets == {"trusted": "trusted.jsonl"} and unnamed.checkpoints == []
    assert unnamed.output == Path("runs/scores/mine")
    assert read(Path("qwen3_1.7b_math_lora")).output == Path("runs/scores/qwen3_1.7b_math_lora")
    named = read(recipe, sets=("a=x.jsonl", "b=with=sign.jsonl"))
    assert named.sets == {"a": "x.jsonl", "b": "with=sign.jsonl"}


def test_checkpoints_are_weighted_by_the_mean_learning_rate_of_their_steps(run: Path) -> None:
    newest = read(run)
    assert newest.checkpoints == [ScoredCheckpoint(str(run), 4, 1.0)]
    assert newest.output == Path("runs/scores/run") and newest.recipe.run.output_dir == str(run)
    every = read(run, checkpoint="all")
    assert every.checkpoints == [ScoredCheckpoint(str(run), 2, 1.5 / 8), ScoredCheckpoint(str(run), 4, 3.5 / 8)]


def test_the_recipe_keeps_what_its_direction_needs(recipe: Path, run: Path) -> None:
    assert read(recipe, "probe.direction=adam").recipe.optimizer.name == "sgd"
    assert read(run).recipe.optimizer.name == "sgd"
    assert read(run, "probe.direction=adam").recipe.optimizer.name == "adamw"
    assert read(recipe, *DIFFERENCES).recipe.utility.estimator == "jvp"  # scores are exact, whatever a run may be


# ---- identity ------------------------------------------------------------------------------------------------------

ADAM = ("probe.direction=adam", "probe.clip=1.0")


def describe_identity(
    target: Path, *overrides: str, checkpoint: str | None = "all", sets: tuple[str, ...] = ("a=x.jsonl", "b=y.jsonl")
) -> dict[str, Any]:
    """Identity of a scoring's inputs; the digests of its sets are their paths."""
    inputs = read(target, *overrides, sets=sets, checkpoint=checkpoint)
    description = replace(DESCRIPTION, checkpoints=inputs.checkpoints)
    config = {"zero_optimization": {"stage": 3}, "bf16": {}}
    return describe_inputs(flat_values(inputs.recipe), description, config, inputs.sets)


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.eps=1e-6",
        "optimizer.betas=[0.9, 0.95]",
        "probe.clip=2.0",
        "probe.loss=dft",
        "model.attention=sdpa",
        "model.precision=fp32",
        "method.normalization=token",
        "data.cutoff_length=77",
        "batch.pack_tokens_per_rank=64",
        "batch.sequence_parallel=1",
        "lora={rank: 2, alpha: 4}",
        "run.seed=7",
    ],
)
def test_unfinished_work_is_not_resumed_with_another_recipe(run: Path, override: str) -> None:
    key = override.partition("=")[0]
    differences = describe_differences(describe_identity(run, *ADAM), describe_identity(run, *ADAM, override))
    assert key == "lora" or len(differences.splitlines()) == 1, differences
    assert key in differences


def test_unfinished_work_is_not_resumed_with_other_passes(run: Path) -> None:
    def differs(**changes: Any) -> bool:
        return bool(describe_differences(there, describe_identity(run, *ADAM, **changes)))

    there = describe_identity(run, *ADAM)
    assert not differs() and not differs(sets=("b=y.jsonl", "a=x.jsonl"))
    assert differs(sets=("a=x.jsonl",)) and differs(sets=("a=y.jsonl", "b=x.jsonl"))
    assert differs(checkpoint="step_00000004")
    (run / "checkpoints" / "step_00000002" / "COMPLETE").write_text("digest of a run that was trained again")
    assert differs()


def test_unfinished_work_is_resumed_with_another_method_and_less_memory(run: Path) -> None:
    changes = [
        "methods/sft.yaml",
        "model.gradient_checkpointing=true",
        "schedule.num_steps=77",
        "optimizer.learning_rate=7",
        "optimizer.eps=1e-6",
        "run.log_every=7",
        "checkpoint.keep_last=7",
        "engine.timeout_minutes=77",
    ]
    assert describe_differences(describe_identity(run), describe_identity(run, *changes)) == ""


# ---- results -------------------------------------------------------------------------------------------------------

NUM_SEQUENCES = 50
DESCRIPTION = Scores(ScoredData("p", "d", NUM_SEQUENCES, "t", "c", 1), "m", "d", [], "sgd", "sequence", {}, "1", "now")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    counts = {"rows": NUM_SEQUENCES + 21, "dropped": {"longer than 128 tokens": 21}}
    write_store(tmp_path / "store", make_sequences(NUM_SEQUENCES, 256), make_tokenizer(), counts=counts)
    make_tokenizer().save_pretrained(tmp_path / "model")  # which the page reads tokens with
    return TokenStore(tmp_path / "store")


def test_tables_sum_the_measurements_of_the_passes(tmp_path: Path, store: TokenStore) -> None:
    random, weights = np.random.default_rng(0), (0.25, 2.0)
    sizes = [int(n) for n in store.num_supervised_tokens]
    values = random.normal(size=(2, 2, sum(sizes))).astype(np.float32)  # pass, loss or utility, token
    work, parts, passes = tmp_path / "out.unfinished", np.cumsum(sizes)[:-1], []
    work.mkdir()
    for number, (losses, utilities) in enumerate(values):
        checkpoint = ScoredCheckpoint("run", number, weights[number])
        passes.append(ScoringPass(work / str(number), "good", checkpoint))
        passes[-1].write_set(1.0 + number, 2.0 + number)
        sequences = list(map(ScoredSequence, range(50), np.split(losses, parts), np.split(utilities, parts)))
        for some in (sequences[30:], sequences[:30]):  # in two files, in another order
            passes[-1].add(some)
        assert passes[-1].read_positions() == set(range(50))
    description = replace(DESCRIPTION, model=str(tmp_path / "model"))
    text = write_results(work, tmp_path / "out", store, {"good": ("good.jsonl", store)}, passes, description)
    scores = read_scores(tmp_path / "out")
    assert replace(scores, sets={}) == description
    assert (scores.sets["good"].num_rows, scores.sets["good"].dropped) == (71, {"longer than 128 tokens": 21})
    assert "Trusted sets" in text and "Mean utility for good" in text and "Point at a bar" not in text

    exact = np.tensordot(weights, values[:, 1].astype(np.float64), 1)
    sums = np.array([part.sum() for part in np.split(exact, parts)])
    means, trusted = sums / sizes, scores.sets["good"]
    columns = [f"{name}.good" for name in ("utility_sum", "utility_mean", "rank", "percentile")]
    traces = read_traces(tmp_path / "out", ["loss", "num_supervised_tokens", "source", "row", *columns])
    assert traces["utility_sum.good"] == pytest.approx(sums, rel=1e-6)
    assert traces["utility_mean.good"] == pytest.approx(means, rel=1e-6)
    assert traces["rank.good"].tolist() == rankdata(-means).astype(int).tolist()
    assert traces["percentile.good"] == pytest.approx(100 * (rankdata(means) - 1) / 49)
    assert traces["loss"] == pytest.approx([part.mean() for part in np.split(values[1, 0], parts)], rel=1e-5)
    assert traces["num_supervised_tokens"].tolist() == sizes
    assert traces["row"].tolist() == store.sequence_ids.tolist() and set(traces["source"]) == {str(store.folder)}
    assert (trusted.loss, trusted.gradient_norm, trusted.num_sequences) == (2.0, 3.0, 50)
    assert trusted.length_correlation_sum == pytest.approx(spearmanr(sums, sizes).statistic)
    assert trusted.length_correlation_mean == pytest.approx(spearmanr(means, sizes).statistic)

    rows, order = read_tokens(tmp_path / "out"), np.argsort(-means).tolist()
    assert [row["sequence"] for row in rows] == order[:20] + order[-20:]
    for row in rows:
        i = row["sequence"]
        assert row["tokens"] == store[i].input_ids.tolist() and row["supervised"] == store[i].supervised.tolist()
        assert row["utilities"] == pytest.approx(np.split(exact, parts)[i], rel=1e-6)
        assert row["losses"] == np.split(values[1, 0], parts)[i].tolist()


def test_tokens_on_the_page_are_exact_also_where_most_belong_to_prompts() -> None:
    """Also where most of the other tokens have a utility of 0, such as those that a model is sure of."""
    random, tokenizer = np.random.default_rng(0), make_tokenizer()
    for share_of_zeros in (0.0, 0.8):
        utilities = (random.normal(size=400) * 10 ** random.uniform(-3, 0, 400)).astype(np.float32)
        utilities[random.uniform(size=400) < share_of_zeros] = 0.0
        row = {
            "set": "good",
            "sequence": 0,
            "tokens": [5] * 1000,
            "supervised": np.arange(1000) >= 600,
            "utilities": utilities,
            "losses": np.ones(400, np.float32),
        }
        columns = {name: np.ones(1) for name in (*utility_columns("good"), "row", "loss")} | {"source": np.array(["a"])}
        description, blob = encode_scored(
            "good", columns, [row], TokenTexts(tokenizer.backend_tokenizer, [ShownTokens.from_row(row)])
        )
        assert description["measures"] == ["utility", "loss"] and [one for one, _ in description["groups"]] == [*ENDS]
        codes = np.frombuffer(gzip.decompress(base64.b64decode(blob)), np.uint8)[2 * 8 * 1000 :][:1000]
        decoded = np.array(description["levels"]["utility"][ENDS[0]])[codes]
        assert not decoded[:600].any() and (decoded[600:] == 0).sum() >= (utilities == 0).sum()
        large = np.abs(utilities) > 0.01 * np.abs(utilities).max()
        assert np.abs(decoded[600:][large] / utilities[large] - 1).max() < 0.04, share_of_zeros


def test_a_pass_without_the_file_of_its_set_has_no_positions(tmp_path: Path) -> None:
    files = ScoringPass(tmp_path, "good", None)
    files.add([ScoredSequence(3, np.ones(2, np.float32), np.ones(2, np.float32))])
    assert files.read_positions() == set()
    files.write_set(1.0, 1.0)
    assert files.read_positions() == {3}


def test_damaged_scores_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.keep.scores: .*found no scores.json"):
        read_scores(tmp_path, "data.keep.scores")
    (tmp_path / "scores.json").write_text('{"format": 2}')
    (tmp_path / "scores.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="Score again, with this version"):
        read_scores(tmp_path)
    with pytest.raises(UserError, match=r"scores.parquet: "):
        read_traces(tmp_path, ["loss"])
