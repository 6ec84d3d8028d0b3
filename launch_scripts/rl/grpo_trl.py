"""GRPO with TRL (1.16) from an exported model or adapter, with the paper's settings.

accelerate launch --num_processes 8 launch_scripts/rl/grpo_trl.py MODEL rl_data/train.parquet --output_dir runs/grpo

Every option of TRL's GRPOConfig can be added. DAPO is the paper's: --epsilon_high 0.28, and nothing else differs.
"""

import os
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWERS_PER_PROMPT = 4
PROMPTS_PER_STEP, PROMPTS_PER_UPDATE = 128, 32
NUM_STEPS = 200


def main() -> None:
    """Train, and write the result to --output_dir."""
    from reward import boxed_answer_reward
    from trl import GRPOConfig, GRPOTrainer, TrlParser

    parser = TrlParser(GRPOConfig)
    parser.add_argument("model", help="a folder that vcore-ds export wrote: a model, or an adapter to train on")
    parser.add_argument("data", help="train.parquet of problems.py")
    parser.set_defaults(**paper_settings(int(os.environ.get("WORLD_SIZE", "1"))))
    config, arguments = parser.parse_args_and_config()
    trainer = GRPOTrainer(
        model=load_model(arguments.model),
        reward_funcs=boxed_answer_reward,
        args=config,
        train_dataset=load_problems(arguments.data),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def paper_settings(num_processes: int) -> dict[str, Any]:
    """Return the paper's table "Hyperparameters used in RL training" in TRL's names, for up to 64 processes."""
    per_device = 2
    return {
        "num_generations": ANSWERS_PER_PROMPT,
        "generation_batch_size": PROMPTS_PER_STEP * ANSWERS_PER_PROMPT,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": PROMPTS_PER_UPDATE * ANSWERS_PER_PROMPT // (per_device * num_processes),
        "max_steps": NUM_STEPS * PROMPTS_PER_STEP // PROMPTS_PER_UPDATE,  # TRL counts updates
        "max_completion_length": 8192,
        "learning_rate": 5e-6,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,  # a share, below 1
        "beta": 0.02,
        "entropy_coef": 0.001,
        "loss_type": "dapo",  # TRL's name for the mean over the tokens of a batch
        "temperature": 1.0,
        "save_steps": 50,
        "logging_steps": 1,
    }


def load_model(folder: str) -> Any:
    """Load the model; with an adapter, the adapter is trained and its present state is the reference of the KL term."""
    if not (Path(folder) / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype="auto"), folder, is_trainable=True
    )


def load_problems(path: str) -> Dataset:
    """Return the columns `prompt` (messages) and `ground_truth`, which TRL hands to the reward."""
    rows = load_dataset("parquet", data_files=path, split="train")
    rows = rows.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]})
    return rows.select_columns(["prompt", "ground_truth"])


if __name__ == "__main__":
    main()
