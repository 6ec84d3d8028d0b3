"""The tests' tokenizer, made in memory: one token per byte, plus the merges and special tokens that a test needs."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tokenizer(
    chat_template: str | None = CHATML,
    *,
    merges: Sequence[tuple[str, str]] = (),
    word_pattern: str | None = None,
    trim_offsets: bool = False,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    begin: str | None = None,
    end: str = "<|im_end|>",
    pad: str | None = "<|endoftext|>",
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. `chat_template`: None for a tokenizer without a chat template. `merges`: pairs of
    pieces; each pair becomes a token too. `word_pattern`: how text is cut into words before merging; None for the rule
    of GPT-2. `trim_offsets`: whether a token's character offsets leave out its leading space. `begin`, `end`, `pad`:
    special tokens for the beginning of a sequence, the end of a turn, and padding."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    if word_pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(word_pattern), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
