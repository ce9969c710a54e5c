"""What the tests of trainers share: the contract with the tuners of this repository, MoLoRA's experts among them."""

from __future__ import annotations

from typing import Any

import molora_kit

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
