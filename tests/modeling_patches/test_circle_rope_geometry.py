"""Circles, schedules and PTD: the definitions."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hfplug.errors import ConfigError
from hfplug.modeling_patches.circle_rope import reference
from hfplug.modeling_patches.circle_rope.distance import layout, per_token_distance
from hfplug.modeling_patches.circle_rope.geometry import IMAGE, blocks, circle, on_circles
from hfplug.modeling_patches.circle_rope.patch import CircleRope, llava_grid, sections

GRIDS = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 3), (4, 7), (16, 16)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_circle_is_the_definition(grid: tuple[int, int], alpha: float) -> None:
    points = circle(*grid, alpha, 10.0)
    expected = torch.tensor(reference.circle_points(*grid, alpha, 10.0), dtype=torch.float64).T
    assert points.dtype == torch.float64
    assert (points - expected).abs().max() < 1e-12
    assert (points.norm(dim=0) - 10).abs().max() < 1e-12, "not on the circle"
    assert points.sum(0).abs().max() < 1e-12, "not orthogonal to the text axis"


@pytest.mark.parametrize("grid", [(2, 3), (1, 5), (7, 7)])
def test_index_angles_alone_give_equal_gaps(grid: tuple[int, int]) -> None:
    count = grid[0] * grid[1]
    points = circle(*grid, 0.0, 4.0)
    gaps = (points - points.roll(1, 1)).norm(dim=0)
    assert (gaps - 8 * math.sin(math.pi / count)).abs().max() < 1e-12


def distinct(points: Tensor) -> tuple[int, float]:
    """How many different points there are, and the smallest gap."""
    gaps = torch.cdist(points.T, points.T, compute_mode="donot_use_mm_for_euclid_dist")
    same = gaps < 1e-9
    left = gaps + torch.eye(len(gaps), dtype=gaps.dtype) * 1e9
    return int((same.double().argmax(1) == torch.arange(len(gaps))).sum()), float(left.min())


def test_spatial_angles_alone_merge_tokens_and_half_of_them_do_not() -> None:
    assert distinct(circle(16, 16, 1.0, 10.0))[0] == 195
    assert distinct(circle(1, 5, 1.0, 10.0))[0] == 1
    count, gap = distinct(circle(16, 16, 0.5, 10.0))
    assert count == 256
    assert gap == pytest.approx(1.5e-3, rel=0.05)
    count, gap = distinct(circle(24, 24, 0.5, 10.0))
    assert count == 576
    assert gap == pytest.approx(1.9e-4, rel=0.05)


def test_automatic_radius() -> None:
    assert circle(3, 9, 0.5, "auto").norm(dim=0).max() == pytest.approx(4.0)
    assert circle(9, 3, 0.5, "auto-2.5").norm(dim=0).max() == pytest.approx(10.0)
    assert circle(1, 1, 0.5, "auto").abs().max() == 0  # a single token has no extent


# -- PTD -------------------------------------------------------------------------------------------------------------------


def test_ptd_of_the_papers_example() -> None:
    """Image of 3 by 3, 5 text tokens: 2.22, 0.64, 0, 0."""
    found = {name: float(per_token_distance(*layout(name))) for name in ("hard", "spatial", "unordered", "circle")}
    assert found["hard"] == pytest.approx(20 / 9, abs=1e-12)
    assert found["spatial"] == pytest.approx(0.6414, abs=5e-5)
    assert found["unordered"] < 1e-12  # the mean of nine equal distances rounds
    assert found["circle"] < 1e-12
    text, image = layout("spatial")
    assert float(per_token_distance(text - 6, image)) == pytest.approx(0.6613, abs=5e-5)  # text at 3..7


def test_ptd_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    text, image = torch.randn(4, 3, generator=generator), torch.randn(7, 3, generator=generator) * 5
    expected = reference.per_token_distance([tuple(t) for t in text.tolist()], [tuple(i) for i in image.tolist()])
    assert float(per_token_distance(text, image)) == pytest.approx(expected, abs=1e-12)
    # Every token of its own weight: a mean over another axis would not notice tokens that are dropped.
    assert float(per_token_distance(text[:1], image)) != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("centre", [0, 7, 50])
def test_every_text_token_is_equally_far_from_a_circle(grid: tuple[int, int], alpha: float, centre: int) -> None:
    """As the model has it, in fp32: before the image and after."""
    count = grid[0] * grid[1]
    tokens = SimpleNamespace(row=0, tokens=torch.arange(count), frames=1, height=grid[0], width=grid[1])
    positions = torch.full((3, 1, count), centre)
    image = on_circles(positions, iter([tokens]), alpha, 10.0)[:, 0].T  # type: ignore[list-item]
    for p in (centre - 40, centre - 1, centre + 1, centre + 60):
        assert float(per_token_distance(torch.full((1, 3), float(p)), image)) < 1e-5


def test_the_flat_grid_turned_into_the_plane_is_no_circle() -> None:
    """The points of the authors' figure: orthogonal to the text, but not equally far from it."""
    y, x = torch.meshgrid(torch.arange(-1.0, 2), torch.arange(-1.0, 2), indexing="ij")
    u, v = torch.tensor([0.0, 1, -1]) / math.sqrt(2), torch.tensor([2.0, -1, -1]) / math.sqrt(6)
    flat = x.reshape(-1, 1) * u + y.reshape(-1, 1) * v
    assert float(per_token_distance(torch.full((1, 3), 2.0), flat)) > 0.05


def test_ptd_zero_does_not_equalise_logits() -> None:
    """M-RoPE turns each axis by frequencies of its own: equally far is not equally rotated. Only one index for all is."""
    import transformers
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, apply_rotary_pos_emb

    config = transformers.Qwen2_5_VLTextConfig(hidden_size=128, num_attention_heads=1)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    rotary = Qwen2_5_VLRotaryEmbedding(config)
    cells = torch.arange(256)
    grid = torch.stack([torch.zeros(256), cells // 16, cells % 16])
    layouts = {"grid": grid, "circle": circle(16, 16, 0.5, 10.0).float(), "unordered": torch.zeros(3, 256)}
    spread = {}
    for name, image in layouts.items():
        rows = torch.cat([image, torch.full((3, 1), 16.0)], 1)[:, None]
        ones = torch.ones(1, 1, 257, 128)
        cos, sin = rotary(ones, rows)
        q, k = apply_rotary_pos_emb(ones, ones, cos, sin)
        spread[name] = float((q[0, 0, -1] * k[0, 0, :-1]).sum(-1).div(math.sqrt(128)).std())
    text = torch.full((1, 3), 16.0)
    assert float(per_token_distance(text, layouts["circle"].T)) < 1e-5
    assert spread["unordered"] < 1e-5
    assert spread["circle"] > 3 * spread["grid"] > 0.01  # so the docs must not promise the opposite


def test_ptd_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ConfigError, match="same axes"):
        per_token_distance(torch.zeros(2, 3), torch.zeros(2, 2))
    with pytest.raises(ConfigError, match="same axes"):
        per_token_distance(torch.zeros(0, 3), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="did you mean 'spatial'"):
        layout("spacial")  # type: ignore[arg-type]


# -- options -----------------------------------------------------------------------------------------------------------------


def test_schedules_fit_any_depth() -> None:
    def on(age: Any, depth: int) -> list[int]:
        return [i for i, flag in enumerate(CircleRope(age=age).schedule(depth)) if flag]

    assert on("all", 3) == [0, 1, 2]
    assert on("alternate", 36) == list(range(0, 36, 2))
    assert on("first", 36) == list(range(18))
    for depth in (1, 2, 3, 5, 28, 36):
        assert len(CircleRope().schedule(depth)) == depth
        assert sorted(on("first", depth) + on("second", depth)) == list(range(depth))
    assert on("first", 3) == [0, 1]
    assert on([False, True], 2) == [1]
    with pytest.raises(ConfigError, match="2 flags, and the model 3 layers"):
        CircleRope(age=(True, False)).schedule(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": "a"}, "alpha='a'"),
        ({"radius": -1.0}, "radius=-1.0"),
        ({"radius": float("nan")}, "radius=nan"),
        ({"radius": True}, "radius=True"),
        ({"radius": "automatic"}, "auto-k"),
        ({"radius": "auto-x"}, "auto-k"),
        ({"radius": "auto--1"}, "auto-k"),
        ({"age": "alternat"}, "did you mean 'alternate'"),
        ({"age": (1, 0)}, "true or false"),
        ({"video": "frame"}, "did you mean 'frames'"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CircleRope(**options)


def test_sections_share_a_head_as_qwen_does() -> None:
    assert sections(64) == (16, 24, 24)
    assert sections(32) == (8, 12, 12)
    for half in range(3, 80):
        assert sum(sections(half)) == half
        assert min(sections(half)) >= 1


def test_tokens_and_grids_must_fit() -> None:
    types = torch.tensor([[0, 1, 1, 1, 1, 0, 1, 1, 0]])
    grids = torch.tensor([[1, 4, 4], [1, 2, 4]])
    found = list(blocks(types, None, {IMAGE: grids}, 2))
    assert [b.tokens.tolist() for b in found] == [[1, 2, 3, 4], [6, 7]]
    assert [(b.height, b.width) for b in found] == [(2, 2), (1, 2)]
    with pytest.raises(ConfigError, match="image_grid_thw does not fit"):
        list(blocks(types, None, {IMAGE: grids[:1]}, 2))
    with pytest.raises(ConfigError, match="row 0 has 2 more tokens"):
        list(blocks(types, None, {IMAGE: torch.tensor([[1, 4, 4], [1, 4, 4]])}, 2))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0]])
    assert len(list(blocks(types, mask, {IMAGE: grids}, 2))) == 1


def test_llava_grids_are_known_or_refused() -> None:
    from hfplug.errors import UnsupportedError

    def config(tower: str, strategy: str, size: Any) -> Any:
        vision = SimpleNamespace(model_type=tower, image_size=size, patch_size=14)
        return SimpleNamespace(vision_config=vision, vision_feature_select_strategy=strategy)

    assert llava_grid(config("clip_vision_model", "default", 336)) == (24, 24)
    assert llava_grid(config("siglip_vision_model", "full", (28, 56))) == (2, 4)
    for tower, strategy in (("clip_vision_model", "full"), ("siglip_vision_model", "default"), ("pixtral", "full")):
        with pytest.raises(UnsupportedError, match=tower):
            llava_grid(config(tower, strategy, 336))
