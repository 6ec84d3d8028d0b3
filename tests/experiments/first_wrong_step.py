"""Where weight goes in wrong solutions: before, in and after the first wrong step that CHAMP's authors marked.

    python -m tests.experiments.first_wrong_step run       four steps of 16 wrong solutions for each row
    python -m tests.experiments.first_wrong_step report    the table of docs/reports/steering-experiments.md

The training data are the 64 shortest wrong solutions with something before and after a marked step; the pool is the
quickstart's, of right answers, without the traces of these problems. Each run records all its tokens
(docs/reading-a-report.md).
The measure, decided before the first run: the mean relative weight (1 is uniform) of a trace's tokens before the first
wrong step, in it, and after it; means over traces, and the 95% interval over traces of the paired difference after -
before.
"""

import argparse
import json
import shutil
from statistics import mean
from typing import Any

from tests.experiments.processes import REPOSITORY, run_train
from tests.experiments.report import cell
from vcore_ds.commands.quickstart.traces import champ_problems, prepare_quickstart_data
from vcore_ds.data.answers import CHAMP
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.train.token_records import SequenceTokens, read_records

FOLDER = REPOSITORY / "runs" / "first_wrong_step"
NUM_TRACES, BATCH_SIZE = 64, 16
TRAIN, POOL = FOLDER / "wrong.jsonl", FOLDER / "trusted.jsonl"
STEERED = ("presets/trusted.yaml", f"data.probe_path={POOL}", "data.trusted_share=0")
ROWS = {
    "dft": ("methods/dft.yaml",),
    "vcore, no pool, B' 16, 0.5 nats": ("probe.batch_size=16", "method.kl_budget=0.5"),
    "vcore, B' all, 0.5 nats": (*STEERED, "method.base_measure=uniform"),
    "vcore, B' all, 0.5 nats, base dft": (*STEERED, "method.base_measure=dft"),
}
COMMON = (
    f"data.train_path={TRAIN}",
    "data.validation_path=null",
    "data.cutoff_length=1024",
    f"batch.global_size={BATCH_SIZE}",
    f"schedule.num_steps={NUM_TRACES // BATCH_SIZE}",
    "run.num_token_records=1000",
    "run.num_followed_traces=0",
    "checkpoint.every_minutes=null",
)


def write_traces() -> None:
    """Write the data files. A row of the training data has the character range of the first wrong step."""
    data = prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data")
    tokenizer = load_tokenizer(str(data.model))
    rows = []
    for problem_id, problem in champ_problems().items():
        for source, marked in problem["fws_annotations"].items():
            begin, end = marked["start_idx"], marked["end_idx"]
            if begin is None or begin == 0 or end >= len(marked["text"].rstrip()) or "Misleading" in source:
                continue
            messages = [
                {"role": "user", "content": CHAMP.format(statement=problem["_text"].strip())},
                {"role": "assistant", "content": marked["text"]},
            ]
            rows.append({"messages": messages, "problem": problem_id, "source": source, "wrong_step": [begin, end]})
    rows.sort(key=lambda row: len(tokenizer(row["messages"][1]["content"])["input_ids"]))
    chosen = rows[:NUM_TRACES]
    problems = {row["problem"] for row in chosen}
    pool = [line for line in data.trusted.read_text().splitlines() if json.loads(line)["problem"] not in problems]
    FOLDER.mkdir(parents=True, exist_ok=True)
    TRAIN.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    POOL.write_text("".join(line + "\n" for line in pool))


def run_rows() -> None:
    write_traces()
    for i, row in enumerate(ROWS):
        output = FOLDER / f"row_{i}"
        if (output / "adapter").is_dir():
            continue
        run_train([*ROWS[row], *COMMON, f"run.output_dir={output}"], output)
        shutil.rmtree(output / "checkpoints")
        print(f"{row}: {output}", flush=True)


def report() -> None:
    wrong_steps = [json.loads(line) for line in TRAIN.read_text().splitlines()]
    tokenizer = load_tokenizer(str(REPOSITORY / "runs" / "quickstart_data" / "SmolLM2-135M-Instruct"))
    print("| row | traces | before the first wrong step | in it | after it | after - before |")
    print("|---" * 6 + "|")
    for i, row in enumerate(ROWS):
        records = read_records(FOLDER / f"row_{i}")
        parts = [
            weights
            for record in records
            for sequence in record.sequences
            if (weights := measure_parts(sequence, wrong_steps[sequence.sequence_id], tokenizer)) is not None
        ]
        differences = [after - before for before, _, after in parts]
        means = " | ".join(f"{mean(part):.3f}" for part in zip(*parts, strict=True))
        print(f"| {row} | {len(parts)} | {means} | {cell(differences, 3, difference=True)} |")


def measure_parts(sequence: SequenceTokens, trace: dict[str, Any], tokenizer: Any) -> tuple[float, float, float] | None:
    """Mean relative weight of the tokens before, in and after the first wrong step, relative to that of the whole
    trace; None where one of the parts has no token."""
    solution = trace["messages"][1]["content"]
    text, starts = "", []
    for token in sequence.token_ids.tolist():
        starts.append(len(text))
        text += tokenizer.decode([token])
    offset = text.index(solution[:20])  # a template adds text before a turn and strips white space
    begin, end = (place + offset for place in trace["wrong_step"])
    relative = sequence.relative_weights / sequence.relative_weights.mean()
    parts: list[list[float]] = [[], [], []]
    for start, weight in zip(starts, relative.tolist(), strict=True):
        parts[(start >= begin) + (start >= end)].append(weight)
    return None if not all(parts) else (mean(parts[0]), mean(parts[1]), mean(parts[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    if parser.parse_args().command == "run":
        run_rows()
    else:
        report()


if __name__ == "__main__":
    main()
