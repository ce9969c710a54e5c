"""The trainer of Bridge-Garden distillation: TRL's ``SFTTrainer`` with a teacher and a hybrid loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.models.utils import _ForwardRedirection

from hfplug.errors import UnsupportedError
from hfplug.metrics import Mode, metrics_of
from hfplug.seams.trainer import MethodTrainer, stock_trainer
from hfplug.trainers import distill_base
from hfplug.trainers.bridge_garden.config import BridgeGardenConfig
from hfplug.trainers.bridge_garden.loss import hybrid_loss, soft_weight
from hfplug.trainers.tiles import Tiles, Wanted, tiles

SFTTrainer: Any = stock_trainer("sft")


class BridgeGardenTrainer(MethodTrainer, SFTTrainer):
    """Distillation on the tokens of a data set, with hard and soft labels mixed token by token.

    Data, packing, completion-only labels and evaluation are those of ``SFTTrainer``; with ``variant="static"`` and
    ``soft_weight=0`` it is ``SFTTrainer``, with ``soft_weight=1`` forward KL to the teacher.

    Logged besides TRL's metrics: ``bridge_garden/soft_weight`` (mean λ), ``bridge_garden/soft_loss`` and
    ``bridge_garden/hard_loss`` (nats per token, unweighted), and for ``risk`` ``bridge_garden/abs_delta`` (per token that
    has a next one).

    Args:
        model: the student, a model or a path.
        teacher_model: the teacher, a model or a path; ``None``: ``args.teacher_model_name_or_path``.
        args: a :class:`BridgeGardenConfig`.
        kwargs: as for ``SFTTrainer``.

    Raises:
        ConfigError: no teacher, one with another vocabulary, or one that shares parameters with the student.
        UnsupportedError: Liger, images, a router's loss, a loss of one's own, sequence parallelism, an adapter on a head,
            prompt learning, or a model whose logits are more than its head.
    """

    method = "bridge_garden"
    config_class = BridgeGardenConfig
    _tag_names: ClassVar = ["trl", "hfplug", "bridge-garden"]
    _name = "Bridge-Garden"

    def __init__(self, model: Any, teacher_model: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        source = self._teacher_source = distill_base.teacher_of(teacher_model, args, "BridgeGardenTrainer")
        super().__init__(model, args, *more, **kwargs)
        if self.aux_loss_enabled:
            raise UnsupportedError(
                f"router_aux_loss_coef={self.router_aux_loss_coef!r}: the load-balancing loss of a mixture of experts is not "
                "added here; to train without it set router_aux_loss_coef=0.0 in the BridgeGardenConfig"
            )
        if self._is_vision_dataset:
            raise UnsupportedError("train_dataset holds images: BridgeGardenTrainer distils text alone")
        parallel = getattr(self.accelerator, "parallelism_config", None)
        if parallel is not None and (parallel.sp_enabled or parallel.cp_enabled):
            raise UnsupportedError(
                "sequence and context parallelism cut rows between ranks, which the tiled loss does not follow"
            )
        teacher = distill_base.load_teacher(source, args.teacher_model_init_kwargs, args)
        distill_base.check_pair(self.accelerator.unwrap_model(self.model), teacher, self.processing_class, source)
        self.teacher_model = distill_base.prepare_teacher(self, teacher)
        self._forward_redirection = _ForwardRedirection()

    def check(self, config: BridgeGardenConfig, given: Mapping[str, Any]) -> None:
        """Refuse another vocabulary and a loss of the caller's own before anything is loaded."""
        distill_base.check_vocabulary(given["model"], self._teacher_source, config)
        if given.get("compute_loss_func") is not None:
            raise UnsupportedError("compute_loss_func: BridgeGardenTrainer has a loss of its own; use SFTTrainer for another")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """As in ``SFTTrainer``: the loss, over the labelled tokens of the whole accumulation window.

        Both parts have that one denominator; the authors' code divides the soft part by the micro-batch's own count, which
        makes it as many times too heavy as there are micro-batches. ``return_outputs=True`` takes another forward: the tiled
        loss builds no logits.
        """
        if kwargs:
            raise UnsupportedError(f"compute_loss got {sorted(kwargs)}, which BridgeGardenTrainer does not know")
        student = self.accelerator.unwrap_model(model)
        # Inside the wrapper's forward, so that DDP sees the gradients and FSDP and ZeRO have the head's weight at hand.
        loss = self._forward_redirection(model, student, self._loss_in_forward, student, inputs, num_items_in_batch)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        self._count_tokens(inputs)
        if not return_outputs:
            return loss
        with torch.no_grad():
            outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
        return loss, outputs

    def _loss_in_forward(self, student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        args: BridgeGardenConfig = self.args
        given = {k: v for k, v in inputs.items() if k not in {"labels", "use_cache"}}
        hidden = _last_hidden_state(student, given)
        self.teacher_model.eval()
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():
            target = self._forward_redirection(self.teacher_model, teacher, _last_hidden_state, teacher, given)
        heads = distill_base.heads_of(student, teacher)
        device = heads[0].weight.device
        labels = inputs["labels"][:, 1:].to(device)
        labelled = labels != -100
        followed = torch.zeros_like(labelled)
        # The next state is looked at where it has a label itself: not at the end of a document, packed or padded.
        followed[:, :-1] = labelled[:, :-1] & labelled[:, 1:]
        wanted = Wanted(
            "forward",
            top=1,
            power=args.garden_power if args.garden_variant == "power_entropy" else None,
            rows=args.garden_chunk_size,
        )
        found = tiles(
            hidden[:, :-1].to(device)[labelled], heads[0], target[:, :-1].to(device)[labelled], heads[1], wanted, labels[labelled]
        )
        state = self.state
        weight = soft_weight(found, args, heads[0].weight.shape[0], state.global_step, state.max_steps)
        loss, delta = hybrid_loss(found, weight, args, followed[labelled])
        self._log_parts(found, weight, delta, followed[labelled])
        return distill_base.per_token(loss.sum(), labelled.sum(), num_items_in_batch)

    def _log_parts(self, found: Tiles, weight: Tensor, delta: Tensor, followed: Tensor) -> None:
        metrics = metrics_of(self.state)
        mode: Mode = "train" if self.model.training else "eval"
        sums = {
            "entropy": found.student_entropy,
            "mean_token_accuracy": (found.label_logit >= found.student_max).float(),
            "bridge_garden/soft_weight": weight,
            "bridge_garden/soft_loss": found.divergence,
            "bridge_garden/hard_loss": found.log_z - found.label_logit,
        }
        for name, values in sums.items():
            metrics.add(name, values.sum(), len(weight), mode)
        if self.args.garden_variant == "risk":
            metrics.add("bridge_garden/abs_delta", delta.abs().sum(), followed.sum(), mode)

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        """``num_tokens``, as ``SFTTrainer`` counts them."""
        mode = "train" if self.model.training else "eval"
        if mode == "train":
            # Packed and padding-free rows have no mask; every one of their tokens is real.
            mask = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(inputs["input_ids"])
            counted = self.accelerator.gather_for_metrics(mask.sum()).sum().item()
            self._total_train_tokens += counted // self._tp_size
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]


def _last_hidden_state(model: Any, inputs: dict[str, Any]) -> Tensor:
    """``(B, T, H)`` of the backbone, adapters included, before the head."""
    base = model.get_base_model() if is_peft_model(model) else model
    return base.base_model(**inputs, use_cache=False).last_hidden_state
