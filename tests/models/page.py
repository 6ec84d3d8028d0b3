"""docs/models.md from what was measured."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers

from tests.models.measurement import MIN_RANK_CORRELATION, Found

PAGE = "docs/models.md"
ABILITIES = ("jvp", "difference", "LoRA", "checkpoints", "fused", "packing", "Ulysses", "tensor")

BEGIN, END = "<!-- survey: begin -->", "<!-- survey: end -->"


def write_page(path: Path, results: list[Found]) -> None:
    """Replaces what stands between the two marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}", encoding="utf-8")


def listed_types(text: str) -> list[str]:
    """The model types that a page names in its tables."""
    return re.findall(r"`([^`]+)`", text.partition(BEGIN)[2].partition(END)[0])


def tables(results: list[Found]) -> str:
    """Right, beyond the bounds, refused."""
    of_verdict: dict[str, list[Found]] = defaultdict(list)
    for found in results:
        of_verdict[found.verdict].append(found)
    lines = [f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, CPU.", ""]
    counts = {"right": "right", "WRONG": "beyond the bounds", "refused": "refused"}
    lines += [", ".join(f"{len(of_verdict[verdict])} {word}" for verdict, word in counts.items()) + ".", ""]
    lines += [
        "### Right",
        "",
        f"| {' | '.join(ABILITIES)} | types, and the largest error |",
    ]
    lines += ["|---" * (len(ABILITIES) + 1) + "|"]
    lines += _grouped(of_verdict["right"], _abilities, lambda found: f"`{found.name}` {found.worst:.0e}")
    measured = [found for found in of_verdict["right"] if "bf16 fused rank" in found.numbers]
    below = [found for found in measured if min(map(float, _in_bf16(found)[:2])) < MIN_RANK_CORRELATION]
    if measured:
        lines += ["", "### In bf16", ""]
        lines += [
            f"Measured: {len(measured)} types. The rank correlation with fp64 is at least {MIN_RANK_CORRELATION} in "
            f"both passes for all but {len(below)}:",
            "",
        ]
        lines += ["| type | jvp, separate | fused | transformers itself |", "|---|---|---|---|"]
        lines += [f"| {found.name} | {' | '.join(_in_bf16(found))} |" for found in below]
    if of_verdict["not built"]:
        lines += ["", "### Not measured", "", "| type | why no tiny model could be made |", "|---|---|"]
        lines += [f"| `{found.name}` | {_problem(found)} |" for found in of_verdict["not built"]]
    if of_verdict["WRONG"]:
        lines += ["", "### Beyond the bounds", "", "| type | what |", "|---|---|"]
        lines += [f"| `{found.name}` | {_problem(found)} |" for found in of_verdict["WRONG"]]
    lines += ["", "### Refused", "", "| message | types |", "|---|---|"]
    lines += _grouped(of_verdict["refused"], lambda found: (_refusal(found),), lambda found: f"`{found.name}`")
    return "\n".join(lines)


def _grouped(
    results: Iterable[Found], key: Callable[[Found], tuple[str, ...]], entry: Callable[[Found], str]
) -> list[str]:
    """A row for each key, the largest group first."""
    groups: dict[tuple[str, ...], list[Found]] = defaultdict(list)
    for found in results:
        groups[key(found)].append(found)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [f"| {' | '.join(cells)} | {', '.join(map(entry, members))} |" for cells, members in ordered]


def _abilities(found: Found) -> tuple[str, ...]:
    yes = {True: "yes", False: "no"}
    return (
        yes["jvp" not in found.refused],
        yes["finite_difference" not in found.refused],
        yes["lora" not in found.late] if "lora probe gradient" in found.numbers or "lora" in found.late else "not run",
        yes["checkpointing" not in found.refused],
        yes["fused, checkpointed" not in found.late and "jvp" not in found.refused],
        yes[found.packing is None],
        yes[found.sequence_parallelism is None],
        yes[found.tensor_parallelism],
    )


def _in_bf16(found: Found) -> list[str]:
    return [f"{found.numbers[name]:.3f}" for name in ("bf16 separate rank", "bf16 fused rank", "plain bf16 rank")]


def _problem(found: Found) -> str:
    said = [f"{what}: {text}" for part in (found.errors, found.late) for what, text in part.items()]
    said += [f"{what} {number:.2g}" for what, number in found.beyond_bounds().items()][:4]
    return "; ".join(said).replace("|", "/").replace("`", "'")


def _refusal(found: Found) -> str:
    """The message, without what belongs to one type."""
    text = found.refused.get("sft") or f"(in the check before the first step) {found.refused['start']}"
    text = re.sub(r"model_type '[\w.-]+'|(?<=model.path: )(?!MODEL)[\w-]+:", "TYPE", text)
    text = re.sub(r" [\d.e-]+ nats", " x nats", text)
    text = re.sub(r"\bno \w+ can be built", "no model can be built", text)
    text = re.sub(r"\b\w+(ForCausalLM|Attention)\b", r"...\1", text)
    # Only what is ours: transformers goes on with a link.
    return text.partition(". Please request")[0].replace("|", "/").replace("`", "'")
