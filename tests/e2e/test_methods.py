"""Every method on the quickstart's traces and the first layers of its model; iw-SFT with all parameters trained, after
the command that prepares it."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch_scripts.quickstart import DATA, RECIPE
from launch_scripts.quickstart_data import prepare_quickstart_data
from tests.helpers import resumed_runs
from tests.helpers.commands import read_metrics
from tests.helpers.jobs import ForkedJob
from tests.helpers.ranks import run_ranks
from tests.helpers.setups import TinySetup, write_first_layers
from tests.helpers.tokenizer import make_tokenizer
from tests.helpers.weightings import write_functions_of_page
from vcore_ds.commands.cli import main
from vcore_ds.commands.tokens import IN_ANSWER, KIND, POSITION, TokenTexts, make_tables
from vcore_ds.config.load import load_recipe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.training.token_records import read_records

pytestmark = pytest.mark.e2e

NUM_LAYERS = 2
"""Layers of the model, of 30: tokens and weights are real, and steps are cheap. `test_quickstart.py` trains all."""
FRAGMENTS = {
    name: f"methods/{name}.yaml" for name in ("sft", "dft", "asft", "eaft", "deft", "profit", "iw_sft", "random")
}


CUSTOM = {
    "ones": ["method.function=own:ones"],
    "focal": ["method.function=my_weights:focal", "method.options={gamma: 2}"],
    "helpful": ["method.function=my_weights:helpful"],
    "both": ["method.function=own:both", "method.options={scale: 0.5}", "run.num_followed_traces=2"],
}
"""Functions of `method.name: custom`: of docs/custom-weighting.md, and ours."""
OWN = """import torch
def ones(losses): return torch.ones_like(losses)
def both(utilities, entropies, scale): return scale * entropies + utilities.abs()
"""


def train_all(overrides: list[str], folder: str) -> None:
    """Train with every method in this process, since a start costs more than a step."""
    os.chdir(folder)
    custom = {name: ["methods/custom", *words] for name, words in CUSTOM.items()}
    for name, words in {"vcore": [], **{name: [path] for name, path in FRAGMENTS.items()}, **custom}.items():
        recipe = load_recipe(RECIPE, [*overrides, *words, f"run.output_dir={folder}/{name}"])
        resumed_runs.run_to_end(recipe, with_card=name in CUSTOM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The runs of all methods, each in a folder named after it."""
    folder = tmp_path_factory.mktemp("methods")
    training = DATA / "train.jsonl"
    if not training.is_file():  # `test_quickstart.py` writes it again
        prepare_quickstart_data(DATA)
    model = write_first_layers(folder / "model", NUM_LAYERS)
    overrides = [f"model.path={model}", f"data.train_path={training}", "data.validation_path=null"]
    overrides += ["batch.global_size=2", "batch.micro_batch_size_per_rank=2", "schedule.num_steps=2"]
    overrides += ["probe.batch_size=1", "data.cutoff_length=192", "run.num_followed_traces=0"]
    write_functions_of_page(folder)
    (folder / "own.py").write_text(OWN)
    run_ranks(train_all, 1, overrides, str(folder))
    return folder


@pytest.fixture(scope="module")
def lines_by_method(folder: Path) -> dict[str, list[dict]]:
    return {name: read_metrics(folder / name) for name in ("vcore", *FRAGMENTS)}


def test_loss_is_the_same_quantity_for_every_method(lines_by_method) -> None:
    firsts = {name: lines[0] for name, lines in lines_by_method.items()}
    print({name: (first["loss"], first["weighted_loss"], first["total_weight"]) for name, first in firsts.items()})
    # The same sequences under the same parameters have the same loss, whatever is trained on. LoRA dropout is off in
    # this recipe.
    assert {first["loss"] for first in firsts.values()} == {firsts["sft"]["loss"]}
    assert firsts["sft"]["weighted_loss"] == pytest.approx(firsts["sft"]["loss"], rel=1e-6)
    for name in ("dft", "asft", "eaft", "deft", "profit", "random", "vcore"):
        assert firsts[name]["weighted_loss"] != pytest.approx(firsts[name]["loss"], rel=1e-3), name
    assert firsts["dft"]["total_weight"] < 0.9
    # Exactly 1: these methods compute no ratio.
    baselines = [lines for name, lines in lines_by_method.items() if name != "vcore"]
    assert {line["alpha"] for lines in baselines for line in lines} == {1.0}
    # Adapters start at the reference.
    assert firsts["iw_sft"]["total_weight"] == pytest.approx(1.0, abs=1e-3)
    assert firsts["asft"]["base_kl"] == pytest.approx(0.0, abs=1e-6) and "base_kl" not in firsts["dft"]
    assert lines_by_method["asft"][1]["base_kl"] > 1e-6


def test_methods_differ_in_their_second_step(lines_by_method) -> None:
    assert len({lines[1]["grad_norm"] for lines in lines_by_method.values()}) == len(lines_by_method)
    assert lines_by_method["iw_sft"][1]["total_weight"] != pytest.approx(1.0, abs=1e-6)
    for name, lines in lines_by_method.items():
        keys = [line[key] is None for line in lines for key in ("tau", "kl", "utility_mean", "probe_loss")]
        assert keys == [name != "vcore"] * 8


def test_a_function_that_gives_1_is_sft_to_the_bit(folder: Path) -> None:
    sft, ones = (resumed_runs.read_deterministic_metrics(folder / name) for name in ("sft", "ones"))
    assert ones == sft
    tensors = resumed_runs.load_checkpoint_tensors(folder / "sft")
    for name, tensor in resumed_runs.load_checkpoint_tensors(folder / "ones").items():
        assert torch.equal(tensor, tensors[name]), name


def test_the_functions_of_the_page_are_trained_with_and_named(folder: Path, capsys) -> None:
    for record in read_records(folder / "helpful"):
        for s in record.sequences:
            np.testing.assert_allclose(s.weights * len(s), np.where(s.utilities > 0, 1.0, 0.1), rtol=1e-6)
    (line, *_) = read_metrics(folder / "helpful")
    assert line["utility_mean"] is not None and line["tau"] is None and line["probe_loss"] > 0
    title = "custom (my_weights.py:focal, gamma 2)"
    assert title in (folder / "focal" / "adapter" / "README.md").read_text()
    code, output, _ = print_report(capsys, folder / "focal")
    assert code == 0 and title in output
    assert (folder / "focal" / "my_weights.py").read_bytes() == (folder / "my_weights.py").read_bytes()
    assert print_report(capsys, folder / "helpful")[0] == 0


def test_a_function_can_have_utilities_and_entropies(folder: Path) -> None:
    """Entropies are recorded of followed traces alone."""
    traces = [trace for record in read_records(folder / "both", "followed") for trace in record.sequences]
    assert traces
    for s in traces:
        np.testing.assert_allclose(s.weights * len(s), 0.5 * s.entropies + abs(s.utilities), rtol=1e-4, atol=1e-5)


# ---- records of tokens, and the text of a report that shows them -----------------------------------------------------


@pytest.mark.parametrize("name", ["vcore", *FRAGMENTS])
def test_token_records_add_up_to_the_metrics(folder: Path, lines_by_method, name: str) -> None:
    for record, line in zip(read_records(folder / name), lines_by_method[name], strict=True):
        assert (record.step, record.num_sequences_global) == (line["step"], line["sequences"])
        assert record.num_tokens == record.num_supervised_tokens_global == line["supervised_tokens"]
        sums = [(s.share * (s.weights * s.losses).sum(), s.uniform_share * s.losses.mean()) for s in record.sequences]
        assert sum(weighted for weighted, _ in sums) == pytest.approx(line["weighted_loss"], rel=1e-5)
        assert sum(uniform for _, uniform in sums) == pytest.approx(line["loss"], rel=1e-5)
        assert [s.alpha for s in record.sequences] == [pytest.approx(line["alpha"])] * 2
        assert all((s.utilities is not None) == (name == "vcore") for s in record.sequences)
        if name == "vcore":
            mean = np.concatenate([s.utilities for s in record.sequences]).mean()
            assert mean == pytest.approx(line["utility_mean"], rel=1e-4, abs=1e-6)


def print_report(capsys, *words: object) -> tuple[int, str, str]:
    """Run `vcore-ds report --text WORDS` in this process; returns exit code, stdout and stderr."""
    code = main(["report", "--text", *map(str, words)])
    return code, *capsys.readouterr()


def cut_token_tables(output: str) -> str:
    """The part of a text report between its first table of tokens and its times."""
    return output.partition("Tokens that gained")[2].partition("Seconds of a step")[0]


def parse_rows(output: str, title: str) -> list[list[str]]:
    """Words of each row of the table under `title`."""
    _, _, *rows = output[output.index(title) :].partition("\n\n")[0].splitlines()
    return [row.split() for row in rows]


def test_the_text_report_lists_the_tokens_that_gained_and_lost(folder: Path, capsys) -> None:
    code, output, _ = print_report(capsys, folder / "vcore", "--top", 3, "--min-count", 2)
    assert code == 0 and "What was learnt" in output and "Seconds of a step" in output
    assert "at steps 1, 2 (first third of the records: 1; last third: 2)" in output
    assert "Phrases that lost most" in output and not (folder / "vcore" / "report.html").exists()
    records = read_records(folder / "vcore")
    sequences = [sequence for record in records for sequence in record.sequences]
    texts = TokenTexts(load_tokenizer(str(folder / "model")).backend_tokenizer, sequences)
    tables = make_tables(records, texts, top=3, min_count=2)
    for kind, is_above in (("gained", True), ("lost", False)):
        rows = tables.extremes[title := f"Tokens that {kind} most weight"]
        shown = parse_rows(output, f"{title} (at least 2 times)")
        assert len(shown) == len(rows) == 3
        for words, row in zip(shown, rows, strict=True):
            assert (row.relative_weight > 1) == is_above and row.count >= 2
            assert words[-8:-6] == [f"{row.relative_weight:,.4g}", f"{row.count:,}"]
    for rows in (tables.groups[POSITION], [row for row in tables.groups[KIND] if row.name != IN_ANSWER]):
        assert sum(row.count for row in rows) == sum(record.num_tokens for record in records)
        assert sum(row.share_of_weight for row in rows) == pytest.approx(1.0)
        assert sum(row.share_of_tokens for row in rows) == pytest.approx(1.0)
    assert tables.relative_weight == pytest.approx(1.0, abs=1e-5)
    assert "over the run" not in output and "recipe.yaml" not in output


def test_the_text_report_compares_runs_by_kind_and_position(folder: Path, capsys) -> None:
    runs = [folder / name for name in ("vcore", "dft", "sft", "random")]
    code, output, _ = print_report(capsys, runs[0], "--top", 3, *runs[1:])
    assert code == 0
    rows = parse_rows(output, "Relative weight by position in the trace")
    assert len(rows) == 10 and {len(row) for row in rows} == {6} and "Uniform weights: sft." in output
    assert all(float(row[-2]) < 1 for row in rows)  # dft's weights are probabilities
    assert "method.name" in output and output.count("Tokens that gained") == 3
    _, output, _ = print_report(capsys, folder / "dft")
    assert "their mean relative weight is 0." in output


def test_the_text_report_says_that_a_run_has_no_records(folder: Path, tmp_path: Path, capsys) -> None:
    for name in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(folder / "vcore" / name, tmp_path)
    code, output, _ = print_report(capsys, tmp_path)
    assert code == 0 and "No tokens were recorded: tokens/ is empty or missing." in output


def test_records_that_the_text_report_cannot_show_get_a_message(folder: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder / "vcore" / "tokens", copy / "tokens")
    shutil.copy(folder / "vcore" / "metrics.jsonl", copy)
    recipe = (folder / "vcore" / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(re.sub(r"(?m)^(model:\n  path:) .*$", rf"\1 {tmp_path}/gone", recipe))
    code, output, _ = print_report(capsys, copy)
    assert code == 0 and f"{tmp_path}/gone: no such folder" in output
    assert "Name it with --tokenizer" in output
    make_tokenizer().save_pretrained(tmp_path / "small")
    for words, message in (
        ([copy, "--tokenizer", tmp_path], f"--tokenizer: {tmp_path}: no tokenizer can be loaded from there"),
        (
            [copy, "--tokenizer", tmp_path / "small"],
            "and a tokenizer with 259 tokens; expected the one that the run was trained with",
        ),
    ):
        code, output, error = print_report(capsys, *words)
        assert (code, output) == (2, "") and message in error and "Traceback" not in error
    _, output, _ = print_report(capsys, copy, "--tokenizer", folder / "vcore" / "adapter")
    expected = print_report(capsys, folder / "vcore")[1]
    assert cut_token_tables(output) == cut_token_tables(expected) != ""


# ---- the reference of iw_sft -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    file: Path
    output: str


RECIPE_32B = "launch_scripts/recipes/qwen3_32b_math_full.yaml"


@pytest.fixture(scope="module")
def reference(setup: TinySetup, tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    words = ["reference", RECIPE_32B, *setup.overrides(folder / "unused"), "--output", f"{folder}/reference.npz"]
    with ForkedJob(main, words, folder / "log", num_ranks=2) as job:
        assert job.wait() == 0, job.output
    return Reference(folder / "reference.npz", job.output)


def test_the_reference_has_the_log_probability_of_every_sequence(reference: Reference, setup: TinySetup) -> None:
    """Compare with the plain Hugging Face model, one conversation at a time."""
    model = AutoModelForCausalLM.from_pretrained(setup.untied, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(setup.untied)
    expected = []
    for line in setup.train.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        conversation = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
        ids = tokenizer(conversation, return_tensors="pt")["input_ids"]
        start = len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        expected.append(float(log_p.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    with np.load(reference.file) as stored:
        assert stored["log_probability"].shape == (12,)
        np.testing.assert_allclose(stored["log_probability"], expected, rtol=1e-5)
    assert "reference.npz, 12 sequences. Train with: methods/iw_sft.yaml" in reference.output


def test_iw_sft_with_all_parameters_starts_at_plain_sft(reference: Reference, setup: TinySetup, tmp_path) -> None:
    words = setup.overrides(
        tmp_path / "run", "methods/iw_sft.yaml", f"data.reference_log_probabilities={reference.file}"
    )
    with ForkedJob(main, ["train", RECIPE_32B, *words], tmp_path / "log") as job:
        assert job.wait() == 0, job.output
    first, second = read_metrics(tmp_path / "run")
    assert first["total_weight"] == pytest.approx(1.0, abs=1e-4)
    assert first["weighted_loss"] == pytest.approx(first["loss"], rel=1e-4)
    assert second["total_weight"] > 1.001  # the model has learned, so its sequences are likelier than before


def test_a_reference_is_not_overwritten_nor_made_for_adapters(reference: Reference, setup: TinySetup, tmp_path) -> None:
    words = setup.overrides(tmp_path / "run")
    cases = {
        (RECIPE_32B, reference.file): "is there already; expected a new file",
        (RECIPE_32B.replace("full", "lora"), tmp_path / "reference.npz"): "without its adapters",
    }
    for (recipe, output), message in cases.items():
        with ForkedJob(main, ["reference", recipe, *words, "--output", str(output)], tmp_path / "log") as job:
            assert job.wait() == 2, job.output
        assert message in job.output and "Traceback" not in job.output
