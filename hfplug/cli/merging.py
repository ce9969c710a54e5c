"""``hfplug merge``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hfplug.errors import ConfigError
from hfplug.merge_report import MergeReport


def merge(
    adapters: Sequence[str],
    output: Path | None,
    rank: int | None,
    weights: str | None,
    method: str,
    settings: Sequence[str],
    seed: int,
) -> MergeReport:
    """Merge what the command line names.

    Raises:
        ConfigError: weights that are no numbers, a setting that is not ``key=value``, or what ``hfplug.tuners.merge`` refuses.
    """
    from hfplug.seams.merge import merge as merge_adapters

    options = dict(setting(text) for text in settings)
    taken = {"adapters", "weights", "rank", "method", "output", "name", "seed", "model"} & set(options)
    if taken:
        raise ConfigError(f"--set {min(taken)}=... is no option of a merge method")
    return merge_adapters(list(adapters), _numbers(weights), rank, method, output, seed=seed, **options)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--weights {text!r} must be numbers with commas between, e.g. 1,1,-0.5") from error


def setting(text: str) -> tuple[str, Any]:
    """``--set key=value``, the value read as YAML.

    Raises:
        ConfigError: not of this form.
    """
    key, found, value = text.partition("=")
    if not found or not key:
        raise ConfigError(f"--set {text!r} must be key=value, e.g. --set rule=ties")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is no YAML") from error
