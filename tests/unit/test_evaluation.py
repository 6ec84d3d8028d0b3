"""Evaluations of a tiny model in this process: ends and lengths of answers, the folder, resuming, refusals."""

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.benchmark_rows import ROWS, write_rows
from tests.helpers.commands import HANG_SECONDS, REPOSITORY, UNUSED_GPU, add_unused_gpu
from tests.helpers.late_imports import LateModule
from tests.helpers.ranks import forkserver
from tests.helpers.setups import write_model
from vcore_ds.commands.cli import main
from vcore_ds.commands.evaluate import RANK_VARIABLES, Sampling, choose_sampling, evaluate_run
from vcore_ds.commands.named_model import NamedModel, find_named_model
from vcore_ds.common.errors import EXIT_STOPPED, UserError
from vcore_ds.common.locks import lock_folder
from vcore_ds.data.answers import AnswerChecker
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.training.evaluation_folder import RUN_EVALUATION, TaskResult, read_evaluation, read_samples

if TYPE_CHECKING:
    from vcore_ds.commands.evaluate.session import Request

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")

FP32 = ["--precision", "fp32"]
GREEDY = Sampling()
session = LateModule("vcore_ds.commands.evaluate.session")
tasks = LateModule("vcore_ds.commands.evaluate.tasks")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    folder = base.parent / "adapter"
    tiny.with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("prompt", "completion", "stop_reason", "answer"),
    [
        ("1 + 4?", r"\boxed{5}, or", "max_tokens", "5"),
        ("1 + 4?\n<think>\n", r"is it \boxed{5}? Let", "max_tokens", None),
        ("1 + 4?\n<think>\n", r"4?</think>\boxed{5}, or", "max_tokens", "5"),
        ("1 + 4?\n<think>\n", r"\boxed{5}", "stop", "5"),
    ],
)
def test_thinking_that_the_prompt_opens_may_be_cut_off(
    prompt: str, completion: str, stop_reason: str, answer: str | None
) -> None:
    from inspect_ai.model import ChatMessageUser, ModelName, ModelOutput
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState

    asked = [ChatMessageUser(content=prompt)]
    output = ModelOutput.from_content("m", completion, stop_reason)
    state = TaskState(ModelName("a/m"), sample_id=1, epoch=1, input=asked, messages=asked, output=output)
    score = asyncio.run(session.final_answer_scorer("math", AnswerChecker(5))(state, Target("5")))
    assert (score.answer, score.value) == (answer, "C" if answer else "I")


def answer(
    base: Path, requests: "list[Request]", sampling: Sampling = GREEDY, adapter: Path | None = None
) -> list[tuple[str, str, int]]:
    """Text, stop reason and number of tokens of each answer."""
    model = NamedModel(str(base), str(base), None if adapter is None else str(adapter))
    api = session.InProcessAPI(model, load_tokenizer(str(base)), sampling, "fp32", [requests])
    return [(one.completion, one.stop_reason, one.usage.output_tokens) for one in api.answer(requests)]


def make_requests(base: Path, num: int, limit: int, seed: int = 1) -> "list[Request]":
    template, requests = load_tokenizer(str(base)).apply_chat_template, []
    for i in range(num):
        turns = [{"role": "user", "content": "word " * (1 + 3 * i)}]
        prompt = template(turns, add_generation_prompt=True, return_dict=False)
        requests.append(session.Request(tuple(prompt), seed + i, limit))
    return requests


# ---- generation ----------------------------------------------------------------------------------------------------


def test_samples_depend_on_the_seed(base: Path) -> None:
    first, repeated, reseeded = (
        answer(base, make_requests(base, 6, 200, seed), Sampling(temperature=1.0)) for seed in (1, 1, 2)
    )
    assert first == repeated != reseeded
    assert {reason for _, reason, _ in first} == {"stop", "max_tokens"}
    assert not any("<|im_end|>" in text for text, _, _ in first)
    assert all(length == 200 if reason == "max_tokens" else 1 <= length < 200 for _, reason, length in first)
    # top_k=1 and a tiny top_p leave only the likeliest token.
    likeliest = answer(base, make_requests(base, 2, 20))
    assert answer(base, make_requests(base, 2, 20), Sampling(temperature=1.0, top_k=1)) == likeliest
    assert answer(base, make_requests(base, 2, 20, seed=7), Sampling(temperature=1.0, top_p=1e-6)) == likeliest


def test_an_end_token_ends_the_answer_and_counts(base: Path, tmp_path: Path) -> None:
    tokenizer, (request,) = load_tokenizer(str(base)), make_requests(base, 1, 30)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.tensor([request.prompt])
    tokens = plain.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :].tolist()
    model = shutil.copytree(base, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[-1]], "max_new_tokens": 3}))
    num = tokens.index(tokens[-1]) + 1
    assert answer(model, make_requests(base, 1, 30)) == [(tokenizer.decode(tokens[:num]), "stop", num)]
    assert answer(base, make_requests(base, 1, num)) == [(tokenizer.decode(tokens[:num]), "max_tokens", num)]


def test_the_models_longest_sequence_ends_an_answer(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    ends = answer(tmp_path / "short", make_requests(base, 2, 60))
    assert [reason for _, reason, _ in ends] == ["model_length"] * 2 and ends[0][2] - ends[1][2] > 0
    with pytest.raises(UserError, match="found a prompt of .* tokens; expected fewer than 64"):
        answer(tmp_path / "short", make_requests(base, 7, 60))


def test_an_adapter_changes_the_answers(base: Path, adapter: Path) -> None:
    assert answer(base, make_requests(base, 2, 20), adapter=adapter) != answer(base, make_requests(base, 2, 20))


@pytest.mark.parametrize(
    ("changes", "reason"), [({"hidden_size": 48}, "size mismatch"), ({"num_hidden_layers": 1}, "layers.1")]
)
def test_an_adapter_of_another_base_is_refused(
    changes: dict, reason: str, adapter: Path, tmp_path: Path, capsys
) -> None:
    other_base = write_model(tmp_path / "other")
    tiny.qwen3(vocab_size=len(load_tokenizer(str(other_base))), **changes).save_pretrained(other_base)
    words = ["eval", str(adapter), "--base", str(other_base), "--output", str(tmp_path / "out"), "--limit", "1", *FP32]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"does not fit the model {other_base}" in error and reason in error and "Traceback" not in error


# ---- complete evaluations --------------------------------------------------------------------------------------------


def test_all_benchmarks_are_evaluated(base: Path, tmp_path: Path, capsys) -> None:
    """On stand-ins for the benchmarks' data."""
    tasks, folder = [write_rows(tmp_path, task) for task in ROWS], tmp_path / "out"
    words = ["eval", str(base), "--output", str(folder), "--preset", "paper", *FP32]
    assert main([*words, "--max-new-tokens", "8", "--tasks", *tasks]) == 0
    table = capsys.readouterr().out.splitlines()[-10:]
    assert table[0].split() == "task problems samples accuracy truncated no answer mean tokens".split()
    assert table[1].split() == ["aime", "1", "1", "0.0%", "100.0%", "100.0%", "8.0"]
    written = read_evaluation(folder)
    assert list(written.tasks) == ["aime", "olympiad", "math500", "gsm8k", "rbench", "supergpqa"]
    assert written.tasks["supergpqa"] == TaskResult(4, 1, 0.0, 1.0, 1.0, 8.0)
    prompts = written.sampling.pop("prompts")
    assert prompts.keys() == ROWS.keys() and len(set(prompts.values())) == len(prompts)
    assert written.sampling == asdict(Sampling()) | {"max_new_tokens": 8} and written.preset == "paper"
    assert written.model["base"] == str(base) and {"inspect_ai", "math-verify"} <= written.versions.keys()
    assert [sample.problem_id for sample in read_samples(folder, "olympiad")] == ["1606", "1610"]
    # For the official graders of code.
    assert table[7].startswith("livecodebench") and "graded elsewhere" in table[7]
    programs = json.loads((folder / "livecodebench.generations.json").read_text())
    assert programs == [{"question_id": "abc301_a", "code_list": [""]}]
    row = json.loads((folder / "ojbench.generations.json").read_text())
    assert row.pop("content") and row == ROWS["ojbench"][0]


def test_the_example_of_own_problems_works_as_documented(base: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    ((file, rows, command),) = re.findall(r"(?ms)^cat > (\S+) <<'EOF'\n(.*?)^EOF\nvcore-ds (.*?)$", page)
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(rows)
    words = [str(base) if word == "RUN" else word for word in shlex.split(command)]
    assert main([*words, "--max-new-tokens", "8", *FP32]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[:2] == ["percent", "2"]
    assert [sample.problem_id for sample in read_samples(Path("percent"), "percent")] == ["half", "tip"]
    shutil.copytree("percent", "again")
    assert main(["compare", "percent", "again"]) == 0 and "percent" in capsys.readouterr().out


def make_words(base: Path, output: Path, *options: str) -> list[str]:
    """Twelve answers in three batches."""
    words = ["eval", str(base), "--output", str(output), "--tasks", "arithmetic", "--limit", "4", "--samples", "3"]
    return [*words, "--temperature", "1", "--max-new-tokens", "12", "--batch-size", "4", *FP32, *options]


def kill_in_the_third_batch(words: Sequence[str]) -> int:
    """`vcore-ds` in a process that is killed while it evaluates."""
    answer, batches = session.InProcessAPI.answer, []

    def answer_twice(self, requests):
        batches.append(requests)
        if len(batches) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer(self, requests)

    session.InProcessAPI.answer = answer_twice
    return main(words)


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "out"
    with redirect_stdout(io.StringIO()):
        assert main(make_words(base, folder)) == 0
    return folder


def test_an_evaluation_that_was_killed_and_interrupted_resumes(
    base: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    words = make_words(base, tmp_path / "out")
    killed = forkserver().Process(target=kill_in_the_third_batch, args=(words,))
    killed.start()
    killed.join(HANG_SECONDS)
    assert killed.exitcode == -signal.SIGKILL
    batches: list[object] = []
    answer = session.InProcessAPI.answer

    def interrupt(self, requests):
        os.kill(os.getpid(), signal.SIGINT)
        return answer(self, requests)

    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))  # it is trained again
    assert main(words) == 2 and "holds an evaluation of another model" in capsys.readouterr().err
    (base / "model.safetensors").write_bytes(weights)
    with lock_folder(tmp_path / "out"):  # by a second command, which would generate the same answers
        assert main(words) == 2 and f"{tmp_path / 'out'}: found another process" in capsys.readouterr().err
    monkeypatch.setattr(session.InProcessAPI, "answer", interrupt)
    assert main(words) == EXIT_STOPPED
    assert "the same command resumes" in capsys.readouterr().err and not (tmp_path / "out/evaluation.json").exists()
    monkeypatch.setattr(session.InProcessAPI, "answer", lambda *arguments: batches.append(1) or answer(*arguments))
    assert main(words) == 0
    assert len(batches) < 3  # of the three
    assert (tmp_path / "out/arithmetic.jsonl").read_bytes() == (finished / "arithmetic.jsonl").read_bytes()
    assert read_evaluation(tmp_path / "out") == read_evaluation(finished)
    samples = read_samples(finished, "arithmetic")
    assert [sample.sample for sample in samples] == [0, 1, 2] * 4 and len({sample.output for sample in samples}) == 12


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch may be able to use GPUs")
def test_gpus_that_pytorch_cannot_use_are_reported(base: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    add_unused_gpu(tmp_path, monkeypatch)
    assert main(make_words(base, tmp_path / "evaluation")) == 2
    assert capsys.readouterr().err.startswith(f"vcore-ds: {UNUSED_GPU}")


def test_a_folder_with_something_else_is_refused(base: Path, finished: Path, tmp_path: Path, capsys) -> None:
    assert main(make_words(base, finished)) == 2
    assert f"--output: {finished}/evaluation.json: is there already" in capsys.readouterr().err
    unfinished = shutil.copytree(finished, tmp_path / "unfinished")
    (unfinished / "evaluation.json").unlink()
    assert main(make_words(base, unfinished, "--seed", "7")) == 2
    assert "holds an evaluation of another model, other problems or with other sampling" in capsys.readouterr().err


def test_a_run_is_evaluated_after_training(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank evaluates a stand-in for the run's model on a few problems of each default task."""
    run = shutil.copytree(base, tmp_path / "run")
    # So that answers end soon.
    (run / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(256)]}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")

    def run_here(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """The command in this process, which has imported everything."""
        assert words[:4] == [sys.executable, "-P", "-m", "vcore_ds.commands.cli"]
        assert not env.keys() & set(RANK_VARIABLES) and str(REPOSITORY) in env["PYTHONPATH"].split(os.pathsep)
        with monkeypatch.context() as patch:
            for name in RANK_VARIABLES:
                patch.delenv(name, raising=False)
            return subprocess.CompletedProcess(words, main([*words[4:], "--limit", "3"]))

    monkeypatch.setattr(subprocess, "run", run_here)
    evaluate_run(run)
    written = read_evaluation(run / RUN_EVALUATION)
    assert {name: task.num_problems for name, task in written.tasks.items()} == {"arithmetic": 3, "champ": 3}
    assert [len(task.problems) for task in tasks.choose_tasks(list(written.tasks))] == [200, 30]
    assert written.sampling["max_new_tokens"] == {"arithmetic": 96, "champ": 256}


# ---- models and sampling ---------------------------------------------------------------------------------------------


def test_sampling_is_read_from_options_preset_and_model(base: Path, tmp_path: Path) -> None:
    assert choose_sampling(str(base), None, {"seed": None}) == Sampling()
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    chosen = choose_sampling(str(tmp_path), None, {"seed": 7})
    assert chosen == Sampling(temperature=0.6, top_p=0.95, top_k=20, seed=7)
    assert choose_sampling(str(tmp_path), "paper", {"top_p": 0.5}) == Sampling(top_p=0.5)


def test_models_that_cannot_be_evaluated_are_refused(base: Path, tmp_path: Path, capsys) -> None:
    output = ["--output", str(tmp_path / "out")]
    cases = [
        ([str(tmp_path / "none"), *output], "no such folder"),
        ([str(base), "--base", str(base), *output], "is a full model; expected an adapter"),
        ([str(base), "--samples", "4", *output], "with greedy decoding, which gives the same answer each time"),
        ([str(base), *output, "--tasks", "amie"], "found 'amie' (did you mean \"aime\"?)"),
    ]
    for words, message in cases:
        assert main(["eval", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_names_no_base_needs_one(base: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="found no base_model_name_or_path; .* Name it$"):
        find_named_model(str(tmp_path), remedy="Name it")
    model = find_named_model(str(tmp_path), str(base))
    assert (model.weights, model.adapter, model.base) == (str(base), str(tmp_path), str(base))
    with pytest.raises(UserError, match=f"no such folder.*It is the base model of {tmp_path}. Name it$"):
        find_named_model(str(tmp_path), "/no/such/model", remedy="Name it")
