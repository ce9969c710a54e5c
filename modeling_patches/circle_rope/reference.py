"""The definitions, cell by cell in Python floats, for the tests."""

from __future__ import annotations

import math

Point = tuple[float, float, float]


def circle_points(height: int, width: int, alpha: float, radius: float, centre: float = 0.0) -> list[Point]:
    """Points (t, h, w) of the cells of an image, row by row."""
    cells = [(w - (width - 1) / 2, h - (height - 1) / 2) for h in range(height) for w in range(width)]
    spatial = [math.atan2(y, x) for x, y in cells]
    low, high = min(spatial), max(spatial)
    out = []
    for k in range(height * width):
        stretched = (spatial[k] - low) / (high - low) * 2 * math.pi if high > low else spatial[k]
        theta = alpha * stretched + (1 - alpha) * 2 * math.pi * k / (height * width)
        u, v = (-1 / math.sqrt(2), 1 / math.sqrt(2), 0.0), (-1 / math.sqrt(6), -1 / math.sqrt(6), 2 / math.sqrt(6))
        w, h, t = (centre + radius * (math.cos(theta) * a + math.sin(theta) * b) for a, b in zip(u, v, strict=True))
        out.append((t, h, w))
    return out


def per_token_distance(text: list[tuple[float, ...]], image: list[tuple[float, ...]]) -> float:
    """PTD: how unequal the distances from a text token to the tokens of an image are; mean absolute deviation, then mean."""
    total = 0.0
    for t in text:
        distances = [math.dist(t, i) for i in image]
        mean = sum(distances) / len(distances)
        total += sum(abs(d - mean) for d in distances)
    return total / (len(text) * len(image))
