"""Every private upstream name in hfplug.upstream is still there; PROVEN is what constraints.txt pins."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import operator
from pathlib import Path

import pytest

from hfplug.cli import health
from hfplug.upstream import PROVEN, UPSTREAM, Upstream

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("item", UPSTREAM, ids=lambda item: item.name)
def test_the_name_is_there_and_takes_what_we_pass(item: Upstream) -> None:
    assert health._check(item) is None, f"upstream changed: re-derive {item.owner}"
    assert item.until


@pytest.mark.parametrize("item", [item for item in UPSTREAM if item.digest], ids=lambda item: item.name)
def test_b38_what_is_done_over_is_as_it_was(item: Upstream) -> None:
    module, _, path = item.name.partition(":")
    function = operator.attrgetter(path)(importlib.import_module(module))
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    assert found == item.digest, f"upstream changed: read {item.name} and re-derive {item.owner}; then its digest is {found}"


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
