"""The ledger: whatever is done through it, in whatever order it is undone, everything is as it was before."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hfplug import Ledger, LedgerError, changes

HOOKS = (
    "forward",
    "forward_pre",
    "full_backward",
    "full_backward_pre",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


class Base:
    inherited = "class value"
    __slots__ = ("empty_slot", "full_slot")


class Thing(Base):
    """An object with every sort of attribute."""

    def __init__(self) -> None:
        self.own = ["own"]
        self.full_slot = ["slot"]
        self._stored: Any = ["property"]

    @property
    def guarded(self) -> Any:
        return self._stored

    @guarded.setter
    def guarded(self, value: Any) -> None:
        self._stored = value


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.last = nn.Linear(3, 3)
        self.notes: dict[str, Any] = {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.norm(self.first(x))))


def make_class() -> type:
    class Patched:
        plain: ClassVar = ["plain"]

        @staticmethod
        def static() -> str:
            return "static"

        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @property
        def computed(self) -> str:
            return "computed"

    return Patched


def contents(target: Any) -> list[Any]:
    """What an object holds, by identity and in order; tables of a module are opened."""
    if isinstance(target, list):
        return [id(value) for value in target]
    pairs = list(target.items()) if isinstance(target, dict) else list(vars(target).items())
    out: list[Any] = [(key, id(value)) for key, value in pairs]
    if isinstance(target, nn.Module):
        out += [(key, contents(value)) for key, value in pairs if isinstance(value, dict)]
    for name in ("empty_slot", "full_slot", "guarded"):
        if isinstance(target, Thing):
            out.append((name, id(getattr(target, name, changes.ABSENT))))
    return out


def model_contents(model: nn.Module) -> list[Any]:
    return [(name, id(module), contents(module)) for name, module in model.named_modules()]


@pytest.fixture(autouse=True, scope="module")
def _nothing_left() -> Iterator[None]:
    import peft  # noqa: F401  switches the seam on, whose own changes stay and are none of these tests'
    import transformers.trainer  # noqa: F401

    def layered() -> set[tuple[int, str]]:
        return {(id(slot.target), repr(slot.place)) for slot in changes.slots.values() if slot.layers}

    before = layered()
    yield
    gc.collect()
    assert layered() <= before, "layers left behind"


# -- one operation at a time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own", "inherited", "absent", "guarded", "empty_slot", "full_slot"])
def test_an_attribute_of_an_object_comes_back_by_identity_or_absence(name: str) -> None:
    thing, new = Thing(), object()
    before = contents(thing)
    ledger = Ledger("t")
    ledger.set_attr(thing, name, new)
    assert getattr(thing, name) is new
    ledger.undo()
    assert contents(thing) == before
    assert hasattr(thing, name) == (name not in ("absent", "empty_slot"))


@pytest.mark.parametrize("name", ["plain", "static", "of_class", "computed", "absent", "__init__"])
def test_an_attribute_of_a_class_comes_back_as_the_raw_descriptor(name: str) -> None:
    cls = make_class()
    before = dict(vars(cls))
    with Ledger("t") as ledger:
        ledger.set_attr(cls, name, lambda self: "new")
        assert vars(cls)[name] is not before.get(name)
    assert dict(vars(cls)) == before
    assert list(vars(cls)) == list(before)
    assert all(vars(cls)[key] is value for key, value in before.items())
    assert (cls.static(), cls.of_class(), cls().computed) == ("static", "Patched", "computed")


def test_an_inherited_attribute_of_a_class_does_not_become_its_own() -> None:
    child = type("Child", (make_class(),), {})
    with Ledger("t") as ledger:
        ledger.set_attr(child, "static", staticmethod(lambda: "child's"))
        assert child.static() == "child's"
    assert "static" not in vars(child)
    assert child.static() == "static"


def test_an_attribute_of_a_module_object_comes_back() -> None:
    module = types.ModuleType("m")
    module.f = before = object()  # type: ignore[attr-defined]
    with Ledger("t") as ledger:
        ledger.set_attr(module, "f", 1)
        ledger.set_attr(module, "g", 2)
        assert (module.f, module.g) == (1, 2)  # type: ignore[attr-defined]
    assert module.f is before  # type: ignore[attr-defined]
    assert not hasattr(module, "g")


@pytest.mark.parametrize("mapping", [{}, {"k": None}, {"a": 1, "k": [2], "b": 3}])
def test_a_dict_item_comes_back_in_its_place(mapping: dict[str, Any]) -> None:
    before = list(mapping.items())
    with Ledger("t") as ledger:
        ledger.set_item(mapping, "k", "new")
        assert mapping["k"] == "new"
    assert list(mapping.items()) == before
    assert all(mapping[key] is value for key, value in before)


def test_b07_a_patched_model_is_as_before_and_shows_no_trace_meanwhile() -> None:
    model = Model()
    before, state = model_contents(model), {k: v.clone() for k, v in model.state_dict().items()}
    order = [name for name, _ in model.named_modules()]
    ledger, new = Ledger("t"), nn.Linear(3, 3)
    former = ledger.swap_module(model, "block.0", new)
    assert isinstance(former, nn.Linear)
    assert model.block[0] is new
    ledger.add_module(model.block, "extra", nn.Identity())
    ledger.set_attr(model.last, "forward", lambda x: x)
    for kind in HOOKS:
        ledger.hook(model.first, kind, lambda *a, **k: None)
    # the swapped module kept its place, and nothing of the ledger's own stands among the model's attributes
    assert [n for n, _ in model.named_modules()] == [*order[:7], "block.extra", *order[7:]]
    assert not [k for m in model.modules() for k in vars(m) if "hfplug" in k or "slot" in k]
    ledger.undo()
    assert model_contents(model) == before
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in state.items())
    ledger.set_attr(model.last, "forward", lambda x: x)  # wrapping again is possible
    ledger.undo()
    assert model_contents(model) == before


def test_a_swapped_module_of_a_swapped_module() -> None:
    model = Model()
    before = model_contents(model)
    outer, inner = Ledger("outer"), Ledger("inner")
    outer.swap_module(model, "block", nn.Sequential(nn.Identity()))
    inner.swap_module(model, "block.0", nn.Tanh())
    outer.undo()
    assert model_contents(model) == before
    inner.undo()
    assert model_contents(model) == before


def test_a_configuration_can_be_saved_while_patched_and_its_redirected_names_come_back() -> None:
    from transformers import GPT2Config

    config = GPT2Config(n_embd=8, n_head=2)
    before, own = config.to_dict(), contents(config)
    keys = set(before)
    with Ledger("t") as ledger:
        ledger.set_attr(config, "hidden_size", 16)
        with pytest.raises(LedgerError, match="already changed"):
            ledger.set_attr(config, "n_embd", 32)  # the same slot by its other name
        ledger.set_attr(config, "use_cache", False)
        ledger.set_attr(config, "_attn_implementation", "eager")
        assert config.n_embd == config.hidden_size == 16
        assert set(config.to_dict()) == keys
        assert "hfplug" not in config.to_json_string()
    assert config.to_dict() == before
    assert contents(config) == own


@pytest.mark.parametrize("kind", ["backward", "full_backward"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_torchs_backward_flag_goes_with_the_last_hook_whatever_the_order(kind: str, order: tuple[int, ...]) -> None:
    module = nn.Linear(2, 2)
    before = contents(module)
    ledgers = [Ledger(str(i)) for i in range(3)]
    for ledger in ledgers:
        ledger.hook(module, kind, lambda *a: None)
    for index in order:
        ledgers[index].undo()
    assert contents(module) == before
    other = "full_backward" if kind == "backward" else "backward"
    Ledger("t").hook(module, other, lambda *a: None)  # torch refuses this on a flagged module


def test_the_backward_flag_stays_while_a_hook_of_someone_else_needs_it() -> None:
    module, seen = nn.Linear(2, 2), []
    ledger = Ledger("t")
    ledger.hook(module, "full_backward", lambda *a: None)
    module.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(len(grad_in)))
    ledger.undo()
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen == [1]
    assert module._is_full_backward_hook is True


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusals(model: Model, thing: Thing, items: list[Any]) -> list[tuple[str, Any]]:
    def hook(*args: Any) -> None: ...

    return [
        ("already changed attribute 'own'", lambda led: led.set_attr(thing, "own", 1)),
        ("already changed item 'k'", lambda led: led.set_item(model.notes, "k", 1)),
        ("already changed submodule 'block.0'", lambda led: led.swap_module(model, "block.0", nn.Identity())),
        ("already hooked", lambda led: led.hook(model, "forward", model.extra_repr)),
        ("already appended", lambda led: led.append(items, thing)),
    ]


@pytest.mark.parametrize("which", range(5))
def test_b06_applying_twice_is_refused_and_changes_nothing(which: int) -> None:
    model, thing, items = Model(), Thing(), [1]
    message, do = refusals(model, thing, items)[which]
    before = [model_contents(model), contents(thing), contents(items), contents(model.notes)]
    ledger = Ledger("twice")
    do(ledger)
    once = [model_contents(model), contents(thing), contents(items), contents(model.notes)]
    assert once != before
    with pytest.raises(LedgerError, match=message):
        do(ledger)
    assert [model_contents(model), contents(thing), contents(items), contents(model.notes)] == once
    ledger.undo()
    assert [model_contents(model), contents(thing), contents(items), contents(model.notes)] == before
    do(ledger)  # undone, it may be applied again
    ledger.undo()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first", 1),
        ("new", nn.Identity()),
        ("new", nn.Parameter(torch.ones(1))),
        ("new", nn.Buffer(torch.ones(1))),
    ],
)
def test_set_attr_refuses_what_a_module_files_elsewhere(name: str, value: Any) -> None:
    model = Model()
    before = model_contents(model)
    with pytest.raises(LedgerError, match="swap_module or add_module"):
        Ledger("t").set_attr(model, name, value)
    for filed in ("weight", "running_mean"):
        with pytest.raises(LedgerError, match=f"{filed}.*set_item on _(parameters|buffers)"):
            Ledger("t").set_attr(model.norm, filed, torch.ones(3))
    assert model_contents(model) == before


def test_wrong_names_are_answered_with_the_nearest() -> None:
    model, ledger = Model(), Ledger("who")
    with pytest.raises(LedgerError, match=r"who: Model has no submodule 'blok.0' \(did you mean 'block.0'\?\)"):
        ledger.swap_module(model, "blok.0", nn.Identity())
    with pytest.raises(LedgerError, match="no submodule ''"):
        ledger.swap_module(model, "", nn.Identity())
    with pytest.raises(LedgerError, match=r"no hook of kind 'foward' \(did you mean 'forward'\?\)"):
        ledger.hook(model, "foward", print)
    for name in ("first", "forward", "a.b", ""):
        with pytest.raises(LedgerError, match="already has"):
            ledger.add_module(model, name, nn.Identity())
    for do in (lambda m: ledger.add_module(model, "new", m), lambda m: ledger.swap_module(model, "first", m)):
        with pytest.raises(LedgerError, match=r"expected an nn.Module, got 3 \(int\)"):
            do(3)
    assert len(ledger) == 0


def test_b11_a_taken_name_is_refused_and_an_overridden_one_comes_back_by_identity() -> None:
    from transformers import AttentionInterface

    registry = AttentionInterface._global_mapping
    stock, before = registry["sdpa"], dict(registry)
    a, b, c = Ledger("plugin a"), Ledger("plugin b"), Ledger("plugin c")
    taken = r"plugin a: attention 'sdpa' is already registered \(sdpa_attention_forward\); .*override=True"
    with pytest.raises(LedgerError, match=taken):
        a.register(registry, "sdpa", print, what="attention")
    a.register(registry, "sdpa", print, what="attention", override=True)
    with pytest.raises(LedgerError, match="already registered by plugin a"):
        b.register(registry, "sdpa", max, what="attention")
    b.register(registry, "sdpa", max, what="attention", override=True)  # another plugin registers in between
    a.undo()
    assert registry["sdpa"] is max
    c.register(registry, "hfplug_test", min, what="attention")
    with pytest.raises(LedgerError, match="already registered by plugin c"):
        a.register(registry, "hfplug_test", min, what="attention")
    b.undo()
    c.undo()
    assert registry["sdpa"] is stock
    assert dict(registry) == before


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def patch_everything(ledger: Ledger, model: Model) -> None:
    ledger.set_attr(model, "forward", lambda x: x)
    ledger.set_item(model.notes, "model", model)
    ledger.swap_module(model, "block.0", nn.Identity())
    ledger.add_module(model.block, "extra", nn.Identity())
    for kind in HOOKS:
        ledger.hook(model.last, kind, lambda *args, **kwargs: None)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "collected"])
def test_an_abandoned_generator_undoes(closed: bool) -> None:
    model = Model()
    before = model_contents(model)

    def work() -> Iterator[int]:
        with Ledger("t") as ledger:
            patch_everything(ledger, model)
            yield 1
            yield 2

    running = work()
    assert next(running) == 1
    assert model_contents(model) != before
    if closed:
        running.close()
    else:
        del running
        gc.collect()
    assert model_contents(model) == before


def test_a_dropped_model_with_an_unfinished_ledger_is_collected() -> None:
    model, ledger = Model(), Ledger("t")
    patch_everything(ledger, model)
    ref, held = weakref.ref(model), weakref.ref(model.notes["model"])
    del model, ledger
    gc.collect()
    assert ref() is None
    assert held() is None


def test_b18_undoing_a_patched_model_leaves_its_copy_patched_and_the_other_way_round() -> None:
    model = Model()
    before = model_contents(model)
    ledger = Ledger("t")
    patch_everything(ledger, model)
    alone = copy.deepcopy(model)
    twin, twin_ledger = copy.deepcopy((model, ledger))
    patched = model_contents(model), model_contents(twin), model_contents(alone)
    assert len(alone.last._forward_hooks) == len(twin.last._forward_hooks) == 1
    ledger.undo()
    assert model_contents(model) == before
    assert (model_contents(twin), model_contents(alone)) == patched[1:]
    twin_ledger.undo()
    assert model_contents(model) == before
    assert model_contents(alone) == patched[2]
    assert "forward" not in vars(twin)
    assert list(twin.block._modules) == ["0", "1", "2"]
    assert isinstance(twin.block[0], nn.Linear)
    assert "model" not in twin.notes
    assert not any(contents(table) for name, table in vars(twin.last).items() if "_hooks" in name)


def test_a_copied_ledger_does_not_undo_what_exists_once() -> None:
    cls, module, calls = make_class(), types.ModuleType("m"), []
    ledger = Ledger("t")
    ledger.set_attr(cls, "plain", 1)
    ledger.set_attr(module, "f", 1)
    ledger.run(lambda: None, calls.append)
    copied = copy.deepcopy(ledger)
    copied.undo()
    assert (cls.plain, module.f, calls) == (1, 1, [])  # type: ignore[attr-defined]
    ledger.undo()
    assert (cls.plain, hasattr(module, "f"), calls) == (["plain"], False, [None])  # type: ignore[attr-defined]


def test_a_second_ledger_on_a_copied_slot_may_be_undone_last() -> None:
    model, ledger, other = Model(), Ledger("t"), Ledger("other")
    ledger.set_attr(model, "forward", lambda x: x)
    twin, twin_ledger = copy.deepcopy((model, ledger))
    other.set_attr(twin, "forward", lambda x: 2 * x)
    twin_ledger.undo()
    assert twin.forward(2) == 4
    other.undo()
    assert "forward" not in vars(twin)
    ledger.undo()


def test_what_was_there_first_is_read_anew_after_everything_was_undone() -> None:
    thing, ledger = Thing(), Ledger("t")
    ledger.set_attr(thing, "own", 1)
    held = list(changes.slots.values())  # as the traceback of an error may hold it
    ledger.undo()
    thing.own = "meanwhile"  # type: ignore[assignment]
    ledger.set_attr(thing, "own", 2)
    ledger.undo()
    assert thing.own == "meanwhile"
    assert held
