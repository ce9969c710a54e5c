"""The EOPD loss over per-token quantities (arXiv 2603.07079)::

    L = Σ_t [ KL(q_t‖p_t) + α · 1{H(p_t) > τ} · Σ_{i in top-k of p_t} p̃_i (log p̃_i - log q_i) ]

with ``q`` the student, ``p`` the teacher, ``H`` the teacher's entropy in nats over all words at temperature 1, and ``p̃`` the
teacher's k largest probabilities, renormalised or not. The gate adds; reverse KL stays on every token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from hfplug.trainers.eopd.config import EOPDConfig
from hfplug.trainers.tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Parts:
    """Sums over the tokens of a batch: ``reverse`` and ``forward`` with gradient, ``gated`` a count."""

    reverse: Tensor
    forward: Tensor
    gated: Tensor


def reverse_kl(found: Tiles, sampled: bool) -> Tensor:
    """KL(student‖teacher) per token ``(N,)``.

    Sampled: ``log q(y) - log p(y)`` of the sampled token, whose expectation it is; its gradient is the policy gradient with
    the advantage ``log p(y) - log q(y)``. There is one update per rollout, so the ratio of the clipped surrogate is 1.
    """
    if not sampled:
        return found.divergence
    log_q = found.label_logit - found.log_z
    advantage = (found.teacher_label - log_q).detach()
    return -advantage * torch.exp(log_q - log_q.detach())


def forward_kl(found: Tiles, *, renormalize_teacher: bool = True, student_full_vocabulary: bool = True) -> Tensor:
    """Forward KL on the teacher's k likeliest words per token ``(N,)``; see :class:`EOPDConfig` for the two switches."""
    log_p, logits = found.teacher_top, found.top_logits
    if renormalize_teacher:
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
    log_q = logits - (found.log_z[:, None] if student_full_vocabulary else logits.logsumexp(-1, keepdim=True))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def eopd_parts(found: Tiles, config: EOPDConfig) -> Parts:
    """Both sums over all tokens in ``found``."""
    gated = found.teacher_entropy > config.eopd_threshold
    extra = forward_kl(found, renormalize_teacher=config.eopd_renormalize, student_full_vocabulary=config.eopd_full_vocabulary)
    # Chosen, not multiplied by 0: where the gate is shut nothing of the term is in the graph.
    return Parts(reverse_kl(found, config.eopd_reverse_kl == "sampled").sum(), extra[gated].sum(), gated.sum())
