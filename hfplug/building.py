"""The trainer of a checked run file: model, data, and every plugin attached to it."""

from __future__ import annotations

from typing import Any

from hfplug.errors import ConfigError, nearest
from hfplug.method import Kind
from hfplug.plugins import load
from hfplug.training import Run, reward_functions


def build_trainer(run: Run) -> Any:
    """The trainer of a checked run, TRL's own or that of ``plugins.trainer``, with its plugins attached, before ``train()``."""
    from trl import get_peft_config, get_quantization_config

    import hfplug.losses
    from hfplug.models import resolve_model
    from hfplug.optimization import prepare
    from hfplug.seams import trainer as seam
    from hfplug.seams.attention import configure

    model, training, script = (run.arguments[k] for k in ("model", "training", "script"))
    tuner = run.plugins.get("tuner", [])
    if tuner and model.use_peft:
        raise ConfigError("the run file asks for both plugins.tuner and TRL's use_peft; choose one")
    peft_config = tuner[0].config if tuner else get_peft_config(model)
    if tuner and peft_config.task_type is None:
        peft_config.task_type = seam.task(run.task).task_type
    attention = run.plugins.get("attention", [])
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": attention[0].name if attention else model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    further = _further_arguments(run)
    data = _dataset(run)
    evaluate = training.eval_strategy != "no" or training.do_eval
    split = script.dataset_test_split
    if evaluate and split not in data:
        raise ConfigError(f"evaluation is on but the data has no split {split!r}{nearest(split, data)}; splits: {sorted(data)}")
    loaded, processing = _patched(run) if run.plugins.get("patches") else (resolve_model(model.model_name_or_path), None)
    chosen, quantizer = run.plugins.get("trainer", []), run.plugins.get("quantizer", [])
    trainer = (load(chosen[0].name, Kind.TRAINER) if chosen else seam.stock_trainer(run.task))(
        model=loaded,
        processing_class=processing,
        args=training,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[split] if evaluate else None,
        quantization_config=quantizer[0].config if quantizer else get_quantization_config(model),
        peft_config=peft_config,
        callbacks=[load(c.name, Kind.CALLBACK)(c.config) for c in run.plugins.get("callbacks", [])],
        **further,
    )
    _quieter_progress(trainer)
    for choice in attention:
        configure(trainer.model, choice.name, **choice.options)
    for choice in run.plugins.get("loss", []):
        hfplug.losses.add(trainer, load(choice.name, Kind.LOSS)(choice.config))
    if tuner:
        prepare(trainer)
    return trainer


def _further_arguments(run: Run) -> dict[str, Any]:
    """What the trainer of the task takes besides, as TRL's script of the task prepares it."""
    from hfplug.models import resolve_model

    script, training = run.arguments["script"], run.arguments["training"]
    if run.task == "grpo":
        scorer = script.reward_model_name_or_path
        return {"reward_funcs": [*([scorer] if scorer else []), *reward_functions(script.reward_funcs or [])]}
    if run.task == "distill":
        model = run.arguments["model"]
        training.teacher_model_init_kwargs = {
            "revision": training.teacher_model_revision,
            "attn_implementation": model.attn_implementation,  # not plugins.attention: an approximation of the student's own
            "dtype": model.dtype,
            **(training.teacher_model_init_kwargs or {}),
        }
        return {"teacher_model": resolve_model(training.teacher_model_name_or_path)}
    return {}


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
