"""Preferences over the vocabulary of the tiny models, and trainers for them, shared by the tests of SA-DPO."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from typing import Any

import datasets
import torch
import transformers
import trl

from hfplug.testing import trainer_kits
from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.trainers import SADPOConfig, SADPOTrainer

SETTINGS: dict[str, Any] = trainer_kits.settings("dpo") | {
    "max_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
}  # fmt: skip


def preferences(rows: int = 8, seed: int = 0, **columns: Any) -> datasets.Dataset:
    """Prompts and responses of uneven length, with ``semantic_distance`` spread over [0, 1] unless other columns are given."""
    made = trainer_kits.rows("dpo", rows, seed)
    extra = columns or {"semantic_distance": [i / max(rows - 1, 1) for i in range(rows)]}
    found = datasets.Dataset.from_list(made)
    for name, values in extra.items():
        found = found.add_column(name, values)
    return found


def policy_and_reference(seed: int = 0) -> tuple[Any, Any]:
    """Two models that differ, so that log ratios are not 0."""
    return tiny_llama(seed), tiny_llama(seed + 1)


def dpo(cls: type[Any] = SADPOTrainer, model: Any = None, ref_model: Any = None, data: Any = None, **options: Any) -> Any:
    """A trainer of one of both classes for two quick steps; ``options`` are fields of its config, ours without ``sa_dpo_``."""
    own = {f.name.removeprefix("sa_dpo_") for f in dataclasses.fields(SADPOConfig) if f.name.startswith("sa_dpo_")}
    options = {f"sa_dpo_{k}" if k in own else k: v for k, v in options.items()}
    if model is None:
        model, ref_model = policy_and_reference()
    elif ref_model is None and not (options.get("sa_dpo_reference_free") or options.get("peft_config")):
        ref_model = None if hasattr(model, "peft_config") else copy.deepcopy(model)
    outer = {k: options.pop(k) for k in ("eval_dataset", "peft_config", "data_collator") if k in options}
    folder = tempfile.TemporaryDirectory()
    config_class = SADPOConfig if cls is SADPOTrainer else trl.DPOConfig
    config = config_class(options.pop("output_dir", folder.name), **{**SETTINGS, **options})
    data = preferences() if data is None else data
    trainer = cls(model, ref_model, config, train_dataset=data, processing_class=tiny_tokenizer(), **outer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.owned = folder  # lives as long as the trainer
    return trainer


def batch(trainer: Any) -> dict[str, Any]:
    """The first training batch, as the loop would hand it over."""
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def loss_of(trainer: Any, inputs: Any = None) -> torch.Tensor:
    """The loss of one batch."""
    trainer.model.train()
    return trainer.compute_loss(trainer.model, batch(trainer) if inputs is None else inputs)


def rewards_of(trainer: Any) -> torch.Tensor:
    """``beta * Delta`` of the first batch by hand: plain forwards, log softmax, sums over the response."""
    inputs, sums = batch(trainer), []
    for model in (trainer.model, trainer.ref_model):
        with torch.no_grad():
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        found = logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
        sums.append((found * inputs["completion_mask"][:, 1:]).sum(1))
    chosen, rejected = (sums[0] - sums[1]).chunk(2)
    return trainer.args.beta * (chosen - rejected)


def parameters(trainer: Any) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
