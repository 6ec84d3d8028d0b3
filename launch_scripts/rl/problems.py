"""Write problems with answers as parquet files for grpo_trl.py and grpo_verl.sh, in the prompt of training.

python launch_scripts/rl/problems.py big_math.parquet --sample 16800 --output rl_data
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import math_prompt
from vcore_ds.data.prepare.sources import find_text, read_problem_rows

PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "expected_answer", "ground_truth", "final_answer")


def main() -> None:
    """Read the problems, draw a sample and write train.parquet and validation.parquet."""
    parser = argparse.ArgumentParser(description="Problems with answers as parquet, for GRPO with TRL or verl.")
    parser.add_argument("source", help="a .jsonl, .json or .parquet file, a folder, or a hub id")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the two files")
    parser.add_argument("--sample", type=int, metavar="N", help="problems to train on (the paper: 16800; default all)")
    parser.add_argument("--held-out", type=int, default=64, metavar="N", help="validation problems (default 64)")
    parser.add_argument("--seed", type=int, default=42, help="of the sample (default 42)")
    parser.add_argument("--split", default="train", help="of a data set on the hub (default train)")
    arguments = parser.parse_args()
    try:
        rows, num_left_out = read_rows(arguments.source, arguments.split)
    except UserError as error:
        parser.error(str(error))
    if len(rows) < arguments.held_out + (arguments.sample or 1):
        parser.error(
            f"{arguments.source}: found {len(rows):,} problems with answers; expected at least {arguments.held_out:,} "
            f"to hold out and {arguments.sample or 1:,} to train on, with one of the keys {', '.join(PROBLEM_KEYS)} "
            f"and one of {', '.join(ANSWER_KEYS)}"
        )
    random.Random(arguments.seed).shuffle(rows)
    held_out, rest = rows[: arguments.held_out], rows[arguments.held_out :]
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rest[: arguments.sample]), ("validation", held_out)):
        pq.write_table(pa.Table.from_pylist(part), arguments.output / f"{name}.parquet")
        print(f"{arguments.output / name}.parquet: {len(part):,} problems")
    print(f"{num_left_out:,} rows without a problem or an answer left out")


def read_rows(source: str, split: str) -> tuple[list[dict[str, Any]], int]:
    """Return verl's rows, which serve TRL too, and how many rows of the source were left out."""
    rows, num_left_out = [], 0
    for number, (_, row) in enumerate(read_problem_rows(source, split)):
        problem = find_text(row, *PROBLEM_KEYS) if isinstance(row, dict) else None
        answer = find_text(row, *ANSWER_KEYS) if isinstance(row, dict) else None
        if problem is None or answer is None:
            num_left_out += 1
            continue
        rows.append(
            {
                "data_source": Path(source).stem,
                "prompt": [{"role": "user", "content": math_prompt(problem)}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": split, "index": number},
            }
        )
    return rows, num_left_out


if __name__ == "__main__":
    main()
