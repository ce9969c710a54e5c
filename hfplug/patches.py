"""Model patches on live models: ``hfplug.apply``, ``hfplug.applied``, ``hfplug.plan``.

A patch is applied to one model, never to a class, so that a teacher built beside a patched student stays stock. The patched
model gets a configuration of its own with the record of the patch; ``save_pretrained`` writes it, and
:mod:`hfplug.seams.patch` rebuilds the structure from it before weights are loaded.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, overload

from hfplug import artefacts
from hfplug.errors import ConfigError, HfplugError, LedgerError, UnsupportedError, one_line
from hfplug.families import Decoder, check_proven, decoder_of
from hfplug.method import Kind
from hfplug.modelpatch import WORKS_WITH, ModelPatch, PatchLedger, PatchModule, Touch
from hfplug.options import build
from hfplug.patchchecks import check_alive, check_state, optimizers_of
from hfplug.patchplan import Plan, Snapshot, describe, without_data
from hfplug.patchundo import check_on_top, settle, swapped
from hfplug.plugins import Entry, catalogue

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_hfplug_patches"  # on the token stack: a tuple of handles, the oldest first


class Patched:
    """A patch that is on a model.

    Use it as a context manager, or call :meth:`remove`.

    Attributes:
        method: name of the patch.
        patch: its options.
        plan: what it changed.
        model: the model it was applied to.
    """

    def __init__(self, entry: Entry, patch: ModelPatch, model: Any, ledger: PatchLedger, plan: Plan, rebuilt: bool) -> None:
        self.method, self.patch, self.model, self.plan = entry.method.name, patch, model, plan
        self.record = {**artefacts.record(entry), "options": dict(plan.options)}
        self._ledger, self._rebuilt = ledger, rebuilt

    def __repr__(self) -> str:
        return f"Patched({self.method!r}, patched {len(self.plan.layers)} of {self.plan.depth} layers)"

    @property
    def active(self) -> bool:
        """Whether it is still on the model."""
        return self in applied(self.model)

    def remove(self) -> None:
        """Take the patch off: modules, parameters, hooks, attributes and configuration are those from before, by identity.

        Weights trained or loaded meanwhile keep their values. Modules that come back follow the model to the device and dtype it
        has now; what a checkpoint of the patched model could not hold (the norms SimpleNorm takes out) starts at its first
        values, with a warning. Removing twice does nothing.

        Raises:
            LedgerError: patches applied later are still on the model and may rest on this one, or something was put over a
                module of the patch (an adapter) and would be lost.
        """
        handles = applied(self.model)
        if self not in handles:
            return
        if later := [h.method for h in handles[handles.index(self) + 1 :]]:
            raise LedgerError(f"{self.method}: {later} were applied after it; remove them first")
        check_on_top(self.method, self._ledger.touches)
        exchanged = swapped(self._ledger.touches)
        self._ledger.undo()
        settle(self.method, decoder_of(self.model).stack, exchanged)
        _remember(self.model, tuple(h for h in handles if h is not self))
        if self._rebuilt:  # its record came with the configuration and is no change of the ledger
            self._forget_record()

    undo = remove

    def _forget_record(self) -> None:
        mapping = _copied_config(self.model)
        for module in self.model.modules():
            for name, value in list(vars(module).items()):
                if id(value) in mapping:
                    setattr(module, name, mapping[id(value)])
        left = [r for r in artefacts.patch_records(self.model.config) if r.get("plugin") != self.method]
        _write_record(self.model.config, left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


# -- verbs ---------------------------------------------------------------------------------------------------------------


def apply(model: Any, patch: str | ModelPatch, *, force: bool = False, **options: Any) -> Patched:
    """Apply a patch to a transformers model.

    Args:
        model: the model, not yet inside PEFT, DDP, FSDP or ``torch.compile``.
        patch: name of a patch, or its options as an object.
        force: go on although the code that is replaced is not the one the patch was written for.
        options: fields of the patch, with a name.

    Returns:
        A handle; ``remove()`` undoes everything.

    Raises:
        ConfigError: no such patch, an unknown option or a wrong value.
        UnsupportedError: a family the patch does not know, or a model in a state it cannot be applied to.
        LedgerError: the patch is on the model already.
    """
    entry, made = resolve(patch, options)
    handle = _apply(model, entry, made, force=force, live=True)
    try:
        for sentence in made.warnings(decoder_of(model)):
            warnings.warn(f"{entry.method.name}: {sentence}", stacklevel=2)
    except BaseException:  # warnings may be errors (python -W error); who gets one has no handle to take the patch off with
        handle.remove()
        raise
    logger.info("%s: patched %d of %d layers", entry.method.name, len(handle.plan.layers), handle.plan.depth)
    return handle


@overload
def applied(model: Any) -> tuple[Patched, ...]: ...


@overload
def applied(model: Any, *patches: str | ModelPatch | tuple[str, Mapping[str, Any]]) -> Any: ...


def applied(model: Any, *patches: str | ModelPatch | tuple[str, Mapping[str, Any]]) -> Any:
    """The patches that are on a model, the oldest first; or, with ``patches``, a context in which those are.

    ``with hfplug.applied(model, "simplenorm", ("turboconn", {"group_size": 8})): ...``
    """
    if patches:
        return _within(model, patches)
    try:
        stack = decoder_of(model).stack
    except UnsupportedError:  # a family no patch knows has none
        return ()
    found: tuple[Patched, ...] = vars(stack).get(_ATTRIBUTE, ())
    return found


def plan(model: Any, patch: str | ModelPatch, *, force: bool = False, **options: Any) -> Plan:
    """What :func:`apply` with the same arguments would do; touches nothing, needs no memory for weights.

    The patch is applied to a copy of the model without data, so the answer is that of the real code.

    Raises:
        As :func:`apply`, but for what only a forward can show.
    """
    entry, made = resolve(patch, options)
    check_state(model, made)
    found = _apply(without_data(model), entry, made, force=force, live=False).plan
    _check_optimizers(model, made, found)
    return found


@contextlib.contextmanager
def _within(model: Any, patches: tuple[Any, ...]) -> Iterator[tuple[Patched, ...]]:
    handles: list[Patched] = []
    with contextlib.ExitStack() as stack:
        for each in patches:
            name, options = each if isinstance(each, tuple) else (each, {})
            handles.append(stack.enter_context(apply(model, name, **options)))
        yield tuple(handles)


def resolve(patch: str | ModelPatch, options: Mapping[str, Any]) -> tuple[Entry, ModelPatch]:
    """The catalogue entry and the options of a patch given by name or as an object.

    Raises:
        ConfigError: no such patch, an unknown option, a wrong value, or options beside an object.
    """
    if isinstance(patch, ModelPatch):
        if options:
            raise ConfigError(f"options {sorted(options)} beside {patch!r}: give them in the object, or give its name instead")
        entry = catalogue().get(patch.method, Kind.PATCH)
        if type(patch) is not entry.load_target():
            raise ConfigError(f"{type(patch).__name__} says it is the patch {patch.method!r}, which is {entry.method.target}")
        return entry, patch
    if not isinstance(patch, str):
        raise ConfigError(f"patch={patch!r} must be a name or the options of a patch as an object")
    entry = catalogue().get(patch, Kind.PATCH)
    entry.check()
    cls = entry.load_target()
    if not (isinstance(cls, type) and issubclass(cls, ModelPatch) and cls.method == patch):
        raise HfplugError(f"{entry.method.target} must be a ModelPatch with method = {patch!r}")
    made: ModelPatch = build(cls, options, where=f"patch {patch!r}")
    if unknown := sorted(cls.works_with - set(WORKS_WITH)):
        raise HfplugError(f"{cls.__name__}.works_with has {unknown[0]!r}; known: {WORKS_WITH}")
    return entry, made


def _plain(patch: ModelPatch) -> dict[str, Any]:
    stored = dataclasses.asdict(patch)
    try:
        plain: dict[str, Any] = json.loads(json.dumps(stored))
        same = build(type(patch), plain, where=f"patch {patch.method!r}") == patch
    except ConfigError:
        raise  # an object made with a wrong value
    except (TypeError, ValueError) as error:
        raise HfplugError(f"options of {patch.method!r} cannot be kept in config.json: {one_line(error)}") from error
    if not same:
        raise HfplugError(f"options of {patch.method!r} do not survive config.json: {stored!r} comes back as {plain!r}")
    return plain


# -- applying --------------------------------------------------------------------------------------------------------------


def _apply(model: Any, entry: Entry, patch: ModelPatch, *, force: bool, live: bool, rebuilt: bool = False) -> Patched:
    name, options = entry.method.name, _plain(patch)
    check_state(model, patch)
    decoder = decoder_of(model, patch.families)
    if any(handle.method == name for handle in applied(model)):
        raise LedgerError(f"{name} is on this {type(decoder.model).__name__} already; remove() it before applying it again")
    if not force and not rebuilt:
        check_proven(decoder)
    whole = decoder.model  # without PEFT around it, as the names of a decoder have it
    before, ledger = Snapshot(whole), PatchLedger(name)
    with ledger.transaction():
        patch.apply(model, ledger)
        found = describe(patch, options, decoder, before, Snapshot(whole), ledger)
        _check_plan(found, patch, decoder, before)
        if live:
            tensors = dict(whole.named_parameters())
            offloaded = any(p.is_meta for p in tensors.values()) and not all(p.is_meta for p in tensors.values())
            if offloaded and any(s.name in tensors and tensors[s.name].is_meta for s in found.added):
                raise UnsupportedError(
                    f"{name}: layers of the model are offloaded (device_map), and what the patch adds there would have no data; "
                    "apply the patch to a model on one device, save it, and load that with the device_map"
                )
            _check_optimizers(model, patch, found)
            for module in (t.new for t in ledger.touches if t.new is not None):
                for part in module.modules():
                    if isinstance(part, PatchModule):
                        part._is_hf_initialized = True  # type: ignore[assignment]
            patch.start(model)
            check_alive(name, decoder, ledger.touches)
        if not rebuilt:
            _keep_record(model, entry, found, ledger)
    handle = Patched(entry, patch, model, ledger, found, rebuilt)
    _remember(model, (*applied(model), handle))
    return handle


def _check_optimizers(model: Any, patch: ModelPatch, found: Plan) -> None:
    parameters = any(s.parameter for s in (*found.added, *found.removed))
    if parameters and "optimizer" not in patch.works_with and (held := optimizers_of(model)):
        raise UnsupportedError(
            f"{patch.method} adds {len(found.added)} and removes {len(found.removed)} tensors, but {held[0]} exists already and "
            "would go on with the old parameters; apply the patch before making the optimizer"
        )


def _check_plan(found: Plan, patch: ModelPatch, decoder: Decoder, before: Snapshot) -> None:
    wanted = sorted(set(patch.layers(decoder)))
    missing = [i for i in wanted if i not in found.layers]
    if missing or not wanted:
        raise UnsupportedError(
            f"{patch.method} patched {len(wanted) - len(missing)} of {len(wanted)} layers of {type(decoder.model).__name__}"
            + (f": nothing was changed in layer {missing[0]}" if missing else "; there is nothing to patch")
        )
    shared = {s.name for s in found.added} & {s.name for s in found.removed}
    if shared:
        raise HfplugError(f"{patch.method}: {min(shared)!r} has another shape or dtype than before; its name must be another too")


def _remember(model: Any, handles: tuple[Patched, ...]) -> None:
    place = vars(decoder_of(model).stack)
    if handles:
        place[_ATTRIBUTE] = handles
    else:
        place.pop(_ATTRIBUTE, None)


# -- the record in the configuration -----------------------------------------------------------------------------------------


def _write_record(config: Any, records: list[dict[str, Any]]) -> None:
    kept = {k: v for k, v in (getattr(config, artefacts.KEY, None) or {}).items() if k != artefacts.PATCH_SECTION}
    if records:
        kept[artefacts.PATCH_SECTION] = records
    if kept:
        setattr(config, artefacts.KEY, kept)
    elif hasattr(config, artefacts.KEY):
        delattr(config, artefacts.KEY)


def _copied_config(model: Any) -> dict[int, Any]:
    """id -> copy, for the configuration of a model and those inside it."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    return {i: c for i, c in copies.items() if isinstance(c, PreTrainedConfig)}


def _keep_record(model: Any, entry: Entry, found: Plan, ledger: PatchLedger) -> None:
    # The configuration object is the user's, who may build a teacher from it: the patched model gets one of its own.
    mapping = _copied_config(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in mapping:
                ledger.set_attr(module, name, mapping[id(value)])
    record = {**artefacts.record(entry), "options": dict(found.options)}
    _write_record(model.config, [*artefacts.patch_records(model.config), record])


def config_to_save(model: Any) -> Any:
    """The configuration that says which patches are on a model: its own, or a copy that does where its own does not.

    A patch given to a part of a model (``hfplug.apply(model.model, ...)``) is recorded in the part's configuration alone, and the
    whole model would be saved as if it were stock.
    """
    here = [handle.record for handle in applied(model)]
    if artefacts.patch_records(model.config) == here:
        return model.config
    config = copy.deepcopy(model.config)
    _write_record(config, here)
    return config


def note_on_adapters(model: Any) -> None:
    """Write on the configuration of each adapter which patches the model has now: they may have come, or gone, after it."""
    here = [handle.record for handle in applied(model)]
    for config in (getattr(model, "peft_config", None) or {}).values():
        vars(config)[artefacts.PATCHES] = here


def rebuild(model: Any) -> tuple[Patched, ...]:
    """Apply the patches that the configuration of a model under construction records, if they are not on it yet.

    Raises:
        MissingPluginError, UnsupportedError: a patch that is not installed here, is of a newer format, or cannot be applied.
        ConfigError: an option this version of the patch does not know or take.
    """
    records = artefacts.patch_records(model.config)
    handles = applied(model)
    for handle in handles:
        handle.model = model  # the outermost so far
    for record in records[len(handles) :]:
        what = f"the model's configuration (patch {record.get('plugin')!r})"
        artefacts.check_record(record, what)
        entry = catalogue().get(record["plugin"], Kind.PATCH)
        entry.check()
        patch = build(entry.load_target(), record.get("options", {}), where=what)
        if getattr(model.config, "quantization_config", None) is not None and "quantized" not in patch.works_with:
            raise UnsupportedError(f"{entry.method.name} cannot be rebuilt in a quantised model; load it without quantisation")
        _apply(model, entry, patch, force=False, live=False, rebuilt=True)
    return applied(model)


__all__ = ["Patched", "Plan", "Touch", "applied", "apply", "config_to_save", "note_on_adapters", "plan", "rebuild", "resolve"]
