"""Loss terms of every installed plugin: ``from hfplug.losses import NITPConfig``, and :func:`add`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfplug.method import Kind
from hfplug.namespace import lazy_namespace

if TYPE_CHECKING:
    from transformers import Trainer

    from hfplug.seams.loss import LossTerm, TermHandle


def add(trainer: Trainer, term: str | LossTerm, **options: Any) -> TermHandle:
    """Train with ``loss + weight * term`` from here on: in ``Trainer``, and in TRL's trainers with their fused LM head.

    Call it on a trainer that is built and has not trained yet::

        trainer = SFTTrainer(model, args=args, train_dataset=data)
        hfplug.losses.add(trainer, "nitp", weight=1.0)
        trainer.train()

    The term is normalised over the accumulation window (and over ranks as the trainer does), it is logged as
    ``<name>/loss`` and, in evaluation, as ``eval_<name>/loss``; ``eval_loss`` stays the stock loss. What the term trains
    besides the model stands in ``checkpoint-*/hfplug_aux_<name>.safetensors``, is restored by ``resume_from_checkpoint``,
    is never part of the saved model, and leaves the model when training ends.

    Args:
        trainer: a ``transformers.Trainer`` or subclass whose optimizer does not exist yet.
        term: name of a loss method, or a :class:`~hfplug.seams.loss.LossTerm`.
        **options: fields of the method's config, when ``term`` is a name.

    Returns:
        A handle; its ``undo()`` leaves trainer and model as they were.

    Raises:
        ConfigError: an unknown name or option (naming the nearest), a wrong value, or something that is not a trainer.
        UnsupportedError: a trainer this cannot work with (FSDP, DeepSpeed, …) or one that has its optimizer already.
    """
    from hfplug.seams import loss

    return loss.add(trainer, term, **options)


__getattr__, __dir__ = lazy_namespace(Kind.LOSS, __name__, dict.fromkeys(("LossTerm", "Term", "TermHandle"), "hfplug.seams.loss"))
