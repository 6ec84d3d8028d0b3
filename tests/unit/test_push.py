"""`vcore-ds export --push` against a stand-in for the hub on this machine (tests/helpers/fake_hub.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from safetensors.torch import load

from tests.helpers import fake_hub
from tests.helpers.evaluations import write_answers
from tests.helpers.setups import write_model
from tests.unit.test_export import make_trained_masters, write_run
from vcore_ds.commands.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is_gradient_checkpointing")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", base, make_trained_masters(base, lora=True), lora=True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.FakeHub]:
    """Set what HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET mean, in a process that has read them already."""
    with fake_hub.fake_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
        yield server


def read_refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["export", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_an_adapter_is_pushed_with_its_card(run: Path, base: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "HF_TOKEN": fake_hub.TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    words = ["export", str(run), "--push", "me/result", "--base-model", "owner/base"]
    with fake_hub.fake_hub() as hub:
        done = subprocess.run(
            [sys.executable, "-m", "vcore_ds.commands.cli", *words],
            env=environment | {"HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert f"Pushed: {hub.url}/me/result" in done.stdout
    assert hub.visibility == {"me/result": "private"}
    files, folder = hub.files["me/result"], run / "export" / "step_00000020" / "adapter"
    assert files.keys() == {path.name for path in folder.iterdir()}
    for name in files.keys() - {"adapter_config.json"}:
        assert files[name] == (folder / name).read_bytes(), name
    assert load(files["adapter_model.safetensors"])
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "owner/base"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert ModelCard(files["README.md"].decode()).data.base_model == "owner/base"
    assert not any(str(tmp_path.parent).encode() in content for content in files.values())
    checks = [request.split("?")[0] for request in hub.requests]
    assert "POST /api/validate-yaml" in checks and any(request.startswith("PUT /blob/") for request in checks)


def test_the_hubs_rules_refuse_the_card_that_peft_writes(run: Path) -> None:
    assert "is not valid" in fake_hub.find_card_problems("---\nbase_model: /home/me/model\n---\n")[0]


def test_a_second_push_uses_the_existing_export(
    run: Path, hub: fake_hub.FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--push", "me/result"]) == 0
    assert "base model's hub id is unknown" in capsys.readouterr().out
    assert json.loads(hub.files["me/result"]["adapter_config.json"])["base_model_name_or_path"] == "base"

    evaluation = write_answers(tmp_path / "evaluation", {"aime": [[k % 2] for k in range(60)]}, truncated=6)
    words = ["--push", "me/result", "--evaluation", str(evaluation)]
    assert main(["export", str(run), *words]) == 0
    assert "only its model card was rewritten" in capsys.readouterr().out
    (result,) = ModelCard(hub.files["me/result"]["README.md"].decode()).data.eval_results
    assert result.metric_value == 0.5


def test_a_folder_that_is_no_export_is_not_pushed(
    run: Path, hub: fake_hub.FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "letter.txt").write_text("not for the hub")
    words = ["--push", "me/result", "--output", tmp_path / "private"]
    assert "is not an earlier export (adapter)" in read_refusal(capsys, run, *words)
    assert main(["export", str(run), "--output", str(tmp_path / "adapter")]) == 0
    words = ["--push", "me/result", "--output", tmp_path / "adapter", "--merge"]
    assert "is not an earlier export (merged)" in read_refusal(capsys, run, *words)
    assert hub.files == {}


def test_a_refusal_of_the_hub_is_one_message(
    run: Path,
    hub: fake_hub.FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", fake_hub.READ_TOKEN)
    assert "403 Forbidden" in read_refusal(capsys, run, "--push", "me/other", "--merge")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    assert "Invalid user token" in read_refusal(capsys, run, "--push", "me/other")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "no token found" in (said := read_refusal(capsys, run, "--push", "me/other")) and "hf auth login" in said
    assert hub.files == {}


def test_without_a_network_nothing_is_exported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    error = read_refusal(capsys, run, "--push", "me/result", "--base-model", "owner/base")
    assert "Connection refused" in error and "HF_ENDPOINT" in error
    assert not (run / "export").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--push", "no_owner"], "expected OWNER/NAME, a repository on the hub"),
        (["--push", "a/b/c"], "expected OWNER/NAME, a repository on the hub"),
        (["--base-model", "/home/me/model"], "expected OWNER/NAME, its id on the hub"),
    ],
)
def test_invalid_options_are_refused(
    run: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in read_refusal(capsys, run, *words)
