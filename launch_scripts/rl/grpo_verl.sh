#!/usr/bin/env bash
# GRPO with verl (0.9.1) from an exported model, with the paper's settings:
#   bash launch_scripts/rl/grpo_verl.sh MODEL rl_data [KEY=VALUE ...]      KEY=VALUE in verl's names, as verl takes it
# For DAPO as in the paper, set only actor_rollout_ref.actor.clip_ratio_high=0.28.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "grpo_verl.sh: expected MODEL (an exported model, LoRA merged in) and the folder that problems.py wrote" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1 data=$2
shift 2
arguments=(
    actor_rollout_ref.model.path="$model"
    data.train_files="$data/train.parquet"
    data.val_files="$data/validation.parquet"
    reward.custom_reward_function.path="$here/reward.py"
    reward.custom_reward_function.name=compute_score

    # The paper's table "Hyperparameters used in RL training", with the 200 steps of its text.
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_batch_size=128
    data.max_prompt_length=4096
    data.max_response_length=8192
    actor_rollout_ref.actor.optim.lr=5e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.2
    actor_rollout_ref.actor.entropy_coeff=0.001
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.02
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.rollout.n=4
    trainer.total_epochs=2
    trainer.total_training_steps=200
    trainer.n_gpus_per_node=8

    # Not the paper's. It sets a model length of 8192, which cuts off long answers to long prompts without a warning.
    actor_rollout_ref.rollout.max_model_len=12288
    data.filter_overlong_prompts=True
    data.truncation=error
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
    trainer.logger='["console"]'
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq=50
)
exec python3 -m verl.trainer.main_ppo "${arguments[@]}" "$@"
