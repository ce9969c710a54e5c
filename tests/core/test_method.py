"""What a plugin declares is checked where it is declared, and is plain data."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from hfplug import ConfigError, Kind, Method, Paper

PAPER = Paper(title="t", venue="v", url="https://example.org", fidelity="our reading")


def method(**changes: Any) -> Method:
    options: dict[str, Any] = {
        "name": "toy",
        "kind": Kind.LOSS,
        "target": "a.b:Toy",
        "config": "a.c:ToyConfig",
        "summary": "s",
        "paper": PAPER,
    }
    return Method(**{**options, **changes})


@pytest.mark.parametrize("name", ["toy", "t", "toy2", "toy_2", "a_b_c"])
def test_good_names(name: str) -> None:
    assert method(name=name).name == name


@pytest.mark.parametrize("name", ["", "Toy", "_toy", "toy_", "to__y", "2toy", "to-y", "to.y", "toy ", "toy\n", "töy", 3, None])
def test_bad_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="must be snake_case"):
        method(name=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "tuner"}, r"kind='tuner' of 'toy' is not one of .*Kind\.TUNER.*did you mean 'tuner'"),
        ({"target": "a.b"}, r"Method.target='a.b' of 'toy' must look like 'package.module:Name'"),
        ({"target": "a.b:C.d"}, "must look like"),
        ({"config": ":C"}, "Method.config=':C'"),
        ({"config": None}, "Method.config=None"),
        ({"exports": ("a.b:Toy2", "a b:C")}, r"Method.exports\[1\]='a b:C'"),
        ({"exports": "a.b:Toy2"}, "Method.exports='a.b:Toy2' of 'toy' must be a tuple of strings"),
        ({"requires": "peft>=0.21"}, "Method.requires='peft>=0.21' of 'toy' must be a tuple of strings"),
        ({"limits": [1]}, r"Method.limits=\[1\]"),
        ({"exports": ("other:Toy",)}, r"offers one name for two objects: \['a.b:Toy', 'a.c:ToyConfig', 'other:Toy'\]"),
        ({"paper": "a title"}, "Method.paper='a title' of 'toy' must be a Paper"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method(**changes)


def test_a_paper_cannot_claim_what_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"fidelity='Paper' is not one of .*did you mean 'paper'"):
        Paper(title="t", venue="v", url="u", fidelity="Paper")


def test_a_method_is_plain_data() -> None:
    given = {"packing": True, "merge": "mean only"}
    made = method(requires=["peft>=0.21"], limits=["one"], exports=("a.b:Extra",), capabilities=given)
    given["packing"] = False
    assert made.capabilities == {"packing": True, "merge": "mean only"}, "a copy of what was given"
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
        assert hash(again) == hash(made)
    shown = json.loads(json.dumps(made.as_dict()))
    assert shown["kind"] == "loss"
    assert shown["requires"] == ["peft>=0.21"]
    assert shown["paper"]["fidelity"] == "our reading"
    assert set(made.public_names) == {"Toy", "ToyConfig", "Extra"}
    assert method(config="a.b:Toy").public_names == {"Toy": "a.b:Toy"}, "one object under one name is no clash"
    with pytest.raises(AttributeError):
        made.name = "other"  # type: ignore[misc]
