"""Training from a run file: stock TRL fields plus a ``plugins:`` section, checked whole before any model is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfplug.errors import ConfigError, HfplugError, nearest
from hfplug.method import Kind
from hfplug.options import build
from hfplug.plugins import catalogue, load, load_dotted

# Key of the `plugins:` section -> kind, and whether it takes a list. Kinds are fixed; methods come from the catalogue.
SECTIONS = {
    "tuner": (Kind.TUNER, False),
    "attention": (Kind.ATTENTION, False),
    "cache": (Kind.CACHE, False),
    "quantizer": (Kind.QUANTIZER, False),
    "patches": (Kind.PATCH, True),
    "loss": (Kind.LOSS, True),
    "trainer": (Kind.TRAINER, False),
    "callbacks": (Kind.CALLBACK, True),
}
_SUPPORTED = {"tuner", "attention", "patches", "loss", "trainer", "callbacks"}


@dataclass(frozen=True)
class Choice:
    """One method chosen in a run file, its options checked.

    Attributes:
        config: the method's config; of a trainer ``None``: its options stand in the run's ``training`` arguments.
    """

    name: str
    options: Mapping[str, Any]
    config: Any


@dataclass(frozen=True)
class Run:
    """A checked run file.

    Attributes:
        task: ``"sft"``, ``"dpo"``, ``"grpo"``, ``"reward"`` or ``"distill"``.
        arguments: the TRL dataclasses by name: ``script``, ``training`` (the method's own config where ``plugins.trainer``
            names one), ``model``, ``dataset``.
        plugins: section -> the methods chosen there.
    """

    task: str
    arguments: Mapping[str, Any]
    plugins: Mapping[str, Sequence[Choice]]


@dataclass(frozen=True)
class TrainResult:
    """What a training run leaves: the trainer (model inside), where it wrote, and its last metrics."""

    trainer: Any
    output_dir: Path
    metrics: Mapping[str, float]


def read_run(path: str | Path) -> dict[str, Any]:
    """Read a YAML run file.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        close = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        raise ConfigError(f"run file {str(path)!r} does not exist" + (f" (did you mean {close[0]!r}?)" if close else ""))
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"run file {str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"run file {str(path)!r} must hold a mapping, found {type(loaded).__name__}")
    return loaded


def with_overrides(run: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Apply command-line words ``--key value`` (or ``--key=value``; dots reach into ``plugins``) over a run file."""
    import yaml

    out: dict[str, Any] = {k: (dict(v) if isinstance(v, dict) else v) for k, v in run.items()}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}; overrides look like --learning_rate 1e-4 or --plugins.tuner.r 16")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not queue:
                raise ConfigError(f"--{key} needs a value")
            value = queue.pop(0)
        place = out
        *path, last = key.split(".")
        for part in path:
            inner = place.get(part, {})
            if isinstance(inner, str):
                inner = {"type": inner}
            if not isinstance(inner, dict):
                raise ConfigError(f"--{key}: {part!r} is a {type(inner).__name__} in the run file and cannot be reached into")
            place[part] = dict(inner)
            place = place[part]
        place[last] = yaml.safe_load(value)
    return out


def parse_sft(run: Mapping[str, Any]) -> Run:
    """:func:`parse` for the commonest task."""
    return parse(run, "sft")


def parse(run: Mapping[str, Any], task: str) -> Run:
    """Check a run: every key, type and plugin name. Loads no model and no data.

    Args:
        run: the content of a run file.
        task: what ``hfplug train`` is followed by; one of :data:`hfplug.seams.trainer.TASKS`.

    Raises:
        ConfigError: anything wrong, naming the place, the value and the nearest valid name.
    """
    from trl.scripts.utils import DatasetConfig

    plugins = parse_plugins(run.get("plugins") or {})  # before the parts, which may touch devices and folders
    classes, values = _by_owner(run, task, plugins)
    _missing(values, task)
    values["dataset"]["datasets"] = [
        build(DatasetConfig, item, where=f"datasets[{i}]") for i, item in enumerate(values["dataset"].get("datasets") or [])
    ]
    built = {part: build(cls, values[part]) for part, cls in classes.items()}
    for choice in plugins.get("attention", []):
        init = built["training"].model_init_kwargs or {}
        asked = [("attn_implementation", built["model"].attn_implementation)]
        asked.append(("model_init_kwargs.attn_implementation", init.get("attn_implementation")))
        for where, value in asked:
            # By parts of the model it may be said twice: {"text_config": "muse", "vision_config": "sdpa"}.
            if choice.name not in (value.values() if isinstance(value, Mapping) else (value or choice.name,)):
                raise ConfigError(f"{where}={value!r} asks for another attention than plugins.attention={choice.name!r}")
    if plugins.get("patches") and (built["model"].load_in_4bit or built["model"].load_in_8bit):
        raise ConfigError("plugins.patches with load_in_4bit or load_in_8bit: patches are put on full-precision weights alone")
    if plugins.get("patches") and task != "sft":
        raise ConfigError(f"plugins.patches: `hfplug train {task}` does not take patches, `hfplug train sft` does")
    if task == "grpo":
        reward_functions(built["script"].reward_funcs or [])
    return Run(task, built, plugins)


def _by_owner(
    run: Mapping[str, Any], task: str, plugins: Mapping[str, Sequence[Choice]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part of the run -> its dataclass, and part -> the values that stand in the file for it."""
    from trl import DatasetMixtureConfig, ModelConfig

    from hfplug.seams import trainer as seam

    script, training = load_dotted(seam.task(task).script), seam.stock_config(task)
    classes = {"script": script, "training": training, "model": ModelConfig, "dataset": DatasetMixtureConfig}
    owner = {f.name: part for part, cls in reversed(classes.items()) for f in dataclasses.fields(cls) if f.init}
    values: dict[str, dict[str, Any]] = {part: {} for part in classes}
    own: list[str] = []
    for choice in plugins.get("trainer", []):
        trains = seam.task_of(load(choice.name, Kind.TRAINER))
        if trains != task:
            raise ConfigError(f"plugins.trainer={choice.name!r} trains with `hfplug train {trains}`, not {task!r}")
        classes["training"] = catalogue().get(choice.name, Kind.TRAINER).load_config()
        own = seam.own_fields(classes["training"])
        values["training"] |= choice.options
    for key, value in run.items():
        if key == "plugins":
            continue
        if key in own:
            raise ConfigError(f"{key!r} is an option of the trainer: it belongs in plugins.trainer, not at the top of the file")
        if key not in owner:
            raise ConfigError(f"unknown key {key!r}{nearest(key, [*owner, 'plugins'])} in the run file; valid: any field of "
                              f"{', '.join(c.__name__ for c in classes.values())}, and 'plugins'")  # fmt: skip
        values[owner[key]][key] = value
    return classes, values


def _missing(values: Mapping[str, Mapping[str, Any]], task: str) -> None:
    """Refuse a run file without what the task cannot do without."""
    script = values["script"]
    if not values["model"].get("model_name_or_path"):
        raise ConfigError("the run file needs 'model_name_or_path': a hub id, a folder, or 'smollm2'")
    if not values["dataset"].get("datasets") and not script.get("dataset_name"):
        raise ConfigError("the run file needs 'datasets' (a list of {path, data_files, ...}) or 'dataset_name'")
    if task == "grpo" and not (script.get("reward_funcs") or script.get("reward_model_name_or_path")):
        raise ConfigError("the run file needs 'reward_funcs' (names or dotted paths) or 'reward_model_name_or_path'")
    if task == "distill" and not values["training"].get("teacher_model_name_or_path"):
        raise ConfigError("the run file needs 'teacher_model_name_or_path': a hub id, a folder, or 'smollm2'")


def parse_plugins(section: Mapping[str, Any]) -> dict[str, list[Choice]]:
    """Check the ``plugins:`` section of a run file."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"plugins={section!r} must be a mapping with keys from {sorted(SECTIONS)}")
    out: dict[str, list[Choice]] = {}
    for key, value in section.items():
        if key not in SECTIONS:
            raise ConfigError(f"plugins: unknown key {key!r}{nearest(key, SECTIONS)}; valid: {sorted(SECTIONS)}")
        kind, many = SECTIONS[key]
        items = value if isinstance(value, list) else [] if value is None else [value]
        if len(items) > 1 and not many:
            raise ConfigError(f"plugins.{key} takes one method, got {len(items)}")
        out[key] = [_choice(item, kind, f"plugins.{key}") for item in items]
        if items and key not in _SUPPORTED:
            raise ConfigError(f"plugins.{key}: `hfplug train` does not take {kind} methods in this version")
    return out


def _choice(item: Any, kind: Kind, where: str) -> Choice:
    if isinstance(item, str):
        item = {"type": item}
    if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
        raise ConfigError(f"{where}={item!r} must be a method name, or a mapping with 'type' and its options")
    options = {k: v for k, v in item.items() if k != "type"}
    load(item["type"], kind)  # unknown names and unmet requirements, before anything else
    config, place = catalogue().get(item["type"], kind).load_config(), f"{where} ({item['type']})"
    if kind is not Kind.TRAINER:
        return Choice(item["type"], options, build(config, options, where=place))
    from hfplug.seams.trainer import own_fields

    # Only what is the method's own; the fields of TRL stand at the top of the file, and only all together make a config.
    for key in options:
        if key not in (own := own_fields(config)):
            raise ConfigError(f"{place}: {config.__name__} has no option {key!r} of its own{nearest(key, own)}; options: {own}")
    return Choice(item["type"], options, None)


def reward_functions(names: Sequence[str]) -> list[Any]:
    """Reward functions by the names TRL's script knows, or by dotted paths; the working folder is on the path, as there.

    Raises:
        ConfigError: no such name or path, or something that cannot be called.
    """
    from trl import rewards

    known = {name: getattr(rewards, name) for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")}
    known["get_soft_overlong_punishment"] = rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    found = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        if name not in known and not module:
            raise ConfigError(f"reward_funcs: {name!r} is neither a dotted path nor one of {sorted(known)}{nearest(name, known)}")
        if name in known:
            function = known[name]
        else:
            if str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            try:
                function = load_dotted(f"{module}:{attribute}")
            except (ImportError, AttributeError, HfplugError) as error:
                raise ConfigError(f"reward_funcs: {name!r} cannot be imported: {error}") from error
        if not callable(function):
            raise ConfigError(f"reward_funcs: {name!r} is a {type(function).__name__}, not a function")
        found.append(function)
    return found


def train_sft(run: Mapping[str, Any] | str | Path) -> TrainResult:
    """:func:`train` for the commonest task."""
    return train(run, "sft")


def train(run: Mapping[str, Any] | str | Path, task: str) -> TrainResult:
    """Train with TRL's trainer of a task, or with the method of ``plugins.trainer``; save the result in ``output_dir``.

    Args:
        run: path of a YAML run file, or its content.
        task: see :func:`parse`.

    Raises:
        ConfigError: the run file is wrong; raised before a model is loaded.
    """
    from hfplug.building import build_trainer

    parsed = parse(read_run(run) if isinstance(run, (str, Path)) else run, task)
    trainer = build_trainer(parsed)
    training = parsed.arguments["training"]
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.save_state()
    metrics = {k: v for entry in trainer.state.log_history for k, v in entry.items() if isinstance(v, (int, float))}
    return TrainResult(trainer, Path(training.output_dir), metrics)
