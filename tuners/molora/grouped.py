"""The grouped matrix product: each row goes through the matrix of its own expert, and through that one alone."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hfplug import ConfigError

logger = logging.getLogger(__name__)

# float64 is for checks of gradients; its products run on the torch path everywhere.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Backend(NamedTuple):
    """The two products everything is made of; both write the whole of ``out``.

    ``multiply_rows(x, weight, offsets, out)``: ``x`` (N, K), ``weight`` (E, K, J) of any strides, ``out`` (N, J).
    ``sum_outer(x, grad, offsets, out)``: ``x`` (N, d_in), ``grad`` (N, d_out), ``out`` (E, d_out, d_in).
    """

    multiply_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    sum_outer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, validate: bool = True) -> torch.Tensor:
    """``y_n = W_e x_n`` for every row ``n`` of expert ``e``: N products of a row with a matrix, whatever the number of experts.

    Triton on a GPU, a loop over the experts present elsewhere; the log says once which. Products are summed in float32
    (float64 for float64 inputs) and rounded once. Gradients are computed only where asked for: with frozen experts there is
    no product for the weight, and ``x`` is not kept.

    Args:
        x: ``(N, d_in)``, rows sorted by expert; float32, bfloat16, float16 (float64: torch path). N may be 0.
        weight: ``(E, d_out, d_in)``, the dtype and device of ``x``.
        offsets: ``(E + 1,)`` int64 on the device of ``x``; the rows of expert ``e`` are ``offsets[e]:offsets[e + 1]``,
            possibly none. Starts at 0, never falls, ends at N.
        validate: check the values of ``offsets`` on a GPU too, which waits for the device; a caller whose offsets are right by
            construction passes False. Wrong ones then give undefined rows, but no access outside of the tensors.
            Elsewhere the check costs nothing and is always made.

    Returns:
        ``(N, d_out)`` in the dtype of ``x``.

    Raises:
        ConfigError: shape, dtype, device or offsets are not as above.
    """
    _check_tensors(x, weight, offsets)
    _check_sizes(x, weight, offsets, validate)
    return _GroupedLinear.apply(x, weight, offsets, _backend(x))  # type: ignore[no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    """The product and its two gradients, on one backend."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, backend: Backend) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)
        ctx.backend, ctx.weight_shape = backend, weight.shape
        out = x.new_empty(x.shape[0], weight.shape[1])
        backend.multiply_rows(x, weight.transpose(1, 2), offsets, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = grad.new_empty(grad.shape[0], weight.shape[2])
            ctx.backend.multiply_rows(grad, weight, offsets, grad_x)
        if x is not None:
            grad_weight = grad.new_empty(ctx.weight_shape)
            ctx.backend.sum_outer(x, grad, offsets, grad_weight)
        return grad_x, grad_weight, None, None


def _multiply_rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop > start:
            # Into the rows themselves: no copy, and autocast leaves a product with `out` alone.
            torch.mm(x[start:stop], weight[expert], out=out[start:stop])


def _sum_outer(x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    bounds = offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        torch.mm(grad[start:stop].T, x[start:stop], out=out[expert])  # zeros for an expert without rows


TORCH = Backend(_multiply_rows, _sum_outer)


def triton_backend() -> Backend:
    """The Triton kernels; ImportError without the package ``triton``."""
    from hfplug.tuners.molora import triton as kernels

    return Backend(kernels.multiply_rows, kernels.sum_outer)


def _backend(x: torch.Tensor) -> Backend:
    reason = _why_torch(x)
    _say("Triton kernels" if reason is None else f"the torch path ({reason})")
    return triton_backend() if reason is None else TORCH


def _why_torch(x: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot take these rows; None if they can."""
    if not x.is_cuda:
        return f"tensors are on {x.device.type!r}, and the kernels need a GPU"
    if x.dtype == torch.float64:
        return "float64"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed: pip install 'hfplug[triton]'"
    return None


@functools.cache  # once per choice and process
def _say(choice: str) -> None:
    logger.info("MoLoRA's grouped products use %s", choice)


def _check_tensors(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> None:
    for name, value, shape in (("x", x, "(N, d_in)"), ("weight", weight, "(E, d_out, d_in)"), ("offsets", offsets, "(E + 1,)")):
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{name} is a {type(value).__name__}; it must be a tensor {shape}")
        if value.dim() != shape.count(",") + (name != "offsets"):
            raise ConfigError(f"{name} has the shape {tuple(value.shape)}; it must be {shape}")
    if x.dtype not in DTYPES:
        raise ConfigError(f"x is {x.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    if weight.dtype != x.dtype:
        raise ConfigError(f"weight is {weight.dtype}; it must be {x.dtype}, the dtype of x")
    if offsets.dtype != torch.int64:
        raise ConfigError(f"offsets is {offsets.dtype}; it must be torch.int64")
    for name, value in (("weight", weight), ("offsets", offsets)):
        if value.device != x.device:
            raise ConfigError(f"{name} is on {value.device}; it must be on {x.device}, the device of x")


def _check_sizes(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, validate: bool) -> None:
    experts, _, d_in = weight.shape
    if experts == 0:
        raise ConfigError("weight has the shape (0, ...); there must be at least one expert")
    if x.shape[1] != d_in:
        raise ConfigError(f"x has the shape {tuple(x.shape)}; its rows must have {d_in} elements, the d_in of weight")
    if offsets.shape[0] != experts + 1:
        raise ConfigError(
            f"offsets has {offsets.shape[0]} elements; weight has {experts} experts, so there must be {experts + 1}"
        )
    if validate or not x.is_cuda:
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != x.shape[0]:
            raise ConfigError(f"offsets goes from {bounds[0]} to {bounds[-1]}; it must go from 0 to {x.shape[0]}, the rows of x")
        if fall := [e for e in range(experts) if bounds[e + 1] < bounds[e]]:
            e = fall[0]
            raise ConfigError(
                f"offsets[{e + 1}] is {bounds[e + 1]}, less than offsets[{e}] = {bounds[e]}; offsets must never fall"
            )
