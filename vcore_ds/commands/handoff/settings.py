"""The paper's settings of reinforcement learning (appendix "Experimental Details of Reinforcement Learning"), in verl's
names, and what verl accepts in silence although it cannot be meant."""

from collections.abc import Mapping, Sequence

from vcore_ds.errors import UserError

KL_LOSS_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of the KL loss that verl computes (it names `full` too, and has none); each also with a `+`, for its
straight-through form."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
MODEL_LENGTH, KL_TYPE = f"{_ROLLOUT}.max_model_len", f"{_ACTOR}.kl_loss_type"
PAPER_MODEL_LENGTH = 8192

PAPER: dict[str, str] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": "False",
    "data.train_batch_size": "128",
    PROMPT: "4096",
    RESPONSE: "8192",
    f"{_ACTOR}.optim.lr": "5e-6",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "0.1",
    f"{_ACTOR}.optim.lr_scheduler_type": "cosine",  # verl called it warmup_style at the time of the paper
    f"{_ACTOR}.ppo_mini_batch_size": "32",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "2",
    f"{_ACTOR}.entropy_coeff": "0.001",
    f"{_ACTOR}.use_kl_loss": "True",
    f"{_ACTOR}.kl_loss_coef": "0.02",
    KL_TYPE: "low_var_kl",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ROLLOUT}.n": "4",
    "trainer.total_epochs": "2",
    "trainer.total_training_steps": "200",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
}
"""Table "Hyperparameters used in RL training", with the 200 steps of the text."""

OURS: dict[str, str] = {
    "data.filter_overlong_prompts": "True",
    "data.truncation": "error",
    "actor_rollout_ref.model.use_remove_padding": "True",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "True",
    f"{_ROLLOUT}.name": "vllm",
    f"{_ROLLOUT}.tensor_model_parallel_size": "1",
    f"{_ROLLOUT}.gpu_memory_utilization": "0.6",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": "4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "4",
    "trainer.logger": '["console"]',
    "trainer.project_name": "vcore_ds_handoff",
    "trainer.val_before_train": "False",
    "trainer.test_freq": "-1",
    "trainer.save_freq": "50",
}
"""What the paper does not say."""

CLIP = {"grpo": ("0.2", "0.2"), "dapo": ("0.2", "0.28")}
"""Lower and upper clip of the ratio. The paper's DAPO differs in nothing else: dynamic sampling is off."""


def parse_overrides(words: Sequence[str]) -> dict[str, str]:
    """`key=value` words, in verl's names. Raises UserError for any other word."""
    wrong = [word for word in words if "=" not in word or word.startswith(("=", "-"))]
    if wrong:
        raise UserError(f"handoff: found {wrong[0]}; expected key=value with verl's keys, such as {PROMPT}=2048")
    return dict(word.split("=", 1) for word in words)


def paper_settings(overrides: Mapping[str, str], *, faithful: bool, model_limit: int | None) -> dict[str, str]:
    """All settings but paths and clips, `overrides` in their place.

    Args:
        faithful: keep the paper's model length of 8,192 tokens, below prompt + response.
        model_limit: tokens that the model takes (max_position_embeddings).

    Raises:
        UserError: for what verl would accept in silence: an unknown estimator of the KL loss, and answers that the
            model's length cuts off.
    """
    settings = {**PAPER, **OURS, **overrides}
    kl_type = settings[KL_TYPE]
    if kl_type.removesuffix("+") not in KL_LOSS_TYPES:
        raise UserError(
            f"{KL_TYPE}: found {kl_type}; expected one of {', '.join(KL_LOSS_TYPES)}. verl checks it in its first "
            "update only, after the first answers were generated"
        )
    prompt, response = _length(settings, PROMPT), _length(settings, RESPONSE)
    if MODEL_LENGTH not in settings:
        settings[MODEL_LENGTH] = str(PAPER_MODEL_LENGTH if faithful else prompt + response)
    length = _length(settings, MODEL_LENGTH)
    if length < prompt + response and not faithful:
        raise UserError(
            f"{MODEL_LENGTH}: found {length:,} for prompts of {prompt:,} and answers of {response:,} tokens, which "
            f"verl would cut off in silence; expected at least {prompt + response:,}. Set one of the three, or "
            "--faithful, which keeps the paper's lengths as they are"
        )
    if model_limit is not None and length > model_limit:
        raise UserError(
            f"{MODEL_LENGTH}: found {length:,}; expected at most {model_limit:,}, the length that the model takes. Set "
            f"{PROMPT} and {RESPONSE} to {model_limit:,} together, such as {RESPONSE}={max(1, model_limit - prompt)}"
        )
    return settings


def _length(settings: Mapping[str, str], key: str) -> int:
    value = settings[key]
    if not value.isdecimal() or not 1 <= int(value) <= 10**7:
        raise UserError(f"{key}: found {value}; expected a number of tokens")
    return int(value)
