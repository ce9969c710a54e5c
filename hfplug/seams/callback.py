"""Callbacks: a ``TrainerCallback`` that never costs the user a run.

:class:`HfplugCallback` gives a method author, without further code:

* errors in events and hooks are reported once, undo everything, and training goes on bit for bit as without the callback;
* metrics that reach ``log_history``, trainer_state.json and every tracker (see :mod:`hfplug.metrics`);
* hooks counted once under gradient checkpointing, and gone when training ends;
* attributes that survive ``resume_from_checkpoint``.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import logging
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from transformers.trainer_callback import ExportableState, TrainerCallback

from hfplug.calls import CallScope, call_scope
from hfplug.errors import ConfigError, HfplugError, one_line
from hfplug.ledger import Ledger
from hfplug.metrics import Mode, deliver, metrics_of
from hfplug.options import build

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

EVENTS = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))
MAX_STATE_BYTES = 2**20  # trainer_state.json is JSON, written whole at every checkpoint
_TENSOR = "hfplug_tensor"


def _guard(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event so that its error ends the callback, not the run; the base's own work is done around it."""

    @functools.wraps(function)
    def guarded(self: HfplugCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._in_event:  # called by a subclass through super()
            return function(self, args, state, control, **kwargs)
        self._in_event = True
        try:
            self._before(event, state, kwargs)
            if self.disabled is None:
                return function(self, args, state, control, **kwargs)
        except ConfigError as error:
            if event == "on_init_end":  # nothing has run yet, and the user can correct what was asked for
                raise
            self._fail(event, error)
        except Exception as error:
            self._fail(event, error)
        finally:
            self._in_event = False
            if event == "on_train_end":
                self._end()
        return None

    guarded._hfplug_guarded = True  # type: ignore[attr-defined]
    return guarded


class HfplugCallback(TrainerCallback, ExportableState):
    """Base of the callbacks of plugins.

    Set ``method`` and ``config_class`` and override events as in any ``TrainerCallback``; there is no need to call
    ``super()`` in them. In an event or a hook use :meth:`hook`, :attr:`ledger`, :meth:`log_metric`, :attr:`scope` and
    :attr:`model`. What hangs on the model is set up in ``on_train_begin`` and is removed by the base after
    ``on_train_end``.

    Args:
        config: a ``config_class``, or a mapping of its options; ``None``: built from ``options``.
        options: the options one by one, instead of ``config``.

    Raises:
        ConfigError: unknown option, wrong type or value; or both ``config`` and options were given.

    Attributes:
        critical: a callback that guards the training (stop on NaN) sets it: then its errors do end the run.
        state_attributes: names of attributes restored by ``resume_from_checkpoint``, whether or not
            ``restore_callback_states_from_checkpoint`` is set. Set them in ``__init__``. Values are what JSON holds, plus
            tensors (bit for bit, at any depth of lists and dicts, restored on the CPU), ``MAX_STATE_BYTES`` in all. They
            are part of trainer_state.json; anything larger belongs in a file of its own, written in ``on_save``.
        config: the options.
        ledger: for every other change to the model or to a registry; undone with the hooks.
        model: the model being trained, without DDP or compile wrappers (a ``PeftModel`` stays one); ``None`` before and
            after training.
        trainer_state: the ``TrainerState`` of the run.
        disabled: ``None``, or the error that turned this callback off.
    """

    method: ClassVar[str]
    config_class: ClassVar[type[Any]]
    critical: ClassVar[bool] = False
    state_attributes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any = None, **options: Any) -> None:
        self.config = self._build_config(config, options)
        self.ledger = Ledger(self.method)
        self.model: nn.Module | None = None
        self.trainer_state: Any = None
        self.disabled: Exception | None = None
        self._scope: CallScope | None = None
        self._in_event = False
        self._late_trackers_told = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for event in EVENTS:  # those of mixins too, hence not only what stands in the class body
            function = getattr(cls, event)
            if function is not getattr(TrainerCallback, event) and not hasattr(function, "_hfplug_guarded"):
                setattr(cls, event, _guard(event, function))

    def _build_config(self, config: Any, options: Mapping[str, Any]) -> Any:
        where = type(self).__name__
        if config is None or isinstance(config, Mapping):
            if config and options:
                raise ConfigError(f"{where}: give config= or single options ({sorted(options)}), not both")
            return build(self.config_class, {**(config or {}), **options}, where)
        if not isinstance(config, self.config_class) or options:
            given = f"and options {sorted(options)}" if options else f"of type {type(config).__name__}"
            raise ConfigError(f"{where}: config must be a {self.config_class.__name__} alone, or a mapping; got config {given}")
        return config

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @property
    def scope(self) -> CallScope:
        """The calls of the model (padding mask, packed documents, recomputation), followed from the first use on.

        Raises:
            HfplugError: no training is running.
        """
        if self._scope is None:
            self._scope = call_scope(self._running())
            self._scope.join(self._user)
        return self._scope

    def hook(self, module: nn.Module, kind: str, function: Callable[..., Any], **kwargs: Any) -> None:
        """Add an observing hook to a module of the model; it is guarded, and removed after training.

        The value ``function`` returns is dropped, so it cannot change the run. Under gradient checkpointing a forward hook
        runs in the forward only, not again in the recomputation.

        Args:
            module: any module.
            kind: ``"forward"``, ``"forward_pre"``, ``"full_backward"``, … as in ``register_<kind>_hook``.
            function: as torch calls it.
            kwargs: passed to torch, e.g. ``with_kwargs=True``.

        Raises:
            LedgerError: torch has no such kind.
            HfplugError: no training is running.
        """
        # Outside the token stack (an output head) nothing is recomputed, and a scope has no call to tell it by; nor is the
        # stack itself, whose call has ended when its own forward hooks run.
        stack = self.scope.stack
        once = kind.startswith("forward") and module is not stack and any(m is module for m in stack.modules())

        def observe(*args: Any, **hook_kwargs: Any) -> None:
            if not (once and self._scope is not None and self._scope.recompute):
                self.attempt(f"a {kind} hook on {type(module).__name__}", function, *args, **hook_kwargs)

        self.ledger.hook(module, kind, observe, **kwargs)

    def attempt(self, where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` under the guard; for code that runs inside the model by another way than :meth:`hook`.

        Returns:
            What it returns; ``None`` when it failed or the callback is off.
        """
        if self.disabled is None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self._fail(where, error)
        return None

    def log_metric(self, name: str, total: Any, count: Any = 1, mode: Mode | None = None) -> None:
        """Add to a metric; ``sum(total) / sum(count)`` over the logging window and all ranks is logged, once.

        Args:
            name: key in the logs, by convention ``"<method>/<what>"``.
            total: number or 0-d tensor; no device is waited for.
            count: number or 0-d tensor: what ``total`` is a sum over.
            mode: ``None``: ``"eval"`` while the model is in evaluation mode. Eval metrics are logged with the evaluation
                that ends next, under its prefix.

        Raises:
            HfplugError: no training is running.
            ConfigError: not a single number.
        """
        running = self._running()
        metrics_of(self.trainer_state).add(name, total, count, mode or ("train" if running.training else "eval"))

    def detach(self) -> None:
        """Take every hook and change off the model now; training goes on unobserved. Safe to call again."""
        scope, self._scope = self._scope, None
        try:
            self.ledger.undo()
        finally:
            if scope is not None:
                scope.leave(self._user)

    # -- events -----------------------------------------------------------------------------------------------------

    def _nothing(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every event the base must see, for subclasses that do not override it."""

    on_train_begin = _guard("on_train_begin", _nothing)
    on_train_end = _guard("on_train_end", _nothing)
    on_log = _guard("on_log", _nothing)

    def _before(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        self.trainer_state = state
        if event == "on_train_begin":
            self.detach()  # a run that was interrupted, or restarted with a smaller batch, had no on_train_end
            self.model = _unwrap(kwargs.get("model"))
            self._restore(state)
        elif event == "on_log":
            self._deliver_late(state, kwargs.get("logs"))

    def _end(self) -> None:
        try:
            self.detach()
        except HfplugError as error:
            logger.warning("hfplug: callback %r: %s", self.method, one_line(error))
        self.model = None
        if self.disabled is not None:
            cause = one_line(self.disabled)
            logger.warning("hfplug: callback %r was off for part of this run: %s", self.method, cause)

    def _fail(self, where: str, error: Exception) -> None:
        first, self.disabled = self.disabled is None, self.disabled or error
        try:
            self.detach()
        except HfplugError as failure:
            error.add_note(f"hfplug: {one_line(failure)}")
        if self.critical:
            raise error
        if first:
            step = getattr(self.trainer_state, "global_step", "?")
            trace = "".join(traceback.format_exception(error))
            logger.warning(
                "hfplug: callback %r failed in %s after step %s and is off from here on; training goes on.\n%s",
                self.method, where, step, trace,
            )  # fmt: skip

    def _deliver_late(self, state: Any, logs: dict[str, Any] | None) -> None:
        # Trainers built before hfplug was imported have no relay in their list. Only this, which is the same on every
        # rank, may decide: delivering is a collective operation.
        if logs is None or metrics_of(state).relayed:
            return
        if deliver(state, logs) and not self._late_trackers_told:
            self._late_trackers_told = True
            logger.warning(
                "hfplug: this Trainer was built before hfplug was imported, so trackers listed before callback %r do not "
                "get its metrics (log_history and trainer_state.json do); import hfplug first",
                self.method,
            )

    def _running(self) -> nn.Module:
        if self.model is None:
            raise HfplugError(f"callback {self.method!r} is not in a training run: this works from on_train_begin on")
        return self.model

    @property
    def _user(self) -> str:
        return f"{self.method}:{id(self)}"

    # -- state over resume ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of this callback: options and ``state_attributes``, as JSON.

        Called by ``Trainer`` outside of any event. What cannot be saved turns the callback off instead of losing the
        checkpoint.
        """
        try:
            out = {
                "args": {"config": dataclasses.asdict(self.config)},
                "attributes": {name: _encode(getattr(self, name), name) for name in self.state_attributes},
            }
            size = len(json.dumps(out))
            if size > MAX_STATE_BYTES:
                raise HfplugError(f"state of {size} bytes is more than {MAX_STATE_BYTES}; save a file in on_save instead")
        except Exception as error:
            self._fail("state()", error)
            return {"args": {}, "attributes": {}}
        return out

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> HfplugCallback:
        """Build the callback a checkpoint describes."""
        instance = cls(**state["args"])
        instance._set_attributes(state)
        return instance

    def _set_attributes(self, saved: Mapping[str, Any]) -> None:
        for name in self.state_attributes:
            if name in saved.get("attributes", {}):
                setattr(self, name, _decode(saved["attributes"][name]))

    def _restore(self, state: Any) -> None:
        name = type(self).__name__
        stored = state.stateful_callbacks
        if name not in stored:
            # Resumed from a checkpoint without this callback: Trainer's next save would end in a KeyError.
            stored[name] = self.state()
            return
        if state.global_step == 0:
            return
        # Trainer appends to the list at every save when there are several callbacks of a class: the last fitting one.
        entries = stored[name] if isinstance(stored[name], list) else [stored[name]]
        mine = self.state()["args"]
        found = [entry for entry in entries if entry.get("args") == json.loads(json.dumps(mine))]
        if found or len(entries) == 1:
            self._set_attributes((found or entries)[-1])
        elif self.state_attributes:
            raise HfplugError(f"the checkpoint holds {len(entries)} states of {name}, none with the options {mine}; not restored")


def _unwrap(model: Any) -> Any:
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)


def _encode(value: Any, where: str) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        from safetensors.torch import save

        data = save({"": value.detach().cpu().contiguous()})
        return {_TENSOR: base64.b64encode(data).decode("ascii")}
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):  # JSON would turn it into one without a word
                raise HfplugError(f"{where} has the key {key!r}; keys of saved state must be strings")
        return {key: _encode(v, f"{where}[{key!r}]") for key, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise HfplugError(f"{where} is a {type(value).__name__}; saved state holds numbers, strings, lists, dicts and tensors")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            from safetensors.torch import load

            return load(base64.b64decode(value[_TENSOR]))[""]
        return {key: _decode(v) for key, v in value.items()}
    return value
