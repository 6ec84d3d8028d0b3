"""The table of chat templates: each is rendered in all forms of thinking, and compared with transformers."""

import pytest

from tests.helpers.template_table import NATIVE, describe_template, read_table


@pytest.mark.parametrize("name", NATIVE)
def test_rows_are_rendered_as_by_transformers_and_learned_whole(name: str) -> None:
    """The table is written by `python -m tests.helpers.template_table docs/templates.md`."""
    assert describe_template(name) in read_table().splitlines()
