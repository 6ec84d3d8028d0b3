"""The settings of pip's configuration that .ci/install.py passes to uv."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / ".ci" / "install.py"
spec = importlib.util.spec_from_file_location("install", FILE)
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


@pytest.fixture
def without_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's configuration file, of this test alone."""
    for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL", "NO_INDEX", "CERT", "TRUSTED_HOST"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "pip.conf"


def test_uv_looks_where_pip_does(without_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings.write_text(
        "[global]\nindex-url = https://mirror/simple\nextra-index-url =\n    https://one/simple\n    file:///two\n"
        "find-links = /wheels /more=wheels\n[install]\nindex-url = https://nearer/simple\n[wheel]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_FIND_LINKS", "/from/environment /and=another")
    settings = install.uv_settings(install.pip_settings())
    assert {name: settings[name] for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS")} == {
        "UV_DEFAULT_INDEX": "https://nearer/simple",
        "UV_INDEX": "https://one/simple file:///two",
        "UV_FIND_LINKS": "/from/environment,/and=another",
    }
    assert "UV_NO_INDEX" not in settings  # a setting of `pip wheel`, not of `pip install`


@pytest.mark.parametrize("failing", ["pip install uv", "uv", "nothing"])
def test_pip_takes_over_where_uv_cannot_install_alone(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = []

    def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        called.append(" ".join(map(str, words)))
        fails = {"pip install uv": "--quiet uv", "uv": "-m uv", "nothing": "\0"}[failing] in called[-1]
        return subprocess.CompletedProcess(words, int(fails), stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert install.main(["--no-deps", "a==1"]) == 0
    tool = "-m uv pip install" if failing == "nothing" else "-m pip --disable-pip-version-check install"
    assert tool in called[-1] and called[-1].endswith("--no-deps a==1")
    assert any("-m uv pip install" in line for line in called) == (failing != "pip install uv")
    assert ("pip takes over" in capsys.readouterr().out) == (failing != "nothing")
