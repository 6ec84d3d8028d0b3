"""`python -m tests.models.survey`: measure tiny models of all decoders of transformers, and write docs/models.md.

Each model is measured in new processes, one after the other: a crash or a hang becomes a row of the page.
"""

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from tests.helpers.ranks import run_ranks
from tests.models import families
from tests.models.measurement import ModelResult, measure

TIMEOUT_SECONDS = 240

PAGE = "docs/models.md"
ABILITIES = ("jvp", "difference", "LoRA", "checkpoints", "fused", "packing", "Ulysses", "tensor")

BEGIN, END = "<!-- survey: begin -->", "<!-- survey: end -->"


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


# The page.


def write_page(path: Path, results: list[ModelResult]) -> None:
    """Replace the text between the two marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{write_tables(results)}\n{END}{after}", encoding="utf-8")


def list_types(text: str) -> list[str]:
    """List the model types in a page's tables."""
    return re.findall(r"`([^`]+)`", text.partition(BEGIN)[2].partition(END)[0])


def read_refusals(text: str) -> dict[str, list[str]]:
    """Read the model types of each message in a page's table of refusals."""
    rows = re.findall(r"^\| (.+) \| (`.+`) \|$", text.partition("### Refused")[2].partition(END)[0], re.MULTILINE)
    return {message: re.findall(r"`([^`]+)`", types) for message, types in rows}


def write_tables(results: list[ModelResult]) -> str:
    """Tables of models that are right, beyond the bounds, and refused."""
    by_verdict: dict[str, list[ModelResult]] = defaultdict(list)
    for result in results:
        by_verdict[result.verdict].append(result)
    lines = [f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, CPU.", ""]
    counts = {"right": "right", "WRONG": "beyond the bounds", "refused": "refused"}
    worst = max((result.worst for result in by_verdict["right"]), default=0.0)
    lines += [", ".join(f"{len(by_verdict[verdict])} {word}" for verdict, word in counts.items()) + "."]
    lines += [f"The largest error of those that are right is {worst:.0e}.", ""]
    lines += ["### Right", "", f"| {' | '.join(ABILITIES)} | types |", "|---" * (len(ABILITIES) + 1) + "|"]
    lines += _group(by_verdict["right"], _list_abilities, lambda result: f"`{result.name}`")
    if by_verdict["not built"]:
        lines += ["", "### Not measured", "", "| type | why no tiny model could be made |", "|---|---|"]
        lines += [f"| `{result.name}` | {_describe_problem(result)} |" for result in by_verdict["not built"]]
    if by_verdict["WRONG"]:
        lines += ["", "### Beyond the bounds", "", "| type | what |", "|---|---|"]
        lines += [f"| `{result.name}` | {_describe_problem(result)} |" for result in by_verdict["WRONG"]]
    lines += ["", "### Refused", "", "| message | types |", "|---|---|"]
    lines += _group(by_verdict["refused"], lambda result: (shorten_refusal(result),), lambda result: f"`{result.name}`")
    return "\n".join(lines)


def _group(
    results: Iterable[ModelResult], key: Callable[[ModelResult], tuple[str, ...]], entry: Callable[[ModelResult], str]
) -> list[str]:
    """A row for each key, the largest group first."""
    groups: dict[tuple[str, ...], list[ModelResult]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [f"| {' | '.join(cells)} | {', '.join(map(entry, members))} |" for cells, members in ordered]


def _list_abilities(result: ModelResult) -> tuple[str, ...]:
    yes = {True: "yes", False: "no"}
    return (
        yes["jvp" not in result.refused],
        yes["finite_difference" not in result.refused],
        yes["lora" not in result.late] if "lora probe gradient" in result.numbers else "not run",
        yes["checkpointing" not in result.refused],
        yes["fused, checkpointed" not in result.late and "jvp" not in result.refused],
        yes[result.packing is None],
        yes[result.sequence_parallelism is None],
        yes[result.tensor_parallelism],
    )


def _describe_problem(result: ModelResult) -> str:
    problems = [f"{what}: {text}" for part in (result.errors, result.late) for what, text in part.items()]
    problems += [f"{what} {number:.2g}" for what, number in result.beyond_bounds().items()][:4]
    return "; ".join(problems).replace("|", "/").replace("`", "'")


def shorten_refusal(result: ModelResult) -> str:
    """Message of a refusal without parts that differ between types."""
    text = result.refused.get("sft") or f"(in the check before the first step) {result.refused['start']}"
    text = re.sub(r"model_type '[\w.-]+'|(?<=model.path: )(?!MODEL)[\w-]+:", "TYPE", text)
    text = re.sub(r" [\d.e-]+ nats", " x nats", text)
    text = re.sub(r"\bno \w+ can be built", "no model can be built", text)
    text = re.sub(r"\b\w+(ForCausalLM|Attention)\b", r"...\1", text)
    # Without what is expected or to be done, and the link that transformers adds.
    text = re.split(r"; expected |; save its |\. Set |\. Choose |, so its | \(on two short |\. Please request", text)[0]
    return text.replace("|", "/").replace("`", "'")


if __name__ == "__main__":
    main()
