"""Training from a run file: stock TRL fields plus a ``plugins:`` section, checked whole before any model is loaded."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfplug.errors import ConfigError, nearest
from hfplug.method import Kind
from hfplug.options import build
from hfplug.plugins import catalogue, load

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
_SUPPORTED = {"tuner", "attention", "quantizer", "patches", "loss", "callbacks"}


@dataclass(frozen=True)
class Choice:
    """One method chosen in a run file, its options checked."""

    name: str
    options: Mapping[str, Any]
    config: Any


@dataclass(frozen=True)
class Run:
    """A checked run file.

    Attributes:
        arguments: the TRL dataclasses by name: ``script``, ``training``, ``model``, ``dataset``.
        plugins: section -> the methods chosen there.
    """

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
    """Check an SFT run: every key, type and plugin name. Loads no model and no data.

    Raises:
        ConfigError: anything wrong, naming the place, the value and the nearest valid name.
    """
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig
    from trl.scripts.utils import DatasetConfig

    classes = {"script": ScriptArguments, "training": SFTConfig, "model": ModelConfig, "dataset": DatasetMixtureConfig}
    owner = {f.name: part for part, cls in reversed(classes.items()) for f in dataclasses.fields(cls) if f.init}
    values: dict[str, dict[str, Any]] = {part: {} for part in classes}
    plugins = parse_plugins(run.get("plugins") or {})  # before the parts, which may touch devices and folders
    for key, value in run.items():
        if key == "plugins":
            continue
        if key not in owner:
            raise ConfigError(f"unknown key {key!r}{nearest(key, [*owner, 'plugins'])} in the run file; valid: any field of "
                              f"{', '.join(c.__name__ for c in classes.values())}, and 'plugins'")  # fmt: skip
        values[owner[key]][key] = value
    if not values["model"].get("model_name_or_path"):
        raise ConfigError("the run file needs 'model_name_or_path': a hub id, a folder, or 'smollm2'")
    if not values["dataset"].get("datasets") and not values["script"].get("dataset_name"):
        raise ConfigError("the run file needs 'datasets' (a list of {path, data_files, ...}) or 'dataset_name'")
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
    packed = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(built["model"], name)]
    if plugins.get("patches") and packed:
        raise ConfigError("plugins.patches with load_in_4bit or load_in_8bit: patches are put on full-precision weights alone")
    if plugins.get("quantizer"):
        _check_quantizer(plugins, built, packed)
    return Run(built, plugins)


def _check_quantizer(plugins: Mapping[str, Sequence[Choice]], built: Mapping[str, Any], packed: Sequence[str]) -> None:
    choice = plugins["quantizer"][0]
    if packed or "quantization_config" in (built["training"].model_init_kwargs or {}):
        other = packed[0] if packed else "model_init_kwargs.quantization_config"
        raise ConfigError(f"{other} and plugins.quantizer={choice.name!r} both quantise the model; choose one")
    if plugins.get("patches"):
        raise ConfigError("plugins.patches with plugins.quantizer: patches are put on full-precision weights alone")
    if not (plugins.get("tuner") or built["model"].use_peft or choice.config.dequantize):
        raise ConfigError(
            f"plugins.quantizer={choice.name!r} packs the weights, which are not trained then; add plugins.tuner or use_peft, or "
            "set its dequantize to true"
        )


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
    config = build(catalogue().get(item["type"], kind).load_config(), options, where=f"{where} ({item['type']})")
    return Choice(item["type"], options, config)


def train_sft(run: Mapping[str, Any] | str | Path) -> TrainResult:
    """Fine-tune with TRL's stock ``SFTTrainer`` and the plugins of a run file; save the result in ``output_dir``.

    Args:
        run: path of a YAML run file, or its content.

    Raises:
        ConfigError: the run file is wrong; raised before a model is loaded.
    """
    from hfplug.report import update_facts

    parsed = parse_sft(read_run(run) if isinstance(run, (str, Path)) else run)
    trainer = build_sft_trainer(parsed)
    training = parsed.arguments["training"]
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.save_state()
    for choice in parsed.plugins.get("quantizer", []):
        quantizer = getattr(trainer.model, "hf_quantizer", None)
        how = f"{choice.name}: dequantised" if quantizer is None else quantizer.summary(trainer.model)
        update_facts(Path(training.output_dir), {"weights": how})
    metrics = {k: v for entry in trainer.state.log_history for k, v in entry.items() if isinstance(v, (int, float))}
    return TrainResult(trainer, Path(training.output_dir), metrics)


def build_sft_trainer(run: Run) -> Any:
    """The stock ``SFTTrainer`` of a checked run, with its plugins attached, ready for ``train()``."""
    from trl import SFTTrainer, get_peft_config, get_quantization_config

    import hfplug.losses
    from hfplug.models import resolve_model
    from hfplug.optimization import prepare
    from hfplug.seams.attention import configure

    model, training, script = (run.arguments[k] for k in ("model", "training", "script"))
    tuner = run.plugins.get("tuner", [])
    if tuner and model.use_peft:
        raise ConfigError("the run file asks for both plugins.tuner and TRL's use_peft; choose one")
    peft_config = tuner[0].config if tuner else get_peft_config(model)
    if tuner and peft_config.task_type is None:
        peft_config.task_type = "CAUSAL_LM"
    attention = run.plugins.get("attention", [])
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": attention[0].name if attention else model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    data = _dataset(run)
    evaluate = training.eval_strategy != "no" or training.do_eval
    split = script.dataset_test_split
    if evaluate and split not in data:
        raise ConfigError(f"evaluation is on but the data has no split {split!r}{nearest(split, data)}; splits: {sorted(data)}")
    quantizer = run.plugins.get("quantizer", [])
    loaded, processing = _patched(run) if run.plugins.get("patches") else (resolve_model(model.model_name_or_path), None)
    trainer = SFTTrainer(
        model=loaded,
        processing_class=processing,
        args=training,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[split] if evaluate else None,
        quantization_config=quantizer[0].config if quantizer else get_quantization_config(model),
        peft_config=peft_config,
        callbacks=[load(c.name, Kind.CALLBACK)(c.config) for c in run.plugins.get("callbacks", [])],
    )
    _quieter_progress(trainer)
    for choice in attention:
        configure(trainer.model, choice.name, **choice.options)
    for choice in run.plugins.get("loss", []):
        hfplug.losses.add(trainer, load(choice.name, Kind.LOSS)(choice.config))
    if tuner:
        prepare(trainer)
    return trainer


def _patched(run: Run) -> tuple[Any, Any]:
    """Model and tokenizer as ``SFTTrainer`` would load them, with the patches of the run: before any adapter or optimizer."""
    from transformers import AutoProcessor, set_seed
    from trl.trainer.utils import create_model_from_path

    from hfplug.models import resolve_model
    from hfplug.patches import apply

    model, training = run.arguments["model"], run.arguments["training"]
    options = {"trust_remote_code": training.trust_remote_code, **training.model_init_kwargs}
    if training.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None  # as SFTTrainer does
    set_seed(training.seed)
    source = resolve_model(model.model_name_or_path)
    loaded = create_model_from_path(source, **options)
    # Of a model that is handed over SFTTrainer does not know the revision.
    trusted = training.trust_remote_code
    processing = AutoProcessor.from_pretrained(source, revision=model.model_revision, trust_remote_code=trusted)
    training.model_init_kwargs = None  # they are used
    for choice in run.plugins["patches"]:
        apply(loaded, choice.config)
    return loaded, processing


def _quieter_progress(trainer: Any) -> None:
    """Leave per-layer metrics out of the lines written above the progress bar; everything else logs them all."""
    from transformers.trainer_callback import ProgressCallback

    class Progress(ProgressCallback):
        """The stock bar."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            shown = {key: value for key, value in (logs or {}).items() if "/layer_" not in key}
            super().on_log(args, state, control, logs=shown, **kwargs)

    for index, callback in enumerate(trainer.callback_handler.callbacks):
        if type(callback) is ProgressCallback:
            trainer.callback_handler.callbacks[index] = Progress(callback.max_str_len)


def _dataset(run: Run) -> Any:
    from datasets import load_dataset
    from trl import get_dataset

    script, dataset = run.arguments["script"], run.arguments["dataset"]
    if dataset.datasets:
        return get_dataset(dataset)
    return load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
