"""Tokenizers with the chat templates of real models."""

from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.helpers.conversations import decode_supervised
from tests.helpers.tokenizer import make_tokenizer

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"

# Begin of sequence, end of text, and the other special tokens of the model's vocabulary.
SPECIAL = {
    "qwen3": ("", "<|im_end|>", ["<|im_start|>", "<think>", "</think>"]),
    "qwen3_5_think": ("", "<|im_end|>", ["<|im_start|>", "<think>", "</think>"]),
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "mistral_nemo": ("<s>", "</s>", ["[INST]", "[/INST]"]),
    "smollm2": ("<|im_start|>", "<|im_end|>", []),
    "deepseek_r1_distill": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ["<｜User｜>", "<｜Assistant｜>"]),
}
_GEMMA4 = ("<bos>", "<turn|>", ["<|turn>", "<|channel>", "<channel|>", "<|think|>", "<|tool_response>"])
OTHERS = {
    "qwen3_5_nothink": SPECIAL["qwen3"],
    "qwen3_6": SPECIAL["qwen3"],
    "deepseek_v3": SPECIAL["deepseek_r1_distill"],
    "gemma2": ("<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "gemma4": _GEMMA4,
    "gemma4_v1": _GEMMA4,
    "phi3": ("<s>", "<|endoftext|>", ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]),
    "phi4": ("", "<|im_end|>", ["<|im_start|>", "<|im_sep|>", "<|endoftext|>"]),
    "glm4_5": ("", "<|endoftext|>", ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>"]),
    "gpt_oss": ("<|startoftext|>", "<|return|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"]),
    "nemotron_3_nano": ("<s>", "<|im_end|>", ["<|im_start|>", "<think>", "</think>"]),
    "lfm2_5": ("<|startoftext|>", "<|im_end|>", ["<|im_start|>"]),
}
"""Templates with other ends of turns, or other forms of thinking."""
# Word pattern of LLaMA 3 and Qwen3: consecutive line breaks stay together, whatever follows.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache
def make_template_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the model's special tokens and chat template."""
    begin, end, markers = (SPECIAL | OTHERS)[name]
    return make_tokenizer(
        (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
        merges=[("Ċ", "Ċ"), ("Ġ", "Ġ"), (":", "Ċ"), (".", "Ċ"), ("Ġ", "I")],
        word_pattern=WORDS,
        special_tokens=[token for token in (begin, end, *markers) if token],
        begin=begin or None,
        end=end,
        pad=None,
    )


def decode_supervised_spans(name: str, sequence) -> list[str]:
    """Texts of the contiguous runs of supervised tokens."""
    return decode_supervised(sequence, make_template_tokenizer(name))
