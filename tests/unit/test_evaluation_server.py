"""Evaluations through a server: what it is asked, and what happens where it is down, fails or serves another model."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from tenacity import wait_none

from tests.helpers.commands import HANG_SECONDS, command_environment, free_port, wait_until
from tests.helpers.late_imports import LateModule
from tests.helpers.setups import write_model
from tests.helpers.soak import soak_only
from vcore_ds.commands.cli import main
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.training.evaluation_folder import read_evaluation, read_samples

Answer = tuple[int, dict]
session = LateModule("vcore_ds.commands.evaluate.session")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits between attempts."""
    monkeypatch.setattr("inspect_ai.model.ModelAPI.retry_wait", lambda self: wait_none())


@contextmanager
def serve(answers: Callable[[str, dict], Answer]) -> Iterator[tuple[str, list[dict]]]:
    """Serve the answers of `answers(path, body)`; yields the URL and the bodies of completion requests."""
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(answers(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            self._reply(answers(self.path, body))

        def _reply(self, answer: Answer) -> None:
            text = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", bodies
    finally:
        httpd.shutdown()
        httpd.server_close()


def answer_as_vllm(path: str, body: dict, *, extra_tokens: int = 0) -> Answer:
    """Answer as vLLM does, with 12 as every completion."""
    if path == "/v1/completions":
        num_prompt = len(body["prompt"]) + extra_tokens
        ends = "length" if body["seed"] % 2 else "stop"
        return 200, {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "text": "It is 12", "finish_reason": ends, "logprobs": None}],
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": 5, "total_tokens": num_prompt + 5},
        }
    return 404, {}


def make_words(base: Path, url: str, output: Path, *more: str) -> list[str]:
    options = ["--url", url, "--served-name", "m", "--output", str(output), "--tasks", "arithmetic", "--limit", "6"]
    return ["eval", str(base), *options, "--temperature", "0.6", "--top-p", "0.95", "--top-k", "20", *more]


def test_every_sampling_field_is_sent_with_each_attempt(base: Path, tmp_path: Path) -> None:
    """The server fails at the first attempt of each request."""
    seen: set[int] = set()

    def answers(path: str, body: dict) -> Answer:
        if body and body["seed"] not in seen:
            seen.add(body["seed"])
            return 503, {"error": {"message": "busy"}}
        return answer_as_vllm(path, body)

    with serve(answers) as (url, bodies):
        assert main(make_words(base, url, tmp_path / "out", "--samples", "2")) == 0
    assert len(bodies) == 24 and len(seen) == 12
    tokenizer = load_tokenizer(str(base))
    for body in bodies:
        fields = {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        assert fields == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
        assert body["max_tokens"] == 96 and body["model"] == "m"
        assert tokenizer.decode(body["prompt"]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    evaluation = read_evaluation(tmp_path / "out")
    assert evaluation.model["served_name"] == "m" and evaluation.model["url"] == url
    result = evaluation.tasks["arithmetic"]
    assert result.mean_tokens == 5.0 and result.num_samples_per_problem == 2
    samples = read_samples(tmp_path / "out", "arithmetic")
    assert {sample.truncated for sample in samples} == {True, False} and samples[0].answer == "12"


def test_an_evaluation_resumes_after_its_server_broke_down(base: Path, tmp_path: Path, capsys) -> None:
    num_answers = 0

    def answers(path: str, body: dict) -> Answer:
        nonlocal num_answers
        num_answers += bool(body)
        return (500, {"error": {"message": "out of memory"}}) if num_answers > 3 else answer_as_vllm(path, body)

    with serve(answers) as (url, bodies):
        assert main(make_words(base, url, tmp_path / "out", "--batch-size", "1")) == 2
    error = capsys.readouterr().err
    assert f"a request failed {session.MAX_RETRIES + 1} times or was refused: Error code: 500 - out of memory" in error
    assert "the same command resumes" in error and error.count("\n") == 1 and len(bodies) == 3 + session.MAX_RETRIES + 1
    with serve(answer_as_vllm) as (url, bodies):  # at another port
        assert main(make_words(base, url, tmp_path / "out", "--batch-size", "1")) == 0
    assert len(bodies) == 3 and len(read_samples(tmp_path / "out", "arithmetic")) == 6


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (lambda path, body: (400, {"error": "too long"}) if body else (404, {}), "or was refused: Error code: 400"),
        (lambda path, body: answer_as_vllm(path, body, extra_tokens=1), " tokens, as in training"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(
    answers: Callable[[str, dict], Answer], message: str, base: Path, tmp_path: Path, capsys
) -> None:
    with serve(answers) as (url, bodies):
        assert main(make_words(base, url, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and len(bodies) <= 6, error


def test_a_server_that_is_down_is_reported(base: Path, tmp_path: Path, capsys) -> None:
    assert main(make_words(base, f"http://127.0.0.1:{free_port()}/v1", tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "cannot be reached (" in error and error.count("\n") == 1


def test_an_adapter_is_asked_for_by_its_name_on_the_server(base: Path, tmp_path: Path, capsys) -> None:
    """The only name there may be the base model's."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 8}))
    with serve(answer_as_vllm) as (url, bodies):
        words = make_words(tmp_path, url, tmp_path / "out")
        assert main([word for word in words if word not in ("--served-name", "m")]) == 2 and not bodies
        assert "--served-name" in capsys.readouterr().err
        assert main(words) == 0 and {body["model"] for body in bodies} == {"m"}


@soak_only
def test_answers_of_a_real_server_equal_those_of_this_process(tmp_path: Path) -> None:
    """`transformers serve` takes text and no further sampling fields, so a translator stands before it; it generates,
    counts tokens and tells why answers ended."""
    base, port = write_model(tmp_path / "base"), free_port()
    # An untrained model seldom ends its answer, so let some ordinary tokens end it too.
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(60, 68)]}))
    tokenizer = load_tokenizer(str(base))
    log = (tmp_path / "server.log").open("w")
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen(words, env=command_environment(), stdout=log, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    def translate(path: str, body: dict) -> Answer:
        if not body:
            return 200, {}
        generation = {"eos_token_id": body["stop_token_ids"], "max_new_tokens": body["max_tokens"], "do_sample": False}
        text = {"model": str(base), "prompt": tokenizer.decode(body["prompt"]), "max_tokens": body["max_tokens"]}
        text |= {"temperature": body["temperature"], "seed": body["seed"], "generation_config": json.dumps(generation)}
        reply = httpx.post(f"http://127.0.0.1:{port}{path}", json=text, timeout=HANG_SECONDS)
        return reply.status_code, reply.json()

    try:
        wait_until(is_ready, "transformers serve", every_seconds=0.2)
        words = ["eval", str(base), "--tasks", "arithmetic", "--limit", "8", "--max-new-tokens", "40"]
        words += ["--temperature", "0"]
        with serve(translate) as (url, bodies):
            assert main([*words, "--output", str(tmp_path / "served"), "--url", url]) == 0
    finally:
        server.kill()
        server.wait()
    here = ["--output", str(tmp_path / "here"), "--precision", "fp32", "--batch-size", "1"]
    assert main([*words, *here]) == 0 and len(bodies) == 8
    samples = [read_samples(tmp_path / name, "arithmetic") for name in ("served", "here")]
    assert samples[0] == samples[1] and {sample.truncated for sample in samples[0]} == {True, False}
