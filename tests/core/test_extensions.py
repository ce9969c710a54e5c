"""Extensions of a method: offered by any plugin through one hook, checked against the points the method declares."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

import hfplug
from hfplug import ConfigError, Extension, Kind, Method, Paper, PluginError, extensions, hookimpl
from hfplug.plugins import Catalogue, Source, discover

PAPER = Paper(title="t", venue="v", url="u", fidelity="our reading")


def method(**more: Any) -> Method:
    place = "hfplug_toy_method"
    return Method(
        name="toy", kind=Kind.CALLBACK, target=f"{place}:Toy", config=f"{place}:ToyConfig", summary="s", paper=PAPER,
        extension_points={"shape": "a dataclass"}, **more,
    )  # fmt: skip


def offer(name: str = "round", *, point: str = "shape", of: str = "toy", target: str = "hfplug_toy_round:Round") -> Extension:
    return Extension(method=of, point=point, name=name, target=target, summary="s")


@dataclass
class Round:
    """What stands behind the name."""

    radius: float = 1.0


def catalogue(monkeypatch: pytest.MonkeyPatch, **plugins: list[Any]) -> Catalogue:
    """A catalogue of plugins in memory: name -> methods and extensions it declares."""
    found = []
    for name, items in plugins.items():
        module = types.ModuleType(f"hfplug_toy_{name}")
        methods, offers = ([i for i in items if isinstance(i, kind)] for kind in (Method, object))
        offers = [i for i in offers if not isinstance(i, Method)]
        if methods:
            module.hfplug_methods = hookimpl(_named("hfplug_methods", methods))
        if offers:
            module.hfplug_extensions = hookimpl(_named("hfplug_extensions", offers))
        module.Round = Round
        monkeypatch.setitem(sys.modules, module.__name__, module)
        found.append(Source(name, module.__name__, f"dist-{name}", "1.0"))
    result = discover(found)
    monkeypatch.setattr(extensions, "catalogue", lambda: result)
    return result


def _named(name: str, items: list[Any]) -> Any:
    def declare() -> list[Any]:
        return items

    declare.__name__ = name
    return declare


def test_a_stranger_extends_a_method_it_does_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = catalogue(monkeypatch, method=[method()], round=[offer()])
    assert found.problems == []
    assert list(extensions.offers("toy", "shape")) == ["round"]
    assert extensions.offers("toy", "shape")["round"].source.distribution == "dist-round"
    assert extensions.build_extension("toy", "shape", "round", {"radius": 2}) == Round(2)


def test_the_order_of_plugins_and_both_hooks_in_one_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalogue(monkeypatch, round=[offer()], method=[method(), offer("own")]).problems == []
    assert list(extensions.offers("toy", "shape")) == ["own", "round"]


def test_what_is_wrong_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = catalogue(
        monkeypatch, method=[method()], round=[offer()], again=[offer()], shap=[offer("x", point="shap")], odd=["round"]
    )
    causes = {p.source.plugin: p.cause for p in found.problems}
    assert causes["again"] == "shape 'round' of 'toy' is already provided by dist-round 1.0; dist-again 1.0 is refused"
    assert "no extension point 'shap' (did you mean 'shape'?)" in causes["shap"]
    assert "expected a list of hfplug.Extension" in causes["odd"]
    assert len(causes) == 3
    for wrong, words in (
        (("toy", "shape", "rund"), "shape='rund' is not known to toy .did you mean 'round'"),
        (("toy", "shap", "round"), "no extension point 'shap' .did you mean 'shape'"),
        (("toyy", "shape", "round"), "unknown method 'toyy' .did you mean 'toy'"),
    ):
        with pytest.raises(ConfigError, match=words):
            extensions.load_extension(*wrong)
    with pytest.raises(ConfigError, match=r"'radus' .did you mean 'radius'"):
        extensions.build_extension("toy", "shape", "round", {"radus": 2})


def test_an_extension_waits_for_its_method_and_strict_forbids_only_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFPLUG_STRICT", "1")
    found = catalogue(monkeypatch, round=[offer()])
    assert [(p.usable, p.cause) for p in found.problems] == [
        (True, "shape 'round' waits for the method 'toy', which is not there")
    ]
    with pytest.raises(PluginError, match="already provided"):
        catalogue(monkeypatch, method=[method()], round=[offer()], again=[offer()])


def test_a_declaration_is_checked() -> None:
    for change, words in (({"name": "Bad Name"}, "Extension.name='Bad Name'"), ({"target": "nowhere"}, "Extension.target")):
        with pytest.raises(ConfigError, match=words):
            offer(**change)
    with pytest.raises(ConfigError, match="extension_points"):
        hfplug.Method(
            name="x", kind=Kind.LOSS, target="a:B", config="a:C", summary="s", paper=PAPER, extension_points={"Bad": "s"}
        )  # fmt: skip
    assert method().as_dict()["extension_points"] == {"shape": "a dataclass"}
