"""Commands that methods bring along: ``hfplug <method> …``, found in the catalogue and imported when they are called."""

from __future__ import annotations

import functools
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hfplug.errors import ConfigError, nearest
from hfplug.plugins import Entry, catalogue, load_dotted


class MethodGroup(TyperGroup):
    """``hfplug <method>``: named and described by the manifest; the method's own code is imported for what lies below."""

    def __init__(self, entry: Entry) -> None:
        method = entry.method
        super().__init__(
            name=method.name, help=f"Commands of {method.kind} {method.name}: {method.summary}.", no_args_is_help=True
        )
        self.entry = entry

    @functools.cached_property
    def loaded(self) -> Any:
        """The commands as the method wrote them.

        Raises:
            ConfigError: what the manifest names is no ``typer.Typer``.
            PluginError: a requirement of the method is not met.
        """
        self.entry.check()
        app = load_dotted(self.entry.method.command)
        if not isinstance(app, typer.Typer):
            method = self.entry.method
            raise ConfigError(f"Method.command={method.command!r} of {method.name!r} is {app!r:.80}, no typer.Typer")
        return typer.main.get_group(app)

    def list_commands(self, ctx: Any) -> list[str]:
        return self.loaded.list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.loaded.get_command(ctx, cmd_name)


class WithMethods(TyperGroup):
    """The host's own commands, then those of methods. The host's come first and read no catalogue."""

    def list_commands(self, ctx: Any) -> list[str]:
        own, theirs = super().list_commands(ctx), _with_commands()
        for name in sorted(set(own) & set(theirs)):
            told = f"hfplug: the commands of {theirs[name].source} cannot be reached: `hfplug {name}` is the host's own"
            print(told, file=sys.stderr)
        return [*own, *(name for name in theirs if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        theirs = _with_commands()
        return MethodGroup(theirs[cmd_name]) if cmd_name in theirs else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            if (entry := catalogue().entries.get(args[0])) is not None:
                raise ConfigError(f"{entry.method.kind} {args[0]!r} has no commands; `hfplug info {args[0]}` shows it")
            known = self.list_commands(ctx)
            cause = catalogue().why_not(args[0])
            why = f"; a plugin of that name was found but not loaded: {cause}" if cause else ""
            raise ConfigError(f"no command {args[0]!r}{nearest(args[0], known)}; commands: {', '.join(known)}{why}")
        return super().resolve_command(ctx, args)


def _with_commands() -> dict[str, Entry]:
    return {name: entry for name, entry in sorted(catalogue().entries.items()) if entry.method.command}
