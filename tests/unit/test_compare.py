"""`vcore-ds compare`: its tables, JSON and refusals."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.helpers.evaluations import SAMPLING, write_answers
from vcore_ds.commands.cli import main
from vcore_ds.training.evaluation_folder import EVALUATION, samples_path


def draw_answers(seed: int, share: float, num_problems: int = 60, num_samples: int = 1) -> np.ndarray:
    """Draw right (1) and wrong (0) answers to problems of varying difficulty, the same problems for all seeds."""
    difficulty = np.random.default_rng(0).uniform(-0.4, 0.4, (num_problems, 1))
    return (np.random.default_rng(seed).random((num_problems, num_samples)) < share + difficulty).astype(int)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Two evaluations of two tasks."""
    for name, seed, shift in (("sft", 1, 0.0), ("vcore", 2, 0.15)):
        tasks = {"aime": draw_answers(seed, 0.4 + shift), "olympiad": draw_answers(seed + 10, 0.5 + shift, 200)}
        write_answers(tmp_path / name, tasks)
    return [str(tmp_path / name) for name in ("sft", "vcore")]


@pytest.fixture
def seeds(tmp_path: Path) -> dict[str, list[str]]:
    """Three seeds of each of two methods, four samples a problem."""
    folders_by_method = {}
    for method, shift in (("sft", 0.0), ("vcore", 0.2)):
        folders = [tmp_path / method / f"seed_{seed}" for seed in range(3)]
        for seed, folder in enumerate(folders):
            write_answers(folder, {"aime": draw_answers(seed + int(100 * shift), 0.4 + shift, num_samples=4)})
        folders_by_method[method] = [str(folder) for folder in folders]
    return folders_by_method


def group_words(seeds: dict[str, list[str]]) -> list[str]:
    return [word for method, folders in seeds.items() for word in ("--group", method, *folders)]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["compare", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(run(capsys, *words, "--json"))


def read_differences(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    results = run_json(capsys, *words)["results"]
    return [result["difference"] for result in results if result["difference"] is not None]


# ---- comparisons -----------------------------------------------------------------------------------------------------


def test_one_run_each_is_compared_by_problem(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    comparison = run_json(capsys, *pair)
    assert comparison["intervals_are_about"] == "these checkpoints"
    assert [(result["task"], result["side"], result["difference"] is None) for result in comparison["results"]] == [
        ("aime", "sft", True),
        ("aime", "vcore", False),
        ("olympiad", "sft", True),
        ("olympiad", "vcore", False),
    ]
    reference, aime, _, olympiad = (result["difference"] or result for result in comparison["results"])
    assert reference["accuracy"] == draw_answers(1, 0.4).mean() and reference["interval"][0] < reference["accuracy"]
    expected = (draw_answers(2, 0.55) - draw_answers(1, 0.4)).ravel()
    assert aime["value"] == pytest.approx(expected.mean()) and aime["two_way"] is None
    assert (aime["num_better"], aime["num_worse"]) == ((expected > 0).sum(), (expected < 0).sum())
    p_values = [aime["p_value"], olympiad["p_value"]]
    assert [aime["holm_p_value"], olympiad["holm_p_value"]] == pytest.approx(
        [max(2 * min(p_values), p) if p > min(p_values) else 2 * p for p in p_values]
    )

    text = run(capsys, *pair)
    for words in ("exact p", "truncated", "Holm", "about these checkpoints", "aime: 60 problems, 1 sample of each"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120
    low, high = aime["interval"]
    row = next(line for line in text.splitlines() if re.match(r" *vcore ", line))
    assert f"{100 * aime['value']:+.1f}" in row and f"[{100 * low:+.1f}, {100 * high:+.1f}]" in row

    # Problems are paired by id, whatever their order in the file; tasks are chosen; groups of one have a name.
    path = samples_path(Path(pair[1]), "aime")
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert run(capsys, *pair) == text
    (result,) = read_differences(capsys, *pair, "--tasks", "olympiad")
    assert result == olympiad | {"holm_p_value": olympiad["p_value"]}
    named = run_json(capsys, "--group", "plain", pair[0], "--group", "weighted", pair[1])
    assert [side["name"] for side in named["sides"]] == ["plain", "weighted"]
    assert named["results"][1]["difference"] == comparison["results"][1]["difference"]


def test_several_seeds_are_compared_by_method(seeds: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = read_differences(capsys, *group_words(seeds))
    assert len(result["by_seed"]) == 3 and result["value"] == pytest.approx(np.mean(result["by_seed"]))
    half = 4.302652730 * np.std(result["by_seed"], ddof=1) / np.sqrt(3)
    assert result["interval"] == pytest.approx([result["value"] - half, result["value"] + half])
    assert result["sign_flip_p_value"] is None  # it would ignore how seeds differ
    text = run(capsys, *group_words(seeds))
    assert "about the methods" in text and "3 seeds" in text and "exact p" not in text
    for folders in zip(*seeds.values(), strict=True):
        assert "  " + "   ".join(folders) in text.splitlines()
    assert "are of the same model" not in text

    low, high = result["two_way"]["interval"]
    assert low <= result["interval"][0] and result["interval"][1] <= high
    assert f"[{100 * low:+.1f}, {100 * high:+.1f}]" in text


def test_several_samples_and_more_than_two_sides_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {name: draw_answers(seed, 0.5, num_samples=4) for seed, name in enumerate("abc")}
    folders = [str(write_answers(tmp_path / name / "eval", {"aime": table})) for name, table in tables.items()]
    comparison = run_json(capsys, *folders)
    assert [result["side"] for result in comparison["results"]] == ["a/eval", "b/eval", "c/eval"]
    for name, result in zip("bc", comparison["results"][1:], strict=True):  # both with the first
        expected = stats.ttest_rel(tables[name].mean(1), tables["a"].mean(1)).confidence_interval()
        assert result["difference"]["interval"] == pytest.approx(list(expected))


def test_numbers_that_evaluations_do_not_determine_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    # A single problem; equal answers.
    for name, first, second in (("single", [[0]], [[1]]), ("equal", draw_answers(1, 0.5), draw_answers(1, 0.5))):
        folders = [write_answers(tmp_path / name / side, {"aime": t}) for side, t in (("a", first), ("b", second))]
        (result,) = read_differences(capsys, *map(str, folders))
        assert result["interval"] is result["p_value"] is result["holm_p_value"] is None
        assert result["sign_flip_p_value"] == 1.0 and "–" in run(capsys, *map(str, folders))
    assert [str(warning.message) for warning in recwarn] == []


def test_warnings_name_what_weakens_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compare_sides(*sides: tuple[np.ndarray, int], model: str | None = None) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        words = [
            str(write_answers(folder / name, {"aime": table}, truncated=truncated, model=model))
            for name, (table, truncated) in zip("abcdef", sides, strict=False)
        ]
        groups = ["--group", "x", *words[:3], "--group", "y", *words[3:]] if len(words) == 6 else words
        return run(capsys, *groups)

    first, second = draw_answers(1, 0.5), draw_answers(2, 0.5)
    assert "warning: " not in compare_sides((first, 1), (second, 1))
    assert "aime: outputs were truncated (a 0.0%, b 3.3%)" in compare_sides((first, 0), (second, 2))
    assert "aime: outputs were truncated (a 6.7%, b 6.7%)" in compare_sides((first, 4), (second, 4))
    second = first.copy()
    second[:3] = 1 - second[:3]
    assert "b and a differ on 3 problems; below 5" in compare_sides((first, 0), (second, 0))
    seeds = [(draw_answers(seed, 0.5), 0) for seed in range(6)]
    assert "are of the same model" not in compare_sides(*seeds)
    assert compare_sides(*seeds, model="one").count("are of the same model") == 2


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def incomparable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with evaluations that differ from `a` in one thing each, but for `b`, `c` and `d`."""
    root = tmp_path_factory.mktemp("evaluations")
    table = draw_answers(1, 0.5, 12)
    for name in ("a", "b", "c", "d", "damaged", "damaged_2", "damaged_3"):
        write_answers(root / name, {"aime": table})
    for name in ("nothing", "nothing_2"):
        write_answers(root / name, {})
    write_answers(root / "more_problems", {"aime": draw_answers(1, 0.5, 17)})
    write_answers(root / "more_samples", {"aime": draw_answers(1, 0.5, 12, 4)})
    write_answers(root / "more_tasks", {"aime": table, "gsm8k": table})
    limits = {"max_new_tokens": {"aime": 8192, "gsm8k": 512}}
    write_answers(root / "limits", {"aime": table, "gsm8k": table}, sampling=SAMPLING | limits)
    changed = SAMPLING | {"temperature": 0.0, "top_k": 20, "seed": 7}
    write_answers(root / "sampling", {"aime": table}, sampling=changed)
    (root / "damaged" / EVALUATION).write_text('{"format": 2}')
    for name, kept in (("damaged_2", 0), ("damaged_3", 1)):  # a line is missing, and another one twice
        path = samples_path(root / name, "aime")
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:-1], *lines[:kept]]))
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "EVAL: found nothing"),
        (["a"], "EVAL: found . a; expected two"),
        (["a", "a/../a"], "EVAL: found . a; . a/../a; expected"),
        (["a", "nowhere"], "found no evaluation.json"),
        (["a", "b", "--tasks", "gsm8k"], "a: found no graded task gsm8k (there: aime)"),
        (["a", "--group", "x", "b"], "EVAL: found a beside --group"),
        (["--group", "x", "--group", "y", "b"], "EVAL: found x; y b; expected"),
        (["--group", "x", "a", "b", "c"], "EVAL: found x a b c; expected"),
        (["--group", "x", "a", "--group", "x", "b"], "EVAL: found x a; x b; expected"),
        (["--group", "x", "a", "b", "--group", "y", "c"], "EVAL: found x a b; y c; expected"),
        (["--group", "x", "a", "b", "--group", "y", "c", "d"], "EVAL: found x a b; y c d; expected"),
        (["a", "more_problems"], "more_problems: aime: found 5 problems that only one of them has, such as aime-0012"),
        (["more_problems", "a"], "a: aime: found 5 problems that only one of them has"),
        (["a", "more_samples"], "more_samples: aime: found samples of a problem 4 (1)"),
        (["a", "more_tasks"], "a: found no graded task gsm8k (there: aime)"),
        (["more_tasks", "a"], "a: found no graded task gsm8k (there: aime)"),
        (["a", "sampling"], "sampling: aime: found temperature 0.0 (0.6), top_k 20 (null); expected"),
        (["more_tasks", "limits"], "limits: gsm8k: found max_new_tokens 512 (8192)"),
        (["nothing", "nothing_2"], "nothing: found no graded task"),
        (["a", "damaged"], "damaged/evaluation.json"),
        (["a", "damaged_2"], "damaged_2/aime.jsonl: is damaged: found 11 samples of 11 problems"),
        (["a", "damaged_3"], "damaged_3/aime.jsonl: is damaged: found 12 samples of 11 problems"),
    ],
)
def test_incomparable_evaluations_are_refused(
    words: list[str],
    message: str,
    incomparable: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(incomparable)
    assert main(["compare", *words]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("vcore-ds: ") and output.out == ""


def test_sampling_seeds_and_limits_of_other_tasks_may_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"max_new_tokens": {"aime": 8192, "gsm8k": 512}, "seed": 7}
    a = write_answers(tmp_path / "a", {"aime": draw_answers(2, 0.5)})
    both = {"aime": draw_answers(1, 0.5), "gsm8k": draw_answers(2, 0.5)}
    b = write_answers(tmp_path / "b", both, sampling=SAMPLING | limits)
    run(capsys, str(a), str(b), "--tasks", "aime")
