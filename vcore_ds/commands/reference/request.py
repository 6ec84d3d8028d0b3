"""What `vcore-ds reference` refuses at once, before torch is imported."""

from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import refuse_existing
from vcore_ds.config.schema import Recipe

NEW_FILE = "a new file in a folder that can be written"
"""What `--output` has to be, for messages."""


def check_request(recipe: Recipe, output: Path) -> None:
    """Raises UserError where training needs no reference, or `output` exists."""
    if recipe.lora is not None:
        raise UserError(
            "lora: found adapters; expected null: with lora the reference of iw_sft is the model without its adapters, "
            "and training needs no file"
        )
    refuse_existing(output, NEW_FILE)
