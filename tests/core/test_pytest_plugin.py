"""The pytest plugin in a stranger's project: costs nothing, knows the kit's marker, explains a failure inside the kit."""

from __future__ import annotations

import os
import subprocess
import sys

PROJECT = """
import sys
import pytest
from hfplug.testing.tuner_files import assert_equal_states

STARTED_WITH_TORCH = "torch" in sys.modules

def test_start():
    assert not STARTED_WITH_TORCH

@pytest.mark.slow
def test_kit():
    assert_equal_states({"a": 1}, {"b": 2}, 0, "what was asked")
"""


def run(folder, *arguments):
    (folder / "test_stranger.py").write_text(PROJECT)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "hfplug.testing.plugin", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # named above instead, whether installed or not
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment).stdout


def test_plugin_in_a_strangers_project(tmp_path):
    out = run(tmp_path)
    assert "1 failed, 1 passed" in out
    assert "what was asked: other tensors: ['a', 'b']" in out
    assert "assert ['a'] == ['b']" in out  # rewritten: pytest shows both sides


def test_the_marker_is_declared_once(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: mine\n")
    out = run(tmp_path, "--markers")
    assert out.count("@pytest.mark.slow:") == 1
    assert "@pytest.mark.slow: mine" in out


CONTRACT = """
from hfplug.testing.patch import PatchContract

class TestSome(PatchContract):
    method, families = "of nobody", ("OPT", "Llama")
"""


def test_other_families_than_those_of_a_class_are_not_collected(tmp_path):
    (tmp_path / "test_contract.py").write_text(CONTRACT)
    quick, every = (run(tmp_path, "--collect-only", "test_contract.py", *more) for more in (("-m", "not slow"), ()))
    for out in (quick, every):
        assert "test_b07_removing_restores_everything[Llama]" in out
        assert "test_b07_removing_restores_everything[OPT]" in out
        assert "test_nothing_flows_back_from_later_tokens[Llama]" in out
        assert "GPT-2" not in out
    assert "test_nothing_flows_back_from_later_tokens[OPT]" in every
    assert "test_nothing_flows_back_from_later_tokens[OPT]" not in quick
