"""An evaluation through a real OpenAI-compatible server equals one in this process, answer by answer."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.commands import HANG_SECONDS, command_environment, free_port
from tests.helpers.setups import write_model
from vcore_ds.commands.cli import main
from vcore_ds.training.evaluation_folder import read_evaluation

pytestmark = pytest.mark.e2e


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port), "--device", "cpu"]
    with (tmp_path / "server.log").open("w") as log:
        # Without a cache the server cannot list its models, which the evaluation does not need.
        environment = command_environment() | {"HF_HUB_CACHE": str(tmp_path / "none")}
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not is_healthy(port):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
        yield f"http://localhost:{port}/v1"
    finally:
        process.kill()
        process.wait()


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://localhost:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_answers_of_transformers_serve_equal_those_of_this_process(url: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    # An untrained model seldom ends its answer, so let some ordinary tokens end it too.
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(60, 68)]}))
    words = ["eval", str(base), "--tasks", "arithmetic", "--limit", "8", "--max-new-tokens", "40"]
    served = ["--output", str(tmp_path / "served"), "--url", url, "--served-name", str(base)]
    assert main([*words, *served]) == 0
    assert main([*words, "--output", str(tmp_path / "here"), "--precision", "fp32", "--batch-size", "1"]) == 0
    name = "arithmetic.jsonl"
    assert (tmp_path / "served" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    evaluation = read_evaluation(tmp_path / "served")
    assert evaluation.model["url"] == url
    assert 0 < evaluation.tasks["arithmetic"].truncated_share < 1  # some answers end, some are truncated
