"""``hfplug doctor``: what this environment has, against what hfplug was proven with."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from packaging.version import Version
from rich import box
from rich.console import Console
from rich.table import Table

import hfplug
from hfplug.cli.show import as_json
from hfplug.errors import one_line
from hfplug.upstream import PROVEN, UPSTREAM, Upstream


def examine() -> dict[str, Any]:
    """Look at versions, imports, upstream names and plugins; never raises for what it finds."""
    imports = {name: _import_error(name) for name in ("torch", "transformers", "accelerate", "peft", "trl")}
    missing = [] if imports["transformers"] else [row for row in map(_check, UPSTREAM) if row]
    plugins = as_json(hfplug.catalogue())
    return {
        "versions": [_version(name, proven) for name, proven in PROVEN.items()],
        "imports": {name: error for name, error in imports.items() if error},
        "missing": missing,
        "problems": plugins["problems"],
        "unmet": [{"method": m["name"], "cause": m["unmet"]} for m in plugins["methods"] if m["unmet"]],
        "healthy": not (any(imports.values()) or missing or plugins["problems"]),
    }


def _version(name: str, proven: str) -> dict[str, str]:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"package": name, "proven": proven, "found": "not installed", "state": "missing"}
    ours, theirs = Version(proven), Version(found)
    same = ours.release[:2] == theirs.release[:2]
    state = "proven" if ours.public == theirs.public else "same minor" if same else "newer" if theirs > ours else "older"
    return {"package": name, "proven": proven, "found": found, "state": state}


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name if name != "transformers" else "transformers.modeling_utils")
    except Exception as error:  # a broken environment is what doctor is there to describe
        return one_line(error)
    return None


def _check(item: Upstream) -> dict[str, Any] | None:
    module_name, _, attribute = item.name.partition(":")
    try:
        found = importlib.import_module(module_name)
        for part in filter(None, attribute.split(".")):
            found = getattr(found, part)
        lacking = [p for p in item.parameters if p not in inspect.signature(found).parameters]  # type: ignore[arg-type]
    except (ImportError, AttributeError) as error:
        return {"name": item.name, "owner": item.owner, "cause": one_line(error)}
    if lacking:
        return {"name": item.name, "owner": item.owner, "cause": f"no longer takes {', '.join(lacking)}"}
    return None


def show(report: dict[str, Any]) -> None:
    """Print what :func:`examine` found."""
    console = Console()
    versions = Table("package", "found", "proven with", "", box=box.SIMPLE)
    for row in report["versions"]:
        versions.add_row(row["package"], row["found"], row["proven"], row["state"])
    console.print(versions)
    for name, cause in report["imports"].items():
        pair = ", ".join(f"{r['package']} {r['found']}" for r in report["versions"] if r["package"] in (name, "torch", "kernels"))
        console.print(f"[red]import {name} fails[/red]: ", end="")
        console.print(f"{cause} ({pair})", markup=False)
    for row in report["missing"]:
        console.print(f"upstream name {row['name']} is gone or changed ({row['cause']}); affected: {row['owner']}", markup=False)
    for row in report["problems"]:
        console.print(f"plugin {row['plugin']} of {row['distribution']} {row['version']}: {row['cause']}", markup=False)
    for row in report["unmet"]:
        console.print(f"method {row['method']} {row['cause']}", markup=False)
    console.print("healthy" if report["healthy"] else "not healthy")
