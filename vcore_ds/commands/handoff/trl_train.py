"""GRPO or DAPO with TRL, continuing from the adapter or model beside this file.

`bash launch.sh grpo|dapo [KEY=VALUE ...]` runs it; KEY=VALUE replaces any value of TRL's GRPOConfig. It stands alone:
`vcore-ds handoff` copies it. settings.json has the settings by TRL's names, but for those of the batch, which are
numbers of prompts and become TRL's own for the number of processes.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from reward import boxed_answer_reward
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO or DAPO with TRL.")
    parser.add_argument("method", choices=["grpo", "dapo"])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values of TRL's GRPOConfig")
    arguments = parser.parse_args()
    settings = json.loads((HERE / "settings.json").read_text(encoding="utf-8"))
    config = make_config(settings, arguments.method, [word.split("=", 1) for word in arguments.overrides])
    tokenizer = AutoTokenizer.from_pretrained(place(settings["folder"]))
    trainer = GRPOTrainer(
        model=load_model(settings),
        reward_funcs=boxed_answer_reward,
        args=config,
        train_dataset=load_rows(HERE / "train.parquet"),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def make_config(settings: dict[str, Any], method: str, overrides: list[list[str]]) -> GRPOConfig:
    """TRL's settings for as many processes as there are."""
    batch, values = settings["batch"], dict(settings["config"])
    per_device, completions = batch["completions_per_device"], batch["num_generations"]
    at_once = per_device * int(os.environ.get("WORLD_SIZE", "1"))
    mini, whole = batch["prompts_per_update"] * completions, batch["prompts_per_step"] * completions
    if mini % at_once or whole % at_once:
        raise SystemExit(f"{mini} completions per update cannot be divided by {at_once} at once; use fewer processes")
    values |= {
        "output_dir": str(HERE / f"output_{method}"),
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": mini // at_once,
        "steps_per_generation": whole // at_once,
        "num_generations": completions,
        "max_steps": batch["num_steps"] * (whole // mini),
        "epsilon": settings["clip"][method][0],
        "epsilon_high": settings["clip"][method][1],
    }
    for key, text in overrides:
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return GRPOConfig(**values)


def load_model(settings: dict[str, Any]) -> Any:
    """The model; with its adapter as what is trained, and as it is now as the reference of the KL term."""
    if settings["base"] is None:
        return AutoModelForCausalLM.from_pretrained(place(settings["folder"]), dtype="auto")
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(settings["base"], dtype="auto")
    return PeftModel.from_pretrained(base, HERE / settings["folder"], is_trainable=True)


def place(name: str) -> str:
    """A folder beside this file, or else a path or a hub id."""
    return str(HERE / name) if (HERE / name).is_dir() else name


def load_rows(path: Path) -> Dataset:
    """Prompts as messages, with the expected answer beside them."""
    rows = load_dataset("parquet", data_files=str(path), split="train")
    rows = rows.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]})
    return rows.select_columns(["prompt", "ground_truth"])


if __name__ == "__main__":
    main()
