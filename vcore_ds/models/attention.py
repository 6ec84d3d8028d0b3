"""Attention of every pass: causal, within each sequence of a pack, heads divided over sequence-parallel ranks.

Hugging Face's models find these functions by name, and pass on the keyword arguments of the decoder. The layout of the
batch is such an argument, so a layer that is recomputed in the backward sees the layout that it ran with.

No mask is built. For packs Hugging Face's attention builds one of `[T, T]`, 0.8 GB per call at 16,384 tokens, and
cannot use the fused kernel.

Shapes: b packs or unpacked sequences of T tokens, t of them on this rank, A query heads, K key/value heads, D head
dimension.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import to_device
from vcore_ds.models.attention_kernels import SUPPORTS_GQA, CpuFlash, CudaFlash, explicit_attention, flash_attention
from vcore_ds.models.block_attention import block_attention, block_attention_tangent
from vcore_ds.models.dual_tensors import make_dual, make_dual_if_any
from vcore_ds.models.sequence_exchange import heads_to_tokens, take_local_heads, tokens_to_heads


@dataclass(frozen=True)
class SequenceLayout:
    """The sequences in each row of a batch (one if unpacked), and the sequence-parallel size; built once per pass."""

    lengths: Sequence[Sequence[int]]  # of the sequences in each row; they sum to T, padding of a pack is a sequence
    sequence_parallel: int  # size; each rank of a group has `t = T / sequence_parallel` columns of its rows
    cu_seqlens: Tensor  # int32 `[num_sequences + 1]` on the device: sequence ends over the concatenated rows, from 0

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], sequence_parallel: int, device: torch.device
    ) -> "SequenceLayout":
        """Build the layout on the host, so that no layer needs a host-device synchronisation."""
        flat = torch.tensor([0, *(n for row in lengths for n in row)], dtype=torch.int32)
        return cls(lengths, sequence_parallel, to_device(flat.cumsum(0, dtype=torch.int32), device))

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return max(n for row in self.lengths for n in row)

    @property
    def is_unpacked(self) -> bool:
        """Whether each row is one sequence."""
        return all(len(row) == 1 for row in self.lengths)

    def iter_sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each sequence, or of the entire batch if it is unpacked."""
        if self.is_unpacked:
            yield slice(None), slice(None)
            return
        for row, lengths in enumerate(self.lengths):
            start = 0
            for n in lengths:
                yield slice(row, row + 1), slice(start, start + n)
                start += n


TRAINING_ATTENTION = "vcore_training"
FORWARD_MODE_ATTENTION = "vcore_forward_mode"
FUSED_ATTENTION = "vcore_fused"
OUR_ATTENTION = (TRAINING_ATTENTION, FORWARD_MODE_ATTENTION, FUSED_ATTENTION)
"""Names under which Hugging Face models find the implementations below, which take a `SequenceLayout`."""

# Largest head dimensions of `flash_tangent`, whose accumulators have to fit into the registers, and of PyTorch's.
MAX_KERNEL_HEAD_DIM = MAX_FLASH_HEAD_DIM = 256


@dataclass(frozen=True)
class ScoreOptions:
    """How a layer computes attention scores."""

    scale: float  # factor on the scores
    sliding_window: int | None = None  # number of keys that a query sees, itself included; None for all
    softcap: float | None = None  # scaled scores become `softcap * tanh(scores / softcap)` (Gemma 2); None for none


AttentionInputs = Sequence[Any]
"""Query `[b, A, T, D]`, key and value `[b, K, T, D]`, and attention sinks `[A]`: either their values, where None means
no sinks, or their tangents, where None means zero."""

Attend = Callable[[AttentionInputs, AttentionInputs, SequenceLayout, ScoreOptions], tuple[Tensor, Tensor | None]]
"""Maps values and tangents to the output `[b, A, T, D]` and its tangent, None if all tangents are None."""

_UNSUPPORTED_ARGUMENTS = ("position_bias", "sinks", "indices", "block_indices")
"""Arguments of some architectures (Inkling, MiniMax-M3). Ignoring them would be a silent error."""


class MaskDescription(NamedTuple):
    """What `comparing_masks` makes an architecture pass to its attention in place of a mask."""

    window: int | None  # as `ScoreOptions.sliding_window`
    is_customised: bool = False  # whether the mask has conditions of the architecture's own


@contextmanager
def comparing_masks() -> Iterator[None]:
    """Context of a forward in which our attention raises UserError if the architecture's mask is not a causal one with
    the window that the layer passes: transformers' attention takes windows from the mask alone, ours from the layer."""

    def describe(*, local_size: int | None = None, use_vmap: bool = False, **others: object) -> MaskDescription | None:
        is_causal = "allow_is_bidirectional_skip" not in others
        return MaskDescription(local_size, use_vmap) if is_causal else None

    with (
        patch.dict(AttentionMaskInterface._global_mapping, {TRAINING_ATTENTION: describe}),
        # It reads values, which tensors on the meta device lack.
        patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
    ):
        yield


def make_hugging_face_attention(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """Wrap `attend` in Hugging Face's attention interface. The result takes query `[b, A, t, D]`, key and value `[b, K,
    t, D]` (values may have a smaller D) and sinks `[A]`, which may be dual tensors, and returns `[b, t, A, D]`, dual if
    an input is, and None for the attention weights. It raises UserError if the model builds a mask, or does not pass on
    the layout."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | MaskDescription | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sequence_layout: SequenceLayout | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        unknown = [name for name in _UNSUPPORTED_ARGUMENTS if others.get(name) is not None]
        if isinstance(attention_mask, MaskDescription):
            if attention_mask.is_customised:
                unknown.append("a mask of its own")
            elif attention_mask.window != sliding_window:
                unknown.append(
                    f"a window of {attention_mask.window or 'all'} tokens by its mask, {sliding_window} else"
                )
            attention_mask = None
        if attention_mask is not None or sequence_layout is None or unknown:
            reason = "does not pass the decoder's keyword arguments on to its attention"
            if attention_mask is not None or unknown:
                reason = f"computes with {', '.join(unknown) or 'an attention mask'}"
            raise UserError(
                f"model.path: {type(module).__name__} {reason}, so its attention cannot be replaced; expected "
                "another architecture, or model.attention eager with a method without utilities (methods/sft.yaml)"
            )
        k, value_dim = sequence_layout.sequence_parallel, value.shape[-1]
        scoring = ScoreOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
        unpacked = [(x, None) if x is None else forward_ad.unpack_dual(x) for x in (query, key, value, s_aux)]
        (*primals, sinks), (*tangents, d_sinks) = zip(*unpacked, strict=True)

        values = [_pad_head_dim(x, query.shape[-1]) for x in primals]
        d_values = [None if x is None else _pad_head_dim(x, query.shape[-1]) for x in tangents]
        values, d_values = tokens_to_heads(values, d_values, k)
        sinks, d_sinks = (None if x is None else take_local_heads(x, k) for x in (sinks, d_sinks))
        # The function mode of the fused pass intercepts every call from Python: half of the time of a block of scores.
        with torch._C.DisableTorchFunction():
            output, d_output = attend([*values, sinks], [*d_values, d_sinks], sequence_layout, scoring)

        d_outputs = [None if d_output is None else d_output[..., :value_dim]]
        (output,), (d_output,) = heads_to_tokens([output[..., :value_dim]], d_outputs, k)
        tangent = None if d_output is None else d_output.transpose(1, 2).contiguous()
        return make_dual_if_any(output.transpose(1, 2).contiguous(), tangent), None

    return attention


def _pad_head_dim(tensor: Tensor, dim: int) -> Tensor:
    """Pad heads with zeros to `dim` dimensions, so that one exchange moves queries, keys and values, and the flash
    kernel takes them: multi-head latent attention (DeepSeek) has smaller values."""
    missing = dim - tensor.shape[-1]
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor


def attend_with_graph(
    primals: AttentionInputs, tangents: AttentionInputs, layout: SequenceLayout, scoring: ScoreOptions
) -> tuple[Tensor, Tensor | None]:
    """Attention of passes with a gradient: the fused kernels, which would lose tangents."""
    assert all(x is None for x in tangents)
    return causal_attention(primals, layout, scoring), None


def causal_attention(primals: AttentionInputs, layout: SequenceLayout, scoring: ScoreOptions) -> Tensor:
    """Compute attention within each sequence, `[b, A, T, D]`, differentiable."""
    query, key, value, sinks = primals
    if _can_use_flash(query, scoring):
        return _attend_on_gpu(primals, layout, scoring)[0]
    (output,) = apply_per_sequence(lambda q, k, v: (_attend(q, k, v, sinks, scoring),), (query, key, value), layout)
    return output


def _can_use_flash(query: Tensor, scoring: ScoreOptions) -> bool:
    """Whether PyTorch's variable-length flash kernel supports this: it has no softcap, and unlike
    `scaled_dot_product_attention` does not pad heads."""
    head_dim, is_half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    # Where a block of threads has 99 KiB of shared memory, its backward refuses 200 to 224 dimensions.
    fits = head_dim % 8 == 0 and head_dim <= MAX_FLASH_HEAD_DIM and not 192 < head_dim <= 224
    return query.is_cuda and is_half and fits and scoring.softcap is None


def _attend_on_gpu(primals: AttentionInputs, layout: SequenceLayout, scoring: ScoreOptions) -> tuple[Tensor, Tensor]:
    """Attention by the flash kernel, differentiable: output `[b, A, T, D]` and log-sum-exp `[b, A, T]`."""
    query, key, value, sinks = primals
    if not SUPPORTS_GQA:
        key, value = _repeat_kv_heads(query, key, value)
    kernel = CudaFlash(scoring.scale, scoring.sliding_window, layout.cu_seqlens, layout.max_seqlen)
    return flash_attention(query, key, value, sinks, kernel)


def _repeat_kv_heads(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Repeat keys or values `[b, K, T, D]` to `[b, A, T, D]`."""
    num_heads = query.shape[1]
    return [x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1) for x in tensors]


def apply_per_sequence(
    attend: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor], layout: SequenceLayout
) -> Sequence[Tensor]:
    """Apply `attend` to query, key and value of each sequence, and concatenate its results along dimension 2."""
    if layout.is_unpacked:
        return attend(*primals)
    rows = []
    for row, lengths in enumerate(layout.lengths):
        parts = zip(*(x[row : row + 1].split(list(lengths), 2) for x in primals), strict=True)
        rows.append([torch.cat(results, 2) for results in zip(*(attend(*part) for part in parts), strict=True)])
    return [torch.cat(results) for results in zip(*rows, strict=True)]


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scoring: ScoreOptions) -> Tensor:
    """Attention of unpacked sequences, for any device and dtype."""
    sees_all = scoring.sliding_window is None or query.shape[2] <= scoring.sliding_window
    if sees_all and scoring.softcap is None:
        if query.device.type == "cpu":
            return flash_attention(query, key, value, sinks, CpuFlash(scoring.scale))[0]
        if sinks is None:
            # Not enable_gqa, which the memory-efficient kernel (fp32 on a GPU) does not support: PyTorch would fall
            # back to unfused attention, which stores all scores, [A, T, T].
            key, value = _repeat_kv_heads(query, key, value)
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale)
    return explicit_attention(query, key, value, sinks=sinks, **vars(scoring))


def attend_with_tangents(
    primals: AttentionInputs, tangents: AttentionInputs, layout: SequenceLayout, scoring: ScoreOptions
) -> tuple[Tensor, Tensor | None]:
    """Attention of forward-mode (JVP) passes without a gradient: the Triton kernel where it applies, else in blocks."""
    (query, key, value, sink), (d_query, d_key, d_value, d_sink) = primals, tangents
    if scoring.softcap is not None:
        duals = [x if x is None or dx is None else make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
        return forward_ad.unpack_dual(causal_attention(duals, layout, scoring))
    if _can_use_triton(query):
        return _run_triton(primals, tangents, layout, scoring)
    sinks = None if sink is None else (sink, d_sink)
    attend_in_blocks = functools.partial(
        block_attention, scale=scoring.scale, sliding_window=scoring.sliding_window, sinks=sinks
    )
    if layout.is_unpacked:
        return attend_in_blocks(query, key, value, (d_query, d_key, d_value))
    output = torch.empty_like(query)
    d_output = None if all(tangent is None for tangent in tangents) else torch.empty_like(output)
    for rows, columns in layout.iter_sequences():
        q, k, v = (x[rows, :, columns] for x in (query, key, value))
        d_qkv = [None if dx is None else dx[rows, :, columns] for dx in (d_query, d_key, d_value)]
        out, d_out = attend_in_blocks(q, k, v, d_qkv)
        output[rows, :, columns] = out
        if d_output is not None and d_out is not None:
            d_output[rows, :, columns] = d_out
    return output, d_output


def _run_triton(
    primals: AttentionInputs,
    tangents: AttentionInputs,
    layout: SequenceLayout,
    scoring: ScoreOptions,
    given: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output and tangent by the Triton kernel; the tangent alone if output and log-sum-exp are given."""
    from vcore_ds.models.flash_tangent import flash_tangent  # needs Triton

    (query, key, value, sink), (*d_qkv, d_sink) = primals, tangents
    output, d_output, _ = flash_tangent(
        query,
        key,
        value,
        d_qkv,
        cu_seqlens=layout.cu_seqlens,
        scale=scoring.scale,
        sliding_window=scoring.sliding_window,
        sinks=None if sink is None else (sink, d_sink),
        given=given,
    )
    return output, d_output


def _can_use_triton(query: Tensor) -> bool:
    """Whether to use `flash_tangent`: where it runs and fits the GPU. In fp32 blocks are faster and as precise."""
    if not runs_triton(query) or query.shape[-1] > MAX_KERNEL_HEAD_DIM:
        return False
    from vcore_ds.models.flash_tangent import find_tiles  # needs Triton

    return find_tiles(query.device) is not None


def runs_triton(x: Tensor) -> bool:
    """Whether Triton's kernels take this tensor: in half precision, on a GPU or in Triton's interpreter."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed: PyTorch's CUDA wheels depend on it, its CPU wheels do not."""
    return importlib.util.find_spec("triton") is not None


def attend_with_graph_and_tangents(
    primals: AttentionInputs, tangents: AttentionInputs, layout: SequenceLayout, scoring: ScoreOptions
) -> tuple[Tensor, Tensor | None]:
    """Attention of passes with a gradient and tangents: autograd records the value but not the tangent.

    The training kernel always computes the value, also within activation checkpoints, so the loss equals that of plain
    fine-tuning bit for bit, and the backward recomputes the values of the forward.
    """
    if all(tangent is None for tangent in tangents):
        return attend_with_graph(primals, tangents, layout, scoring)
    (query, key, value, sink), (d_query, d_key, d_value, d_sink) = primals, tangents
    detached = [None if x is None else x.detach() for x in primals]
    if _can_use_flash(query, scoring) and _can_use_triton(query):
        output, log_sum_exp = _attend_on_gpu(primals, layout, scoring)
        with torch.no_grad():
            given = output.detach(), log_sum_exp.detach()
            return output, _run_triton(detached, tangents, layout, scoring, given)[1]
    is_windowed = scoring.sliding_window is not None and layout.max_seqlen > scoring.sliding_window
    if query.device.type != "cpu" or is_windowed or scoring.softcap is not None:
        output = causal_attention(primals, layout, scoring)
        with torch.no_grad():
            _, d_output = attend_with_tangents(detached, tangents, layout, scoring)
        return output, d_output
    # `causal_attention` on a CPU, keeping the log-sum-exp.
    attend = functools.partial(flash_attention, sinks=sink, kernel=CpuFlash(scoring.scale))
    output, log_sum_exp = apply_per_sequence(attend, (query, key, value), layout)
    sinks = None if sink is None else (sink.detach(), d_sink)
    with torch.no_grad():
        d_output = torch.empty_like(output)
        for rows, columns in layout.iter_sequences():
            q, k, v, out = (x.detach()[rows, :, columns] for x in (query, key, value, output))
            d_qkv = [None if x is None else x.detach()[rows, :, columns] for x in (d_query, d_key, d_value)]
            d_output[rows, :, columns] = block_attention_tangent(
                q, k, v, d_qkv, out, log_sum_exp[rows, :, columns], scale=scoring.scale, sinks=sinks
            )
    return output, d_output


training_attention = make_hugging_face_attention(attend_with_graph)
forward_mode_attention = make_hugging_face_attention(attend_with_tangents)
# New names, so that no other model in the process changes. No mask function is registered under them, so Hugging Face
# builds no mask, and does not detect packs by their positions, which would be a host-device synchronisation.
AttentionInterface.register(TRAINING_ATTENTION, training_attention)
AttentionInterface.register(FORWARD_MODE_ATTENTION, forward_mode_attention)
AttentionInterface.register(FUSED_ATTENTION, make_hugging_face_attention(attend_with_graph_and_tangents))
