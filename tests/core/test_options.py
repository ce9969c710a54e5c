"""Options from user input: what fits is kept, what YAML cannot say is converted, everything else is named."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfplug import ConfigError
from hfplug.errors import nearest
from hfplug.options import build, coerce, describe, table


@dataclass
class Options:
    """Options of every sort."""

    size: int
    rate: float = field(default=0.5, metadata={"help": "learning rate"})
    mode: Literal["fast", "exact"] = "exact"
    names: list[str] | str | None = None
    layers: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    derived: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size={self.size} must be at least 0")
        if self.rate > 1:
            raise ConfigError(f"rate={self.rate} must be at most 1")


FITS: list[tuple[Any, Any]] = [
    (1, int), (1.5, float), (1, float), (True, bool), ("x", str), (None, None), (None, int | None), ("1e-4", str), (3, Any),
    ("1e-4", float | str), ("fast", Literal["fast", 1]), (1, Literal["fast", 1]), ([1, 2], list[int]), ([], list[str]),
    ((1, 2), tuple[int, ...]), ((1, "a"), tuple[int, str]), ({"a"}, set[str]), ({"a": 1}, dict[str, int]),
    (["a"], list[str] | str),
    ([["a"], ["b"]], list[list[str]]), ({"a": 1}, typing.Mapping[str, int]), (print, typing.Callable[..., None]), ([1], list),
]  # fmt: skip
CONVERTED: list[tuple[Any, Any, Any]] = [
    ("1e-4", float, 1e-4), ("5e3", float | None, 5e3), ([1, 2], tuple[int, ...], (1, 2)), ([1, "a"], tuple[int, str], (1, "a")),
    (["a"], set[str] | None, {"a"}), (["a"], tuple[str, ...] | None, ("a",)), (["1e-4", 1], list[float], [1e-4, 1]),
    ([["1e-4"]], list[tuple[float, ...]], [(1e-4,)]), (["a", "a"], frozenset[str], frozenset({"a"})),
]  # fmt: skip
REFUSED: list[tuple[Any, Any, str]] = [
    ("1", int, "int"), (1.0, int, "int"), (True, int, "int"), (False, float, "float"), ("fast", float, "float"), (1, str, "str"),
    ("nan", float, "float"), ("inf", float, "float"), (None, int, "int"), (1, type(None), "null"), (True, Literal[1], "one of 1"),
    ([1, "a"], tuple[int, ...], "tuple[int, ...]"), ([1], list[str], "list[str]"), ("abc", list[str], "list[str]"),
    ([1], tuple[int, str], "tuple[int, str]"), ((1, 2, 3), tuple[int, int], "tuple[int, int]"), ({"a"}, list[str], "list[str]"),
    (1, list[int] | str | None, "list[int] or str or null"), (["a", 1], set[str] | None, "set[str] or null"),
    (3, dict[str, int], "dict"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint"), FITS, ids=repr)
def test_what_fits_is_kept_as_it_is(value: Any, hint: Any) -> None:
    assert coerce(value, hint, "x") is value


@pytest.mark.parametrize(("value", "hint", "wanted"), CONVERTED, ids=repr)
def test_what_yaml_cannot_say_is_converted(value: Any, hint: Any, wanted: Any) -> None:
    found = coerce(value, hint, "x")
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(("value", "hint", "allowed"), REFUSED, ids=repr)
def test_what_does_not_fit_is_refused_naming_value_type_and_what_is_allowed(value: Any, hint: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        coerce(value, hint, "plugins.tuner: x")
    message = str(raised.value)
    assert message.startswith(f"plugins.tuner: x={value!r} ({type(value).__name__}) is not {allowed}"), message


def test_a_boolean_that_yaml_made_of_no_is_explained_and_a_wrong_choice_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="YAML reads an unquoted yes or no as a boolean"):
        coerce(False, str, "x")
    with pytest.raises(ConfigError, match=r"one of 'fast', 'exact' \(did you mean 'exact'\?\)"):
        coerce("Exakt", Literal["fast", "exact"], "x")


def test_items_that_compare_oddly_are_no_problem() -> None:
    import torch

    rows = [torch.ones(2), torch.ones(2)]
    assert coerce(rows, list[torch.Tensor], "x") is rows
    assert coerce(rows, list[Any], "x") is rows


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.recursive(SCALARS, lambda items: st.lists(items, max_size=3), max_leaves=5))
def test_a_value_fits_its_own_type_and_a_refusal_is_always_a_config_error(value: Any) -> None:
    assert coerce(value, type(value), "x") is value
    for hint in (int, float, str, list[int], tuple[float, ...], int | str | None, Literal["a", 1]):
        try:
            found = coerce(value, hint, "x")
        except ConfigError:
            continue
        assert coerce(found, hint, "x") is found, "what was accepted fits"


def test_build_makes_the_dataclass() -> None:
    made = build(Options, {"size": 2, "rate": "1e-4", "layers": [1, 2], "names": ["q"], "extra": {"k": 1}})
    assert made == Options(2, 1e-4, "exact", ["q"], (1, 2), {"k": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 1, "rat": 1}, r"here: Options has no option 'rat' \(did you mean 'rate'\?\); options: \['extra', "),
        ({"size": 1, "Mode": "fast"}, r"did you mean 'mode'"),
        ({"size": 1, 3: 1}, "no option 3"),
        ({"size": 1, "derived": 1}, "no option 'derived'"),
        ({}, "here: Options needs a value for 'size'"),
        ({"size": "1"}, r"here: size='1' \(str\) is not int"),
        ({"size": -1}, "here: size=-1 must be at least 0"),
        ({"size": 1, "rate": 2}, "here: rate=2 must be at most 1"),
        ([1], r"here: expected a mapping of options, got list \[1\]"),
    ],
)
def test_build_refuses_naming_the_place_the_value_and_what_is_allowed(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Options, values, where="here")


def test_table_lists_what_a_user_may_set() -> None:
    rows = {row["name"]: row for row in table(Options)}
    assert list(rows) == ["size", "rate", "mode", "names", "layers", "extra"]
    assert rows["size"]["default"] == "required"
    assert rows["rate"] == {"name": "rate", "type": "float", "default": "0.5", "help": "learning rate"}
    assert rows["mode"]["type"] == "one of 'fast', 'exact'"
    assert rows["extra"]["default"] == "{}"


@pytest.mark.parametrize(
    ("hint", "words"),
    [(int, "int"), (None | int, "null or int"), (Literal["a"], "one of 'a'"), (list[str], "list[str]"), (Any, "Any")],
)
def test_describe(hint: Any, words: str) -> None:
    assert describe(hint) == words


def test_nearest_forgives_case_and_is_silent_about_strangers() -> None:
    assert nearest("ULoRA", ["ulora", "nitp"]) == " (did you mean 'ulora'?)"
    assert nearest("ullora", ["ULoRA"]) == " (did you mean 'ULoRA'?)"
    assert nearest("xyz", ["ulora"]) == ""
    assert nearest(3, []) == ""
