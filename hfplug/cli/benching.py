"""``hfplug bench``: the measurements of a checkout, behind a gate: a figure is worth nothing while its tests are red."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfplug.errors import ConfigError, HfplugError, nearest

GATE = "HFPLUG_BENCH_GATE"  # what benchmarks/_bench.py writes into the provenance of a result


class RedGateError(HfplugError):
    """Tests of what is to be measured fail."""


@dataclass(frozen=True)
class Program:
    """One program of ``benchmarks/``: its first line, the methods it measures (``METHODS = (...)`` in it), its newest result.

    Attributes:
        quick: whether it takes ``--quick``.
    """

    path: Path
    claim: str
    methods: tuple[str, ...]
    quick: bool

    @property
    def name(self) -> str:
        """As it is called: ``ulora_cost``."""
        return self.path.stem

    @property
    def result(self) -> dict[str, Any] | None:
        """What the last full run wrote."""
        file = self.path.parent / "results" / f"{self.name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def programs(folder: Path) -> dict[str, Program]:
    """Every program of a ``benchmarks`` folder, read without running it.

    Raises:
        ConfigError: no such folder (the programs come with the source, not with the wheel), or a program names no methods.
    """
    files = [p for p in sorted(folder.glob("*.py")) if not p.name.startswith("_")]
    if not files:
        raise ConfigError(f"{folder} holds no measurements; they are in hfplug's source: clone it, or pass --folder")
    return {p.stem: _read(p) for p in files}


def _read(path: Path) -> Program:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["METHODS"]:
            claim = (ast.get_docstring(tree) or "").partition("\n")[0]
            return Program(path, claim, tuple(ast.literal_eval(node.value)), '"--quick"' in text)
    raise ConfigError(f'{path} does not say what it measures: METHODS = ("ulora",), or () for the core')


def chosen(folder: Path, names: Sequence[str], every: bool) -> list[Program]:
    """The programs asked for.

    Raises:
        ConfigError: a name that is no program (naming the nearest), or names together with ``--all``.
    """
    found = programs(folder)
    if names and every:
        raise ConfigError(f"bench: --all is every program, and {list(names)} were named; give one of the two")
    for name in names:
        if name not in found:
            raise ConfigError(f"bench: no measurement {name!r}{nearest(name, found)}; there are: {', '.join(found)}")
    return list(found.values()) if every else [found[name] for name in names]


def tests_of(root: Path, program: Program) -> list[Path]:
    """The test files that have to be green: those named after the methods; of the core's without one, the core's.

    Raises:
        ConfigError: a method without tests.
    """
    if not program.methods:
        return [root / "tests" / "core" / "test_plugins.py"]
    out: list[Path] = []
    for method in program.methods:
        files = sorted({*root.glob(f"tests/*/test_{method}.py"), *root.glob(f"tests/*/test_{method}_*.py")})
        if not files:
            raise ConfigError(f"{program.path.name}: METHODS names {method!r}, and no tests/*/test_{method}*.py exist")
        out += files
    return out


def gate(root: Path, program: Program) -> dict[str, Any]:
    """Run the quick tests of what is measured.

    Raises:
        RedGateError: one fails, or none ran; with the end of what pytest printed.
    """
    files = [str(p.relative_to(root)) for p in tests_of(root, program)]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        tail = "\n".join(done.stdout.strip().splitlines()[-15:])
        raise RedGateError(f"{program.name} is not measured: its tests are red (exit code {done.returncode})\n{tail}")
    return {"tests": files, "outcome": last}


def run(folder: Path, names: Sequence[str], *, every: bool, quick: bool) -> Iterator[tuple[Program, int]]:
    """Measure the programs asked for, one after the other; yields each with its exit code.

    Raises:
        ConfigError: as :func:`chosen`.
        RedGateError: as :func:`gate`; what was measured before stays.
    """
    root = folder.resolve().parent
    asked = chosen(folder, names, every)
    if quick:
        without = [p.name for p in asked if not p.quick]
        if without and not every:
            raise ConfigError(
                f"bench: {without} have no quick run; with one: {[p.name for p in programs(folder).values() if p.quick]}"
            )
        asked = [p for p in asked if p.quick]
    green: dict[tuple[str, ...], dict[str, Any]] = {}  # of methods, whose tests run once for all that measure them
    for program in asked:
        if program.methods not in green:
            green[program.methods] = gate(root, program)
        proof = green[program.methods]
        command = [sys.executable, str(program.path), *(["--quick"] if quick else [])]
        yield program, subprocess.run(command, cwd=root, env={**os.environ, GATE: json.dumps(proof)}, check=False).returncode


def listing(folder: Path) -> list[dict[str, Any]]:
    """Name, first line, methods, date and verdict of the newest result of every program."""
    rows = []
    for program in programs(folder).values():
        result = program.result or {}
        rows.append(
            {
                "name": program.name,
                "claim": program.claim,
                "methods": list(program.methods),
                "measured": result.get("provenance", {}).get("date"),
                "verdict": result.get("row", {}).get("verdict"),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print :func:`listing`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("measurement", "what", "measured", "verdict", box=box.SIMPLE)
    for row in rows:
        table.add_row(row["name"], row["claim"], row["measured"] or "-", row["verdict"] or "-")
    Console().print(table)


def folder_of_checkout() -> Path:
    """``benchmarks`` beside the package, where this is a checkout; else in the working directory."""
    beside = Path(__file__).resolve().parents[2] / "benchmarks"
    return beside if beside.is_dir() else Path.cwd() / "benchmarks"
