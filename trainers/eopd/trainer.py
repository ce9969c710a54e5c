"""The trainer of EOPD: TRL's ``DistillationTrainer`` with another loss over the same hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfplug.errors import UnsupportedError
from hfplug.seams.trainer import MethodTrainer, stock_trainer
from hfplug.trainers import distill_base
from hfplug.trainers.eopd.config import EOPDConfig
from hfplug.trainers.eopd.loss import eopd_parts
from hfplug.trainers.tiles import Wanted, tiles

DistillationTrainer: Any = stock_trainer("distill")


class EOPDTrainer(MethodTrainer, DistillationTrainer):
    """On-policy distillation with reverse KL everywhere and forward KL where the teacher is uncertain.

    Everything but the loss is TRL's: sampling from the student, vLLM, tools, images, accumulation. With
    ``eopd_weight=0`` or ``eopd_threshold=inf`` it is ``DistillationTrainer`` with ``beta=1``.

    Logged besides TRL's metrics: ``eopd/gated_fraction`` (of trained tokens), ``eopd/teacher_entropy`` (nats per token),
    ``eopd/reverse_kl`` (nats per token) and ``eopd/forward_kl`` (nats per gated token).

    Args:
        model: the student, a model or a path.
        teacher_model: the teacher, a model or a path; ``None``: ``args.teacher_model_name_or_path``.
        args: an :class:`EOPDConfig`.
        kwargs: as for ``DistillationTrainer``.

    Raises:
        ConfigError: no teacher, one with another vocabulary, or one that shares parameters with the student.
        UnsupportedError: Liger, an adapter on a head, or a model whose logits are more than its head.
    """

    method = "eopd"
    config_class = EOPDConfig
    _tag_names: ClassVar = ["trl", "hfplug", "eopd"]
    _name = "EOPD"

    def __init__(self, model: Any, teacher_model: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        source = distill_base.teacher_of(teacher_model, args, "EOPDTrainer")
        super().__init__(model, source, args, *more, **kwargs)
        student, teacher = (self.accelerator.unwrap_model(m) for m in (self.model, self.teacher_model))
        distill_base.check_pair(student, teacher, self.processing_class, source)

    def check(self, config: EOPDConfig, given: Mapping[str, Any]) -> None:
        """Refuse another vocabulary before anything is loaded."""
        distill_base.check_vocabulary(given["model"], given["teacher_model"], config)
        if config.eopd_normalizer == "gated" and config.world_size > 1:
            raise UnsupportedError(
                f"eopd_normalizer='gated' on {config.world_size} processes: each would divide by its own count; use 'all'"
            )

    def _hidden_pair(self, student: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
        """Last hidden states of student and teacher over the completion, and the unwrapped teacher."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_ids"].shape[1]
        # What TRL passes on to the models besides, it names in this signature: images and their shapes.
        known = inspect.signature(self._get_last_hidden_state).parameters
        images = {name: value for name, value in inputs.items() if name in known}
        hidden = self._get_last_hidden_state(student, ids, mask, kept, **images)
        self.teacher_model.eval()
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():
            target = self._forward_redirection(
                self.teacher_model, teacher, self._get_last_hidden_state, teacher, ids, mask, kept, **images
            )
        return hidden, target, teacher

    def _compute_loss(self, unwrapped_student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Tensor, ...]:
        """As in TRL: the loss, the sum of the student's entropies, and how many tokens they are of."""
        args: EOPDConfig = self.args
        hidden, target, teacher = self._hidden_pair(unwrapped_student, inputs)
        heads = distill_base.heads_of(unwrapped_student, teacher)
        device = heads[0].weight.device
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:  # what a tool said is not the student's
            mask = mask * inputs["tool_mask"]
        counted = mask.to(device).bool()
        wanted = Wanted("reverse", self.temperature, args.eopd_top_k, rows=args.eopd_chunk_size)
        labels = inputs["completion_ids"].to(device)[counted] if args.eopd_reverse_kl == "sampled" else None
        found = tiles(hidden.to(device)[counted], heads[0], target.to(device)[counted], heads[1], wanted, labels)
        parts, count = eopd_parts(found, args), counted.sum()
        # One denominator for both: the tokens of the whole accumulation window over all ranks.
        total = parts.reverse
        if args.eopd_normalizer == "all":
            loss = distill_base.per_token(total + args.eopd_weight * parts.forward, count, num_items_in_batch)
        else:
            loss = distill_base.per_token(total, count, num_items_in_batch)
            loss = loss + args.eopd_weight * parts.forward / parts.gated.clamp(min=1)
        self.log_metric("gated_fraction", parts.gated, count)
        self.log_metric("teacher_entropy", found.teacher_entropy.sum(), count)
        self.log_metric("reverse_kl", parts.reverse, count)
        self.log_metric("forward_kl", parts.forward, parts.gated)
        return loss, found.student_entropy.sum(), count
