"""EOPD written out over full logits, in the dtype given: what the tiled loss is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div


def eopd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    threshold: float = 0.8,
    weight: float = 1.0,
    top_k: int = 16,
    renormalize_teacher: bool = True,
    student_full_vocabulary: bool = True,
    temperature: float = 1.0,
) -> Tensor:
    """Loss per token ``(N,)`` of logits ``(N, V)`` after scale and softcap; the gate sees the teacher at temperature 1."""
    log_q = (student_logits / temperature).log_softmax(-1)
    log_p = (teacher_logits / temperature).log_softmax(-1)
    reverse = kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    cold = teacher_logits.log_softmax(-1)
    gated = -(cold.exp() * cold).sum(-1) > threshold
    top, ids = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    if renormalize_teacher:
        top = top.log_softmax(-1)
    chosen = log_q.gather(-1, ids)
    if not student_full_vocabulary:
        chosen = chosen.log_softmax(-1)
    forward = kl_div(chosen, top, reduction="none", log_target=True).sum(-1)
    return reverse + weight * torch.where(gated, forward, 0)
