"""Steps and runs of `tests.gpu.cases` on a GPU against the same on the CPU, from their lines of JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP_BOUND = 1e-3
"""Relative, for each number of a step in fp32."""
ROUNDED_BOUND, ROUNDED_UTILITY_BOUND = 2e-2, 0.4
"""With stochastic rounding, which draws other numbers on another device: between draws on one CPU the standard
deviation of utilities varies by 0.01 to 0.18, other numbers by less than 1e-2."""
LOSS_BOUNDS, RESUMED_BOUNDS = (1e-2, 1e-3), (1e-2, 1e-4)
"""In bf16 and in fp32: losses of a run, and all numbers of a resumed run against one that was never stopped. Some sums
have no fixed order on a GPU."""


def read_cases(folder: Path, kind: str, device: str) -> dict[str, Any]:
    """Case -> what was measured, or the error."""
    cases: dict[str, Any] = {}
    for file in sorted(folder.glob(f"{kind}_{device}_*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for line in lines:
            try:
                measured = json.loads(line)
            except ValueError:  # it is being written
                continue
            cases[measured.pop("case")] = measured
    return cases


def compare_devices(folder: Path) -> tuple[list[str], list[str]]:
    """Return the lines of a table of all cases measured so far, and a sentence for each that is out of bounds.
    `folder`: with the files of `tests.gpu.cases`."""
    lines, failures = [], []
    for kind in ("steps", "runs"):
        measured, references = (read_cases(folder, kind, device) for device in ("cuda", "cpu"))
        if measured:
            lines += ["", f"| {kind}: case | GPU against CPU | resumed against straight |", "|---|---|---|"]
        for case, outcome in measured.items():
            reference = references.get(case, {"error": "not measured"})
            for device, side in (("GPU", outcome), ("CPU", reference)):
                if "error" in side:
                    text = f"{device}: {side['error'].strip().splitlines()[-1][:160]}"
                    break
            else:
                text, problem = _compare_case(kind, case, outcome, reference)
                failures += [f"{kind}, {case}: {problem}"] if problem else []
            lines.append(f"| {case} | {text} |")
    return lines, failures


def _compare_case(kind: str, case: str, measured: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[str, str]:
    """Text of the table, and what is out of bounds, if anything."""
    pairs = list(zip(measured["straight"], reference["straight"], strict=True))
    if kind == "steps":
        utility_bound = ROUNDED_UTILITY_BOUND if "stochastic" in case else STEP_BOUND
        bound = ROUNDED_BOUND if "stochastic" in case else STEP_BOUND
        rest = max(largest_difference(*pair, but="utility_std") for pair in pairs)
        utilities = max(largest_difference(*pair, only="utility_std") for pair in pairs)
        is_bad = not (rest < bound and utilities < utility_bound)
        return f"{max(rest, utilities):.1e} | ", f"differs from the CPU by {rest:.1e}, {utilities:.1e}" * is_bad
    is_fp32 = "fp32" in case
    losses = max(largest_difference(*pair, only="loss") for pair in pairs)
    both = zip(measured["resumed"], measured["straight"], strict=True)
    resumed = max(largest_difference(*pair) for pair in both)
    is_bad = not (losses < LOSS_BOUNDS[is_fp32] and resumed < RESUMED_BOUNDS[is_fp32])
    problem = f"losses differ from the CPU's by {losses:.1e}, from a resumed run's by {resumed:.1e}"
    return f"{losses:.1e} | {resumed:.1e}", problem * is_bad


def largest_difference(
    measured: Mapping[str, float], expected: Mapping[str, float], *, only: str = "", but: str = ""
) -> float:
    """Largest relative difference between the numbers of a step; NaN if one is."""
    assert measured.keys() == expected.keys()
    names = [name for name in expected if name != but and (not only or name == only)]
    differences = [abs(measured[name] - expected[name]) / max(abs(expected[name]), 1e-6) for name in names]
    return float("nan") if any(x != x for x in differences) else max(differences, default=0.0)
