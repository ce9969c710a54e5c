"""``hfplug list`` and ``hfplug info``."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hfplug.errors import HfplugError, one_line
from hfplug.extensions import offers
from hfplug.options import table
from hfplug.plugins import Catalogue, Entry


def as_json(catalogue: Catalogue) -> dict[str, Any]:
    """Everything the catalogue knows; the options are left to ``info``, since reading them imports torch."""
    return {
        "methods": [
            {**e.method.as_dict(), "distribution": e.source.distribution, "version": e.source.version, "unmet": e.unmet()}
            for _, e in sorted(catalogue.entries.items())
        ],
        "problems": [
            {
                "plugin": p.source.plugin,
                "distribution": p.source.distribution,
                "version": p.source.version,
                "method": p.method,
                "cause": p.cause,
            }
            for p in catalogue.problems
        ],
    }


def listing(catalogue: Catalogue) -> None:
    """Print the methods, then the problems."""
    console = Console()
    methods = Table(box=box.SIMPLE)
    for heading in ("method", "kind"):
        methods.add_column(heading, no_wrap=True)
    for heading in ("what it does", "paper", "from"):
        methods.add_column(heading, overflow="fold", ratio=3 if heading == "what it does" else None)
    for name, entry in sorted(catalogue.entries.items()):
        summary = entry.method.summary + (f" [{entry.unmet()}]" if entry.unmet() else "")
        paper = entry.method.paper
        methods.add_row(name, str(entry.method.kind), summary, f"{paper.venue} ({paper.fidelity})", str(entry.source))
    console.print(methods)
    if catalogue.problems:
        broken = Table("plugin", "from", "cause", box=box.SIMPLE, title="not usable, or to be mended", title_justify="left")
        for problem in catalogue.problems:
            broken.add_row(problem.method or problem.source.plugin, str(problem.source), problem.cause)
        console.print(broken)


def entry_json(entry: Entry) -> dict[str, Any]:
    """One method with its options."""
    return {
        **entry.method.as_dict(),
        "distribution": entry.source.distribution,
        "version": entry.source.version,
        "options": table(entry.load_config()),
    }


def details(entry: Entry) -> None:
    """Print one method."""
    console, method = Console(), entry.method
    console.print(f"[bold]{method.name}[/bold] ({method.kind}), from {entry.source}", highlight=False)
    console.print(method.summary + ".", highlight=False)
    console.print(f"\n{method.paper.title}. {method.paper.venue}. {method.paper.url}", highlight=False, markup=False)
    console.print(f"Fidelity: {method.paper.fidelity}", highlight=False)
    if method.example:
        console.print(f"\n    {method.example}\n", highlight=False, markup=False)
    try:
        options = Table(box=box.SIMPLE)
        options.add_column("option", no_wrap=True)  # a name cut short cannot be used
        for heading in ("type", "default", "meaning"):
            options.add_column(heading)
        for row in table(entry.load_config()):
            options.add_row(row["name"], row["type"], row["default"], row["help"])
        console.print(options)
    except (ImportError, HfplugError) as error:
        console.print(f"options: not readable here: {one_line(error)}", markup=False)
    if method.capabilities:
        can = Table("works with", "", box=box.SIMPLE)
        for name, value in method.capabilities.items():
            can.add_row(name, {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else value)
        console.print(can)
    if method.extension_points:
        offered = Table("extension point", "takes", "offered", box=box.SIMPLE)
        for point, takes in method.extension_points.items():
            names = [f"{name}: {offer.extension.summary}" for name, offer in offers(method.name, point).items()]
            offered.add_row(point, escape(takes), escape("\n".join(names)))
        console.print(offered)
    for limit in method.limits:
        console.print(f"- {limit}", highlight=False, markup=False)
