"""The CI script tells the truth: red on a failing test, red on no test, skips shown with their reasons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTEST_STEP = ROOT / ".ci" / "pytest"

PASSING = "def test_right():\n    assert True\n"
FAILING = "def test_wrong():\n    assert 1 + 1 == 3\n"
SKIPPED = "import pytest\n\n@pytest.mark.skip(reason='no accelerator here')\ndef test_left_out():\n    pass\n"
SLOW = "import pytest\n\n@pytest.mark.slow\ndef test_long():\n    assert True\n"
INI = "[pytest]\nmarkers =\n    slow: long\n"


def run(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "HFPLUG_"))}
    return subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_right.py").write_text(PASSING)
    return tmp_path


def step(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Plugins of the environment are left out: only the script is on trial.
    return run([str(PYTEST_STEP), *arguments], project, PYTHON=sys.executable, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_b27_passing_tests_pass_and_the_closing_line_is_shown(project: Path) -> None:
    done = step(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"=+ 1 passed in [\d.]+s", done.stdout.splitlines()[-1])


def test_b27_one_failing_test_fails_the_step(project: Path) -> None:
    (project / "test_wrong.py").write_text(FAILING)
    done = step(project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("arguments", [(), ("-m", "slow")], ids=["no test file", "none selected"])
def test_b27_no_test_fails_the_step(project: Path, arguments: tuple[str, ...]) -> None:
    if not arguments:
        (project / "test_right.py").unlink()
    done = step(project, *arguments)
    assert done.returncode == 5, done.stdout + done.stderr


def test_b27_a_test_file_that_cannot_be_imported_fails_the_step(project: Path) -> None:
    (project / "test_broken.py").write_text("import a_module_that_does_not_exist\n")
    assert step(project).returncode == 2


def test_b27_skips_are_counted_and_their_reasons_printed(project: Path) -> None:
    (project / "test_skip.py").write_text(SKIPPED)
    done = step(project)
    assert done.returncode == 0
    assert "no accelerator here" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


FAKE_PYTHON = f"""#!/usr/bin/env bash
case " $* " in
    *" pytest "*) shift 3; exec "{sys.executable}" -P -m pytest -p no:cacheprovider "$@" ;;
esac
"""


@pytest.fixture
def checkout(project: Path) -> Path:
    """A project with our .ci/ and Makefile, whose environment stands already and whose linters agree."""
    (project / ".ci").mkdir()
    for name in ("run", "pytest"):
        (project / ".ci" / name).write_text((ROOT / ".ci" / name).read_text())
        (project / ".ci" / name).chmod(0o755)
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "entry_points.txt"):
        (project / name).write_text((ROOT / name).read_text())
    programs = project / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", FAKE_PYTHON), ("ruff", "#!/bin/sh\n"), ("mypy", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (project / ".venv" / ".installed").touch()
    (project / "test_slow.py").write_text(SLOW)
    return project


def whole(checkout: Path) -> subprocess.CompletedProcess[str]:
    return run(["bash", ".ci/run"], checkout, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", MAKEFLAGS="", WORKERS="")


def test_b27_the_whole_run_is_green_only_when_all_is(checkout: Path) -> None:
    done = whole(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    closing = [line for line in done.stdout.splitlines() if re.search(r"=+ .*\d+ passed", line)]
    assert len(closing) == 2, "the quick and the slow tests each end with pytest's own summary"


@pytest.mark.parametrize("file", ["test_wrong.py", "test_slow.py"], ids=["quick test", "slow test"])
def test_b27_a_failing_test_turns_the_whole_run_red(checkout: Path, file: str) -> None:
    mark = "import pytest\n\n@pytest.mark.slow\n" if file == "test_slow.py" else ""
    (checkout / file).write_text(mark + FAILING)
    assert whole(checkout).returncode != 0


@pytest.mark.parametrize("file", ["test_right.py", "test_slow.py"])
def test_b27_a_run_without_quick_or_without_slow_tests_is_red(checkout: Path, file: str) -> None:
    (checkout / file).unlink()
    assert whole(checkout).returncode != 0


@pytest.mark.parametrize("linter", ["ruff", "mypy"])
def test_b27_a_linter_turns_the_whole_run_red(checkout: Path, linter: str) -> None:
    (checkout / ".venv" / "bin" / linter).write_text("#!/bin/sh\nexit 1\n")
    assert whole(checkout).returncode != 0


def test_ci_scripts_are_executable_and_strict() -> None:
    for name in ("run", "pytest"):
        script = ROOT / ".ci" / name
        assert os.access(script, os.X_OK), f"{script} is not executable"
        code = [line for line in script.read_text().splitlines() if not line.startswith("#")]
        assert code[0] == "set -euo pipefail"
        assert not any("|" in line for line in code), "a pipe or an '||' could hide a failing step"
