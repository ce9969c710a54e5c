"""``hfplug plan``."""

from __future__ import annotations

from collections.abc import Sequence

from hfplug.cli.merging import setting
from hfplug.errors import ConfigError
from hfplug.models import resolve_model
from hfplug.patches import Plan
from hfplug.patches import plan as plan_of


def plan(model: str, patch: str, settings: Sequence[str]) -> Plan:
    """What a patch would do to the model of a configuration, which is built without weights.

    Raises:
        ConfigError: no such model or patch, or an option it does not take.
        UnsupportedError: a model it cannot be applied to.
    """
    import torch
    import transformers

    source = resolve_model(model)
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r}: {error}") from error
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    cls = next((c for c in named if c is not None), transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        made = cls._from_config(config) if hasattr(cls, "_from_config") else cls.from_config(config)
    return plan_of(made, patch, **dict(setting(text) for text in settings))
