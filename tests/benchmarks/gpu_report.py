"""The numbers of tests/benchmarks/gpu.py as Markdown."""

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30


def markdown(results: Mapping[str, Any]) -> str:
    """A heading with device, command and versions, and a table for each kind of number."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    sizes = results["sizes"]
    yield f"## Qwen3-{results['shape']}, {sizes['num_hidden_layers']} layers, on {results['device']}"
    yield ""
    yield (
        f"{results['date']}; `{results['command']}`; {versions}; commit {results['commit']}. Random weights, all "
        f"parameters trained, bf16, activation checkpoints, {results['packs']} pack(s) of "
        f"{results['tokens_of_a_pack']:,} tokens a rank and step; medians of {results['rounds']} round(s) in turns."
    )
    yield ""
    yield (
        "| method | s a step (plan) | over SFT | tokens/s a rank | MFU | peak GiB (estimated) | probe s (plan) "
        "| utility s (plan) | main s (plan) | update s (plan) |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, row in results["steps"].items():
        if "skipped" in row:
            yield f"| {name} | skipped: {row['skipped']} |" + " |" * 8
            continue
        predicted = row["predicted_seconds"]
        parts = " | ".join(
            _seconds(row[f"seconds_{part}"], None if predicted is None else predicted[part])
            for part in ("probe", "utility", "main", "step")
        )
        total = _seconds(row["seconds"], None if predicted is None else sum(predicted.values()))
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        over = f"{row['over_sft']:.2f}" if "over_sft" in row else "-"
        memory = f"{row['peak_memory_bytes'] / GIB:.2f} ({row['estimated_peak_memory_bytes'] / GIB:.2f})"
        speed = f"{row['tokens_per_second_per_rank']:,.0f}"
        yield f"| {name} | {total} | {over} | {speed} | {mfu} | {memory} | {parts} |"
    yield ""
    yield "| attention of one layer, one pack | ms |"
    yield "|---|---|"
    for name, seconds in results["attention"].items():
        yield f"| {name} | {seconds if isinstance(seconds, str) else f'{1e3 * seconds:.3f}'} |"
    yield ""
    fidelity = results["fidelity_in_bf16"]
    if "skipped" in fidelity:
        yield f"Fidelity in bf16 skipped: {fidelity['skipped']}."
        return
    yield (
        f"Utilities in bf16 against fp32, same weights and direction, {fidelity['num_tokens']:,} tokens: Spearman "
        f"{fidelity['spearman']:.4f}, relative error {fidelity['relative_error']:.2g}."
    )


def _seconds(measured: float, predicted: float | None) -> str:
    return f"{measured:.3f}" if predicted is None else f"{measured:.3f} ({predicted:.3f})"
