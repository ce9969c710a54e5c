"""What the tests of trainers share: the contract with the tuners of this repository, MoLoRA's experts among them."""

from __future__ import annotations

from typing import Any

import molora_kit
import torch

import hfplug.tuners
from hfplug.seams.trainer import task
from hfplug.testing import trainer


class TrainerContract(trainer.TrainerContract):
    """The contract; tuners that need more than a rank get it."""

    def tuner(self, name: str) -> Any:
        task_type = task(self.task).task_type
        if name == "molora":
            return molora_kit.config(router_hidden=16, task_type=task_type)
        found = super().tuner(name)
        if name == "bayes_lora":  # counts labels where it is not told, and batches of most tasks have none
            found.train_size = 8
        return found


def stir(model: Any) -> None:
    """Move every trainable parameter away from its first value, where most adapters do nothing."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))


def moves_alone(trainer: Any) -> None:
    """Train: a tensor of the adapter moves, every parameter without one in its name and the teacher stay, losses are finite."""
    prefix = trainer.model.base_model.prefix
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    taught = {n: t.clone() for n, t in trainer.teacher_model.state_dict().items()}
    assert all(prefix in n for n, p in trainer.model.named_parameters() if p.requires_grad)
    hfplug.tuners.prepare(trainer)
    trainer.train()
    moved = [n for n, p in trainer.model.named_parameters() if not bool((p == before[n]).all())]
    assert moved
    assert all(prefix in name for name in moved)
    assert all(bool((t == taught[n]).all()) for n, t in trainer.teacher_model.state_dict().items())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == trainer.args.max_steps
    assert all(torch.isfinite(torch.tensor(losses)))
