"""Every private upstream name in hfplug.upstream is still there; PROVEN is what constraints.txt pins."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hfplug.cli import health
from hfplug.plugins import load_dotted
from hfplug.upstream import DERIVED, PROVEN, UPSTREAM, Derived, Upstream

ROOT = Path(__file__).parents[2]


def fingerprint(function: Any) -> str:
    """SHA-256 of what a function does: its syntax tree without docstring, so that comments and layout do not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


@pytest.mark.parametrize("item", UPSTREAM, ids=lambda item: item.name)
def test_the_name_is_there_and_takes_what_we_pass(item: Upstream) -> None:
    assert health._check(item) is None, f"upstream changed: re-derive {item.owner}"
    assert item.until


@pytest.mark.parametrize("item", DERIVED, ids=lambda item: item.name)
def test_what_is_overridden_by_derivation_is_what_it_was_derived_from(item: Derived) -> None:
    module, _, path = item.name.partition(":")
    function = functools.reduce(getattr, path.split(".")[1:], load_dotted(f"{module}:{path.split('.')[0]}"))
    assert fingerprint(function) == item.sha256, f"upstream changed, re-derive {item.owner} from {item.name}"
    assert item.until


def test_a_fingerprint_sees_code_and_not_comments() -> None:
    def plain(x: int) -> int:
        return x + 1

    first = fingerprint(plain)

    def plain(x: int) -> int:  # type: ignore[no-redef]
        """A docstring."""
        # and a comment
        return x + 1

    assert fingerprint(plain) == first

    def plain(x: int) -> int:  # type: ignore[no-redef]
        return x + 2

    assert fingerprint(plain) != first


def test_a_missing_name_and_a_missing_parameter_are_seen() -> None:
    for wrong in (
        Upstream("peft.mapping:NOWHERE", "x", "y"),
        Upstream("peft.nowhere:X", "x", "y"),
        Upstream("peft.config:PeftConfigMixin.from_json_file", "x", "y", ("nowhere",)),
    ):
        assert health._check(wrong) is not None


def test_the_proven_versions_are_those_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert {name: pins[name] for name in PROVEN} == PROVEN
