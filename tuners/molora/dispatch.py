"""Sends rows through the experts they were decided for: gather, small GEMMs, scatter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from hfplug.tuners.molora.router import Decision

Factors = Mapping[str, tuple[Tensor, Tensor, float]]  # expert -> A (r, in), B (out, r), scaling


def use_grouped(x: Tensor) -> bool:
    """Whether the rows of all experts go through one grouped GEMM (a GPU) or one small GEMM each."""
    return x.is_cuda


def add_deltas(result: Tensor, x: Tensor, decision: Decision, factors: Factors, stacks: dict[Any, Any]) -> tuple[Tensor, int]:
    """``result_t + sum_k w_tk·s_k·B_k·A_k·x_t`` over the slots ``k`` of token ``t``.

    Args:
        result: ``(batch, tokens, out)``, what the base layer returned.
        x: ``(batch, tokens, in)``, its input.
        factors: the experts that adapt this module; tokens of any other get nothing.
        stacks: scratch space for :func:`stacked`, kept with the module.

    Returns:
        the sum, in the wider of the dtypes of ``result`` and of the deltas, and the number of rows that went through an A.
    """
    order, counts = decision.by_slot()
    present = [(s, n) for s, n in zip(decision.slots, counts, strict=True) if n and s is not None and s in factors]
    if not present:
        return result, 0
    width, positions = decision.index.shape[-1], decision.index.numel()
    if len(present) == 1 and width == 1 and present[0][1] == positions:
        # All tokens to one expert: the operations of PEFT's LoRA on the whole batch, bit for bit.
        a, b, scaling = factors[present[0][0]]
        delta = linear(linear(x.to(a.dtype), a), b) * scaling
        return result + (delta if decision.weight is None else delta * decision.weight.to(delta.dtype)), positions
    order = order.to(x.device)  # under device_map every layer has its own device
    flat = x.reshape(-1, x.shape[-1])
    a0 = factors[present[0][0]][0]
    if use_grouped(x):
        taken, deltas = _grouped(flat.to(a0.dtype), order, counts, width, decision, factors, stacks)
    else:
        taken, deltas = _one_by_one(flat, order, counts, width, decision, factors)
    if decision.weight is not None:
        deltas = deltas * decision.weight.reshape(-1, 1).to(deltas.device)[taken].to(deltas.dtype)
    out = result.to(torch.promote_types(result.dtype, deltas.dtype)).reshape(-1, result.shape[-1])
    return out.index_add(0, taken // width, deltas.to(out.dtype)).reshape(result.shape), len(taken)


def _one_by_one(
    x: Tensor, order: Tensor, counts: list[int], width: int, decision: Decision, factors: Factors
) -> tuple[Tensor, Tensor]:
    taken, deltas = [], []
    for slot, part in zip(decision.slots, order.split(counts), strict=True):
        if slot is not None and slot in factors and len(part):
            a, b, scaling = factors[slot]
            taken.append(part)
            deltas.append(linear(linear(x[part // width].to(a.dtype), a), b) * scaling)
    widest = deltas[0].dtype
    for delta in deltas[1:]:
        widest = torch.promote_types(widest, delta.dtype)
    return torch.cat(taken), torch.cat([delta.to(widest) for delta in deltas])


def _grouped(
    x: Tensor, order: Tensor, counts: list[int], width: int, decision: Decision, factors: Factors, stacks: dict[Any, Any]
) -> tuple[Tensor, Tensor]:
    from hfplug.tuners.molora.grouped import grouped_linear

    names = [s for s in decision.slots if s is not None and s in factors]
    # Slots without a delta here are cut out of the sorted positions: what is left is sorted by expert still.
    parts = [p for s, p in zip(decision.slots, order.split(counts), strict=True) if s in names]
    sizes = [n for s, n in zip(decision.slots, counts, strict=True) if s in names]
    taken = torch.cat(parts)
    offsets = torch.tensor([0, *sizes], device=x.device).cumsum(0)
    a, b = stacked(names, factors, stacks)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, a, b = x.to(dtype), a.to(dtype), b.to(dtype)
    codes = grouped_linear(x[taken // width], a, offsets, validate=False)  # from the sort above: no need to wait for them
    deltas = grouped_linear(codes, b, offsets, validate=False)
    scalings = torch.tensor([factors[n][2] for n in names], device=x.device, dtype=torch.float32)
    each = scalings.repeat_interleave(torch.tensor(sizes, device=x.device), output_size=len(taken))
    return taken, deltas * each.unsqueeze(-1).to(deltas.dtype)


def stacked(names: list[str], factors: Factors, stacks: dict[Any, Any]) -> tuple[Tensor, Tensor]:
    """``A (experts, r, in)`` and ``B (experts, out, r)``, ranks padded with zeros to the largest.

    Kept until a factor is replaced or written to: the experts are frozen.
    """
    key = tuple((name, *((id(f), f._version, f.dtype, f.device) for f in factors[name][:2])) for name in names)
    if stacks.get("key") != key:
        rank = max(factors[name][0].shape[0] for name in names)
        with torch.no_grad():
            a = torch.stack([pad(factors[n][0], (0, 0, 0, rank - factors[n][0].shape[0])) for n in names])
            b = torch.stack([pad(factors[n][1], (0, rank - factors[n][1].shape[1])) for n in names])
        stacks.update(key=key, a=a, b=b)
    return stacks["a"], stacks["b"]


def straight_through(result: Tensor, x: Tensor, decision: Decision, factors: Factors) -> tuple[Tensor, int]:
    """``result`` itself, with the gradient of ``sum_k p_tk·s_k·B_k·A_k·x_t`` for the probabilities ``p`` of all slots.

    The gradient of ``p_tk`` is what expert ``k`` would have changed, so a token learns of experts it was not sent through,
    and a token on the null expert learns at all. Only the codes ``A_k·x_t`` are kept for it, ``r`` numbers per token.

    Returns:
        the result, and the number of rows that went through an A for it.
    """
    present = [(slot, *factors[s]) for slot, s in enumerate(decision.slots) if s is not None and s in factors]
    if not present or decision.probabilities is None:
        return result, 0
    with torch.no_grad():
        flat = x.reshape(-1, x.shape[-1])
        codes = [linear(flat.to(a.dtype), a) for _, a, _, _ in present]
    probabilities = decision.probabilities.to(result.device)
    found: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        result, probabilities, [slot for slot, *_ in present], [s for *_, s in present], *codes, *[b for _, _, b, _ in present]
    )
    return found, len(present) * len(flat)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, p: Tensor, slots: list[int], scalings: list[float], *codes_and_b: Tensor) -> Tensor:
        ctx.save_for_backward(*codes_and_b)
        ctx.slots, ctx.scalings, ctx.like = slots, scalings, p.detach()
        return result.view_as(result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        codes, bs = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        rows = gradient.reshape(-1, gradient.shape[-1])
        own = torch.zeros_like(ctx.like).reshape(-1, ctx.like.shape[-1])
        for slot, scaling, code, b in zip(ctx.slots, ctx.scalings, codes, bs, strict=True):
            own[:, slot] = (linear(rows.to(b.dtype), b.T) * code).sum(-1).to(own.dtype) * scaling
        return gradient, own.reshape(ctx.like.shape), None, None, *(None for _ in saved)
