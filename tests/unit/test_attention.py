"""Attention of all passes against the unfused one, its gradient and `torch.func.jvp`; inside models; its memory."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.helpers import tiny
from tests.helpers.allocations import Allocations
from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import Batch
from vcore_ds.models import attention as attention_module
from vcore_ds.models import attention_kernels
from vcore_ds.models.attention import (
    FORWARD_MODE_ATTENTION,
    FUSED_ATTENTION,
    TRAINING_ATTENTION,
    SequenceLayout,
    forward_mode_attention,
    training_attention,
)
from vcore_ds.models.block_attention import BLOCK_TOKENS, block_attention
from vcore_ds.models.causal_lm import TokenLossModel

SCALE = 0.37


def draw_inputs(
    num_tokens: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, seed: int = 0, dtype=torch.float64
):
    """(query, key, value) and their tangents, of two sequences or packs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, num_heads, num_tokens, head_dim) for num_heads in (heads, kv_heads, kv_heads)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes * 2]
    return tuple(drawn[:3]), tuple(drawn[3:])


def make_mask(num_tokens: int, sliding_window: int | None = None, lengths=None) -> Tensor:
    """[1 or 2, 1, T, T]: query (row) may see key (column). `lengths`: of the sequences in each row."""
    seen = torch.ones(num_tokens, num_tokens).tril().bool()
    if sliding_window is not None:
        seen &= ~torch.ones(num_tokens, num_tokens).tril(-sliding_window).bool()
    if lengths is None:
        return seen[None, None]
    number = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    return (seen & (number[:, :, None] == number[:, None, :]))[:, None]


def draw_sinks(heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The sink of each query head, and the sinks' tangent."""
    sinks, d_sinks = torch.randn(2, heads, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    return sinks, d_sinks


def attend_unfused(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    group, num_keys = query.shape[1] // key.shape[1], key.shape[2]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = SCALE * query @ key.transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :num_keys] @ value


def check(
    num_tokens: int,
    block_tokens: tuple[int, int] = (16, 16),
    *,
    sliding_window: int | None = None,
    moving: str = "qkv",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    with_sinks: bool = False,
    **sizes: int,
) -> None:
    """`moving`: which inputs have a tangent; s stands for the sinks."""
    primals, tangents = draw_inputs(num_tokens, dtype=dtype, **sizes)
    given = tuple(tangent if name in moving else None for name, tangent in zip("qkv", tangents, strict=True))
    sinks, d_sinks = draw_sinks(primals[0].shape[1], dtype)
    options = dict(scale=SCALE, sliding_window=sliding_window)
    with patch.dict(BLOCK_TOKENS, cpu=block_tokens):
        moving_sinks = (sinks, d_sinks if "s" in moving else None) if with_sinks else None
        output, d_output = block_attention(*primals, given, sinks=moving_sinks, **options)
        without, _ = block_attention(*primals, sinks=(sinks, None) if with_sinks else None, **options)
    assert (output.dtype, output.shape) == (dtype, primals[0].shape)
    assert torch.equal(output, without)  # the losses of a pass do not depend on whether it carries tangents

    seen = make_mask(num_tokens, sliding_window)
    exact = tuple(tensor.double() for tensor in (*primals, sinks))
    full = tuple(t.double() * (name in moving) for name, t in zip("qkvs", (*tangents, d_sinks), strict=True))
    expected, d_expected = torch.func.jvp(
        lambda q, k, v, s: attend_unfused(q, k, v, seen, s if with_sinks else None), exact, full
    )
    close = dict(rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(output.double(), expected, **close)
    if moving:
        torch.testing.assert_close(d_output.double(), d_expected, **close)
    else:
        assert d_output is None


# ---- output and tangent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("num_tokens", [1, 9, 16, 17, 18, 41, 64], ids=lambda n: f"{n} tokens")
def test_lengths_around_multiples_of_the_block_are_correct(
    num_tokens: int, dtype: torch.dtype, tolerance: float
) -> None:
    check(num_tokens, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [8, 7, 1])
def test_grouped_heads_and_odd_head_dimensions_are_correct(heads: int, kv_heads: int, head_dim: int) -> None:
    check(37, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("block_tokens", [(16, 16), (8, 32), (32, 8)], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 1, 5, 15, 16, 20, 31, 40, 100])
def test_sliding_windows_are_correct(sliding_window: int | None, block_tokens: tuple[int, int]) -> None:
    check(60, block_tokens, sliding_window=sliding_window)


@pytest.mark.parametrize("moving", ["", "q", "k", "v", "qk", "qv", "kv"])
def test_some_inputs_may_have_no_tangent(moving: str) -> None:
    check(41, moving=moving)


@pytest.mark.parametrize("moving", ["qkvs", "s", "", "qk"])
@pytest.mark.parametrize("sliding_window", [None, 5, 16])
def test_sinks_and_their_tangents_are_correct(sliding_window: int | None, moving: str) -> None:
    check(41, sliding_window=sliding_window, moving=moving, with_sinks=True, heads=6, kv_heads=3)


@pytest.mark.parametrize("growing", [True, False])
def test_scores_far_beyond_the_range_of_exp_are_correct(growing: bool) -> None:
    # Growing scores raise the running maximum by hundreds, which rescales the sums so far to zero.
    (query, key, value), tangents = draw_inputs(40)
    steps = torch.arange(40.0, dtype=torch.float64)[:, None]
    query, key = query.abs() + 1, (key.abs() + 1) * (steps if growing else 40 - steps) * 10
    with patch.dict(BLOCK_TOKENS, cpu=(16, 16)):
        output, d_output = block_attention(query, key, value, tangents, scale=SCALE)
    seen = make_mask(40)
    expected = torch.func.jvp(lambda q, k, v: attend_unfused(q, k, v, seen), (query, key, value), tangents)
    torch.testing.assert_close((output, d_output), expected, rtol=1e-9, atol=1e-9)


def test_a_token_does_not_depend_on_later_ones() -> None:
    primals, tangents = draw_inputs(41)
    later = [tensor.clone() for tensor in (*primals, *tangents)]
    for tensor in later:
        tensor[:, :, 20:] = torch.nan
    with patch.dict(BLOCK_TOKENS, cpu=(20, 20)):
        before = block_attention(*primals, tangents, scale=SCALE)
        after = block_attention(*later[:3], tuple(later[3:]), scale=SCALE)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, :20], y[:, :, :20])


# ---- the interface: sequences of a pack, with a gradient and with a tangent ------------------------------------------

LAYOUTS = {
    "unpacked": [[60], [60]],
    "one pack of two": [[20, 40], [60]],
    "short ones": [[16, 16, 28], [1, 58, 1]],
    "many": [[1] * 60, [17, 3, 33, 7]],
}
CPU = torch.device("cpu")


@pytest.mark.parametrize(("with_sinks", "softcap"), [(False, None), (True, None), (True, 0.7)])
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 59, 60])
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_attentions_keep_sequences_apart(
    name: str, sliding_window: int | None, with_sinks: bool, softcap: float | None
) -> None:
    primals, tangents = draw_inputs(60)
    if with_sinks:
        sinks, d_sinks = draw_sinks(4)
        primals, tangents = (*primals, sinks), (*tangents, d_sinks)
    seen = make_mask(60, sliding_window, LAYOUTS[name])
    options = dict(scaling=SCALE, sliding_window=sliding_window, softcap=softcap)
    options["sequence_layout"] = SequenceLayout.from_lengths(LAYOUTS[name], 1, CPU)

    def reference(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend_unfused(query, key, value, seen, sinks, softcap).transpose(1, 2)

    def run_attention(attention: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        attend = AttentionInterface()[attention]
        return attend(torch.nn.Module(), query, key, value, None, s_aux=sinks, **options)[0]

    weight = torch.randn(2, 60, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def compute_output_and_gradients(attend) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in primals]
        output = attend(*leaves)
        return output.detach(), *torch.autograd.grad((output * weight).sum(), leaves)

    expected, *expected_gradients = compute_output_and_gradients(reference)
    _, d_expected = torch.func.jvp(reference, primals, tangents)
    with patch.object(attention_kernels, "BAND_TOKENS", 16):
        output, *gradients = compute_output_and_gradients(partial(run_attention, TRAINING_ATTENTION))
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-12)

        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
            value_and_tangent = forward_ad.unpack_dual(run_attention(FORWARD_MODE_ATTENTION, *duals))
            torch.testing.assert_close(tuple(value_and_tangent), (expected, d_expected), rtol=1e-12, atol=1e-12)

        with forward_ad.dual_level():
            recorded = {}

            def attend_fused(*leaves: Tensor) -> Tensor:
                duals = [forward_ad.make_dual(x, dx) for x, dx in zip(leaves, tangents, strict=True)]
                value, recorded["tangent"] = forward_ad.unpack_dual(run_attention(FUSED_ATTENTION, *duals))
                return value

            fused = compute_output_and_gradients(attend_fused)
        assert all(torch.equal(x, y) for x, y in zip(fused, (output, *gradients), strict=True))
        assert not recorded["tangent"].requires_grad
        torch.testing.assert_close(recorded["tangent"], d_expected, rtol=1e-12, atol=1e-12)


def test_a_sequence_layout_lists_its_sequences() -> None:
    layout = SequenceLayout.from_lengths([[3, 5], [8]], 1, CPU)
    assert layout.cu_seqlens.tolist() == [0, 3, 8, 16] and layout.cu_seqlens.dtype == torch.int32
    assert (layout.max_seqlen, layout.is_unpacked) == (8, False)
    assert list(layout.iter_sequences()) == [
        (slice(0, 1), slice(0, 3)),
        (slice(0, 1), slice(3, 8)),
        (slice(1, 2), slice(0, 8)),
    ]
    assert list(SequenceLayout.from_lengths([[8], [8]], 1, CPU).iter_sequences()) == [(slice(None), slice(None))]


@pytest.mark.parametrize("attend", [training_attention, forward_mode_attention])
def test_values_may_have_fewer_dimensions_than_keys(attend) -> None:
    (query, key, value), (d_query, d_key, d_value) = draw_inputs(60)
    primals, tangents = (query, key, value[..., :5]), (d_query, d_key, d_value[..., :5])
    options = dict(scaling=SCALE, sequence_layout=SequenceLayout.from_lengths(LAYOUTS["short ones"], 1, CPU))
    seen = make_mask(60, None, LAYOUTS["short ones"])
    expected = torch.func.jvp(lambda q, k, v: attend_unfused(q, k, v, seen), primals, tangents)
    with torch.no_grad(), forward_ad.dual_level():
        carries_tangents = attend is forward_mode_attention
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
        output, _ = attend(torch.nn.Module(), *(duals if carries_tangents else primals), None, **options)
        output = forward_ad.unpack_dual(output)
        torch.testing.assert_close(output.primal.transpose(1, 2), expected[0], rtol=1e-12, atol=1e-12)
        if carries_tangents:
            torch.testing.assert_close(output.tangent.transpose(1, 2), expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("sliding_window", [None, 7])
def test_sinks_are_correct_in_single_precision(sliding_window: int | None, softcap: float | None) -> None:
    primals, _ = draw_inputs(60, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (*primals, draw_sinks(4, torch.float32)[0])]
    options = dict(scaling=SCALE, sliding_window=sliding_window, softcap=softcap)
    options["sequence_layout"] = SequenceLayout.from_lengths(LAYOUTS["short ones"], 1, CPU)
    output, _ = training_attention(torch.nn.Module(), *leaves[:3], None, s_aux=leaves[3], **options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    seen = make_mask(60, sliding_window, LAYOUTS["short ones"])
    expected = attend_unfused(*exact[:3], seen, exact[3], softcap).transpose(1, 2)
    gradients = [torch.autograd.grad(y.square().sum(), x) for y, x in ((output, leaves), (expected, exact))]
    for computed, reference in [(output, expected), *zip(*gradients, strict=True)]:
        error = float((computed.double() - reference).detach().norm() / reference.detach().norm())
        assert error < 1e-6, error


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_sinks_are_added_around_the_gpu_kernel(sliding_window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins replace the kernel and its backward, with the same layouts: tokens first, log-sum-exp last."""
    primals = (*draw_inputs(60)[0], draw_sinks(4)[0])
    layout = SequenceLayout.from_lengths(LAYOUTS["short ones"], 1, CPU)
    seen = make_mask(60, sliding_window, LAYOUTS["short ones"])

    def compute_scores(query: Tensor, key: Tensor) -> Tensor:
        """Scores `[2, 4, 60, 60]` of query heads."""
        rows = [x.unflatten(0, (2, 60)).transpose(1, 2) for x in (query, key)]
        scores = SCALE * rows[0] @ rows[1].repeat_interleave(2, 1).transpose(2, 3)
        return scores.masked_fill(~seen, -torch.inf)

    def forward(query, key, value, ends, _ends, longest, _longest, *, scale, window_size, **_) -> tuple[Tensor, Tensor]:
        assert (scale, longest) == (SCALE, 58) and ends.tolist() == layout.cu_seqlens.tolist()
        assert window_size == ((-1, 0) if sliding_window is None else (sliding_window - 1, 0))
        scores = compute_scores(query, key)
        rows = value.unflatten(0, (2, 60)).transpose(1, 2).repeat_interleave(2, 1)
        output = (scores.softmax(-1) @ rows).transpose(1, 2).flatten(0, 1)
        return output, scores.logsumexp(-1).transpose(0, 1).flatten(1)

    def backward(gradient, query, key, value, output, log_sum_exp, *rest, scale, window_size_left, window_size_right):
        is_causal = rest[5]
        assert is_causal == (sliding_window is None) and (window_size_left, window_size_right) != (-1, -1)
        assert log_sum_exp.is_contiguous() and log_sum_exp.shape == (4, 120)
        q, k, v, out, d_out = (x.unflatten(0, (2, 60)).transpose(1, 2) for x in (query, key, value, output, gradient))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        weights = (compute_scores(query, key) - log_sum_exp.unflatten(1, (2, 60)).transpose(0, 1)[..., None]).exp()
        d_scores = SCALE * weights * (d_out @ v.transpose(2, 3) - (d_out * out).sum(-1, keepdim=True))
        gradients = d_scores @ k, d_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ d_out
        gradients = (gradients[0], *(x.unflatten(1, (2, 2)).sum(2) for x in gradients[1:]))  # of a group's query heads
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in gradients)

    monkeypatch.setattr(attention_kernels, "varlen_attn", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    kernel = attention_kernels.CudaFlash(SCALE, sliding_window, layout.cu_seqlens, layout.max_seqlen)
    weight = torch.randn(2, 4, 60, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    results = []
    for attend in (
        lambda *x: attention_kernels.flash_attention(*x, kernel)[0],
        lambda q, k, v, s: attend_unfused(q, k, v, seen, s),
    ):
        leaves = [x.clone().requires_grad_() for x in primals]
        output = attend(*leaves)
        results.append((output, *torch.autograd.grad((output * weight).sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


# ---- the kernel that is chosen on a GPU ------------------------------------------------------------------------------


class TakenFor(Exception):
    """Ends a call at the kernel that would be launched."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, tuple[int, ...]]]:
    """The kernel that attention of passes with a gradient takes on a GPU, and the shape of the keys that it gets. Fake
    tensors, which have a device and no values."""

    def find_kernel(dtype: torch.dtype, head_dim: int, heads: tuple[int, int] = (4, 2)):
        def stop_at(name: str) -> Callable[..., None]:
            def stop(query, key, *_, **options) -> None:
                raise TakenFor(name, tuple(key.shape))

            return stop

        monkeypatch.setattr(attention_kernels, "varlen_attn", stop_at("varlen"))
        monkeypatch.setattr(attention_module, "scaled_dot_product_attention", stop_at("one call a sequence"))
        layout = SequenceLayout([[16]], 1, torch.zeros(2))
        with FakeTensorMode():
            query, key, value = (
                torch.empty(1, n, 16, head_dim, dtype=dtype, device="cuda:0") for n in (*heads, heads[1])
            )
            options = attention_module.ScoreOptions(SCALE)
            with pytest.raises(TakenFor) as stopped:
                attention_module.causal_attention((query, key, value, None), layout, options)
        return stopped.value.args

    return find_kernel


@pytest.mark.parametrize("head_dim", [8, 64, 80, 192, 256])
def test_head_sizes_of_the_flash_kernel_use_it(on_gpu, head_dim: int) -> None:
    assert on_gpu(torch.bfloat16, head_dim)[0] == "varlen"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads"),
    [*((torch.bfloat16, dim, (4, 2)) for dim in (4, 100, 200, 224, 257, 264, 512)), (torch.float32, 64, (6, 3))],
)
def test_others_fall_back_to_one_call_a_sequence(on_gpu, dtype: torch.dtype, head_dim: int, heads) -> None:
    """With keys repeated for each query head: with grouped heads the only fp32 kernel of PyTorch holds all scores.
    The flash kernel's backward raises for 192 < D <= 224 on compute capability 8.6, 8.9 and 12.x."""
    assert on_gpu(dtype, head_dim, heads) == ("one call a sequence", (1, heads[0], 16, head_dim))


@pytest.mark.parametrize("takes_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_grouped_heads_work_with_and_without_enable_gqa(takes_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins have the signatures of both versions, so another argument would be a TypeError."""
    primals, layout = draw_inputs(60)[0], SequenceLayout.from_lengths(LAYOUTS["short ones"], 1, CPU)

    def attend(query, key, value, scale, window_size) -> tuple[Tensor, None]:
        assert window_size == (-1, 0) and scale == SCALE
        q, k, v = (x.unflatten(0, (2, 60)).transpose(1, 2) for x in (query, key, value))
        assert takes_groups or q.shape == k.shape
        output = attend_unfused(q, k, v, make_mask(60, lengths=LAYOUTS["short ones"]))
        return output.transpose(1, 2).flatten(0, 1), output[..., 0].transpose(0, 1).flatten(1)

    def varlen_attn_2_11(
        query, key, value, ends, _ends, longest, _longest, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        return attend(query, key, value, scale, window_size)

    def varlen_attn_2_13(
        query, key, value, ends, _ends, longest, _longest, *, return_aux=None, scale=None, window_size=(-1, -1),
        enable_gqa=False,
    ):  # fmt: skip
        assert enable_gqa
        return attend(query, key, value, scale, window_size)

    monkeypatch.setattr(attention_kernels, "varlen_attn", varlen_attn_2_13 if takes_groups else varlen_attn_2_11)
    for module in (attention_kernels, attention_module):
        monkeypatch.setattr(module, "SUPPORTS_GQA", takes_groups)
    monkeypatch.setattr(attention_module, "_can_use_flash", lambda query, scoring: True)
    output = attention_module.causal_attention((*primals, None), layout, attention_module.ScoreOptions(SCALE))
    expected = attend_unfused(*primals, make_mask(60, lengths=LAYOUTS["short ones"]))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_masks_and_lost_layouts_are_refused() -> None:
    primals, _ = draw_inputs(4)
    layout = SequenceLayout.from_lengths([[4], [4]], 1, CPU)
    for attend in (training_attention, forward_mode_attention):
        for mask, extra, words in (
            (make_mask(4), dict(sequence_layout=layout), "computes with an attention mask"),
            (None, dict(sequence_layout=layout, position_bias=make_mask(4)), "computes with position_bias"),
            (None, dict(sequence_layout=layout, block_indices=make_mask(4)), "computes with block_indices"),
            (None, {}, "does not pass the decoder"),
        ):
            with pytest.raises(UserError, match=words):
                attend(torch.nn.Module(), *primals, mask, **extra)


# ---- inside Hugging Face models -------------------------------------------------------------------------------------

SIZES = dict(vocab_size=tiny.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
ALTERNATING = dict(
    initializer_range=0.1, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
)
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, **HEADS, head_dim=8),
    "qwen2": lambda: Qwen2Config(**SIZES, **HEADS),
    "llama": lambda: LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "smollm2, tied, 3 heads a group": lambda: LlamaConfig(
        **SIZES | {"hidden_size": 36}, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "mistral, sliding window": lambda: MistralConfig(**SIZES, **HEADS | {"num_key_value_heads": 1}, sliding_window=6),
    "phi3": lambda: Phi3Config(**SIZES, **HEADS, pad_token_id=0),
    "qwen2, a window in the second layer": lambda: Qwen2Config(
        **SIZES, **HEADS, use_sliding_window=True, sliding_window=6, layer_types=["full_attention", "sliding_attention"]
    ),
    "deepseek, values of 6 dimensions": lambda: DeepseekV3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=2,  # so that no layer has experts
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=6,
    ),
    "gpt-oss, sinks": lambda: GptOssConfig(
        **SIZES, **HEADS, **ALTERNATING, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
    "mimo-v2, sinks under the window": lambda: MiMoV2FlashConfig(
        **SIZES,
        **HEADS,
        **ALTERNATING,
        v_head_dim=6,
        mlp_layer_types=["dense", "dense"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
            for kind in ALTERNATING["layer_types"]
        },
    ),
    "gemma2, capped scores": lambda: Gemma2Config(
        **SIZES,
        **HEADS,
        **ALTERNATING,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=0.05,
        final_logit_softcapping=None,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_give_the_losses_and_gradients_of_eager_attention(name: str) -> None:
    config: PreTrainedConfig = CONFIGS[name]()
    torch.manual_seed(0)
    model = TokenLossModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    rows = tiny.make_batch(3, num_tokens=24)
    trained = list(model.parameters())
    for batch, unpacked in ((rows, rows), (tiny.pack_rows(rows, [1, 2]), tiny.take_rows(rows, [1, 2]))):
        losses = {}
        for attention in ("eager", TRAINING_ATTENTION, FORWARD_MODE_ATTENTION):
            model.base.config._attn_implementation = attention
            with (
                torch.set_grad_enabled(attention != FORWARD_MODE_ATTENTION),
                patch.object(attention_module, "ScoreOptions", wraps=attention_module.ScoreOptions) as scoring,
            ):
                # The mask that gpt-oss makes for eager attention does not keep packed sequences apart.
                losses[attention] = model(*tiny.inputs(unpacked if attention == "eager" else batch))
            assert scoring.call_count == (0 if attention == "eager" else 2)  # layers
        expected = losses["eager"]
        for attention in (TRAINING_ATTENTION, FORWARD_MODE_ATTENTION):
            torch.testing.assert_close(losses[attention], expected, rtol=1e-5, atol=1e-5)
        gradients = [
            torch.autograd.grad(losses[a].sum(), trained, materialize_grads=True) for a in ("eager", TRAINING_ATTENTION)
        ]
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss, sinks", "mimo-v2, sinks under the window", "gemma2, capped scores"])
def test_models_with_sinks_and_capped_scores_have_the_utilities_of_eager_attention(name: str) -> None:
    """In fp64, except where Hugging Face computes in fp32, with weights so large that no part is nearly linear."""
    config: PreTrainedConfig = CONFIGS[name]()
    torch.manual_seed(0)
    model = TokenLossModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager").double())
    point = {key: value.detach() + 0.3 * torch.randn_like(value) for key, value in model.named_parameters()}
    direction = {key: torch.randn_like(value) for key, value in point.items()}
    results = {}
    for attention in ("eager", FORWARD_MODE_ATTENTION, FUSED_ATTENTION):
        model.base.config._attn_implementation = attention
        with torch.no_grad(), forward_ad.dual_level():
            duals = {key: forward_ad.make_dual(value, direction[key]) for key, value in point.items()}
            losses = torch.func.functional_call(model, duals, tiny.inputs(tiny.make_batch(3, num_tokens=24)))
            results[attention] = tuple(forward_ad.unpack_dual(losses))
    for attention in (FORWARD_MODE_ATTENTION, FUSED_ATTENTION):
        pairs = zip(results[attention], results["eager"], strict=True)
        errors = [float((x - y).norm() / y.norm()) for x, y in pairs]
        print(f"{attention}: losses {errors[0]:.1e}, utilities {errors[1]:.1e}")
        assert max(errors) < 1e-6


# ---- memory --------------------------------------------------------------------------------------------------------


def measure_allocations(attention, num_tokens: int) -> Allocations:
    """Memory of one forward with all tangents; one sequence, 2 heads of 32, one key/value head."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, num_tokens, 32), (1, 1, num_tokens, 32), (1, 1, num_tokens, 32)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes * 2]
    with torch.no_grad(), Allocations() as allocations:
        attention(tensors[:3], tuple(tensors[3:]))
    return allocations


def attend_in_blocks(primals, tangents) -> None:
    block_attention(*primals, tangents, scale=SCALE)


def attend_unfused_dual(primals, tangents) -> None:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
        attend_unfused(*duals, make_mask(primals[0].shape[2]))


def test_memory_of_block_attention_grows_linearly_with_the_length() -> None:
    ours = [measure_allocations(attend_in_blocks, n) for n in (1024, 2048)]
    math = [measure_allocations(attend_unfused_dual, n) for n in (1024, 2048)]
    for name, (half, full) in (("in blocks", ours), ("unfused", math)):
        print(
            f"{name}: peak {half.peak_bytes / 2**20:.1f} MiB at 1,024 tokens, {full.peak_bytes / 2**20:.1f} MiB at "
            f"2,048: {full.peak_bytes / half.peak_bytes:.2f} times; largest tensor {full.largest_numel:,} elements"
        )
    assert ours[1].peak_bytes <= 2.2 * ours[0].peak_bytes
    assert math[1].peak_bytes >= 3.5 * math[0].peak_bytes  # so that the measurement can tell
    assert ours[1].peak_bytes < math[1].peak_bytes / 10
    # The output, [1, 2, T, 32]: no score block is larger, and nothing is [T, T].
    assert [allocations.largest_numel for allocations in ours] == [2 * 32 * n for n in (1024, 2048)]


def test_packs_need_no_mask() -> None:
    """Under Hugging Face's sdpa attention a pack of T tokens has a mask of `[T, T]`."""
    num_tokens = 512
    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    batch = Batch([0, 1], ids, ids.clone(), segments=(torch.arange(num_tokens) >= 200).long()[None])
    model = tiny.token_loss_model()
    largest = {}
    for attention in ("sdpa", TRAINING_ATTENTION):
        model.base.config._attn_implementation = attention
        with Allocations() as allocations:
            model(*tiny.inputs(batch)).sum().backward()
        largest[attention] = [shape for shape in allocations.shapes if shape[-2:] == (num_tokens, num_tokens)]
    assert largest["sdpa"]  # so that the measurement can tell
    assert not largest[TRAINING_ATTENTION]
