"""`python -m tests.models.survey`: measure tiny models of all decoders of transformers, and write docs/models.md.

Each model is measured in new processes, one after the other: a crash or a hang becomes a row of the page.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.helpers.ranks import run_ranks
from tests.models import families
from tests.models.measurement import ModelResult, measure
from tests.models.page import PAGE, write_page

TIMEOUT_SECONDS = 240


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", help="model types, separated by commas (default: all)")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("runs/models.jsonl"),
        help="a line per model; models in it are not run again",
    )
    parser.add_argument("--markdown", type=Path, help=f"write the page from the results, such as {PAGE}")
    parsed = parser.parse_args(arguments)
    names = [*families.list_model_types(), *families.VARIANTS]
    wanted = parsed.families.split(",") if parsed.families else names
    parsed.results.parent.mkdir(parents=True, exist_ok=True)
    known = read(parsed.results)
    for name in wanted:
        if name in known:
            continue
        start = time.monotonic()
        result = known[name] = survey(name)
        with parsed.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(f"{name}: {result.verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    if parsed.markdown is not None:
        write_page(parsed.markdown, [known[name] for name in names if name in known])


def read(path: Path) -> dict[str, ModelResult]:
    """Read results by name; the last one of a name counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["name"]: ModelResult(**row) for row in map(json.loads, lines)}


def survey(name: str) -> ModelResult:
    try:
        return run_ranks(measure, 1, name, timeout_seconds=TIMEOUT_SECONDS)[0]
    except AssertionError as error:  # the process failed, died or hung
        return ModelResult(name, errors={"process": str(error).strip().splitlines()[-1]})


if __name__ == "__main__":
    main()
