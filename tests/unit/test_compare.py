"""`vcore-ds compare`: its tables, JSON and picture, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.evaluations import SAMPLING, write_answers
from vcore_ds.cli import main
from vcore_ds.commands.compare.read import names_of
from vcore_ds.files.evaluation_folder import EVALUATION, samples_path


def answers(seed: int, share: float, num_problems: int = 60, num_samples: int = 1) -> np.ndarray:
    """Right answers to problems of different difficulty, the same problems for all seeds."""
    difficulty = np.random.default_rng(0).uniform(-0.4, 0.4, (num_problems, 1))
    return (np.random.default_rng(seed).random((num_problems, num_samples)) < share + difficulty).astype(int)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Two evaluations of two tasks."""
    for name, seed, shift in (("sft", 1, 0.0), ("vcore", 2, 0.15)):
        tasks = {"aime": answers(seed, 0.4 + shift), "olympiad": answers(seed + 10, 0.5 + shift, 200)}
        write_answers(tmp_path / name, tasks)
    return [str(tmp_path / name) for name in ("sft", "vcore")]


@pytest.fixture
def seeds(tmp_path: Path) -> dict[str, list[str]]:
    """Three seeds of each of two methods, four samples a problem."""
    found = {}
    for method, shift in (("sft", 0.0), ("vcore", 0.2)):
        folders = [tmp_path / method / f"seed_{seed}" for seed in range(3)]
        for seed, folder in enumerate(folders):
            write_answers(folder, {"aime": answers(seed + int(100 * shift), 0.4 + shift, num_samples=4)})
        found[method] = [str(folder) for folder in folders]
    return found


def grouped(seeds: dict[str, list[str]]) -> list[str]:
    return [word for method, folders in seeds.items() for word in ("--group", method, *folders)]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["compare", *words])
    output = capsys.readouterr()
    assert (code, output.err) == (0, "")
    return output.out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(run(capsys, *words, "--json"))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["compare", *words])
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert output.err.startswith("vcore-ds: ") and "Traceback" not in output.err
    return output.err


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_one_run_each(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *pair)
    assert found["reference"] == "sft" and found["intervals_are_about"] == "these checkpoints"
    assert [(one["task"], one["side"], one["reference"]) for one in found["differences"]] == [
        ("aime", "vcore", "sft"),
        ("olympiad", "vcore", "sft"),
    ]
    aime = found["differences"][0]
    differences = (answers(2, 0.55) - answers(1, 0.4)).ravel()
    assert aime["difference"] == pytest.approx(differences.mean())
    assert (aime["num_better"], aime["num_worse"]) == ((differences > 0).sum(), (differences < 0).sum())
    for interval in (aime["interval"], aime["bootstrap_interval"]):
        assert interval[0] < aime["difference"] < interval[1]
    assert aime["two_way"] is None and aime["sample_sizes"] is None
    p_values = [one["p_value"] for one in found["differences"]]
    assert [one["holm_p_value"] for one in found["differences"]] == pytest.approx(
        [max(2 * min(p_values), p) if p > min(p_values) else 2 * p for p in p_values]
    )
    first = found["accuracies"][0]
    assert first["accuracy"] == answers(1, 0.4).mean() and first["interval"][0] < first["accuracy"]


def test_the_tables_of_one_run_each(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *pair)
    for words in ("Accuracy in percent, with 95% intervals (Wilson)", "McNemar p", "bootstrap", "truncated", "Holm"):
        assert words in text
    assert "about these two checkpoints" in text and "not about the methods" in text
    assert max(map(len, text.splitlines()[:12])) <= 120
    # The number of a row is that of the JSON.
    found = run_json(capsys, *pair)["differences"][0]
    low, high = found["interval"]
    row = next(line for line in text.splitlines() if re.match(r"aime +vcore", line))
    assert f"{100 * found['difference']:+.1f}" in row and f"[{100 * low:+.1f}, {100 * high:+.1f}]" in row


def test_several_seeds(seeds: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = run_json(capsys, *grouped(seeds))["differences"]
    assert len(one["by_seed"]) == 3 and one["difference"] == pytest.approx(np.mean(one["by_seed"]))
    half = 4.302652730 * np.std(one["by_seed"], ddof=1) / np.sqrt(3)
    assert one["interval"] == pytest.approx([one["difference"] - half, one["difference"] + half])
    # What would take the seeds for granted is not offered.
    assert one["bootstrap_interval"] is None and one["sign_flip_p_value"] is None and one["two_way"] is None
    text = run(capsys, *grouped(seeds))
    assert "about the methods" in text and "Student's t over seeds" in text and "McNemar" not in text
    for folders in zip(*seeds.values(), strict=True):
        assert "  " + "   ".join(folders) in text.splitlines()


def test_two_way_clustering_on_request(seeds: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = run_json(capsys, *grouped(seeds), "--two-way")["differences"]
    low, high = one["two_way"]["interval"]
    assert low <= one["interval"][0] and one["interval"][1] <= high
    assert "two-way interval" in run(capsys, *grouped(seeds), "--two-way")


def test_samples_of_a_problem_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [
        str(write_answers(tmp_path / name, {"aime": answers(seed, 0.5, num_samples=16)}))
        for name, seed in (("a", 1), ("b", 2))
    ]
    found = run_json(capsys, *pair)
    differences = answers(2, 0.5, num_samples=16).mean(1) - answers(1, 0.5, num_samples=16).mean(1)
    half = 2.000995378 * differences.std(ddof=1) / np.sqrt(60)
    interval = found["differences"][0]["interval"]
    assert interval == pytest.approx([differences.mean() - half, differences.mean() + half])
    assert "sign-flip p" in run(capsys, *pair)


def test_all_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_answers(tmp_path / name / "eval", {"aime": answers(i, 0.5)})) for i, name in enumerate("abc")]
    found = run_json(capsys, folders[0], "--power", "5", *folders[1:])
    assert [(one["side"], one["reference"]) for one in found["differences"]] == [("b", "a"), ("c", "a")]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/a/eval", "runs/b/eval"], ["a", "b"]),
        (["runs/a/seed_1/eval", "runs/b/seed_1/eval", "runs/b/seed_2/eval"], ["a/seed_1", "b/seed_1", "b/seed_2"]),
        (["runs/a", "runs/a/a"], ["a", "a/a"]),
        (["x", "runs/x"], ["x", "runs/x"]),
        (["x"], ["x"]),
        ([], []),
    ],
)
def test_sides_are_called_by_what_differs_in_their_paths(folders: list[str], names: list[str]) -> None:
    assert names_of([Path(folder) for folder in folders]) == names


def test_groups_of_one_are_names(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "--group", "plain", pair[0], "--group", "weighted", pair[1])
    assert found["reference"] == "plain" and found["intervals_are_about"] == "these checkpoints"
    assert found["differences"][0]["interval"] == run_json(capsys, *pair)["differences"][0]["interval"]


def test_tasks_are_chosen(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *pair, "--tasks", "olympiad")
    assert [one["task"] for one in found["differences"]] == ["olympiad"]
    (one,) = found["differences"]
    assert one["holm_p_value"] == one["p_value"]


def test_problems_are_paired_by_id(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = run(capsys, *pair)
    path = samples_path(Path(pair[1]), "aime")
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert run(capsys, *pair) == before


# ---- sample sizes ----------------------------------------------------------------------------------------------------


def test_more_samples_need_fewer_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [
        str(write_answers(tmp_path / name, {"aime": answers(seed, 0.5, num_samples=4)}))
        for name, seed in (("a", 1), ("b", 2))
    ]
    sizes = run_json(capsys, *pair, "--power", "5")["differences"][0]["sample_sizes"]
    assert sizes["unit"] == "problems" and list(sizes["needed"]) == ["1", "4", "16", "64"]
    needed = list(sizes["needed"].values())
    assert needed == sorted(needed, reverse=True) and needed[0] > 2 * needed[-1]
    assert "k = 16" in run(capsys, *pair, "--power", "5")
    # The difference that 60 problems detect needs 60.
    detectable = 100 * sizes["detectable"]
    sizes = run_json(capsys, *pair, "--power", f"{detectable}")["differences"][0]["sample_sizes"]
    assert sizes["needed"]["4"] in (60, 61)


def test_one_sample_does_not_say_what_more_would_do(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = run_json(capsys, *pair, "--power", "5")["differences"][0]["sample_sizes"]
    assert sizes["needed"]["1"] > 60 and sizes["needed"]["16"] is None
    assert "One sample a problem does not tell" in run(capsys, *pair, "--power", "5")


def test_a_single_problem_does_not_say_what_more_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    folders = [write_answers(tmp_path / name, {"aime": [[right]]}) for name, right in (("sft", 0), ("vcore", 1))]
    (one,) = run_json(capsys, *map(str, folders), "--power", "5")["differences"]
    assert one["difference"] == 1.0 and one["interval"] is None
    assert set(one["sample_sizes"]["needed"].values()) == {None} and one["sample_sizes"]["detectable"] is None
    assert [str(warning.message) for warning in recwarn] == []


def test_seeds_that_are_needed(seeds: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = run_json(capsys, *grouped(seeds), "--power", "2")["differences"]
    assert one["sample_sizes"]["unit"] == "seeds" and one["sample_sizes"]["needed"]["4"] >= 3


# ---- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truncated", "words"),
    [
        ((0, 0), None),
        ((1, 1), None),
        ((0, 2), "aime: truncated shares differ (a 0.0%, b 3.3%)"),
        ((4, 4), "aime: many outputs were truncated (a 6.7%, b 6.7%)"),
    ],
)
def test_truncation_is_warned_of(
    truncated: tuple[int, int], words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [
        str(write_answers(tmp_path / name, {"aime": answers(seed, 0.5)}, truncated=count))
        for name, seed, count in (("a", 1, truncated[0]), ("b", 2, truncated[1]))
    ]
    text = run(capsys, *pair)
    assert ("warning: " in text) == (words is not None) and (words or "") in text
    assert f"{truncated[1] / 60:.1%}" in text


def test_few_differing_problems_and_other_versions_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = answers(1, 0.5)
    second = first.copy()
    second[:3] = 1 - second[:3]
    a = write_answers(tmp_path / "a", {"aime": first}, versions={"vllm": "0.9.2"})
    b = write_answers(tmp_path / "b", {"aime": second}, versions={"vllm": "0.10.0"})
    text = run(capsys, str(a), str(b))
    second[1:3] = first[1:3]
    c = write_answers(tmp_path / "c", {"aime": second}, versions={"vllm": "0.9.2"})
    assert "c and a differ on 1 problem; below 5" in run(capsys, str(a), str(c))
    assert "b and a differ on 3 problems" in text and "vllm 0.10.0 (0.9.2)" in text


def test_seeds_of_one_model_are_warned_of(
    seeds: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "are of the same model" not in run(capsys, *grouped(seeds))
    again = [write_answers(tmp_path / f"{i}", {"aime": answers(i, 0.5, num_samples=4)}, model="one") for i in range(3)]
    text = run(capsys, *grouped(seeds | {"vcore": [str(folder) for folder in again]}))
    assert "vcore: " + " and ".join(map(str, again)) + " are of the same model" in text


def test_equal_answers_have_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = [str(write_answers(tmp_path / name, {"aime": answers(1, 0.5)})) for name in "ab"]
    (one,) = run_json(capsys, *pair, "--power", "5")["differences"]
    assert (one["difference"], one["interval"], one["p_value"], one["holm_p_value"]) == (0.0, None, None, None)
    assert one["sign_flip_p_value"] == 1.0 and set(one["sample_sizes"]["needed"].values()) == {None}
    assert "differ on 0 problems" in run(capsys, *pair, "--power", "5")


# ---- picture ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "begin"), [("x.png", b"\x89PNG"), ("x.pdf", b"%PDF"), ("x.svg", b"<?xml")])
def test_the_picture(name: str, begin: bytes, pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(pair[0]).parent / name
    run(capsys, *pair, "--png", str(path))
    assert path.read_bytes().startswith(begin)


def test_the_picture_of_seeds_has_every_name(
    seeds: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = dict(zip(["$sft", "v$core"], seeds.values(), strict=True))
    run(capsys, *grouped(names), "--two-way", "--png", str(tmp_path / "x.svg"))
    assert "methods on these problems" in (tmp_path / "x.svg").read_text()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "found no evaluation; expected at least two"),
        (["a"], "found 1 evaluation; expected at least two"),
        (["a", "a"], "found twice"),
        (["a", "a/../a"], "found twice"),
        (["a", "nowhere"], "found no evaluation.json"),
        (["a", "b", "--two-way"], "--two-way: found one evaluation a side"),
        (["a", "b", "--png", "x.gif"], "--png: found x.gif; expected a name that ends in .png, .pdf, .svg"),
        (["a", "b", "--png", "none/x.png"], "--png: none/x.png: cannot be written"),
        (["a", "b", "--power", "100"], "--power: found 100 points"),
        (["a", "b", "--tasks", "gsm8k"], "found no task gsm8k (there: aime)"),
        (["a", "--group", "x", "b"], "found a beside --group"),
        (["--group", "x", "--group", "y", "b"], "--group: x: found no evaluation"),
        (["--group", "x", "a", "b", "c"], "found 1 side; expected at least two"),
        (["--group", "x", "a", "--group", "x", "b"], "--group: x: found twice"),
        (["--group", "x", "a", "b", "--group", "y", "c"], "found 2 of x, 1 of y; expected as many"),
        (["--group", "x", "a", "b", "--group", "y", "c", "d"], "found 2 evaluations in each; expected one, or at"),
    ],
)
def test_what_cannot_be_compared(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for i, name in enumerate("abcd"):
        write_answers(tmp_path / name, {"aime": answers(i, 0.5, 12)})
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *words)


def test_other_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_answers(tmp_path / "a", {"aime": answers(1, 0.5, 30)})
    b = write_answers(tmp_path / "b", {"aime": answers(1, 0.5, 35)})
    message = refusal(capsys, str(a), str(b))
    assert "b/aime.jsonl: found other problems" in message
    assert "5 only there (aime-0030, aime-0031, aime-0032, ..)" in message
    assert "5 missing" in refusal(capsys, str(b), str(a))


def test_other_numbers_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_answers(tmp_path / f"{k}", {"aime": answers(1, 0.5, 30, k)}) for k in (4, 16))
    assert "found 16 samples of each problem, and 4 in" in refusal(capsys, str(a), str(b))


def test_other_sampling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"temperature": 0.0, "top_k": 20, "seed": 7}
    a = write_answers(tmp_path / "a", {"aime": answers(1, 0.5)})
    b = write_answers(tmp_path / "b", {"aime": answers(2, 0.5)}, sampling=SAMPLING | changes)
    message = refusal(capsys, str(a), str(b))
    assert "  temperature: 0.0 there, 0.6 in" in message and "  top_k: 20 there, nothing in" in message
    assert "seed" not in message
    c = write_answers(tmp_path / "c", {"aime": answers(2, 0.5)}, sampling=SAMPLING | {"seed": 7})
    run(capsys, str(a), str(c))


def test_limits_on_new_tokens_are_compared_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"aime": answers(1, 0.5), "gsm8k": answers(2, 0.5)}
    limits = {"max_new_tokens": {"aime": 8192, "gsm8k": 512}}
    a = write_answers(tmp_path / "a", {"aime": answers(2, 0.5)})
    b = write_answers(tmp_path / "b", both, sampling=SAMPLING | limits)
    c = write_answers(tmp_path / "c", both, sampling=SAMPLING | {"max_new_tokens": {"aime": 8192, "gsm8k": 1024}})
    run(capsys, str(a), str(b), str(c), "--tasks", "aime")
    assert "  max_new_tokens: 1024 there, 512 in" in refusal(capsys, str(b), str(c))


def test_a_task_that_only_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_answers(tmp_path / "a", {"aime": answers(1, 0.5)})
    b = write_answers(tmp_path / "b", {"aime": answers(2, 0.5), "gsm8k": answers(2, 0.5)})
    for words in ((str(a), str(b)), (str(b), str(a))):
        message = refusal(capsys, *words)
        assert f"{a}: found no task gsm8k (there: aime)" in message and "--tasks" in message
    run(capsys, str(a), str(b), "--tasks", "aime")


def _drop_a_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _repeat_a_line(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[0]]))


def _cut_a_line(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def _empty(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("damage", [_drop_a_line, _repeat_a_line, _cut_a_line, _empty, Path.unlink])
def test_damaged_samples(damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_answers(tmp_path / name, {"aime": answers(1, 0.5, 12, 2)}) for name in "ab")
    damage(samples_path(b, "aime"))
    message = refusal(capsys, str(a), str(b))
    assert "b/aime.jsonl" in message and "expected" in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "tasks": {"aime": {}}}'])
def test_a_damaged_evaluation(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_answers(tmp_path / name, {"aime": answers(1, 0.5, 12)}) for name in "ab")
    (b / EVALUATION).write_text(text)
    message = refusal(capsys, str(a), str(b))
    assert "b/evaluation.json" in message and "expected" in message


def test_no_graded_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write_answers(tmp_path / name, {}) for name in "ab")
    assert "found no graded task" in refusal(capsys, str(a), str(b))
