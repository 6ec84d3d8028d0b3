"""`vcore-ds keys`: every key of the schema, and docs/keys.md with them."""

from pathlib import Path

import pytest

from vcore_ds.cli import main
from vcore_ds.config.keys import recipe_keys
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


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("method.name", "vcore, sft, dft, iw_sft, random", "vcore"),
        ("method.keep_share", "number above 0 and at most 1", "0.2"),
        ("utility.epsilon", "number above 0 or auto or null", "null"),
        ("batch.global_size", "whole number at least 1", "32"),
        ("optimizer.betas", "[number at least 0 and below 1, number at least 0 and below 1]", "[0.9, 0.999]"),
        ("optimizer.learning_rate", "number above 0", None),
        ("data.validation_path", "text or {NAME: text, ...} or null", "null"),
        ("track.tags", "list of text", "[]"),
        ("data.keep", "keys of its own or null", "null"),
        ("data.keep.scores", "text", None),
        ("data.keep.above", "number or null", "null"),
        ("engine.memory_check", "true, false", "true"),
    ],
)
def test_values_and_defaults_in_words(name: str, values: str, default: str | None) -> None:
    (key,) = (key for key in recipe_keys() if key.dotted == name)
    assert (key.values, key.default) == (values, default)


def test_sections_and_keys_are_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "probe.every", "parallel"]) == 0
    out = capsys.readouterr().out
    assert "  probe.every: whole number at least 1 (default 1)\n" in out and "parallel.tensor: 1, 2, 4, 8" in out
    assert "probe.clip" not in out and "optimizer" not in out


@pytest.mark.parametrize(("name", "hint"), [("espilon", "utility.epsilon"), ("utility.espilon", "utility.epsilon")])
def test_an_unknown_name_brings_the_nearest(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", name]) == 2
    assert capsys.readouterr().err.endswith(f"found {name}; expected a section or section.key; is it {hint}?\n")
