"""What distillation trainers check before the first step: the teacher, its vocabulary, and that both heads are understood."""

from __future__ import annotations

import logging
from typing import Any

import torch
from peft import PeftModel, PromptLearningConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.models import resolve_model
from hfplug.probing import evaluating, probe_ids
from hfplug.trainers.tiles import Head

logger = logging.getLogger(__name__)
# How far a head rebuilt from weights and configuration may be from the model's own logits, relative to the largest of them.
_HEAD_BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}
_HEAD_BOUND_NARROW = 5e-2


def name_of(model: Any) -> str:
    """How a message calls a model: its path or hub id, or its class where it was built in memory."""
    if isinstance(model, str):
        return repr(model)
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{type(model).__name__}{f' {path!r}' if path else ''}"


def check_no_liger(args: Any, method: str) -> None:
    """Refuse Liger: its fused losses replace a head that the tiles read themselves."""
    if args.use_liger_kernel:
        raise UnsupportedError(
            f"use_liger_kernel=True: {method} projects both heads in tiles of its own, which Liger's fused losses do not know; "
            "leave it False"
        )


def teacher_of(teacher_model: Any, args: Any, trainer: str) -> Any:
    """The teacher: the argument, or where that is ``None`` ``args.teacher_model_name_or_path``; a path for a short name.

    Raises:
        ConfigError: neither.
    """
    if teacher_model is None:
        teacher_model = getattr(args, "teacher_model_name_or_path", None)
    if teacher_model is None:
        raise ConfigError(
            f"{trainer} needs a teacher: pass teacher_model (a model or a path), or set teacher_model_name_or_path in its config"
        )
    return resolve_model(teacher_model) if isinstance(teacher_model, str) else teacher_model


def check_vocabulary(model: Any, teacher: Any, args: Any) -> None:
    """Refuse a teacher with another number of words, before any weight is loaded.

    Raises:
        ConfigError: names both models and both sizes.
    """
    sizes = [_words(side, args) for side in (model, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"teacher_model={name_of(teacher)} has vocab_size {sizes[1]}, the student {name_of(model)} has {sizes[0]}: a "
            "divergence between next-token distributions needs one vocabulary. Use a teacher of the student's family, or TRL's "
            "GOLDTrainer for other vocabularies"
        )


def _words(model: Any, args: Any) -> int:
    if isinstance(model, str):
        config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    else:
        config = model.config
    return int(config.get_text_config().vocab_size)


def check_pair(student: nn.Module, teacher: nn.Module, processing: Any, source: Any) -> None:
    """Check a student and a teacher that are loaded and not yet wrapped.

    Args:
        student: as it will be trained, adapters included.
        teacher: as it will be asked.
        processing: the student's tokenizer or processor.
        source: what the teacher was given as; a path names the teacher's tokenizer.

    Raises:
        ConfigError: shared parameters, or another vocabulary.
        UnsupportedError: prompt learning, an adapter on a head, or a head that the tiles cannot rebuild.
    """
    shared = {id(p) for p in student.parameters()} & {id(p) for p in teacher.parameters()}
    if shared:
        raise ConfigError(
            f"teacher_model={name_of(teacher)} shares {len(shared)} parameters with the student, so it would change as the "
            "student learns; load the teacher as a model of its own"
        )
    for role, model in (("the student", student), ("teacher_model", teacher)):
        _check_adapters(model, role)
    heads = Head.of(student), Head.of(teacher)
    if heads[0].weight.numel() and heads[1].weight.numel() and heads[0].weight.shape[0] != heads[1].weight.shape[0]:
        raise ConfigError(
            f"the head of teacher_model={name_of(teacher)} has {heads[1].weight.shape[0]} rows, that of the student "
            f"{name_of(student)} {heads[0].weight.shape[0]}: their distributions are over different words"
        )
    _check_tokenizers(processing, teacher, source)
    for role, model, head in zip(("the student", "teacher_model"), (student, teacher), heads, strict=True):
        _check_head(model, head, role)


def _check_adapters(model: nn.Module, role: str) -> None:
    if isinstance(model, PeftModel):
        prompts = [n for n, c in model.peft_config.items() if isinstance(c, PromptLearningConfig)]
        if prompts:
            raise UnsupportedError(
                f"{role} has the prompt-learning adapter {prompts[0]!r}: the loss reads the backbone, which virtual tokens never "
                "reach. Use an adapter on weights, such as LoRA"
            )
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):  # type: ignore[operator]
        raise UnsupportedError(
            f"{role} has an adapter on its output embeddings: the loss reads their weight, so the adapter would be ignored. Take "
            "the head out of target_modules, or merge the adapter first"
        )


def _check_tokenizers(processing: Any, teacher: Any, source: Any) -> None:
    """Same size is not same words: compare the tokenizers where the teacher's can be found."""
    own = getattr(processing, "tokenizer", processing)
    path = source if isinstance(source, str) else getattr(teacher.config, "_name_or_path", "")
    if not path or not isinstance(own, PreTrainedTokenizerBase):
        return
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        logger.warning("no tokenizer found with teacher_model=%r (%s): its token ids are taken for the student's", path, error)
        return
    mine, theirs = ({i: word for word, i in t.get_vocab().items()} for t in (own, other))
    unlike = sorted(i for i in mine.keys() & theirs.keys() if mine[i] != theirs[i])
    if unlike:
        i = unlike[0]
        raise ConfigError(
            f"teacher_model={path!r} has another vocabulary of the same size: {len(unlike)} ids mean other tokens, the first is "
            f"{i}: {mine[i]!r} for the student, {theirs[i]!r} for the teacher"
        )


def _check_head(model: Any, head: Head, role: str) -> None:
    """The head rebuilt from weights and configuration must give the model's own logits."""
    ids = probe_ids(model, 1, 3)
    if ids is None or not head.weight.numel() or head.weight.is_meta:  # sharded by ZeRO-3, or not here yet
        return
    with evaluating(model):
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = model(input_ids=ids, use_cache=False).logits
        found = head.logits(hidden.to(head.weight)).to(expected)
    apart = float((found - expected).abs().max())
    bound = _HEAD_BOUND.get(expected.dtype, _HEAD_BOUND_NARROW) * max(1.0, float(expected.abs().max()))
    if not apart <= bound:
        raise UnsupportedError(
            f"{role} ({name_of(model)}) does more between its last hidden state and its logits than a matrix, a bias, a scale "
            f"and a softcap: rebuilt logits are off by {apart:.3g}. Distilling through them would train another model"
        )


def heads_of(student: nn.Module, teacher: nn.Module) -> tuple[Head, Head]:
    """Both heads, for the tiles of one step.

    Raises:
        UnsupportedError: they are on two devices.
    """
    heads = Head.of(student), Head.of(teacher)
    own, other = (head.weight.device for head in heads)
    if own != other:
        raise UnsupportedError(f"the student's head is on {own}, the teacher's on {other}: put both on one device_map device")
    return heads


def per_token(total: Any, count: Any, items: Any) -> Any:
    """``total`` over the number of tokens of the whole accumulation window, or of this batch where that is unknown."""
    if items is None:
        return total / count.clamp(min=1)
    items = torch.as_tensor(items, device=total.device)
    return total / items.masked_fill(items == 0, 1)  # a window without tokens is 0, as in TRL, not 0 / 0


def prepare_teacher(trainer: Any, teacher: nn.Module) -> nn.Module:
    """The teacher placed as the trainer places models for evaluation; it is never trained."""
    from trl.models import prepare_deepspeed

    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(teacher, trainer.accelerator)
    return trainer.accelerator.prepare_model(teacher, evaluation_mode=True)


def load_teacher(source: Any, init: Any, args: Any) -> Any:
    """A teacher from a path, as TRL loads its teachers, or the model itself.

    Raises:
        ConfigError: options for loading a model that is loaded already.
    """
    from trl.trainer.utils import create_model_from_path

    if not isinstance(source, str):
        if init:
            raise ConfigError(
                f"teacher_model_init_kwargs={dict(init)!r} are for loading, but teacher_model is the loaded {name_of(source)}"
            )
        return source
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, **(init or {})}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    return create_model_from_path(source, **options)
