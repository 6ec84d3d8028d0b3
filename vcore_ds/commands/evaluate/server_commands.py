"""Command lines that serve a model the way this evaluation wants it, ready to paste."""

import shlex

from vcore_ds.commands.evaluate.problems import BENCHMARK_TOKENS
from vcore_ds.models.configuration import read_config
from vcore_ds.models.named_model import NamedModel, read_adapter_config

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank."""
PROMPT_TOKENS = 4_096
"""Room for a prompt."""


def server_commands(model: NamedModel, *, max_new_tokens: int | None, seed: int, words: str) -> str:
    """Lines for vLLM and for SGLang, each with the evaluation that asks it.

    Args:
        max_new_tokens: None for what the benchmarks take.
        words: further arguments of the evaluation.
    """
    positions = read_config(model.weights).get_text_config().max_position_embeddings
    name, longest = model.name, min((max_new_tokens or BENCHMARK_TOKENS) + PROMPT_TOKENS, positions)
    vllm = ["vllm", "serve", model.weights, "--dtype", "bfloat16"]
    # Otherwise both servers fill the fields that a request leaves out from the model's generation_config.json.
    vllm += ["--max-model-len", str(longest), "--seed", str(seed), "--generation-config", "vllm"]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", model.weights, "--dtype", "bfloat16"]
    sglang += ["--context-length", str(longest), "--random-seed", str(seed), "--sampling-defaults", "openai"]
    served = {"vllm": model.weights, "sglang": model.weights}
    if model.adapter is not None:
        config = read_adapter_config(model.adapter)
        rank = max([config.get("r", 8), *(config.get("rank_pattern") or {}).values()])
        allowed = next((size for size in _RANKS if size >= rank), rank)
        vllm += ["--enable-lora", "--max-lora-rank", str(allowed), "--lora-modules", f"{name}={model.adapter}"]
        sglang += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-paths", f"{name}={model.adapter}"]
        served = {"vllm": name, "sglang": f"{model.weights}:{name}"}
    urls = {"vllm": "http://localhost:8000/v1", "sglang": "http://localhost:30000/v1"}
    lines = []
    for title, software, command in (("vLLM", "vllm", vllm), ("SGLang", "sglang", sglang)):
        evaluation = ["vcore-ds", "eval", model.path, "--url", urls[software], "--served-name", served[software]]
        lines += [f"# {title}, in an environment of its own", shlex.join(command), f"{shlex.join(evaluation)} {words}"]
    return "\n".join(lines)
