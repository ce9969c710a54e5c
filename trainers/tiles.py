"""Quantities of a student's and a teacher's next-token distributions, from hidden states, without the logits of either.

Both heads are projected tile by tile (``rows`` tokens by ``columns`` words); only running sums per token are kept, and the
backward projects each tile again. So no tensor of all tokens by all words exists, and the peak of memory does not grow with
the number of tokens. One :class:`Tiles` serves every distillation loss: what comes back per token is differentiable with
respect to the student (``divergence``, ``log_z``, ``label_logit``, ``top_logits``), and a loss is a few lines over vectors.

The gradient is worked out by hand. With ``z`` the student's logits after scale, softcap and temperature, ``q`` their softmax,
``p`` the teacher's, per token::

    d reverse KL / dz = q (log q - log p - KL),   d forward KL / dz = q - p,   d log_z / dz = q

and ``label_logit``, ``top_logits`` are entries of ``z``, whose gradient is scattered back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from trl.trainer.utils import maybe_gather_lm_head_ctx

from hfplug.errors import UnsupportedError

Divergence = Literal["reverse", "forward"]
# Words per tile, and tokens per tile at most. 128 MiB in fp32; four such tiles are alive at a time.
COLUMNS = 32768
ROWS = 1024
# Where a configuration says how its logits are scaled: the last one divides, except in the one family that multiplies.
_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVIDES, _MULTIPLIES = "logits_scaling", frozenset({"hyperclovax"})


@dataclasses.dataclass(frozen=True)
class Head:
    """What a model does between its last hidden state and its logits: ``cap * tanh(scale * (h Wᵀ + b) / cap)``.

    Attributes:
        weight: ``(V, H)``.
        bias: ``(V,)`` or ``None``.
        scale: factor on the projection (Cohere, Granite, Falcon-H1, ...).
        softcap: bound of the final tanh (Gemma), or ``None``.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Head:
        """The head of a causal language model; a ``PeftModel`` is asked for its base model's."""
        module: Any = model
        config = module.config.get_text_config()
        head = module.get_output_embeddings()
        if head is None:
            raise UnsupportedError(f"{type(model).__name__} has no output embeddings to distil through")
        given = [getattr(config, name) for name in _SCALES if getattr(config, name, None) is not None]
        if given:
            scale = float(given[0])
        elif getattr(config, _DIVIDES, None) is not None:
            scaling = float(getattr(config, _DIVIDES))
            scale = scaling if config.model_type in _MULTIPLIES else 1 / scaling
        else:
            scale = 1.0
        return cls(head.weight, getattr(head, "bias", None), scale, getattr(config, "final_logit_softcapping", None))

    def gathered(self, dtype: torch.dtype) -> Head:
        """The head with whole tensors: FSDP2's shards are gathered once, not once per tile."""
        if not hasattr(self.weight, "full_tensor"):
            return self
        bias = self.bias.full_tensor() if self.bias is not None else None  # type: ignore[attr-defined]
        return dataclasses.replace(self, weight=self.weight.full_tensor().to(dtype), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits ``(..., V)`` of hidden states ``(..., H)``: for checks and tests, not for training."""
        raw = nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What :func:`tiles` is to compute.

    Attributes:
        divergence: ``"reverse"``: KL(student‖teacher); ``"forward"``: KL(teacher‖student).
        temperature: of both distributions, in everything but the teacher's entropy.
        top: number of the teacher's likeliest words whose logits come back; more than there are means all.
        power: exponent g of the teacher's power sum ``log Σ pᵍ``; ``None``: not computed.
        rows: tokens per tile, at most.
        columns: words per tile, at most.
    """

    divergence: Divergence
    temperature: float = 1.0
    top: int = 0
    power: float | None = None
    rows: int = ROWS
    columns: int = COLUMNS


class Tiles(NamedTuple):
    """Per-token quantities of ``N`` tokens in float32 (float64 for float64 input), logits after ``temperature``.

    The first four carry gradient to the student, the others none.
    """

    divergence: Tensor  # (N,) the divergence asked for, nats
    log_z: Tensor  # (N,) logsumexp of the student's logits
    label_logit: Tensor  # (N,) the student's logit of the label; 0 without labels
    top_logits: Tensor  # (N, k) the student's logits of the teacher's k likeliest words
    student_entropy: Tensor  # (N,) nats
    student_max: Tensor  # (N,) the student's largest logit
    teacher_entropy: Tensor  # (N,) nats, at temperature 1 whatever `temperature` is
    teacher_top: Tensor  # (N, k) the teacher's log-probabilities of its k likeliest words, falling
    teacher_label: Tensor  # (N,) the teacher's log-probability of the label; 0 without labels
    teacher_power: Tensor  # (N,) log of the sum of the teacher's probabilities to the power g; 0 if not asked for


def tiles(
    student_hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, wanted: Wanted, labels: Tensor | None = None
) -> Tiles:
    """Compute :class:`Tiles` of ``N`` tokens.

    Args:
        student_hidden: ``(N, H_s)``, before the head; ``N`` may be 0.
        student: the student's head.
        teacher_hidden: ``(N, H_t)``, same tokens; widths may differ, vocabularies may not.
        teacher: the teacher's head; nothing of it gets a gradient.
        wanted: what to compute.
        labels: ``(N,)`` word per token.
    """
    student, teacher = student.gathered(student_hidden.dtype), teacher.gathered(teacher_hidden.dtype)
    out = _Tiled.apply(  # type: ignore[no-untyped-call]
        student_hidden, student.weight, student.bias, teacher_hidden.detach(), teacher.weight, teacher.bias, labels,
        (student.scale, student.softcap), (teacher.scale, teacher.softcap), wanted,
    )  # fmt: skip
    return Tiles(*out)


class _Sums:
    """Running sums over the words of ``Σ e^z f`` for several ``f``, kept relative to the largest ``z`` so far."""

    def __init__(self, like: Tensor, names: tuple[str, ...]) -> None:
        self.peak = torch.full_like(like, -math.inf)
        self.of = {name: torch.zeros_like(like) for name in ("one", *names)}

    def raise_peak(self, z: Tensor) -> None:
        """Take the tile's largest ``z`` into account; sums so far shrink accordingly."""
        peak = torch.maximum(self.peak, z.amax(-1))
        factor = torch.exp(self.peak - peak)
        for total in self.of.values():
            total.mul_(factor)
        self.peak = peak

    def exponentials(self, z: Tensor, out: Tensor) -> Tensor:
        """``e^(z - peak)`` of a tile, into ``out``; also added to ``one``."""
        torch.sub(z, self.peak.unsqueeze(-1), out=out).exp_()
        self.of["one"] += out.sum(-1)
        return out

    @property
    def log(self) -> Tensor:
        """``log Σ e^z``."""
        return self.peak + self.of["one"].log()

    def mean(self, name: str) -> Tensor:
        """``Σ e^z f / Σ e^z``."""
        return self.of[name] / self.of["one"]


def _dtypes(hidden: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """In what dtype the matrices are multiplied, and in what dtype results are kept."""
    device = hidden.device.type
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return narrow, torch.promote_types(narrow, torch.float32)


def _multiply(a: Tensor, b: Tensor, wide: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``a @ b`` with the result, and on a CPU the operands, in ``wide``: logits are not rounded before they are compared."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and wide is torch.float32:
        return torch.mm(a, b, out_dtype=wide) if out is None else torch.mm(a, b, out_dtype=wide, out=out)
    a, b = a.to(wide), b.to(wide)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


@dataclasses.dataclass
class _Side:
    """One model's part: projects a tile of its logits."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    dtype: torch.dtype
    wide: torch.dtype

    def project(self, rows: slice, columns: slice, temperature: float, buffer: Tensor) -> Tensor:
        """Logits after scale, softcap and temperature, in the leading part of ``buffer``."""
        h, w = self.hidden[rows].to(self.dtype), self.weight[columns].to(self.dtype)
        tile = buffer.view(-1)[: h.shape[0] * w.shape[0]].view(h.shape[0], w.shape[0])
        _multiply(h, w.t(), self.wide, out=tile)
        if self.bias is not None:
            tile.add_(self.bias[columns].to(self.wide))
        if self.scale != 1:
            tile.mul_(self.scale)
        if self.softcap is not None:
            tile.div_(self.softcap).tanh_().mul_(self.softcap)
        return tile if temperature == 1 else tile.div_(temperature)


def _blocks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _inside(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Which ids lie in a block of words, and their places in it (0 for those that do not)."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return inside, torch.where(inside, ids - columns.start, 0)


class _Tiled(torch.autograd.Function):
    """:func:`tiles` with its own backward."""

    @staticmethod
    def forward(
        ctx: Any, student_hidden: Tensor, student_weight: Tensor, student_bias: Tensor | None, teacher_hidden: Tensor,
        teacher_weight: Tensor, teacher_bias: Tensor | None, labels: Tensor | None, student_head: tuple[float, float | None],
        teacher_head: tuple[float, float | None], wanted: Wanted,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dtype, wide = _dtypes(student_hidden)
        count, vocabulary = student_hidden.shape[0], student_weight.shape[0]
        ctx.heads, ctx.wanted, ctx.dtypes = (student_head, teacher_head), wanted, (dtype, _dtypes(teacher_hidden)[0], wide)
        k = min(wanted.top, vocabulary)
        with _unsharded(student_hidden, student_weight, student_bias, teacher_weight, teacher_bias):
            sides = _sides(
                student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, ctx.heads, ctx.dtypes
            )
            parts = [
                _one_block(sides, rows, vocabulary, wanted, k, labels[rows] if labels is not None else None, buffers)
                for buffers in [_buffers(student_hidden, count, vocabulary, wanted, wide, 4)]
                for rows in _blocks(count, wanted.rows)
            ]
        if not parts:  # a rank may have no token: nothing is summed, and the backward gives zeros
            empty, top = student_hidden.new_zeros(0, dtype=wide), student_hidden.new_zeros((0, k), dtype=wide)
            shapes = (empty, empty, empty, top, empty, empty, empty, top, empty, empty)
            parts = [(*(t.clone() for t in shapes), empty.clone(), torch.zeros((0, k), dtype=torch.int32, device=empty.device))]
        whole = [torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts, strict=True)]
        *out, teacher_log_z, ids = whole
        ctx.save_for_backward(
            student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, labels,
            out[0], out[1], teacher_log_z, ids,
        )  # fmt: skip
        ctx.mark_non_differentiable(*out[4:])
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, divergence, log_z, teacher_log_z,
         ids) = ctx.saved_tensors  # fmt: skip
        wanted, (dtype, _, wide) = ctx.wanted, ctx.dtypes
        (scale, softcap), _ = ctx.heads
        of_divergence, of_log_z, of_label, of_top = (g.to(wide) for g in grads[:4])
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        count, vocabulary = hidden.shape[0], weight.shape[0]
        with _unsharded(hidden, weight, bias, teacher_weight, teacher_bias):
            grad_hidden = torch.zeros_like(hidden, dtype=wide) if needs_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
            grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
            student, teacher = _sides(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, ctx.heads, ctx.dtypes)
            student_buffer, teacher_buffer, third = _buffers(hidden, count, vocabulary, wanted, wide, 3)
            for rows in _blocks(count, wanted.rows):
                for columns in _blocks(vocabulary, wanted.columns):
                    z = student.project(rows, columns, wanted.temperature, student_buffer)
                    zt = teacher.project(rows, columns, wanted.temperature, teacher_buffer)
                    slope = third.view(-1)[: z.numel()].view_as(z)
                    if softcap is not None:  # of the tanh, from its value: 1 - (z T / cap)²
                        torch.mul(z, wanted.temperature / softcap, out=slope).square_().neg_().add_(1)
                    log_q, log_p = z.sub_(log_z[rows, None]), zt.sub_(teacher_log_z[rows, None])
                    if wanted.divergence == "reverse":
                        inner = torch.sub(log_q, log_p, out=log_p).sub_(divergence[rows, None]).mul_(of_divergence[rows, None])
                        grad = inner.add_(of_log_z[rows, None]).mul_(log_q.exp_())
                    else:
                        grad = log_p.exp_().mul_(-of_divergence[rows, None])
                        grad.add_(log_q.exp_().mul_((of_divergence + of_log_z)[rows, None]))
                    if ids.shape[1]:
                        inside, place = _inside(ids[rows].long(), columns)
                        grad.scatter_add_(1, place, torch.where(inside, of_top[rows], 0))
                    if labels is not None:
                        inside, place = _inside(labels[rows, None], columns)
                        grad.scatter_add_(1, place, torch.where(inside, of_label[rows, None], 0))
                    if softcap is not None:
                        grad.mul_(slope)
                    grad.mul_(scale / wanted.temperature)
                    if grad_bias is not None:
                        grad_bias[columns] += grad.sum(0)
                    narrow = grad.to(dtype)
                    if grad_hidden is not None:
                        grad_hidden[rows] += _multiply(narrow, weight[columns].to(dtype), wide)
                    if grad_weight is not None:
                        grad_weight[columns].addmm_(narrow.t().to(wide), hidden[rows].to(dtype).to(wide))
        return (
            grad_hidden.to(hidden.dtype) if grad_hidden is not None else None,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 7,
        )


@contextlib.contextmanager
def _unsharded(hidden: Tensor, *parameters: Tensor | None) -> Any:
    """Whole heads under ZeRO-3, and no autocast: what is narrow here is chosen."""
    weight, bias, teacher_weight, teacher_bias = parameters
    with (
        torch.autocast(hidden.device.type, enabled=False),
        maybe_gather_lm_head_ctx(weight, bias),
        maybe_gather_lm_head_ctx(teacher_weight, teacher_bias),
    ):
        yield


def _buffers(like: Tensor, count: int, vocabulary: int, wanted: Wanted, wide: torch.dtype, number: int) -> list[Tensor]:
    shape = (min(count, wanted.rows), min(vocabulary, wanted.columns))
    return [torch.empty(shape, device=like.device, dtype=wide) for _ in range(number)]


def _sides(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor | None, heads: tuple[tuple[float, float | None], tuple[float, float | None]],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[_Side, _Side]:  # fmt: skip
    dtype, teacher_dtype, wide = dtypes
    return (
        _Side(hidden, weight, bias, *heads[0], dtype, wide),
        _Side(teacher_hidden, teacher_weight, teacher_bias, *heads[1], teacher_dtype, wide),
    )


def _one_block(
    sides: tuple[_Side, _Side], rows: slice, vocabulary: int, wanted: Wanted, k: int, labels: Tensor | None, buffers: list[Tensor]
) -> tuple[Tensor, ...]:
    """The forward for one block of tokens: one pass over the words."""
    student, teacher = sides
    temperature = wanted.temperature
    like = torch.zeros(rows.stop - rows.start, device=student.hidden.device, dtype=student.wide)
    q = _Sums(like, ("z", "gap"))
    p = _Sums(like, ("z", "gap"))
    cold = _Sums(like, ("z",)) if temperature != 1 else p  # of the teacher at temperature 1
    power = _Sums(like, ()) if wanted.power is not None else None
    label_logit, teacher_label = torch.zeros_like(like), torch.zeros_like(like)
    best: tuple[Tensor, Tensor, Tensor] | None = None  # the teacher's largest logits, their words, the student's there
    for columns in _blocks(vocabulary, wanted.columns):
        z = student.project(rows, columns, temperature, buffers[0])
        zt = teacher.project(rows, columns, temperature, buffers[1])
        e, scratch = (b.view(-1)[: z.numel()].view_as(z) for b in buffers[2:])
        q.raise_peak(z)
        q.exponentials(z, e)
        q.of["z"] += torch.mul(e, z, out=scratch).sum(-1)
        if wanted.divergence == "reverse":
            q.of["gap"] += torch.sub(z, zt, out=scratch).mul_(e).sum(-1)
        p.raise_peak(zt)
        p.exponentials(zt, e)
        p.of["z"] += torch.mul(e, zt, out=scratch).sum(-1)
        if wanted.divergence == "forward":
            p.of["gap"] += torch.sub(zt, z, out=scratch).mul_(e).sum(-1)
        if power is not None and wanted.power is not None:
            torch.mul(zt, wanted.power, out=scratch)
            power.raise_peak(scratch)
            power.exponentials(scratch, e)
        if labels is not None:
            inside, place = _inside(labels[:, None], columns)
            label_logit += torch.where(inside, z.gather(1, place), 0)[:, 0]
            teacher_label += torch.where(inside, zt.gather(1, place), 0)[:, 0]
        if k:
            best = _merge_top(best, z, zt, columns, k)
        if temperature != 1:
            torch.mul(zt, temperature, out=scratch)
            cold.raise_peak(scratch)
            cold.exponentials(scratch, e)
            cold.of["z"] += e.mul_(scratch).sum(-1)
    log_z, teacher_log_z = q.log, p.log
    if wanted.divergence == "reverse":
        divergence = q.mean("gap") - log_z + teacher_log_z
    else:
        divergence = p.mean("gap") - teacher_log_z + log_z
    top, ids, top_logits = best if best is not None else (like.new_zeros((len(like), 0)),) * 3
    return (
        divergence, log_z, label_logit, top_logits, log_z - q.mean("z"), q.peak, cold.log - cold.mean("z"),
        top - teacher_log_z[:, None], teacher_label - teacher_log_z if labels is not None else teacher_label,
        power.log - wanted.power * teacher_log_z if power is not None and wanted.power is not None else torch.zeros_like(like),
        teacher_log_z, ids.to(torch.int32),
    )  # fmt: skip


def _merge_top(
    best: tuple[Tensor, Tensor, Tensor] | None, z: Tensor, zt: Tensor, columns: slice, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    top, place = zt.topk(min(k, zt.shape[1]), dim=1)
    found = (top, place + columns.start, z.gather(1, place))
    if best is None:
        return found
    top, ids, logits = (torch.cat(pair, dim=1) for pair in zip(best, found, strict=True))
    top, order = top.topk(min(k, top.shape[1]), dim=1)
    return top, ids.gather(1, order), logits.gather(1, order)
