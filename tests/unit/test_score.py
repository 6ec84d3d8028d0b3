"""`vcore-ds score` without a model: refusals, sums over passes, and files."""

import base64
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from tests.helpers.recipes import smallest_recipe
from tests.helpers.tokenizer import make_tokenizer
from tests.unit.test_store import make_sequences
from vcore_ds.commands.report.tokens import TokenTexts
from vcore_ds.commands.score.inputs import describe_inputs, read_inputs
from vcore_ds.commands.score.page import ENDS, ShownTokens, encode_scored
from vcore_ds.commands.score.tables import PassFiles, ScoredSequence, ScoredSet, write_tables
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import describe_differences
from vcore_ds.data.prepare.convert import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
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


def test_a_second_selection_is_recognized(run: Path, recipe: Path) -> None:
    words = ["data.probe_path=t.jsonl"]
    assert not read_inputs(str(run), words, [], None, None).trained_on_selection
    selected = [*words, "data.keep.scores=runs/scores/x", "data.keep.top=0.5"]
    assert read_inputs(str(run), selected, [], None, None).trained_on_selection
    assert not read_inputs(str(recipe), selected, [], None, None).trained_on_selection


TRUSTED = ["data.probe_path=trusted.jsonl"]
Refuse = Callable[..., str]


@pytest.fixture
def read_refusal(tmp_path: Path) -> Refuse:
    """The message that a request ends in."""

    def read_refusal(target: Path, *overrides: str, sets: tuple[str, ...] = (), checkpoint: str | None = None) -> str:
        with pytest.raises(UserError) as caught:
            read_inputs(str(target), overrides, sets, checkpoint, tmp_path / "new")
        return str(caught.value)

    return read_refusal


def test_a_request_without_a_trusted_set_is_refused(read_refusal: Refuse, recipe: Path) -> None:
    message = read_refusal(recipe)
    assert message.startswith("data.probe_path: found null; expected a trusted set") and "--set NAME=PATH" in message


@pytest.mark.parametrize("sets", [("trusted.jsonl",), ("a b=trusted.jsonl",), ("a=",), ("a=x.jsonl", "a=y.jsonl")])
def test_sets_need_valid_and_distinct_names(read_refusal: Refuse, recipe: Path, sets: tuple[str, ...]) -> None:
    assert read_refusal(recipe, sets=sets).startswith(f"--set: found {sets[-1]}; expected NAME=PATH")


def test_finite_differences_are_refused(read_refusal: Refuse, recipe: Path) -> None:
    message = read_refusal(recipe, *TRUSTED, "utility.estimator=finite_difference", "utility.epsilon=0.01")
    assert message.startswith("utility.estimator: found finite_difference; expected jvp")
    read_inputs(str(recipe), [*TRUSTED, "methods/sft.yaml"], [], None, recipe.with_name("new"))


def test_missing_checkpoints_are_refused(read_refusal: Refuse, recipe: Path, run: Path) -> None:
    assert "together with a recipe" in read_refusal(recipe, *TRUSTED, checkpoint="step_00000002")
    message = read_refusal(run, *TRUSTED, checkpoint="step_00000005")
    assert (
        message.startswith("--checkpoint: ") and "expected step_00000005; found step_00000002, step_00000004" in message
    )
    assert "found no recipe.yaml" in read_refusal(run / "checkpoints", *TRUSTED)


def test_an_existing_output_is_refused(read_refusal: Refuse, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert read_refusal(recipe, *TRUSTED).startswith(f"--output: {tmp_path / 'new'}: is there already")


def test_named_sets_replace_the_trusted_set_of_the_recipe(recipe: Path, tmp_path: Path) -> None:
    unnamed = read_inputs(str(recipe), TRUSTED, [], None, None)
    assert unnamed.sets == {"trusted": "trusted.jsonl"} and unnamed.checkpoints == []
    assert unnamed.output == Path("runs/scores/mine")
    by_name = read_inputs("qwen3_1.7b_math_lora", TRUSTED, [], None, None)
    assert by_name.output == Path("runs/scores/qwen3_1.7b_math_lora")
    named = read_inputs(str(recipe), TRUSTED, ["a=x.jsonl", "b=with=sign.jsonl"], None, None)
    assert named.sets == {"a": "x.jsonl", "b": "with=sign.jsonl"}


def test_checkpoints_are_weighted_by_the_mean_learning_rate_of_their_steps(run: Path) -> None:
    newest = read_inputs(str(run), TRUSTED, [], None, None)
    assert newest.checkpoints == [ScoredCheckpoint(str(run), 4, 1.0)]
    assert newest.output == Path("runs/scores/run") and newest.recipe.run.output_dir == str(run)
    every = read_inputs(str(run), TRUSTED, [], "all", None)
    assert every.checkpoints == [ScoredCheckpoint(str(run), 2, 1.5 / 8), ScoredCheckpoint(str(run), 4, 3.5 / 8)]


def test_a_run_without_the_learning_rates_of_its_steps_is_refused(read_refusal: Refuse, run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]))
    assert "found no learning rate of step 2" in read_refusal(run, *TRUSTED, checkpoint="all")


def test_finite_differences_of_a_method_without_utilities_are_ignored(recipe: Path) -> None:
    """MoE models refuse finite differences only where utilities are computed."""
    overrides = ["methods/sft.yaml", "utility.estimator=finite_difference", "utility.epsilon=0.01"]
    scored = read_inputs(str(recipe), [*TRUSTED, *overrides], [], None, None).recipe
    assert scored.utility.estimator == "jvp"


def test_moments_are_kept_only_where_the_direction_needs_them(recipe: Path, run: Path) -> None:
    adam = [*TRUSTED, "probe.direction=adam"]
    assert read_inputs(str(recipe), adam, [], None, None).recipe.optimizer.name == "sgd"
    assert read_inputs(str(run), TRUSTED, [], None, None).recipe.optimizer.name == "sgd"
    assert read_inputs(str(run), adam, [], None, None).recipe.optimizer.name == "adamw"


# ---- identity ------------------------------------------------------------------------------------------------------

ADAM = ("probe.direction=adam", "probe.clip=1.0")


def describe_identity(
    target: Path, *overrides: str, checkpoint: str | None = "all", sets: tuple[str, ...] = ("a=x.jsonl", "b=y.jsonl")
) -> dict[str, Any]:
    """Identity of a scoring's inputs; the digests of its sets and data are their paths."""
    inputs = read_inputs(str(target), [*TRUSTED, *overrides], sets, checkpoint, None)
    data = replace(DESCRIPTION.data, digest=inputs.recipe.data.train_path)
    stores = {name: SimpleNamespace(digest=path) for name, path in inputs.sets.items()}
    passes = [(name, stores[name], checkpoint) for checkpoint in inputs.checkpoints or [None] for name in stores]
    return describe_inputs(
        inputs.recipe, replace(DESCRIPTION, data=data), {"zero_optimization": {"stage": 3}, "bf16": {}}, passes
    )


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
        "data.train_path=other",
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
    assert ("data.digest" if key == "data.train_path" else key) in differences


def test_unfinished_work_is_not_resumed_with_other_passes(run: Path) -> None:
    def differs(**changes: Any) -> bool:
        return bool(describe_differences(there, describe_identity(run, *ADAM, **changes)))

    there = describe_identity(run, *ADAM)
    assert not differs()
    assert differs(sets=("b=y.jsonl", "a=x.jsonl")) and differs(sets=("a=x.jsonl",))
    assert differs(sets=("a=y.jsonl", "b=x.jsonl")) and differs(checkpoint="step_00000004")
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
    write_store(tmp_path / "store", make_sequences(NUM_SEQUENCES), make_tokenizer(), counts=counts)
    make_tokenizer().save_pretrained(tmp_path / "model")  # which the page reads tokens with
    return TokenStore(tmp_path / "store")


def test_tables_sum_the_measurements_of_the_passes(tmp_path: Path, store: TokenStore) -> None:
    random, weights = np.random.default_rng(0), (0.25, 2.0)
    sizes = [int(n) for n in store.num_supervised_tokens]
    values = random.normal(size=(2, 2, sum(sizes))).astype(np.float32)  # pass, loss or utility, token
    work, parts, passes = tmp_path / "out.unfinished", np.cumsum(sizes)[:-1], []
    work.mkdir()
    for number, (losses, utilities) in enumerate(values):
        passes.append(PassFiles(work, number))
        passes[-1].write_set(1.0 + number, 2.0 + number)
        sequences = list(map(ScoredSequence, range(50), np.split(losses, parts), np.split(utilities, parts)))
        for some in (sequences[30:], sequences[:30]):  # in two files, in another order
            passes[-1].add(some)
        assert passes[-1].read_positions() == set(range(50))
    inputs = {"good": ScoredSet("good.jsonl", store, list(zip(weights, passes, strict=True)))}
    scores = write_tables(work, tmp_path / "out", store, inputs, replace(DESCRIPTION, model=str(tmp_path / "model")))
    assert read_scores(tmp_path / "out") == scores
    assert (scores.sets["good"].num_rows, scores.sets["good"].dropped) == (71, {"longer than 128 tokens": 21})
    sentence = "50 of 71 rows of good.jsonl are used as the trusted set good; dropped: 21 longer than 128 tokens."
    assert sentence in (tmp_path / "out" / "scores.html").read_text()

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
        description, blob = encode_scored("good", columns, [row], TokenTexts(tokenizer, [ShownTokens.from_row(row)]))
        assert description["measures"] == ["utility", "loss"] and [one for one, _ in description["groups"]] == [*ENDS]
        codes = np.frombuffer(gzip.decompress(base64.b64decode(blob)), np.uint8)[2 * 8 * 1000 :][:1000]
        decoded = np.array(description["levels"]["utility"][ENDS[0]])[codes]
        assert not decoded[:600].any() and (decoded[600:] == 0).sum() >= (utilities == 0).sum()
        large = np.abs(utilities) > 0.01 * np.abs(utilities).max()
        assert np.abs(decoded[600:][large] / utilities[large] - 1).max() < 0.04, share_of_zeros


def test_a_pass_without_the_file_of_its_set_has_no_positions(tmp_path: Path) -> None:
    files = PassFiles(tmp_path, 0)
    files.add([ScoredSequence(3, np.ones(2, np.float32), np.ones(2, np.float32))])
    assert files.read_positions() == set()
    files.write_set(1.0, 1.0)
    assert files.read_positions() == {3}


def test_a_store_knows_the_row_of_each_sequence_in_its_source(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    row = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("\n".join([row, "", row]) + "\n")
    second.write_text("\n".join(["", row]) + "\n")
    for name, sources in (("both", [first, second]), ("one", [second])):
        request = PrepareRequest("chat", tuple(map(str, sources)), str(tmp_path / "model"), "train", cutoff_length=64)
        prepare(request, tmp_path / name, say=lambda line: None)
    sources_read, rows = TokenStore(tmp_path / "both").origins()
    assert sources_read == [str(first), str(first), str(second)] and rows.tolist() == [0, 2, 1]
    sources_read, rows = TokenStore(tmp_path / "one").origins()
    assert sources_read == [str(second)] and rows.tolist() == [1]


def test_damaged_scores_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.keep.scores: .*found no scores.json"):
        read_scores(tmp_path, "data.keep.scores")
    (tmp_path / "scores.json").write_text('{"format": 2}')
    (tmp_path / "scores.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="Score again, with this version"):
        read_scores(tmp_path)
    with pytest.raises(UserError, match=r"scores.parquet: is damaged"):
        read_traces(tmp_path, ["loss"])
