"""Where the tokens of an image stand: circles around the text axis, and the tokens of each image in a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hfplug.errors import ConfigError

IMAGE, VIDEO = 1, 2  # the values of transformers' mm_token_type_ids


def angles(height: int, width: int, alpha: float) -> Tensor:
    """Angles of the cells of a grid, row by row: ``alpha`` times the spatial angle plus ``1 - alpha`` times the index angle.

    The spatial angle is that of the cell as seen from the middle of the grid, stretched so that all of them span ``2 pi``; the
    index angle is ``2 pi k / (height * width)``.

    Returns:
        ``(height * width,)`` fp64, radians.
    """
    count = height * width
    x, y = _centred(height, width)
    spatial = torch.atan2(y, x)
    low, high = spatial.min(), spatial.max()
    if high > low:
        spatial = (spatial - low) / (high - low) * (2 * math.pi)
    index = torch.arange(count, dtype=torch.float64) * (2 * math.pi / count)
    return alpha * spatial + (1 - alpha) * index


def _centred(height: int, width: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    grid = torch.meshgrid(y, x, indexing="ij")
    return grid[1].reshape(-1), grid[0].reshape(-1)


def radius_of(radius: float | str, height: int, width: int) -> float:
    """The radius for one image, in steps of position: a number as it is, ``"auto-k"`` as ``k`` times half the longer side."""
    if isinstance(radius, str):
        return auto_factor(radius) * (max(height, width) - 1) / 2
    return float(radius)


def auto_factor(radius: str) -> float:
    """The ``k`` of ``"auto-k"``; 1 for ``"auto"``.

    Raises:
        ConfigError: another string, or a ``k`` that is no positive number.
    """
    head, dash, tail = radius.partition("-")
    try:
        factor = float(tail) if dash else 1.0
    except ValueError:
        factor = math.nan
    if head != "auto" or not 0 < factor < math.inf:
        raise ConfigError(f"radius={radius!r} must be a positive number, 'auto', or 'auto-k' with a positive k, e.g. 'auto-2'")
    return factor


@functools.lru_cache(maxsize=256)
def circle(height: int, width: int, alpha: float, radius: float | str) -> Tensor:
    """Points of an image's tokens relative to their centre: on a circle in the plane orthogonal to the text axis ``(1, 1, 1)``.

    ``R (cos a * u + sin a * v)`` with ``u = (-1, 1, 0) / sqrt 2`` and ``v = (-1, -1, 2) / sqrt 6`` in the order (w, h, t).

    Returns:
        ``(3, height * width)`` fp64, rows t, h, w, in steps of position. Shared between calls: do not write into it.
    """
    angle, r = angles(height, width, alpha), radius_of(radius, height, width)
    along, across = r * angle.cos() / math.sqrt(2), r * angle.sin() / math.sqrt(6)
    return torch.stack([2 * across, along - across, -along - across])


@dataclass(frozen=True)
class Block:
    """The tokens of one image or video.

    Attributes:
        row: of the batch.
        kind: :data:`IMAGE` or :data:`VIDEO`.
        tokens: ``(frames * height * width,)`` int, where in the row.
        frames, height, width: its grid of tokens.
    """

    row: int
    kind: int
    tokens: Tensor
    frames: int
    height: int
    width: int


def blocks(types: Tensor, mask: Tensor | None, grids: Mapping[int, Tensor | None], merge: int) -> Iterator[Block]:
    """The images and videos of a batch, in the order of their grids.

    Args:
        types: ``(batch, tokens)`` int: 0 text, 1 image, 2 video.
        mask: ``(batch, tokens)``, nonzero for real tokens; ``None``: all are.
        grids: kind -> ``(count, 3)`` int: frames, height and width in patches.
        merge: patches that make one token, along each side.

    Raises:
        ConfigError: the tokens of a row are not those of whole grids.
    """
    waiting = {k: iter(() if g is None else g.tolist()) for k, g in grids.items()}
    real = torch.ones_like(types, dtype=torch.bool) if mask is None else mask.to(types.device).bool()
    for row in range(types.shape[0]):
        for kind, queue in waiting.items():
            left = ((types[row] == kind) & real[row]).nonzero()[:, 0]
            while left.numel():
                frames, height, width = next(queue, (0, 0, 0))
                height, width = height // merge, width // merge
                count = frames * height * width
                if not 0 < count <= left.numel():
                    what = "image_grid_thw" if kind == IMAGE else "video_grid_thw"
                    raise ConfigError(
                        f"{what} does not fit mm_token_type_ids: row {row} has {left.numel()} more tokens of type {kind}, the "
                        f"next grid is {frames} x {height} x {width}"
                    )
                yield Block(row, kind, left[:count], frames, height, width)
                left = left[count:]


def on_circles(positions: Tensor, found: Iterator[Block], alpha: float, radius: float | str) -> Tensor:
    """M-RoPE positions with the tokens of the blocks moved to circles; the centre of each is ``(t, t, t)``.

    Args:
        positions: ``(3, batch, tokens)``, rows t, h, w. For an image ``t`` is the first position after the text before it.
        found: the images, and the videos whose frames are to stand on circles.

    Returns:
        ``(3, batch, tokens)`` fp32: an integer tensor, as transformers allocates, would cut the fractions off.
    """
    out = positions.to(torch.float32, copy=True)
    for block in found:
        points = circle(block.height, block.width, alpha, radius).repeat(1, block.frames)
        centre = positions[0, block.row, block.tokens].to("cpu", torch.float64)
        out[:, block.row, block.tokens] = (centre + points).to(out.device, out.dtype)
    return out
