"""``hfplug bench``: nothing is measured while the tests of what is measured are red."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hfplug.cli import app, benching
from hfplug.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAM = '''"""How fast toy is.

More.
"""
import json, os, sys
from pathlib import Path

METHODS = {methods}
if sys.argv[1:] != ["--quick"]:
    gate = json.loads(os.environ["HFPLUG_BENCH_GATE"])
    out = Path(__file__).parent / "results"
    out.mkdir(exist_ok=True)
    found = {{"row": {{"verdict": "measured"}}, "provenance": {{"date": "d", "gate": gate}}}}
    (out / "{name}.json").write_text(json.dumps(found))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with a program of a method whose test is green, and one of a method whose test is red."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "tests" / "kind").mkdir(parents=True)
    for name, methods, outcome in (("toy_speed", ("toy",), True), ("red_claim", ("toy", "red"), False)):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(PROGRAM.format(name=name, methods=methods))
        (tmp_path / "tests" / "kind" / f"test_{methods[-1]}.py").write_text(f"def test_it():\n    assert {outcome}\n")
    (tmp_path / "benchmarks" / "_bench.py").write_text("")
    return tmp_path / "benchmarks"


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *words])
    error = f"{type(done.exception).__name__}: {done.exception}" if done.exception and done.exit_code == 1 else ""
    return done.exit_code, done.output + error


def test_a_green_gate_lets_the_program_run_and_is_recorded(folder: Path) -> None:
    assert call("toy_speed", "--folder", str(folder))[0] == 0
    gate = json.loads((folder / "results" / "toy_speed.json").read_text())["provenance"]["gate"]
    assert gate["tests"] == ["tests/kind/test_toy.py"]
    assert "1 passed" in gate["outcome"]
    rows = {row["name"]: row for row in json.loads(call("--json", "--folder", str(folder))[1])}
    assert rows["toy_speed"] == {
        "name": "toy_speed", "claim": "How fast toy is.", "methods": ["toy"], "measured": "d", "verdict": "measured",
    }  # fmt: skip
    assert rows["red_claim"]["measured"] is None


def test_a_red_gate_measures_nothing(folder: Path) -> None:
    code, said = call("red_claim", "--folder", str(folder))
    assert code == 1
    assert "red_claim is not measured: its tests are red" in said
    assert "FAILED tests/kind/test_red.py::test_it" in said
    assert not (folder / "results").exists()


def test_tests_that_do_not_run_are_red(folder: Path) -> None:
    (folder.parent / "tests" / "kind" / "test_toy.py").write_text("")
    assert "exit code 5" in call("toy_speed", "--folder", str(folder))[1]


def test_quick_runs_write_nothing(folder: Path) -> None:
    assert call("toy_speed", "--quick", "--folder", str(folder))[0] == 0
    assert not (folder / "results").exists()
    (folder / "slow_one.py").write_text('"""Slow."""\nMETHODS = ()\n')
    assert "['slow_one'] have no quick run" in call("slow_one", "--quick", "--folder", str(folder))[1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["toy_sped"], "no measurement 'toy_sped' (did you mean 'toy_speed'?); there are: red_claim, toy_speed"),
        (["toy_speed", "--all"], "give one of the two"),
    ],
)
def test_names(folder: Path, words: list[str], text: str) -> None:
    code, said = call(*words, "--folder", str(folder))
    assert code == 1
    assert text in said


def test_a_program_that_does_not_say_what_it_measures_is_refused(folder: Path) -> None:
    (folder / "other.py").write_text('"""Other."""\n')
    with pytest.raises(ConfigError, match="does not say what it measures"):
        benching.programs(folder)
    with pytest.raises(ConfigError, match="holds no measurements"):
        benching.programs(folder / "nowhere")


def test_a_method_without_tests_is_refused(folder: Path) -> None:
    (folder.parent / "tests" / "kind" / "test_toy.py").unlink()
    with pytest.raises(ConfigError, match="METHODS names 'toy'"):
        benching.gate(folder.parent, benching.programs(folder)["toy_speed"])


def test_every_program_here_names_its_methods_and_their_tests_and_says_what_came_out() -> None:
    found = benching.programs(ROOT / "benchmarks")
    for program in found.values():
        assert benching.tests_of(ROOT, program), program.name
        tree = ast.parse(program.path.read_text(encoding="utf-8"))
        assert "results_row" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], program.name
        assert program.result is None or "row" in program.result, f"{program.name}: python benchmarks/_rows.py {program.name}"
