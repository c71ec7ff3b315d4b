"""Multi-head attention, whose projections PyTorch hides in one function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bilevel.layouts import FIRST, Layout
from bilevel.responding import NoExamples, NoRule
from bilevel.structure.linear import linear
from bilevel.structure.moves import move
from bilevel.structure.respond import Respond, rule


@rule(F.multi_head_attention_forward)
def attention(
    mode: Respond,
    function: Any,
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
    """Three projections, attention, and one more projection; time comes first, examples second."""
    params = (in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight, out_proj_bias)
    given = (*params, bias_k, bias_v, query, key, value)
    name = mode.name(*given)
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        reason = "with bias_k, bias_v, add_zero_attn, static_k or static_v"
        raise NoRule(mode.refusal(name, function, reason))
    if query.ndim != 3:
        raise NoExamples(mode.refusal(name, function, "on an input without a dimension of examples"))

    def first(x: Tensor) -> Tensor:
        """The rules expect examples first."""
        if mode.layouts.known(x) and mode.layouts.of(x) != Layout(1):
            raise NoExamples(mode.refusal(name, function, f"on {tuple(x.shape)}, whose dimension 1 counts no examples"))
        x = move(mode, torch.transpose, x, 0, 1) if mode.responds(x) else x.transpose(0, 1)
        return mode.check(x, function, *given)

    query, key, value = (first(x) for x in (query, key, value))
    biases = [None] * 3 if in_proj_bias is None else _chunks(mode, in_proj_bias)
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = [*_chunks(mode, in_proj_weight)]

    def heads(x: Tensor, weight: Any, bias: Any) -> Tensor:
        parts: Tensor = _maybe(mode, x, weight, bias).unflatten(-1, (num_heads, -1))
        return parts.transpose(1, 2)

    q, k, v = (heads(*parts) for parts in zip((query, key, value), weights, biases, strict=True))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    for mask in (
        None if attn_mask is None else attn_mask.unflatten(0, (-1, num_heads)) if attn_mask.ndim == 3 else attn_mask,
        None if key_padding_mask is None else key_padding_mask[:, None, None, :],
    ):
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    shares = F.dropout(scores.softmax(-1), dropout_p, training)  # PyTorch returns them as they were used
    mixed = shares @ v
    out = _maybe(mode, mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return out, None
    return out, shares.mean(1) if average_attn_weights else shares


@rule(F.scaled_dot_product_attention)
def attend(
    mode: Respond,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """A weight is added to the scores, such as a bias for each distance; then each example has scores of its own."""
    inputs = [mode.activation(x) for x in (query, key, value)]
    layouts = {mode.layout(x, function, query, key, value, attn_mask) for x in inputs}
    layout = layouts.pop()
    if layouts or layout.dim:  # windows of images have several entries for each example, but in front
        mode.check(next(x for x in inputs if mode.layouts.of(x) != FIRST), function, query, key, value, attn_mask)
    if attn_mask is not None and mode.responds(attn_mask):
        name, _, factor, template, *_ = mode.weight(attn_mask)
        aligned = attn_mask.ndim == query.ndim
        same = aligned and factor.shape[1] == 1 and (len(template) == 1 or template.stride(0) == 0)
        if aligned and not same:
            raise NoExamples(mode.refusal(name, function, "whose examples it shares"))
        change = factor[:, 0] * template[0] if aligned else factor * template
        change = change.reshape(mode.count, *[1] * (query.ndim - change.ndim), *change.shape[1:])
        change = change if layout == FIRST else change[layout.ids(mode.count, change.device)]
        attn_mask = mode.join(attn_mask.expand(change.shape).clone(), change)
    result: Tensor = function(*inputs, attn_mask, *args, **kwargs)
    return result


def _maybe(mode: Respond, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer, whether it responds or not."""
    responds = mode.responds(weight) or mode.responds(bias)
    return linear(mode, F.linear, x, weight, bias) if responds else F.linear(x, weight, bias)


def _chunks(mode: Respond, weight: Tensor) -> list[Tensor]:
    """The three parts of a joint projection, each responding with its own rows."""
    return [*(move(mode, torch.chunk, weight, 3) if mode.responds(weight) else weight.chunk(3))]
