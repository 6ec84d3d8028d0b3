"""The folder that `vcore-ds fidelity` writes into; looked at before torch is imported."""

from pathlib import Path

from vcore_ds.errors import UserError
from vcore_ds.files.user_paths import check_folder, writing

JSON_NAME, PICTURE_NAME = "fidelity.json", "fidelity.png"


def prepare_output(folder: Path) -> None:
    """Makes `folder`. Raises UserError where it cannot be made or written, and where it holds a result already."""
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)  # so that no rank's check removes it while another one looks
        check_folder(folder)
        there = [name for name in (JSON_NAME, PICTURE_NAME) if (folder / name).exists()]
    for name in there:
        raise UserError(
            f"--output: {folder}: holds a {name} already; expected a folder without a result, which is never "
            "overwritten. Name another one, or remove it"
        )
