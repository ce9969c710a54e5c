from typing import Any, ClassVar

from hfplug.testing.tuner import TunerContract


class TestULoraContract(TunerContract):
    method, options, dropout = "ulora", {"r": 4}, {"lora_dropout": 0.2}
    merge: ClassVar[dict[str, Any]] = {"merge_mode": "mean", "ema_weight": 1.0}
