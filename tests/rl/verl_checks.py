"""Print what verl parses from launch_scripts/rl/grpo_verl.sh; run by a Python that has verl.

Prints one line of JSON. `grpo_verl.sh` runs with a `python3` in front of PATH that starts this script, so that it gets
the arguments of verl: ARGV = -m verl.trainer.main_ppo KEY=VALUE ...
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    module, *words = sys.argv[2:]
    assert module == "verl.trainer.main_ppo", sys.argv

    import verl
    from hydra import compose, initialize_config_dir
    from transformers import AutoTokenizer
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
    from verl.utils.config import validate_config

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=words)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))

    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    parsed: dict[str, Any] = {"verl": verl.__version__, "sizes": [], "rows": []}
    for files in (config.data.train_files, config.data.val_files):
        data = create_rl_dataset(files, config.data, tokenizer, None)
        parsed["sizes"].append(len(data))
        for i in range(min(3, len(data))):
            row = data[i]
            options = dict(config.data.get("apply_chat_template_kwargs", {}))
            text = tokenizer.apply_chat_template(
                row["raw_prompt"], add_generation_prompt=True, tokenize=False, **options
            )
            truth, source = row["reward_model"]["ground_truth"], row["data_source"]
            parsed["rows"].append({"text": text, "truth": truth, "source": source, "index": row["index"]})

    score = get_custom_reward_fn(config)
    assert score is not None
    truth = parsed["rows"][0]["truth"]
    parsed["rewards"] = [
        score(data_source="sums", solution_str=text, ground_truth=truth, extra_info={})
        for text in (rf"It is \boxed{{{truth}}}.", r"\boxed{-7}", truth)
    ]
    actor = config.actor_rollout_ref.actor
    parsed["clip"] = [actor.clip_ratio_low, actor.clip_ratio_high]
    parsed["kl"] = [actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type]
    parsed["adv_estimator"] = str(config.algorithm.adv_estimator)
    parsed["lengths"] = [
        config.data.max_prompt_length, config.data.max_response_length, config.actor_rollout_ref.rollout.max_model_len
    ]  # fmt: skip
    print("PARSED " + json.dumps(parsed))


if __name__ == "__main__":
    main()
