"""Reports: what is encoded for the page, curves over seeds, groups, warnings, and bad input."""

import base64
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.commands import HANG_SECONDS
from tests.helpers.report_runs import random_sequence, random_trace, step_line, write_run
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.commands.page import (
    FILES,
    NOTHING,
    SCRIPTS,
    STYLE,
    as_json,
    loss_levels,
    name_by_first_words,
    nearest,
    utility_levels,
    weight_levels,
)
from vcore_ds.commands.report.runs import (
    MOST_POINTS,
    Chart,
    ReportedRun,
    group_runs,
    make_charts,
    read_runs,
    write_pictures,
)
from vcore_ds.commands.report.tables import (
    compare_weights,
    encode_records,
    make_page,
    results_table,
    summarize,
    weight_range,
)
from vcore_ds.common.errors import UserError
from vcore_ds.training.evaluation_folder import (
    EVALUATION,
    RUN_EVALUATION,
    Evaluation,
    TaskResult,
    compute_weights_digest,
    write_evaluation,
)

TOKENIZER = make_tokenizer()
TEXT = "so \\boxed{42} 😀 is right"
IDS = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]


def make_run(folder: Path, *, num_steps: int = 4, seed: int = 0, records: bool = True, **sections) -> Path:
    lines = [step_line(step, loss=(1 + seed) / step) for step in range(1, num_steps + 1)]
    sequences = {2: [random_sequence(IDS, i, seed=seed + i, share=0.5) for i in range(2)]} if records else {}
    return write_run(folder, TOKENIZER, lines, sequences, run={"output_dir": str(folder), "seed": seed}, **sections)


def read_reported(*folders: Path) -> list[ReportedRun]:
    return read_runs(folders, top=5)


def chart_of(*folders: Path) -> dict[str, Chart]:
    return {chart.key: chart for chart in make_charts(group_runs(read_reported(*folders)))}


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_utilities_have_levels_of_their_own_at_each_step(tmp_path: Path) -> None:
    """`e2e/test_report.py` compares each token's numbers on the page with its record."""
    small, large = (random_sequence(IDS, 0, seed=0) for _ in range(2))
    small = replace(small, utilities=small.utilities * np.float32(1e-4))
    (run,) = read_reported(write_run(tmp_path / "run", TOKENIZER, [step_line(1)], {1: [small], 2: [large]}))
    description, blob = encode_records(run, run.records, 10**6)
    assert description["measures"] == ["weight", "loss", "utility"]
    packed = np.frombuffer(gzip.decompress(base64.b64decode(blob)), dtype=np.uint8)
    first, second = packed[-4 * len(IDS) : -2 * len(IDS)].reshape(2, -1)
    decoded = np.array(description["levels"]["utility"][1])[first]
    assert np.abs(decoded - small.utilities).max() < 0.02 * np.abs(small.utilities).max()
    assert (first == second).all()


def test_the_uniform_weight_and_no_utility_are_exact() -> None:
    levels = weight_levels(np.array([0.0, 0.3, 1.0, 7.0]))
    codes = nearest(levels, np.array([0.0, 0.3, 1.0, 7.0]))
    assert levels[codes].tolist() == pytest.approx([0.0, 0.3, 1.0, 7.0]) and levels[128] == 1.0
    assert utility_levels(np.array([-3.0, 0.0, 100.0]))[[0, 128, 255]].tolist() == pytest.approx([-3.0, 0.0, 100.0])
    for levels in (
        weight_levels(np.ones(3)),
        weight_levels(np.array([1e-30, 2e4])),
        utility_levels(np.zeros(3)),
        utility_levels(np.array([-1e-9, 1e6])),
        loss_levels(np.zeros(2)),
        loss_levels(np.array([1e-6, 30.0])),
    ):
        assert len(levels) == 256 and np.isfinite(levels).all() and (np.diff(levels) > 0).all()


QUESTIONS = ["user\nAdd the numbers.\n\nAnn has 7 coins", "user\nAdd the numbers.\n\nAnn has 9 books"]
LONG = "What is the sum of all of the numbers from 1 to "


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (QUESTIONS, ["Ann has 7 coins", "Ann has 9 books"]),
        (QUESTIONS[:1] * 2, ["Add the numbers. Ann has 7 coins"] * 2),
        ([f"{LONG}{n} in base {n}?" for n in (10, 20)], ["10 in base 10?", "20 in base 20?"]),
        ([f"{LONG}10?"], ["What is the sum of all of the numbers from 1 …"]),
        (["", "x"], ["", "x"]),
    ],
)
def test_a_trace_is_named_by_what_tells_it_apart(texts: list[str], names: list[str]) -> None:
    assert name_by_first_words(texts) == names


def test_traces_have_prompts_and_stand_up_to_the_size_of_a_page(tmp_path: Path) -> None:
    texts = (*(f"{question}\nassistant\n" for question in QUESTIONS), "")
    ids = [np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32) for text in texts]
    recorded = [replace(random_sequence(IDS, i, seed=i), prompt_ids=prompt) for i, prompt in enumerate(ids)]
    (run,) = read_reported(write_run(tmp_path / "run", TOKENIZER, [step_line(1)], {1: recorded}))
    description, _ = encode_records(run, run.records, 10**6)
    prompts = [description["prompts"][entry["prompt"]] for entry in description["sequences"]]
    assert prompts == [*(question.replace("\n\n", "\n") for question in QUESTIONS), ""]
    assert description["sequences"][2]["name"].startswith("so \\boxed{42}")  # without a prompt, the trace's first words
    for most_tokens, expected in ((1, 1), (2 * len(IDS) - 1, 1), (2 * len(IDS), 2)):
        description, _ = encode_records(run, run.records, most_tokens)
        assert len(description["sequences"]) == expected and description["numRecorded"] == 3 * len(IDS)
    powers = np.abs(np.log2(np.concatenate([one.relative_weights for one in recorded])))
    assert np.median(powers) < weight_range([run]) < powers.max() and weight_range([]) <= 1.0


def test_followed_traces_are_shown_where_they_were_measured(tmp_path: Path) -> None:
    held_out, trained = (random_trace(IDS, i, i, source) for i, source in ((4, "held out, a"), (2, "training data")))
    broken = replace(trained, losses=trained.losses * np.float32("inf"))
    cut = replace(trained, num_supervised_tokens=2 * len(IDS))  # the file has the first tokens
    followed = {1: [held_out, cut], 2: [held_out, broken], 3: [broken]}
    records = {1: [random_sequence(IDS, 0, seed=0)]}
    (run,) = read_reported(write_run(tmp_path / "run", TOKENIZER, [step_line(1)], records, followed=followed))
    description, _ = encode_records(run, run.followed, 10**6)
    n = len(IDS)
    assert [(entry["group"], entry["source"], entry["id"], entry["note"]) for entry in description["sequences"]] == [
        (1, "held out, a", 4, f"Held out, not trained on: all of {n} tokens"),
        (1, "training data", 2, f"Training data: the first {n} of {2 * n} tokens"),
        (2, "held out, a", 4, f"Held out, not trained on: all of {n} tokens"),
    ]
    assert description["measures"] == ["weight", "loss", "utility", "entropy"]


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_seeds_of_a_recipe_are_one_curve(tmp_path: Path) -> None:
    runs = read_reported(
        make_run(tmp_path / "a", seed=0),
        make_run(tmp_path / "b", seed=1, num_steps=3, track={"tags": ["second"], "trackers": ["tensorboard"]}),
        make_run(tmp_path / "c", seed=0, method={"kl_budget": 0.1}),
        tmp_path / "a",
    )
    assert [run.name for run in runs] == ["a", "b", "c"]
    groups = group_runs(runs)
    assert [label for label, _ in groups] == ["kl_budget 0.05 (2 runs)", "kl_budget 0.1"]
    charts = {chart.key: chart for chart in make_charts(groups)}
    both, single = charts["loss"].series
    assert both.steps == [1, 2, 3] and both.values == pytest.approx([1.5, 0.75, 0.5])  # steps that both have
    assert both.bands[0][0] == pytest.approx([1, 0.5, 1 / 3], rel=1e-5) and both.bands[0][1][0] == 2
    assert single.steps == [1, 2, 3, 4] and single.bands == []
    negative = [(np.concatenate([s.utilities for s in run.records[0].sequences]) < 0).mean() for run in runs[:2]]
    assert charts["negative"].series[0].steps == [2]
    assert charts["negative"].series[0].values[0] == pytest.approx(100 * np.mean(negative), rel=1e-5)
    wide, middle = charts["quantiles"].series[0].bands
    assert wide[0][0] < middle[0][0] < charts["quantiles"].series[0].values[0] < middle[1][0] < wide[1][0]
    assert charts["alpha"].is_constant() and "tau" not in charts  # not measured
    long = make_run(tmp_path / "long", num_steps=3 * MOST_POINTS + 1, records=False)
    (thinned,) = chart_of(long)["loss"].series
    assert len(thinned.steps) == MOST_POINTS and thinned.steps[-1] == 3 * MOST_POINTS + 1


def test_all_measures_have_curves_in_the_order_of_interest(tmp_path: Path) -> None:
    lines = [
        step_line(step, validation_loss_b=1 / step, peak_memory_bytes=step << 30, learning_rate=1e-3 / step)
        | {"new_one": step, "$^{": step}
        for step in (1, 2)
    ]
    run = write_run(tmp_path / "run", TOKENIZER, lines, {1: [random_sequence(IDS, 0, seed=0)]})
    (run / "held_out.json").write_text('{"before": {"b": 3.0}, "after": {}}')
    charts = chart_of(run)
    held_out = charts["validation_loss_b"].series[0]
    assert (held_out.steps, held_out.values) == ([0, 1, 2], [3.0, 1.0, 0.5])  # before the first step, too
    keys, sorted_keys = list(charts), ["weighted_loss", "negative", "seconds", "new_one"]
    assert keys[:4] == ["loss", "validation_loss_b", "grad_norm", "learning_rate"]
    assert [chart.section for chart in charts.values()][:3] == ["Losses", "Losses", "Learning"]
    assert sorted(sorted_keys, key=keys.index) == sorted_keys and charts["peak_memory_bytes"].series[0].values == [1, 2]
    assert (charts["new_one"].title, charts["new_one"].section) == ("New one", "Other measures")
    assert charts["validation_loss_b"].title == "Held-out loss b"
    moving = [chart for chart in charts.values() if not chart.is_constant()]
    written = write_pictures(read_reported(run), tmp_path / "pictures")  # `$` begins no formula
    assert len(written) == 2 * len(moving)


def test_adams_first_step_is_not_on_the_scale_of_the_others(tmp_path: Path) -> None:
    lines = [step_line(step, tau=0.9 if step == 1 else 0.01 / step, utility_mean=1.0 * step) for step in (1, 2, 3)]
    adam = {"probe": {"direction": "adam", "clip": 1.0}}
    for name, key, steps, note, sections in (
        ("adam", "tau", [2, 3], "Mean over sequences. Without step 1", adam),
        ("adam_alpha", "loss", [1, 2, 3], "Uniform cross-entropy", adam),
        ("sgd", "tau", [1, 2, 3], "Mean over sequences", {}),
    ):
        run = write_run(tmp_path / name, TOKENIZER, lines, {}, optimizer={"gradient_clipping": 1.0}, **sections)
        chart = chart_of(run)[key]
        assert chart.series[0].steps == steps and chart.note.startswith(note)


def test_constant_measures_are_shown_as_values(tmp_path: Path) -> None:
    def read_constants(*folders: Path) -> dict[str, str]:
        groups = group_runs(read_reported(*folders))
        labels = [label for label, _ in groups]
        return {chart.key: chart.format_values(labels) for chart in make_charts(groups) if chart.is_constant()}

    def write(name: str, kl: Callable[[int], float], num_steps: int = 4, **sections) -> Path:
        lines = [step_line(step, kl=kl(step), peak_memory_bytes=2**30) for step in range(1, num_steps + 1)]
        return write_run(tmp_path / name, TOKENIZER, lines, {}, **sections)

    first = write("first", lambda step: 0.05 + 1e-7 * step)
    values = read_constants(first)
    assert {"alpha": "0.95", "kl": "0.05 nats", "peak_memory_bytes": "1 GiB"}.items() <= values.items()
    assert not {"loss", "grad_norm"} & values.keys()
    changed = write("other", lambda step: 0.1, method={"kl_budget": 0.1})
    values = read_constants(first, changed)
    assert (values["kl"], values["alpha"]) == ("0.05 nats (kl_budget 0.05), 0.1 nats (kl_budget 0.1)", "0.95")
    assert "kl" not in read_constants(first, changed, write("moving", float, run={"seed": 1}))
    assert read_constants(write("one_step", float, num_steps=1)) == {}


# ---- results ---------------------------------------------------------------------------------------------------------


def add_evaluation(run: Path, accuracy: float) -> Path:
    """The run with held-out losses, and an evaluation of its result."""
    (run / "held_out.json").write_text(json.dumps({"before": {"a": 1.5}, "after": {"a": 1.25, "b": 0.5}}))
    task = TaskResult(40, 1, accuracy, truncated_share=0.0, unanswered_share=0.0, mean_tokens=9.0)
    (run / RUN_EVALUATION).mkdir()
    write_evaluation(run / RUN_EVALUATION, Evaluation({"path": str(run)}, None, {}, {}, {"arithmetic": task}))
    return run


def test_evaluations_of_the_result_are_found_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the run and in the working directory; not those of other weights, or that cannot be read."""
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / "runs" / name) for name in "ab"]
    digests = []
    for run in runs:
        (run / "model" / "model.safetensors").write_text(run.name)
        digests.append(compute_weights_digest(run / "model"))
    add_evaluation(runs[0], 0.1)
    places = {"runs/evaluations/a": (digests[0], 0.2), "here": (digests[0], 0.3), "runs/other": (digests[1], 0.4)}
    for place, (digest, accuracy) in {**places, "runs/old": (None, 0.9)}.items():
        task = TaskResult(40, 1, accuracy, truncated_share=accuracy / 4, unanswered_share=0.0, mean_tokens=9.0)
        Path(place).mkdir(parents=True)
        write_evaluation(Path(place), Evaluation({"digest": digest} if digest else {}, None, {}, {}, {"math": task}))
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / EVALUATION).write_text("{")
    first, second = read_reported(*runs)
    assert {name: task.accuracy for name, task in first.evaluated.items()} == {
        "arithmetic": 0.1, "math": 0.2, "math, here": 0.3,
    }  # fmt: skip
    assert {name: task.accuracy for name, task in second.evaluated.items()} == {"math": 0.4}
    assert [sum("limit on new tokens" in note for note in run.notes) for run in (first, second)] == [2, 1]  # from 5%
    (runs[1] / "model" / "model.safetensors").write_text("trained again")
    assert read_reported(runs[1])[0].evaluated == {}


def test_uniform_weights_have_no_tables(tmp_path: Path) -> None:
    """Plain SFT had four tables of ones, and a column of them beside other runs."""
    sequence = random_sequence(IDS, 0, seed=0)
    flat = replace(sequence, weights=np.full(len(IDS), 1 / len(IDS), np.float32), utilities=None)
    runs = [write_run(tmp_path / name, TOKENIZER, [step_line(1)], {1: [one]}, method={"name": name, "kl_budget": kl})
            for name, one, kl in (("sft", flat, None), ("vcore", sequence, 0.05))]  # fmt: skip
    (sentence,) = compare_weights(read_reported(runs[0]))
    assert isinstance(sentence, str)
    text = make_page(read_reported(*runs)).text()
    assert "Uniform weights: sft." in text and text.count("By kind of token") == 1


def test_the_results_of_several_runs(tmp_path: Path) -> None:
    """No row compares a mean over sequences with one over tokens; a file of an earlier version has the former."""
    token: dict[str, Any] = {"normalization": "token"}
    add_evaluation(make_run(tmp_path / "a", lora={"rank": 4, "alpha": 8.0}), 0.425)
    make_run(tmp_path / "b", method=token)
    (tmp_path / "b/held_out.json").write_text(json.dumps({"before": {"a": 1.0}, "after": {"a": 0.5}} | token))
    lines = [step_line(1, loss=None, seconds=5400.0, sequences=8, supervised_tokens=12345)]
    sections: dict[str, Any] = {"method": {"name": "sft", "kl_budget": None}, "environment": {"world_size": 2}}
    write_run(tmp_path / "c", TOKENIZER, lines, {}, model={"path": "/models/other"}, **sections)
    runs = read_reported(*(tmp_path / name for name in "abc"))
    table = results_table(runs)
    assert table.head == ["", "a", "b", "c"]
    training = ["vcore, 4 steps: 16s"] * 2 + ["sft, 1 step, 8 sequences, 12,345 tokens, 2 ranks: 1h30m"]
    assert table.rows == [
        ["held-out loss, a (nats)", "1.5000 → 1.2500", NOTHING, NOTHING],
        ["held-out loss, b (nats)", "– → 0.5000", NOTHING, NOTHING],  # validation_path changed when it was resumed
        ["training loss, first and last step (nats)", "1.0000 → 0.2500", NOTHING, "– → –"],
        ["accuracy, arithmetic (40 problems)", "42.5%", NOTHING, NOTHING],
        ["training", *training],
        ["held-out loss, a (nats, mean over tokens)", NOTHING, "1.0000 → 0.5000", NOTHING],
        ["training loss, first and last step (nats, mean over tokens)", NOTHING, "1.0000 → 0.2500", NOTHING],
    ]
    assert summarize(runs) == "some/model, /models/other fine-tuned with vcore, sft."
    assert "method.normalization" in chart_of(tmp_path / "a", tmp_path / "b")["loss"].note


# ---- warnings and the page -------------------------------------------------------------------------------------------


def test_notes_warn_of_what_went_wrong(tmp_path: Path) -> None:
    clean = make_run(tmp_path / "clean")
    assert read_reported(clean)[0].notes == []
    lines = [step_line(1), step_line(2, loss=None, signal_to_noise=0.0, num_saturated=3)]
    environment = {"git_commit": "abc-dirty", "resumed": [{"step": 1}]}
    run = write_run(tmp_path / "run", TOKENIZER, lines, {}, environment=environment)
    (run / "metrics_lost.jsonl").touch()
    (run / "model").rename(run / "elsewhere")
    notes = " ".join(read_reported(run)[0].notes)
    for part in ("Last step: 2", "Resumed from step 1", "taken again", "not finite in step 2", "noise in step 2",
                 "out of reach in 3 sequences", "differed from its git commit"):  # fmt: skip
        assert part in notes
    assert len(read_reported(run)[0].notes) == 7


def test_a_report_imports_no_torch(tmp_path: Path) -> None:
    """Its 6 CPU seconds were nearly all imports; the tokens' texts need the library tokenizers alone."""
    code = (
        "import sys\n"
        "from vcore_ds.commands.cli import main\n"
        "code = main(['report', *sys.argv[1:]])\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'transformers', 'deepspeed', 'peft', 'scipy', 'datasets', 'matplotlib'}\n"
        "print('loaded:', *sorted(heavy), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(make_run(tmp_path / "run"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert (done.stderr, done.returncode) == ("loaded:\n", 0)
    assert "boxed" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_how_a_run_ended_and_its_warnings_stand_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First what was learnt, then warnings, then the keys that differ. A loss that rises from 10.8 to 96,348 was
    introduced with "Losses fall, by any method"."""
    make_run(tmp_path / "clean")
    rising = [step_line(step, loss=10.8 if step < 3 else 96_348.0) for step in range(1, 5)]
    write_run(tmp_path / "rising", TOKENIZER, rising, {}, optimizer={"learning_rate": 0.5})
    stopped = write_run(tmp_path / "stopped", TOKENIZER, [step_line(1)], {}, environment={"git_commit": "abc-dirty"})
    (stopped / "model").rename(stopped / "elsewhere")
    (stopped / "end.json").write_text('{"step": 2, "message": "the loss is not finite"}')
    names = [str(tmp_path / name) for name in ("clean", "rising", "stopped")]
    assert main(["report", *names, "--text"]) == 0
    text = capsys.readouterr().out
    parts = [
        "What was learnt",
        "Warnings on the comparison",
        "Warnings on rising",
        "diverged: the loss rose from 10.8 to 96,348 nats",
        "Warnings on stopped",
        "ended in step 2: the loss is not finite",
        "differed from its git commit",
        "Keys in which the recipes differ",
    ]
    assert [text.count(part) for part in parts] == [1] * len(parts) and "Losses fall" not in text
    assert sorted(parts, key=text.index) == parts
    assert main(["report", *names, "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = page[page.index("<main>") :]
    assert sorted(parts, key=page.index) == parts and page.index("<section") == page.index('<section id="losses">')
    assert main(["report", names[0], "--text"]) == 0
    assert "Losses fall" in capsys.readouterr().out
    (stopped / "end.json").write_text('{"step": 2')
    assert main(["report", names[2], "--text"]) == 2 and "end.json: is damaged" in capsys.readouterr().err


def test_json_and_scripts_cannot_end_their_element() -> None:
    assert "<" not in as_json({"</script>": ["<!--", "\u2028"]}) and as_json(["<a"]) == '["\\u003ca"]'
    for name in SCRIPTS:
        assert "</script" not in (FILES / name).read_text().lower()
    assert "</style" not in (FILES / STYLE).read_text().lower()


# ---- bad input -------------------------------------------------------------------------------------------------------


def read_refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one message of a report that cannot be written."""
    assert main(["report", *map(str, words)]) == UserError.EXIT_CODE == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("vcore-ds: ") and "Traceback" not in captured.err
    return captured.err


DAMAGES = [
    ("metrics.jsonl", "", "metrics.jsonl: is empty"),
    ("metrics.jsonl", None, "found no metrics.jsonl there"),
    *(("metrics.jsonl", f'{{"step": 1}}\n{{"step": 2}}\n{line}\n', "metrics.jsonl: line 3: found ")
      for line in ('{"step": 3, "lo', "[1]", "null", '{"loss": 1.0}', '{"step": "3"}', '{"step": 0}', '{"step": 2}',
                   "\ufffd", "", "[" * 100_000)),
    ("tokens/step_00000002.npz", "PK", "tokens/step_00000002.npz: is damaged"),
    *((name, text, f"{name}: is damaged") for name in ("held_out.json", "evaluation/evaluation.json")
      for text in ("{", "[{}, {}]", '{"format": 1, "before": {}}')),
    *(("environment.json", text, "environment.json: is damaged") for text in ("[]", "{", "\0")),
    ("recipe.yaml", "method: [", "recipe.yaml:1:10: found no YAML"),
]  # fmt: skip
"""A file of a run, what stands in it, and what the message names."""


def test_damaged_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", num_steps=2)
    for name, text, named in DAMAGES:
        path = run / name
        before = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        message = read_refusal(capsys, run)
        assert named in message and str(run) in message and len(message) < 500, (name, text)
        path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
    assert not (run / "report.html").exists() and main(["report", str(run)]) == 0
    (run / "environment.json").unlink()
    assert main(["report", str(run)]) == 0


def test_folders_and_options_that_cannot_be_used_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for words in ([tmp_path / "nothing"], [tmp_path], [tmp_path / "file"], [run, tmp_path]):
        assert f"RUN: {words[-1]}: " in read_refusal(capsys, *words)
    for option, value in (("output", "file/report.html"), ("output", "full"), ("png", "file"), ("tokenizer", "full")):
        assert f"--{option}: " in read_refusal(capsys, run, f"--{option}", tmp_path / value)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = read_refusal(capsys, run, "--png", tmp_path / "pictures")
    assert "--png: " in message and "pip install 'vcore_ds[pictures]'" in message
