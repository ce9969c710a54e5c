"""What MuSe's Triton kernels share: starting one, the sizes of its tiles, and the product every one of them begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hfplug import ConfigError, UnsupportedError
from hfplug.launch import launch_options

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # of keys and values: an accumulator of 16 rows still fits the registers


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(at, mask, ds, D: tl.constexpr, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements ``ds`` of the rows whose first elements are at ``at``; 0 where ``mask`` is false or ``ds >= D``."""
    x = tl.load(at[:, None] + ds[None, :], mask=mask[:, None] & (ds < D)[None, :], other=0.0)
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def inner(  # type: ignore[no-untyped-def]
    whole_a,
    a,
    a_mask,
    whole_b,
    b,
    b_mask,
    D: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sum_d a[i, d] b[j, d]``, from tiles that are at hand if ``BK == BD``, else loaded ``BK`` elements at a time.

    Exact float32 products run outside the tensor cores, and a thread then holds the whole inner dimension of its rows and
    columns: short pieces keep them in the registers.
    """
    if BK == BD:
        out = tl.dot(whole_a, tl.trans(whole_b).to(whole_a.dtype), input_precision=PRECISION)
    else:
        out = tl.zeros((a.shape[0], b.shape[0]), dtype=tl.float32)
        for first in range(0, BD, BK):
            ds = first + tl.arange(0, BK)
            x = rows_of(a, a_mask, ds, D, WIDEN)
            y = rows_of(b, b_mask, ds, D, WIDEN)
            out = tl.dot(x, tl.trans(y).to(x.dtype), out, input_precision=PRECISION)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def hide(a, bias, rows, columns, mask, block, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits and bias where a row attends to a column, -inf elsewhere; all but ``block`` broadcast to the shape of ``a``.

    In the near part that is where the column is not later, and in the row's own block of positions or the one before.
    """
    if NEAR:
        mask = mask & (columns <= rows) & (columns >= (rows // block - 1) * block)
    return tl.where(mask, a + bias, float("-inf"))


@triton.jit
def row_totals(lse, at, mask):  # type: ignore[no-untyped-def]
    """Log-sum-exps of rows; +inf, which makes all weights 0, for a row that sees nothing and for no row."""
    total = tl.load(lse + at, mask=mask, other=float("-inf"))
    return tl.where(total == float("-inf"), float("inf"), total)


@dataclass(frozen=True)
class Seen:
    """Which keys the rows of a group attend to.

    ``bias`` ``(G, M)``: all ``M`` of the group, with a bias each. ``index`` ``(G, M)`` and ``source`` ``(G,)``: those at these
    positions of head ``source`` of keys ``(H, N, D)``. ``block``: those of the own block of positions and the one before,
    not later than the row. One of the three.
    """

    bias: Tensor | None = None
    index: Tensor | None = None
    source: Tensor | None = None
    block: int | None = None

    def arguments(self, k: Tensor) -> dict[str, Any]:
        """What the kernels are told of it."""
        M = k.shape[1] if self.index is None else self.index.shape[1]
        return {
            "bias": self.bias, "index": self.index, "source": self.source, "M": M, "N": k.shape[1],
            "block": 1 if self.block is None else self.block, "NEAR": self.block is not None, "GATHER": self.index is not None,
        }  # fmt: skip


# Rows a program owns, what it takes of the other side at a time, warps and stages of the pipeline, by bits of the inputs and
# for rows of up to 64, 128 and 256 elements: large, but such that no chip of hfplug.testing.kernels.CHIPS spills registers.
# Found by compiling; not timed on any of them.
TILES = {
    ("tilt", 16): ((64, 32, 4, 2), (32, 32, 4, 2), (64, 16, 8, 2)),
    ("tilt", 32): ((32, 16, 4, 1), (32, 16, 4, 1), (32, 16, 8, 1)),
    ("tilt_backward", 16): ((32, 32, 4, 2), (32, 16, 8, 1), (16, 16, 8, 1)),
    ("tilt_backward", 32): ((16, 16, 8, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    ("attend", 16): ((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    ("attend", 32): ((32, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
    ("attend gathered", 16): ((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 2)),
    ("attend gathered", 32): ((32, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
    ("dq", 16): ((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    ("dq", 32): ((32, 16, 4, 1), (32, 16, 4, 1), (32, 16, 4, 1)),
    ("dkv", 16): ((32, 32, 4, 2), (32, 16, 8, 1), (32, 16, 8, 2)),
    ("dkv", 32): ((32, 16, 4, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    ("dkv gathered", 16): ((32, 32, 4, 2), (32, 16, 8, 2), (32, 16, 8, 1)),
    ("dkv gathered", 32): ((32, 16, 4, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
}


def tiles(kernel: str, dtype: torch.dtype, width: int, own: int, other: int) -> tuple[int, int, dict[str, int]]:
    """How a kernel's work is cut: rows a program owns, what it takes of the other side at a time, and the launch's options.

    Args:
        kernel: name in :data:`TILES`.
        dtype: of the inputs.
        width: elements of the widest row.
        own, other: how many rows there are; smaller tiles suffice for few.
    """
    bits = 8 * dtype.itemsize
    rows, columns, warps, stages = TILES[kernel, bits][0 if width <= 64 else 1 if width <= 128 else 2]
    if torch.version.hip and (kernel, bits) == ("tilt_backward", 16):
        warps = 4  # AMD gives a thread 512 registers in groups of four warps, and only 256 in groups of eight
    return power(own, 16, rows), power(other, 16, columns), launch_options(warps, stages)


def power(size: int, least: int, most: int) -> int:
    """The power of two a tile takes to cover ``size``; ``tl.dot`` wants at least 16."""
    return int(min(max(triton.next_power_of_2(max(size, 1)), least), most))


def piece(dtype: torch.dtype, width: int) -> int:
    """How much of an inner dimension is multiplied at a time."""
    return power(width, 16, 16 if dtype == torch.float32 else WIDEST)


def common(dtype: torch.dtype, D: int, Dv: int) -> dict[str, Any]:
    """Arguments of all kernels: widths, their tiles, the pieces of the keys' width, and how numbers are multiplied."""
    return {
        "D": D, "Dv": Dv, "BD": power(D, 16, WIDEST), "BV": power(Dv, 16, WIDEST), "BK": piece(dtype, D),
        "WIDEN": interpreted(), "PRECISION": precision(),
    }  # fmt: skip


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter.

    It keeps bfloat16 as bit patterns and would multiply those; compiled, the tensor cores take it as it is.
    """
    return not isinstance(rows_of, triton.JITFunction)


def precision() -> str:
    """The user's setting for float32 products, as for torch's own; it changes nothing for 16-bit inputs."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


# -- what is refused ---------------------------------------------------------------------------------------------------


def check(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None) -> None:
    """A contiguous tensor of this shape on the device of ``like``, of this dtype (None: any the kernels take).

    Raises:
        ConfigError: it is not.
    """
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}; it must be {shape}")
    allowed = DTYPES if dtype is None else (dtype,)
    if tensor.dtype not in allowed:
        raise ConfigError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, allowed))}")
    if tensor.device != like.device:
        raise ConfigError(f"{name} is on {tensor.device}; it must be on {like.device}")
    if not tensor.is_contiguous():
        raise ConfigError(f"{name} has the strides {tensor.stride()}; it must be contiguous")


def check_tilt(mu: Tensor, k: Tensor, v: Tensor, count: Tensor) -> None:
    """Raises ConfigError or UnsupportedError where these are no inputs of ``tilt``."""
    _check_dims(mu=(mu, "(G, C, D)"), k=(k, "(G, T, P, D)"), v=(v, "(G, T, P, Dv)"))
    _check_keys(k, v)
    G, T, _, D = k.shape
    check("mu", mu, (G, mu.shape[1], D), k, k.dtype)
    check("count", count, (G, T), k, torch.int32)


def check_attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> None:
    """Raises ConfigError or UnsupportedError where these are no inputs of ``attend``."""
    _check_dims(q=(q, "(G, R, D)"), k=(k, "(G, M, D)"), v=(v, "(G, M, Dv)"))
    _check_keys(k, v)
    check("q", q, (k.shape[0], q.shape[1], k.shape[2]), k, k.dtype)
    check("bias", bias, tuple(k.shape[:2]), k, torch.float32)


def check_gathered(q: Tensor, k: Tensor, v: Tensor, index: Tensor, source: Tensor) -> None:
    """Raises ConfigError or UnsupportedError where these are no inputs of ``attend_gathered``."""
    _check_dims(q=(q, "(G, R, D)"), k=(k, "(H, N, D)"), v=(v, "(H, N, Dv)"), index=(index, "(G, M)"))
    _check_keys(k, v)
    check("q", q, (*q.shape[:2], k.shape[2]), k, k.dtype)
    check("index", index, (q.shape[0], index.shape[1]), k, torch.int32)
    check("source", source, (q.shape[0],), k, torch.int32)


def check_near(q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    """Raises ConfigError or UnsupportedError where these are no inputs of ``near``."""
    _check_dims(q=(q, "(G, g, N, D)"), k=(k, "(G, N, D)"), v=(v, "(G, N, Dv)"))
    _check_keys(k, v)
    G, N, D = k.shape
    check("q", q, (G, q.shape[1], N, D), k, k.dtype)
    if block < 1:
        raise ConfigError(f"block is {block}; it must be at least 1")


def _check_dims(**tensors: tuple[Tensor, str]) -> None:
    for name, (tensor, shape) in tensors.items():
        if tensor.dim() != shape.count(",") + 1:
            raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}; it must be {shape}")


def _check_keys(k: Tensor, v: Tensor) -> None:
    check("k", k, tuple(k.shape), k, None)
    check("v", v, (*k.shape[:-1], v.shape[-1]), k, k.dtype)
    for name, width in (("k", k.shape[-1]), ("v", v.shape[-1])):
        if not 1 <= width <= WIDEST:
            raise UnsupportedError(f"{name} has rows of {width} elements; the Triton kernels take 1 to {WIDEST}")
