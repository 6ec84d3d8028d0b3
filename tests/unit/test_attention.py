"""Attention with a tangent against the unfused one under `torch.func.jvp`; inside Hugging Face models; its memory."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from tests.helpers.allocations import Allocations
from vcore_ds.models.attention import (
    FORWARD_MODE_ATTENTION,
    block_attention,
    forward_mode_attention,
    segment_starts,
)

SCALE = 0.37


def inputs(num_tokens: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, seed: int = 0, dtype=torch.float64):
    """(query, key, value) and their tangents, two rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, num_heads, num_tokens, head_dim) for num_heads in (heads, kv_heads, kv_heads)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes * 2]
    return tuple(drawn[:3]), tuple(drawn[3:])


def visible(num_tokens: int, key_mask: Tensor | None, sliding_window: int | None, segments: Tensor | None) -> Tensor:
    """[1 or 2, 1, T, T]: query (row) may see key (column). `segments` [2, T]: the sequence of each token."""
    seen = torch.ones(num_tokens, num_tokens).tril().bool()
    if sliding_window is not None:
        seen &= ~torch.ones(num_tokens, num_tokens).tril(-sliding_window).bool()
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
        return seen[:, None] if key_mask is None else seen[:, None] & key_mask[:, None, None, :]
    return seen[None, None] if key_mask is None else seen[None, None] & key_mask[:, None, None, :]


def unfused(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = (SCALE * query @ key.transpose(2, 3)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


def padding(kind: str, num_tokens: int) -> Tensor | None:
    """Row 0 is whole, row 1 has a third of padding."""
    if kind == "none":
        return None
    mask = torch.ones(2, num_tokens, dtype=torch.bool)
    third = max(1, num_tokens // 3)
    mask[1, slice(-third, None) if kind == "right" else slice(0, third)] = False
    return mask


def check(
    num_tokens: int,
    block_tokens: int = 16,
    *,
    pad: str = "none",
    sliding_window: int | None = None,
    moving: str = "qkv",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    lengths: tuple[list[int], list[int]] | None = None,
    **sizes: int,
) -> None:
    """`lengths`: of the sequences in each of the two rows, None for one in each."""
    primals, tangents = inputs(num_tokens, dtype=dtype, **sizes)
    key_mask = padding(pad, num_tokens)
    given = tuple(tangent if name in moving else None for name, tangent in zip("qkv", tangents, strict=True))
    starts = segments = None
    if lengths is not None:
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        starts, segments = segment_starts(positions), (positions == 0).cumsum(1)
    output, d_output = block_attention(
        *primals,
        given,
        scale=SCALE,
        key_mask=key_mask,
        segment_starts=starts,
        sliding_window=sliding_window,
        block_tokens=block_tokens,
    )
    assert (output.dtype, output.shape) == (dtype, primals[0].shape)

    seen = visible(num_tokens, key_mask, sliding_window, segments).expand(2, 1, -1, -1)
    blind = ~seen.any(-1, keepdim=True)  # queries without a key: padding on the left, whose softmax is nan
    exact = tuple(tensor.double() for tensor in primals)
    full = tuple(t.double() * (name in moving) for name, t in zip("qkv", tangents, strict=True))
    expected, d_expected = torch.func.jvp(lambda q, k, v: unfused(q, k, v, seen | blind), exact, full)
    close = dict(rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(output.double(), expected.masked_fill(blind, 0.0), **close)
    if moving:
        torch.testing.assert_close(d_output.double(), d_expected.masked_fill(blind, 0.0), **close)
    else:
        assert d_output is None


# ---- output and tangent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("num_tokens", [1, 9, 16, 17, 18, 41, 64], ids=lambda n: f"{n} tokens")
def test_lengths_around_multiples_of_the_block(num_tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    check(num_tokens, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [8, 7, 1])
def test_groups_of_heads_and_odd_head_dimensions(heads: int, kv_heads: int, head_dim: int) -> None:
    check(37, heads=heads, kv_heads=kv_heads, head_dim=head_dim, pad="left")


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 15, 16, 20, 31, 40, 100])
@pytest.mark.parametrize("pad", ["none", "right", "left"])
def test_padding_and_sliding_windows(pad: str, sliding_window: int | None) -> None:
    check(60, pad=pad, sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize(
    "lengths",
    [([60], [60]), ([20, 40], [60]), ([16, 16, 28], [1, 58, 1]), ([1] * 60, [17, 3, 33, 7]), ([48, 12], [5, 55])],
    ids=str,
)
def test_sequences_in_one_row_do_not_see_each_other(lengths, sliding_window: int | None) -> None:
    check(60, lengths=lengths, sliding_window=sliding_window)
    check(60, lengths=lengths, dtype=torch.float32, tolerance=1e-5, pad="right")


def test_where_sequences_start() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert segment_starts(positions).tolist() == [[0, 0, 0, 3, 3, 5], [0] * 6]
    assert segment_starts(positions[1:]) is None


@pytest.mark.parametrize("moving", ["", "q", "k", "v", "qk", "qv", "kv"])
def test_tangents_of_some_inputs_only(moving: str) -> None:
    check(41, moving=moving, pad="right")


@pytest.mark.parametrize("growing", [True, False])
def test_scores_far_beyond_the_range_of_exp(growing: bool) -> None:
    # Later keys raise (or do not raise) the running maximum by hundreds: the sums so far are rescaled to nothing.
    (query, key, value), tangents = inputs(40)
    steps = torch.arange(40.0, dtype=torch.float64)[:, None]
    query, key = query.abs() + 1, (key.abs() + 1) * (steps if growing else 40 - steps) * 10
    output, d_output = block_attention(query, key, value, tangents, scale=SCALE, block_tokens=16)
    seen = visible(40, None, None, None)
    expected = torch.func.jvp(lambda q, k, v: unfused(q, k, v, seen), (query, key, value), tangents)
    torch.testing.assert_close((output, d_output), expected, rtol=1e-9, atol=1e-9)


def test_a_token_does_not_depend_on_later_ones() -> None:
    primals, tangents = inputs(41)
    later = [tensor.clone() for tensor in (*primals, *tangents)]
    for tensor in later:
        tensor[:, :, 20:] = torch.nan
    before = block_attention(*primals, tangents, scale=SCALE, block_tokens=20)
    after = block_attention(*later[:3], tuple(later[3:]), scale=SCALE, block_tokens=20)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, :20], y[:, :, :20])


# ---- inside Hugging Face models -------------------------------------------------------------------------------------

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "llama": lambda: LlamaConfig(**SIZES, num_key_value_heads=4),
    "mistral, sliding window": lambda: MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=6),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pad", ["none", "right", "left"])
def test_models_give_the_logits_of_eager_attention(name: str, pad: str) -> None:
    config: PreTrainedConfig = CONFIGS[name]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    mask = padding(pad, 21)
    call = dict(input_ids=torch.randint(0, 64, (2, 21)), use_cache=False)
    call["attention_mask"] = None if mask is None else mask.long()
    with torch.no_grad():
        eager = model(**call).logits
        model.config._attn_implementation = FORWARD_MODE_ATTENTION
        blocks = model(**call).logits
    real = torch.ones(2, 21, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(blocks[real], eager[real], rtol=1e-5, atol=1e-5)
    assert not torch.equal(blocks, eager)  # so that both really ran
    if mask is not None:
        call["attention_mask"] = None
        with torch.no_grad():
            unmasked = model(**call).logits
        assert torch.allclose(unmasked[real], blocks[real], atol=1e-5) == (pad == "right")  # left padding is seen


def test_score_caps_and_sinks_are_refused() -> None:
    primals, _ = inputs(4)
    module = torch.nn.Module()
    for extra in (dict(softcap=30.0), dict(s_aux=torch.zeros(4))):
        with pytest.raises(NotImplementedError):
            forward_mode_attention(module, *primals, None, **extra)


# ---- memory --------------------------------------------------------------------------------------------------------


def allocations_of(attention, num_tokens: int) -> Allocations:
    """Memory of one forward with all tangents; one row, 2 heads of 32, one key/value head."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, num_tokens, 32), (1, 1, num_tokens, 32), (1, 1, num_tokens, 32)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes * 2]
    with torch.no_grad(), Allocations() as allocations:
        attention(tensors[:3], tuple(tensors[3:]))
    return allocations


def in_blocks(primals, tangents) -> None:
    block_attention(*primals, tangents, scale=SCALE)


def whole(primals, tangents) -> None:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
        unfused(*duals, visible(primals[0].shape[2], None, None, None))


def test_memory_grows_linearly_with_the_length() -> None:
    ours = [allocations_of(in_blocks, n) for n in (2048, 4096)]
    math = [allocations_of(whole, n) for n in (2048, 4096)]
    for name, (half, full) in (("in blocks", ours), ("unfused", math)):
        print(
            f"{name}: peak {half.peak_bytes / 2**20:.1f} MiB at 2,048 tokens, {full.peak_bytes / 2**20:.1f} MiB at "
            f"4,096: {full.peak_bytes / half.peak_bytes:.2f} times; largest tensor {full.largest_numel:,} elements"
        )
    assert ours[1].peak_bytes <= 2.2 * ours[0].peak_bytes
    assert math[1].peak_bytes >= 3.5 * math[0].peak_bytes  # so that the measurement can tell
    assert ours[1].peak_bytes < math[1].peak_bytes / 10
    # The output, [1, 2, T, 32]: no score block is larger, and nothing is [T, T].
    assert [allocations.largest_numel for allocations in ours] == [2 * 32 * n for n in (2048, 4096)]
