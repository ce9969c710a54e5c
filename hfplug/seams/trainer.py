"""How a trainer enters training: an ordinary subclass of a TRL trainer with a config of its own, checked before it is built.

``TASKS`` is the one table of where TRL keeps its trainers; the base of every method and ``hfplug train`` read it. A method is

* a config, ``@dataclass class XConfig(MethodConfig, stock_config("sft"))``: its own fields are strict, TRL's stay TRL's;
* a trainer, ``class XTrainer(MethodTrainer, stock_trainer("sft"))``, with the constructor of its stock trainer, whose
  :meth:`MethodTrainer.check` refuses what the method cannot do before a model is loaded or data is tokenised.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.metrics import metrics_of
from hfplug.options import coerce
from hfplug.plugins import load_dotted


@dataclass(frozen=True)
class Task:
    """One way of training that TRL has a trainer for; every place is ``"module:attribute"``.

    Attributes:
        trainer: the trainer.
        config: its config.
        script: the arguments of its script.
        task_type: PEFT's name of what is trained.
    """

    trainer: str
    config: str
    script: str = "trl:ScriptArguments"
    task_type: str = "CAUSAL_LM"


# The only place that says where TRL keeps a trainer: they have moved between trl and trl.experimental before.
TASKS = {
    "sft": Task("trl:SFTTrainer", "trl:SFTConfig"),
    "dpo": Task("trl:DPOTrainer", "trl:DPOConfig"),
    "grpo": Task("trl:GRPOTrainer", "trl:GRPOConfig", "trl.scripts.grpo:GRPOScriptArguments"),
    "reward": Task("trl:RewardTrainer", "trl:RewardConfig", task_type="SEQ_CLS"),
    "distill": Task("trl:DistillationTrainer", "trl:DistillationConfig"),
}


def task(name: str) -> Task:
    """The row of a task.

    Raises:
        ConfigError: no such task.
    """
    if name not in TASKS:
        raise ConfigError(f"task {name!r} is not one of {list(TASKS)}{nearest(name, TASKS)}")
    return TASKS[name]


@functools.cache
def stock_trainer(name: str) -> Any:
    """TRL's trainer class of a task (a base for subclasses)."""
    return load_dotted(task(name).trainer)


@functools.cache
def stock_config(name: str) -> Any:
    """TRL's config class of a task (a base for subclasses)."""
    return load_dotted(task(name).config)


def task_of(cls: type[Any]) -> str:
    """The task whose stock trainer (or config) a class extends.

    Raises:
        ConfigError: it extends none of them.
    """
    for name in TASKS:
        if issubclass(cls, (stock_trainer(name), stock_config(name))):
            return name
    raise ConfigError(f"{cls.__name__} extends none of TRL's trainers: {', '.join(t.trainer for t in TASKS.values())}")


def own_fields(cls: type[Any]) -> list[str]:
    """Names of the fields that a config adds to the stock config it extends."""
    stock = {f.name for f in dataclasses.fields(stock_config(task_of(cls)))}
    return [f.name for f in dataclasses.fields(cls) if f.name not in stock]


class _StockFields:
    """The fields of the stock config by name, once the subclass is a dataclass."""

    def __get__(self, instance: Any, owner: type[Any]) -> tuple[str, ...]:
        own = own_fields(owner)
        return tuple(f.name for f in dataclasses.fields(owner) if f.name not in own)


class MethodConfig:
    """First base of a method's config. Fields of its own are checked strictly, before TRL's ``__post_init__`` runs.

    A subclass overrides :meth:`check` for ranges, and for stock fields the method cannot work with. Changed defaults of
    stock fields are declared again. Fields of its own carry the method's name (``tgpo_tau``), so that they never meet a
    field of TRL.
    """

    hidden_options: ClassVar[Any] = _StockFields()  # what the method's own table of options leaves out

    def check(self) -> None:
        """Raise :class:`ConfigError` for what is out of range, :class:`UnsupportedError` for what does not go together."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for name in own_fields(type(self)):
            setattr(self, name, coerce(getattr(self, name), hints[name], name))
        self.check()
        super().__post_init__()  # type: ignore[misc]

    def require(self, method: str, why: str, **allowed: Iterable[Any]) -> None:
        """Refuse stock fields with a value outside those allowed, e.g. ``require("tgpo", "…", loss_type=("grpo", "dapo"))``.

        Raises:
            UnsupportedError: names the field, its value, what is allowed and why.
        """
        for name, values in allowed.items():
            value, known = getattr(self, name), list(values)
            if value not in known:
                near = nearest(value, map(str, known))
                raise UnsupportedError(f"{method}: {name}={value!r} is not supported, {why}; allowed: {known}{near}")

    def bound(self, name: str, *, least: float | None = None, most: float | None = None, above: float | None = None) -> None:
        """Refuse a number of one of its own fields (``None`` passes) unless ``least <= value <= most`` and ``value > above``.

        Raises:
            ConfigError: names the field, the value and the range; NaN and infinity are never in it.
        """
        value = getattr(self, name)
        if value is None:
            return
        low = f"> {above}" if above is not None else f">= {least}" if least is not None else ""
        words = " and ".join(w for w in (low, f"<= {most}" if most is not None else "") if w)
        inside = (above is None or value > above) and (least is None or value >= least) and (most is None or value <= most)
        if not inside or not math.isfinite(value):
            raise ConfigError(f"{name}={value!r} must be finite" + (f" and {words}" if words else ""))


class MethodTrainer:
    """First base of a method's trainer; the second is :func:`stock_trainer` (or a subclass of it).

    The constructor takes what that of the stock trainer takes. Before it runs, the config is looked at and :meth:`check` may
    refuse: nothing has been loaded, tokenised or changed by then.

    Attributes:
        method: name of the method; metrics are called ``<method>/…``.
        config_class: its config.
    """

    method: ClassVar[str]
    config_class: ClassVar[type[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        config = given.arguments.get("args")
        if not isinstance(config, self.config_class):
            kind = type(config).__name__
            raise ConfigError(f"{type(self).__name__}(args=…) needs a {self.config_class.__name__}, got a {kind}")
        self.check(config, given.arguments)
        super().__init__(*given.args, **given.kwargs)

    def check(self, config: Any, given: Mapping[str, Any]) -> None:
        """Raise or warn about what the method cannot do.

        Args:
            config: the method's config.
            given: the arguments of the constructor by name, those that were passed.
        """

    def log_metric(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to the metric ``<method>/<name>`` of this logging window; see :meth:`hfplug.metrics.PendingMetrics.add`.

        Training and evaluation are kept apart as TRL does: by whether the model is in training mode.
        """
        trainer: Any = self
        mode: Any = "train" if trainer.model.training else "eval"
        metrics_of(trainer.state).add(f"{self.method}/{name}", total, count, mode)


def columns_of(dataset: Any) -> list[str] | None:
    """Column names of a dataset (of the first of several); ``None`` where they are not known before it is read."""
    if isinstance(dataset, Mapping):
        dataset = next(iter(dataset.values()), None)
    return getattr(dataset, "column_names", None)


def require_columns(method: str, dataset: Any, columns: Iterable[str], where: str = "train_dataset") -> None:
    """Refuse a dataset that is known to lack a column.

    Raises:
        ConfigError: names the column, the nearest that is there, and all of them.
    """
    found = columns_of(dataset)
    for column in columns:
        if found is not None and column not in found:
            raise ConfigError(f"{method}: {where} has no column {column!r}{nearest(column, found)}; columns: {sorted(found)}")
