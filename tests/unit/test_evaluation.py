"""Evaluations of a tiny model in this process: ends and lengths of answers, the folder, resuming, tables, refusals."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.benchmark_rows import ROWS, write_rows
from tests.helpers.setups import write_model
from vcore_ds.cli import main
from vcore_ds.commands.evaluate.generation import InProcessModel
from vcore_ds.commands.evaluate.journal import Generation, Journal, Request
from vcore_ds.commands.evaluate.sampling import PAPER, Sampling, model_sampling
from vcore_ds.commands.evaluate.server_commands import server_commands
from vcore_ds.commands.evaluate.table import describe
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.evaluation_folder import Evaluation, TaskResult, read_evaluation, read_samples
from vcore_ds.models.named_model import NamedModel, find_named_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")

FP32 = ["--precision", "fp32"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    folder = base.parent / "adapter"
    tiny.with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)).save_pretrained(folder)
    return folder


def in_process(base: Path, sampling: Sampling, adapter: Path | None = None) -> InProcessModel:
    model = NamedModel(str(base), str(base), None if adapter is None else str(adapter))
    return InProcessModel(model, load_tokenizer(str(base)), sampling, "fp32")


def requests_of(num: int, limit: int) -> list[Request]:
    return [Request(f"p{i}", 0, "", tuple(range(65, 70 + 3 * i)), limit, seed=1000 + i) for i in range(num)]


# ---- generation ----------------------------------------------------------------------------------------------------


def test_answers_depend_on_their_own_seed_alone(base: Path) -> None:
    model, requests = in_process(base, Sampling(temperature=1.0)), requests_of(6, 200)
    together = model.generate(requests)
    assert [model.generate([request])[0] for request in requests] == together
    assert {answer.stop_reason for answer in together} == {"stop", "max_tokens"}
    for answer in together:
        assert answer.num_tokens == 200 if answer.stop_reason == "max_tokens" else 1 <= answer.num_tokens < 200
    other = model.generate([Request("p0", 1, "", requests[0].prompt_ids, 200, seed=7)])[0]
    assert other != together[0]


def test_an_end_token_counts_and_is_not_in_the_text(base: Path) -> None:
    model, (request,) = in_process(base, PAPER), requests_of(1, 30)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.tensor([request.prompt_ids])
    tokens = plain.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :].tolist()
    tokenizer = load_tokenizer(str(base))
    at = tokens.index(tokenizer.eos_token_id)
    assert model.generate([request]) == [Generation(tokenizer.decode(tokens[:at]), "stop", at + 1)]
    (cut,) = model.generate(requests_of(1, at))
    assert cut == Generation(tokenizer.decode(tokens[:at]), "max_tokens", at)


def test_the_models_longest_sequence_ends_an_answer(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16}))
    model = in_process(tmp_path / "short", PAPER)
    answers = model.generate(requests_of(2, 30))
    assert [(answer.stop_reason, answer.num_tokens) for answer in answers] == [
        ("model_length", 11),
        ("model_length", 8),
    ]
    with pytest.raises(UserError, match="p6: found a prompt of 23 tokens; expected fewer than 16"):
        model.generate(requests_of(7, 30))


def test_an_adapter_changes_the_answers(base: Path, adapter: Path) -> None:
    with_adapter = in_process(base, PAPER, adapter).generate(requests_of(2, 20))
    assert with_adapter != in_process(base, PAPER).generate(requests_of(2, 20))


@pytest.mark.parametrize(
    ("changes", "reason"), [({"hidden_size": 48}, "size mismatch"), ({"num_hidden_layers": 1}, "layers.1")]
)
def test_an_adapter_of_another_base(changes: dict, reason: str, adapter: Path, tmp_path: Path, capsys) -> None:
    other = write_model(tmp_path / "other")
    tiny.qwen3(vocab_size=len(load_tokenizer(str(other))), **changes).save_pretrained(other)
    words = ["eval", str(adapter), "--base", str(other), "--output", str(tmp_path / "out"), "--limit", "1", *FP32]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"does not fit the model {other}" in error and reason in error and "Traceback" not in error


# ---- whole evaluations ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation on stand-ins for all benchmarks."""
    folder = tmp_path_factory.mktemp("whole")
    tasks = [write_rows(folder, task) for task in ROWS]
    words = ["eval", str(base), "--output", str(folder / "out"), "--preset", "paper", *FP32]
    assert main([*words, "--max-new-tokens", "8", "--tasks", *tasks]) == 0
    return folder / "out"


def test_the_folder(whole: Path, base: Path) -> None:
    found = read_evaluation(whole)
    assert list(found.tasks) == ["aime", "olympiad", "math500", "gsm8k", "rbench", "supergpqa"]
    assert found.tasks["supergpqa"] == TaskResult(4, 1, 0.0, 1.0, 1.0, 8.0)
    assert found.generations["ojbench"]["num_problems"] == 1 and "accuracy" not in found.generations["ojbench"]
    prompts = found.sampling.pop("prompts")
    assert prompts.keys() == {*found.tasks, *found.generations} and len(set(prompts.values())) == len(prompts)
    assert found.sampling == asdict(PAPER) | {"max_new_tokens": 8} and found.preset == "paper"
    assert found.model["base"] == str(base) and {"inspect_ai", "math-verify"} <= found.versions.keys()
    assert [sample.problem_id for sample in read_samples(whole, "olympiad")] == ["1606", "1610"]
    assert not (whole / "unfinished").exists() and list((whole / "inspect_logs").glob("*.eval"))


def test_code_is_written_for_the_official_graders(whole: Path) -> None:
    assert json.loads((whole / "livecodebench.generations.json").read_text()) == [
        {"question_id": "abc301_a", "code_list": [""]}
    ]
    (line,) = (whole / "ojbench.generations.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row.pop("content") and row == ROWS["ojbench"][0]


def test_the_table(whole: Path) -> None:
    found = read_evaluation(whole)
    lines = describe(found).splitlines()
    assert lines[0].split() == "task problems samples accuracy truncated no answer mean tokens".split()
    assert lines[1].split() == ["aime", "1", "1", "0.0%", "100.0%", "100.0%", "8.0"]
    assert lines[7].startswith("livecodebench") and "(graded elsewhere)" in lines[7]
    head, rule, row = (line for line in lines if line.startswith("|"))
    assert head == "| Model | AIME | Olympiad | LCB | OJBench | RBench | SGPQA-1k | GSM8K | MATH500 |"
    assert row.count("0.00") == 6 and row.count("(graded elsewhere)") == 2 and rule.count("---:") == 8
    own = Evaluation({"path": "m"}, None, {}, {}, {"champ": TaskResult(28, 4, 0.25, 0.5, 0.125, 300.0)})
    assert describe(own).splitlines()[1].split() == ["champ", "28", "4", "25.0%", "50.0%", "12.5%", "300.0"]
    assert "|" not in describe(own)


def sampled(base: Path, output: Path) -> list[str]:
    """Twelve answers in three batches."""
    words = ["eval", str(base), "--output", str(output), "--tasks", "arithmetic", "--limit", "4", "--samples", "3"]
    return [*words, "--temperature", "1", "--max-new-tokens", "12", "--batch-size", "4", *FP32]


def test_an_evaluation_that_was_killed_resumes(base: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(sampled(base, whole)) == 0
    generate, batches = InProcessModel.generate, []

    def killed_in_the_third_batch(self, requests):
        batches.append([request.key for request in requests])
        if len(batches) == 3:
            raise MemoryError("killed")
        return generate(self, requests)

    monkeypatch.setattr(InProcessModel, "generate", killed_in_the_third_batch)
    with pytest.raises(MemoryError):
        main(sampled(base, killed))
    journal = killed / "unfinished" / "arithmetic.jsonl"
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1] + b"?")  # the model is trained again
    assert main(sampled(base, killed)) == 2 and "\n  weights: " in capsys.readouterr().err
    (base / "model.safetensors").write_bytes(weights)
    # As a kill in the middle of a write leaves it: the second batch is cut off.
    journal.write_text(journal.read_text()[:-20])
    batches.clear()
    batches.append([])  # no third batch in this attempt
    capsys.readouterr()
    monkeypatch.setattr(InProcessModel, "generate", lambda *words: batches.append([]) or generate(*words))
    assert main(sampled(base, killed)) == 0
    said = capsys.readouterr().out
    assert said.startswith("arithmetic: 12 answers of at most ")  # before the first batch, which may take hours
    assert "arithmetic: 7 of 12 answers are there already" in said and len(batches) == 3
    assert (killed / "arithmetic.jsonl").read_bytes() == (whole / "arithmetic.jsonl").read_bytes()
    assert read_evaluation(killed) == read_evaluation(whole)
    samples = read_samples(whole, "arithmetic")
    assert [sample.sample for sample in samples] == [0, 1, 2] * 4 and len({sample.output for sample in samples}) == 12


def test_another_evaluation_in_the_folder_is_refused(base: Path, whole: Path, tmp_path: Path, capsys) -> None:
    assert main(sampled(base, whole)) == 2
    assert "holds a finished evaluation; expected a new folder" in capsys.readouterr().err
    begun = tmp_path / "begun"
    (begun / "unfinished").mkdir(parents=True)
    (begun / "unfinished" / "request.json").write_text(json.dumps({"model": str(base), "seed": 7}))
    assert main(sampled(base, begun)) == 2
    error = capsys.readouterr().err
    assert "holds an unfinished evaluation of something else" in error and "  seed: 7 there, 42 here" in error
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert main(sampled(base, tmp_path / "other")) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_a_journal_keeps_whole_lines(tmp_path: Path) -> None:
    requests, answer = requests_of(3, 8), Generation("a\u2028b", "stop", 3)
    journal = Journal(tmp_path / "j.jsonl", "t", 3)
    journal.append(requests[:2], [answer, answer])
    with (tmp_path / "j.jsonl").open("a") as file:
        file.write('{"problem_id": "p2", "sam')
    again = Journal(tmp_path / "j.jsonl", "t", 3)
    assert [again.get(request) for request in requests] == [answer, answer, None]
    again.append(requests, [Generation("other", "stop", 1)] * 3)
    assert [again.get(request).output for request in requests] == ["a\u2028b", "a\u2028b", "other"]
    assert len((tmp_path / "j.jsonl").read_text().split("\n")) == 4


# ---- what is evaluated ---------------------------------------------------------------------------------------------


def test_the_models_own_sampling(base: Path, tmp_path: Path) -> None:
    assert model_sampling(str(base)) == Sampling()
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert model_sampling(str(tmp_path)) == Sampling(temperature=0.6, top_p=0.95, top_k=20)


def test_models_that_cannot_be_evaluated(base: Path, adapter: Path, tmp_path: Path, capsys) -> None:
    output = ["--output", str(tmp_path / "out")]
    cases = [
        ([str(tmp_path / "none"), *output], "no such folder, and not a hub id"),
        ([str(base), "--base", str(base), *output], "is a whole model; expected an adapter"),
        ([str(base)], "found no --output"),
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
    found = find_named_model(str(tmp_path), str(base))
    assert (found.weights, found.adapter, found.base) == (str(base), str(tmp_path), str(base))
    with pytest.raises(UserError, match=f"no such folder.*It is the base model of {tmp_path}. Name it$"):
        find_named_model(str(tmp_path), "/no/such/model", remedy="Name it")


def test_lines_that_serve_a_model(base: Path, adapter: Path) -> None:
    words = "--tasks aime --output out"
    plain = server_commands(find_named_model(str(base), None), max_new_tokens=8_192, seed=42, words=words)
    assert f"vllm serve {base} --dtype bfloat16 --max-model-len 12288 --seed 42 --generation-config vllm\n" in plain
    lines = server_commands(
        find_named_model(str(adapter), str(base)), max_new_tokens=None, seed=42, words=words
    ).splitlines()
    assert f"--enable-lora --max-lora-rank 8 --lora-modules {base.parent.name}={adapter}" in lines[1]
    assert lines[2].endswith(f"--served-name {base.parent.name} {words}") and lines[4].startswith("python -m sglang")
