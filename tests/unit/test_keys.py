"""`vcore-ds keys`: every key of the schema, and docs/keys.md with them."""

from pathlib import Path

import pytest

from vcore_ds.commands.cli import main
from vcore_ds.config.problems import recipe_keys
from vcore_ds.config.schema import SECTIONS, SUBSECTIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "keys.md"


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "write it anew: vcore-ds keys --markdown > docs/keys.md"


def test_every_key_is_described() -> None:
    keys = recipe_keys()
    assert [key.dotted for key in keys if key.dotted.count(".") == 1] == [
        f"{name}.{key}" for name, kind in SECTIONS.items() for key in kind.model_fields
    ]
    assert {key.dotted for key in keys if key.dotted.count(".") == 2} == {
        f"{section}.{name}.{key}" for (section, name), kind in SUBSECTIONS.items() for key in kind.model_fields
    }
    assert all(len(key.meaning) > 10 and key.meaning.endswith((".", "}.")) for key in keys)


def test_values_and_defaults_in_words() -> None:
    keys = {key.dotted: (key.values, key.default) for key in recipe_keys()}
    for name, words in {
        "method.name": ("vcore, sft, dft, iw_sft or random", "vcore"),
        "method.keep_share": ("a number above 0 and at most 1", "0.2"),
        "utility.epsilon": ("a number above 0, auto or null", "null"),
        "batch.global_size": ("a whole number of at least 1", "32"),
        "optimizer.betas": ("[a number of at least 0 and below 1, a number of at least 0 and below 1]", "[0.9, 0.999]"),
        "optimizer.learning_rate": ("a number above 0", None),
        "data.validation_path": ("text, {NAME: text, ...} or null", "null"),
        "track.tags": ("a list of text", "[]"),
        "data.keep": ("a section or null", "null"),
        "data.keep.above": ("a number or null", "null"),
        "engine.memory_check": ("true or false", "true"),
    }.items():
        assert keys[name] == words


def test_sections_and_keys_are_looked_up_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "probe.every", "parallel"]) == 0
    out = capsys.readouterr().out
    assert "  probe.every: a whole number of at least 1 (default 1)\n" in out and "parallel.tensor: 1, 2, 4 or 8" in out
    assert "probe.clip" not in out and "optimizer" not in out
    assert main(["keys", "checkpointing"]) == 0
    assert "model.gradient_checkpointing: " in capsys.readouterr().out
    assert main(["keys", "max_seq_length"]) == 0
    assert capsys.readouterr().out.count("\n  data.") == 1
    for name in ("espilon", "utility.espilon"):
        assert main(["keys", name]) == 2
        error = capsys.readouterr().err
        assert f"keys: found {name}; expected a section, section.key or a word of a key's meaning; did" in error
        assert error.endswith('; did you mean "utility.epsilon"?\n')
