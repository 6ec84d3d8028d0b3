"""The files that start reinforcement learning: launch.sh, TRL's settings.json, and VERSIONS."""

import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from vcore_ds import __version__
from vcore_ds.commands.handoff.settings import CLIP, KL_TYPE, MODEL_LENGTH, PROMPT, RESPONSE
from vcore_ds.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_IN_TRL: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "data.train_batch_size": ("batch", "prompts_per_step", int),
    f"{_ACTOR}.ppo_mini_batch_size": ("batch", "prompts_per_update", int),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": ("batch", "completions_per_device", int),
    "actor_rollout_ref.rollout.n": ("batch", "num_generations", int),
    "trainer.total_training_steps": ("batch", "num_steps", int),
    f"{_ACTOR}.optim.lr": ("config", "learning_rate", float),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": ("config", "warmup_steps", float),
    f"{_ACTOR}.optim.lr_scheduler_type": ("config", "lr_scheduler_type", str),
    f"{_ACTOR}.kl_loss_coef": ("config", "beta", float),
    f"{_ACTOR}.entropy_coeff": ("config", "entropy_coef", float),
    RESPONSE: ("config", "max_completion_length", int),
}
"""verl's keys that TRL has too: section of settings.json, TRL's name and type. A share of warm-up steps is below 1."""

TESTED = {"verl": "verl 0.9.1", "trl": "trl 1.16.0"}
"""The versions that tests/handoff ran with."""

_VERL = """#!/usr/bin/env bash
# {title}
# bash launch.sh grpo|dapo [KEY=VALUE ...]     KEY=VALUE in verl's names goes to verl as it is, unchecked.
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
case "${{1:-grpo}}" in
  grpo) CLIP_LOW={grpo[0]} CLIP_HIGH={grpo[1]} ;;
  dapo) CLIP_LOW={dapo[0]} CLIP_HIGH={dapo[1]} ;;  # the paper's: nothing but the clip differs
  *) echo "launch.sh: found $1; expected grpo or dapo" >&2; exit 2 ;;
esac
METHOD=${{1:-grpo}}
shift || true
exec python3 -m verl.trainer.main_ppo \\
  actor_rollout_ref.model.path={model} \\
  data.train_files="$HERE/train.parquet" \\
  data.val_files="$HERE/validation.parquet" \\
  reward.custom_reward_function.path="$HERE/reward.py" \\
  reward.custom_reward_function.name=compute_score \\
  actor_rollout_ref.actor.clip_ratio_low="$CLIP_LOW" \\
  actor_rollout_ref.actor.clip_ratio_high="$CLIP_HIGH" \\
  trainer.experiment_name="$METHOD" \\
  trainer.default_local_dir="$HERE/output_$METHOD" \\
{settings} \\
  "$@"
"""

_TRL = """#!/usr/bin/env bash
# {title}
# bash launch.sh grpo|dapo [KEY=VALUE ...]     KEY=VALUE replaces values of TRL's GRPOConfig (train.py).
# More than one GPU: LAUNCHER="accelerate launch --num_processes 8" bash launch.sh grpo use_vllm=true
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
exec ${{LAUNCHER:-python3}} "$HERE/train.py" "${{@:-grpo}}"
"""


def verl_script(title: str, model: str | None, settings: Mapping[str, str]) -> str:
    """launch.sh for verl.

    Args:
        model: folder or hub id; None for model/ beside the script.
    """
    lines = [f"  {key}={shlex.quote(value)}" for key, value in settings.items()]
    return _VERL.format(
        title=title,
        model='"$HERE/model"' if model is None else shlex.quote(model),
        settings=" \\\n".join(lines),
        grpo=CLIP["grpo"],
        dapo=CLIP["dapo"],
    )


def trl_script(title: str) -> str:
    """launch.sh for TRL, whose settings are in settings.json."""
    return _TRL.format(title=title)


def check_trl_overrides(overrides: Mapping[str, str]) -> None:
    """Raises UserError for settings that TRL would not see, and for a KL estimator that it does not have."""
    unseen = sorted(overrides.keys() - _IN_TRL.keys() - {PROMPT, MODEL_LENGTH, KL_TYPE})
    if unseen:
        raise UserError(
            f"handoff: found {unseen[0]} with --to trl; expected one of {', '.join([*_IN_TRL, PROMPT])}. Values of "
            "TRL's own GRPOConfig are given to launch.sh"
        )
    if overrides.get(KL_TYPE, "low_var_kl") not in ("low_var_kl", "k3"):
        raise UserError(
            f"{KL_TYPE}: found {overrides[KL_TYPE]} with --to trl; expected low_var_kl, the only one of TRL"
        )


def trl_settings(settings: Mapping[str, str], *, seed: int) -> dict[str, Any]:
    """verl's settings in TRL's names, for settings.json. Raises UserError where a number is none."""
    found: dict[str, dict[str, Any]] = {"batch": {}, "config": {}}
    for key, (section, name, kind) in _IN_TRL.items():
        try:
            found[section][name] = kind(settings[key])
        except ValueError:
            raise UserError(f"{key}: found {settings[key]}; expected a number") from None
    return {
        "batch": found["batch"],
        "clip": {method: [float(low), float(high)] for method, (low, high) in CLIP.items()},
        "config": {
            **found["config"],
            "loss_type": "dapo",  # TRL's name for verl's token-mean
            "temperature": 1.0,
            "logging_steps": 1,
            "save_steps": 50,
            "report_to": "none",
            "seed": seed,
        },
    }


def versions(target: str, model: str, data: Sequence[str]) -> str:
    """The content of VERSIONS: what these files were made with, and of what."""
    packages = ("torch", "transformers", "peft", "math-verify")
    lines = [
        f"vcore_ds {__version__}, Python {platform.python_version()}",
        ", ".join(f"{name} {version(name)}" for name in packages),
        f"{TESTED[target]}: the version that these files were tested with",
        f"model: {model}",
        *data,
    ]
    return "\n".join(lines) + "\n"


def length_note(settings: Mapping[str, str]) -> str | None:
    """A sentence where answers will be cut off by the model's length (--faithful); None elsewhere."""
    prompt, response, model_length = (int(settings[key]) for key in (PROMPT, RESPONSE, MODEL_LENGTH))
    if model_length >= prompt + response:
        return None
    return (
        f"Faithful to the paper: prompts of up to {prompt:,} and answers of up to {response:,} tokens with a model "
        f"length of {model_length:,}. The answer to a long prompt is cut off earlier"
    )
