"""Attention from plain operations, so that its dropout can have a rate that is a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Drop = Callable[[Tensor], Tensor]
"""Dropout of the shares, shape ``(B, ..., T, S)``."""


def attend(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with dropout of one's own.

    Args:
        drop: In place of ``dropout_p``.
        query: As there, and so are the others.
        key: See there.
        value: See there.
        attn_mask: See there.
        dropout_p: Not used.
        is_causal: See there.
        scale: See there.
        enable_gqa: See there.

    Returns:
        As there.
    """
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return drop(_shares(scores, attn_mask)) @ value


def multi_head_attention(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``F.multi_head_attention_forward`` with dropout of one's own; time comes first, examples second.

    The weights of the network are used by ``F.linear`` and ``chunk`` only, which respond.

    Args:
        drop: In place of ``dropout_p``.
        query: As there, and so are the others.
        key: See there.
        value: See there.
        embed_dim_to_check: Not used.
        num_heads: See there.
        in_proj_weight: See there.
        in_proj_bias: See there.
        bias_k: Must be None.
        bias_v: Must be None.
        add_zero_attn: Must be false.
        dropout_p: Not used.
        out_proj_weight: See there.
        out_proj_bias: See there.
        training: Not used.
        key_padding_mask: See there.
        need_weights: See there.
        attn_mask: See there.
        use_separate_proj_weight: See there.
        q_proj_weight: See there.
        k_proj_weight: See there.
        v_proj_weight: See there.
        static_k: Must be None.
        static_v: Must be None.
        average_attn_weights: See there.
        is_causal: A hint that ``attn_mask`` is causal; that mask is used.

    Returns:
        As there.

    Raises:
        NotImplementedError: If an argument must be None and is not.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise NotImplementedError(
            "the dropout of attention with bias_k, bias_v, add_zero_attn, static_k or static_v cannot be tuned: leave "
            "it out with bilevel.dropout_rates(net, groups=...)."
        )
    single = query.ndim == 2
    if single:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)

    def heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected: Tensor = F.linear(x.transpose(0, 1), weight, bias).unflatten(-1, (num_heads, -1))
        return projected.transpose(1, 2)

    q, k, v = (heads(*parts) for parts in zip((query, key, value), weights, biases, strict=True))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    for mask in (attn_mask, padding):
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    shares = drop(scores.softmax(-1))
    out = F.linear((shares @ v).transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    out = out.squeeze(1) if single else out
    if not need_weights:
        return out, None
    shares = shares.mean(1) if average_attn_weights else shares
    return out, shares.squeeze(0) if single else shares


def _shares(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax of what is not masked; zero where all is."""
    if mask is None or mask.dtype != torch.bool:
        return (scores if mask is None else scores + mask).softmax(-1)
    hidden = ~mask
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
