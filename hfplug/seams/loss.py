"""How a loss term enters training: ``loss + weight * term`` in any ``Trainer``, TRL's included, right under accumulation.

TRL's trainers run a fused LM head that builds no logits and ignores the loss a model returns, so a term reads hidden states
through hooks on the token stack (:func:`hfplug.calls.token_stack`) and is added by wrapping ``trainer.compute_loss``.

Normalisation. A term returns a sum over positions and their count. The count of the whole accumulation window, over all
ranks where ``average_tokens_across_devices`` is set, is taken from the batches before the first of them runs; the term is
``total / count`` of the window, whatever the cut into micro-batches and whatever way the stock loss is normalised. Where a
trainer's batches do not tell (GRPO draws its samples later), it is the mean of the micro-batch, averaged over the window.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback

from hfplug.auxiliary import depend, hide, restore, save
from hfplug.calls import Call, CallScope, call_scope
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.ledger import Ledger
from hfplug.method import Kind
from hfplug.metrics import metrics_of, relay_class
from hfplug.options import build
from hfplug.plugins import catalogue, load
from hfplug.positions import batch_pairs, first_tensor

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Term:
    """What one forward contributes.

    Attributes:
        total: 0-d float tensor with gradient: the sum over the counted positions.
        count: 0-d tensor: how many positions ``total`` is a sum over.
    """

    total: Tensor
    count: Tensor


class LossTerm:
    """Base of a loss term. A subclass sets the class attributes and implements :meth:`setup` and :meth:`compute`.

    Attributes:
        method: name of the method; metrics are called ``<method>/loss``.
        config_class: the dataclass of its options; ``weight`` is read from it unless :meth:`weight` is overridden.
    """

    method: ClassVar[str]
    config_class: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__}(config={config!r}) takes a {self.config_class.__name__}, not a {type(config).__name__}"
            )
        self.config = config
        self._call: Call | None = None  # the forward of the stack that is running and counts

    def setup(self, model: nn.Module, stack: nn.Module, ledger: Ledger) -> nn.Module | None:
        """Install what the term reads (see :meth:`capture`); return its trainable module, if it has one.

        The seam places that module in ``model``, on the device of the stack's output, where the optimizer, clipping and DDP
        see it. It is never part of what is saved as the model, and is gone when training has ended.

        Args:
            model: the trainer's model, unwrapped (a ``PeftModel`` where PEFT is used).
            stack: its token stack, whose output holds the last hidden states.
            ledger: everything done to the model goes through it.
        """
        raise NotImplementedError

    def compute(self, inputs: Mapping[str, Any], call: Call) -> Term:
        """The term of one forward of the stack; called while the forward is running, autocast included.

        Args:
            inputs: the batch as ``compute_loss`` got it.
            call: what the stack was called with; :meth:`captured` reads what :meth:`capture` stored.
        """
        raise NotImplementedError

    def support(self, batch: Any) -> Tensor | None:
        """How many positions :meth:`compute` will count in ``batch``; ``None`` when the batch alone does not tell.

        By default the pairs of :func:`token_pairs` whose target has a label.
        """
        return batch_pairs(batch, "labels")

    def weight(self, state: Any) -> float:
        """The weight at this step of training; ``state`` is the ``TrainerState``."""
        return float(self.config.weight)

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do at all; if not, the trainer is left as it is."""
        return bool(self.config.weight != 0)

    def capture(self, ledger: Ledger, module: nn.Module, key: str, *, detach: bool = False) -> None:
        """Keep the first tensor that ``module`` returns, for :meth:`captured`; once per forward, also under checkpointing.

        Raises (when it runs):
            UnsupportedError: the tensor has no gradient because a checkpoint function hides it, unless ``detach``.
        """

        def keep(hooked: nn.Module, args: Any, output: Any) -> None:
            # No call when the stack is not running: gradient checkpointing recomputes in backward, after it has returned.
            if self._call is None:
                return
            value = first_tensor(output)
            if self._differentiated and not detach and not torch.is_grad_enabled():
                raise UnsupportedError(
                    f"{self.method} needs the gradient of {type(module).__name__}, which reentrant gradient checkpointing hides; "
                    'set gradient_checkpointing_kwargs={"use_reentrant": False}'
                )
            self._call.memo[self.method, key] = value.detach() if detach else value

        ledger.hook(module, "forward", keep)

    def captured(self, call: Call, key: str) -> Tensor:
        """Take what :meth:`capture` kept under ``key`` in this call."""
        try:
            return call.memo.pop((self.method, key))
        except KeyError:
            raise UnsupportedError(
                f"{self.method}: the forward did not run the module captured as {key!r}, so there is nothing to compute from"
            ) from None

    _differentiated = False  # whether that forward builds a graph


# -- attaching ----------------------------------------------------------------------------------------------------------


class TermHandle:
    """A loss term on a trainer. Also a context manager that undoes on exit.

    Attributes:
        term: the term.
        auxiliary: its trainable module while training is possible, else ``None``.
    """

    def __init__(self, term: LossTerm) -> None:
        self.term = term
        self.auxiliary: nn.Module | None = None

    def undo(self) -> None:
        """Leave trainer and model as they were before. An optimizer that exists by now keeps the module's parameters."""

    def __enter__(self) -> TermHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class _Attached(TermHandle):
    def __init__(self, trainer: Trainer, term: LossTerm) -> None:
        super().__init__(term)
        self.trainer: Any = trainer
        self.name = f"hfplug_{term.method}"
        self.model: nn.Module = self.trainer.model
        self.scope: CallScope = call_scope(self.model)
        self.on_model, self.on_trainer = Ledger(term.method), Ledger(term.method)
        self.ended = False
        self.window: Tensor | None = None  # positions in the accumulation window, over all ranks it is averaged over
        self.inputs: Mapping[str, Any] | None = None
        self.ddp = False
        self.terms: list[Term] = []

    def attach(self) -> None:
        self.scope.join(self.name)
        try:
            with self.on_model.transaction(), self.on_trainer.transaction():
                self._on_model()
                self._on_trainer()
        except BaseException:
            self.scope.leave(self.name)
            raise

    def undo(self) -> None:
        self.ended = True
        self.on_trainer.undo()
        self._leave_model()

    def _leave_model(self) -> None:
        self.ended, self.auxiliary, self.window = True, None, None
        try:
            self.on_model.undo()
        finally:
            self.scope.leave(self.name)

    # -- model

    def _on_model(self) -> None:
        stack, ledger, term = self.scope.stack, self.on_model, self.term

        def enter(module: nn.Module, args: Any) -> None:
            # Only the forwards of compute_loss count, and of those in training only the ones that will be differentiated:
            # a reference's or a metric's forward runs without gradients. A deepcopy of the model has these hooks too.
            term._differentiated = torch.is_grad_enabled()
            counts = module is stack and self.inputs is not None and term._differentiated == self.model.training
            term._call = self.scope.current if counts else None

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            call, term._call = term._call, None
            if call is None or self.inputs is None:
                return None
            found = term.compute(self.inputs, call)
            self.terms.append(found)
            return depend(output, found.total) if self.ddp and found.total.requires_grad else None

        ledger.hook(stack, "forward_pre", enter)
        # Its own stream of random numbers: dropout and the order of the data stay those of the run without the term.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.trainer.args.seed)  # torch.manual_seed would reseed the GPUs too
            auxiliary = term.setup(self.model, stack, ledger)
        if auxiliary is not None:
            device = list(stack.parameters())[-1].device
            auxiliary.to(device).train(self.model.training).requires_grad_(True)
            hide(auxiliary, self.name)
            ledger.add_module(self.model, self.name, auxiliary)
            self.auxiliary = auxiliary
        ledger.hook(stack, "forward", leave)  # after the hooks of setup, whose captures it needs

    # -- trainer

    def _on_trainer(self) -> None:
        trainer, ledger = self.trainer, self.on_trainer
        callbacks = trainer.callback_handler.callbacks
        if not any(isinstance(c, relay_class()) for c in callbacks):  # the trainer was built before hfplug was imported
            relay = relay_class()()
            ledger.append(callbacks, relay)
            callbacks.insert(0, callbacks.pop())
        ledger.append(callbacks, _Watch(self))
        for name in ("compute_loss", "get_batch_samples", "_save_optimizer_and_scheduler", "_load_from_checkpoint"):
            stock = getattr(trainer, name)
            ledger.set_attr(trainer, name, functools.wraps(stock)(functools.partial(getattr(self, f"_wrap_{name}"), stock)))

    def _wrap_get_batch_samples(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        if not self.ended:
            counts = [self.term.support(batch) for batch in found[0]]
            self.window = None
            if counts and all(c is not None for c in counts):
                device = self.trainer.args.device
                self.window = torch.stack([torch.as_tensor(c, device=device, dtype=torch.float64) for c in counts]).sum()
                if self._over_ranks:
                    self.window = self.trainer.accelerator.gather(self.window.reshape(1)).sum()
        return found

    def _wrap_compute_loss(self, stock: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        training = self.model.training
        if self.ended:
            if training and torch.is_grad_enabled() and len(self.on_trainer):
                raise UnsupportedError(
                    f"the loss term {self.term.method!r} ended with the previous train(), and its trainable module is gone; "
                    "call undo() on its handle to go on without it, or build a new Trainer and add it again"
                )
            return stock(model, inputs, *args, **kwargs)
        self.terms = []
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else {}  # the stock code takes labels out of it
        self.ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        try:
            result = stock(model, inputs, *args, **kwargs)
        finally:
            self.inputs = None
        terms, self.terms = self.terms, []
        if not terms:
            if training and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"{type(self.trainer).__name__}.compute_loss did not run {type(self.scope.stack).__name__} with gradients, "
                    f"so the loss term {self.term.method!r} has nothing to add to"
                )
            return result
        total, count = sum(t.total for t in terms), sum(t.count for t in terms)
        metrics_of(self.trainer.state).add(f"{self.term.method}/loss", total, count, "train" if training else "eval")
        if not (training and torch.is_grad_enabled()):
            return result  # eval_loss stays comparable with a run without the term
        bound = inspect.signature(stock).bind(model, inputs, *args, **kwargs).arguments
        scale = self._scale(count, bound.get("num_items_in_batch", kwargs.get("num_items_in_batch")))
        extra = self.term.weight(self.trainer.state) * scale * total
        if isinstance(result, tuple):
            return (result[0] + extra.to(result[0].device), *result[1:])
        return result + extra.to(result.device)

    @property
    def _over_ranks(self) -> bool:
        return bool(self.trainer.args.average_tokens_across_devices and self.trainer.accelerator.num_processes > 1)

    def _scale(self, count: Any, num_items_in_batch: Any) -> Any:
        """What ``total`` of this micro-batch is multiplied with to become its share of the window's mean."""
        trainer = self.trainer
        # The length of this window; the attribute appears with the first one.
        steps = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
        # As Trainer.training_step decides whether it divides the loss by the accumulation steps.
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_model or trainer.compute_loss_func is not None
        divided_later = 1 if scaled else steps
        if self.window is None:
            return divided_later / (torch.as_tensor(count).clamp(min=1) * steps)
        ranks = trainer.accelerator.num_processes if self._over_ranks else 1  # DDP averages gradients over ranks
        return ranks * divided_later / self.window.clamp(min=1).to(torch.float32)

    # -- checkpoints

    @property
    def _file(self) -> str:
        return f"hfplug_aux_{self.term.method}.safetensors"

    def _wrap__save_optimizer_and_scheduler(self, stock: Any, output_dir: str, *args: Any, **kwargs: Any) -> Any:
        if self.auxiliary is not None and self.trainer.args.should_save:
            save(self.auxiliary, Path(output_dir) / self._file, {"hfplug": self.term.method})
        return stock(output_dir, *args, **kwargs)

    def _wrap__load_from_checkpoint(self, stock: Any, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> Any:
        found = stock(resume_from_checkpoint, *args, **kwargs)
        if self.auxiliary is not None:
            restore(self.auxiliary, Path(resume_from_checkpoint) / self._file, f"the loss term {self.term.method!r}")
        return found

    # -- events

    def begin(self) -> None:
        if self.trainer.model is not self.model:
            raise UnsupportedError(
                f"the trainer's model was replaced after the loss term {self.term.method!r} was added; add it to the new one"
            )
        if self.auxiliary is not None:
            held = {id(p) for group in self.trainer.optimizer.param_groups for p in group["params"]}
            if missing := [n for n, p in self.auxiliary.named_parameters() if id(p) not in held]:
                raise UnsupportedError(
                    f"{type(self.trainer).__name__}.create_optimizer left out {missing} of {self.name}, so they would not be "
                    "trained; let it take every parameter of the model that requires a gradient"
                )


class _Watch(TrainerCallback):
    """Looks at the trainer when training begins, and takes the term off the model when it ends."""

    def __init__(self, attached: _Attached) -> None:
        self.attached = attached

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.attached.ended:
            self.attached.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.attached.ended:
            # Only the model: taking callbacks out of the list that is being walked would skip one.
            self.attached._leave_model()


def _refuse(trainer: Any, term: LossTerm) -> None:
    def no(why: str) -> UnsupportedError:
        return UnsupportedError(f"losses.add({term.method!r}): {why}")

    if trainer.optimizer is not None:
        raise no("the trainer has an optimizer already, which would not train the term's parameters; add the term before train() "
                 "and leave `optimizers` to the trainer")  # fmt: skip
    if trainer.model_init is not None:
        raise no("a trainer with `model_init` builds a new model at train(); pass it `model` instead")
    sizes = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    if split := [f"{name} parallelism of {size}" for name, size in sizes.items() if size > 1]:
        raise no(f"{' and '.join(split)} is not supported: a rank does not hold whole sequences and layers; data parallelism is")
    for active, what in (
        (trainer.is_fsdp_enabled, "FSDP"),
        (trainer.is_deepspeed_enabled, "DeepSpeed"),
        (trainer.args.n_gpu > 1, "torch.nn.DataParallel (several GPUs in one process)"),
        (trainer.args.torch_compile, "torch_compile=True"),
    ):
        if active:
            raise no(f"{what} is not supported; one device per process, with DDP over several, is")
    watching = [c for c in trainer.callback_handler.callbacks if isinstance(c, _Watch)]
    if any(c.attached.term.method == term.method for c in watching):
        raise no("this term is on the trainer already; call undo() on its handle first")


def add(trainer: Trainer, term: str | LossTerm, **options: Any) -> TermHandle:
    """Add a loss term to a trainer that is built and has not trained yet. See :func:`hfplug.losses.add`."""
    if isinstance(term, str):
        entry = catalogue().get(term, Kind.LOSS)
        config = build(entry.load_config(), options, where=f"losses.add({term!r})")
        term = load(term, Kind.LOSS)(config)
    elif options:
        raise ConfigError(
            f"losses.add: options {sorted(options)} belong into the config of the {type(term).__name__} that was passed"
        )
    if not isinstance(term, LossTerm):
        raise ConfigError(f"losses.add: term={term!r} is neither the name of a loss nor a LossTerm")
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"losses.add: trainer={type(trainer).__name__} is not a transformers Trainer (or a subclass, as TRL's are)"
        )
    if not term.enabled:
        logger.info("hfplug: the weight of the loss term %r is 0; the trainer is left as it is", term.method)
        return TermHandle(term)
    _refuse(trainer, term)
    attached = _Attached(trainer, term)
    attached.attach()
    return attached
