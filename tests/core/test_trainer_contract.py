"""The contract of trainers is met by an honest toy of each task, and sees each fault it is there for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from trainer_kit import TrainerContract

from hfplug.seams.trainer import MethodConfig, MethodTrainer, stock_config, stock_trainer


def toy(name: str) -> tuple[Any, Any]:
    """A trainer of a task whose loss is multiplied by ``toy_scale``, with its config."""

    @dataclass
    class ToyConfig(MethodConfig, stock_config(name)):
        toy_scale: float = dataclasses.field(default=2.0, metadata={"help": "factor of the loss"})

        def check(self) -> None:
            self.bound("toy_scale", least=0)

    class ToyTrainer(MethodTrainer, stock_trainer(name)):
        method, config_class = "toy", ToyConfig

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if return_outputs:
                return self.args.toy_scale * found[0], found[1]
            self.log_metric("scale", self.args.toy_scale)
            return self.args.toy_scale * found

    ToyConfig.__module__, ToyConfig.__qualname__ = __name__, f"ToyConfig_{name}"  # for pickle
    globals()[ToyConfig.__qualname__] = ToyConfig
    return ToyConfig, ToyTrainer


class Toy(TrainerContract):
    method = "toy"
    neutral: ClassVar[dict[str, Any]] = {"toy_scale": 1.0}
    options: ClassVar[dict[str, Any]] = {"toy_scale": 2.0}
    name = "sft"

    @property
    def task(self) -> str:
        return self.name

    def config_class(self) -> Any:
        return _toys(self.name)[0]

    def trainer_class(self) -> Any:
        return _toys(self.name)[1]


_made: dict[str, Any] = {}


def _toys(name: str) -> Any:
    if name not in _made:
        _made[name] = toy(name)
    return _made[name]


class TestSft(Toy):
    name = "sft"


class TestDpo(Toy):
    name = "dpo"


class TestReward(Toy):
    name = "reward"
    dense = False


class TestGrpo(Toy):
    name = "grpo"


class TestDistill(Toy):
    name = "distill"
