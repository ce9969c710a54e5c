"""Options of the callback."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfplug import ConfigError


@dataclass
class SinkProbeConfig:
    """Which probe judges what at every evaluation; the probe itself has its own options, see ``SinkProbe``."""

    probe: str | None = field(
        default=None,
        metadata={"help": "folder of a fitted probe (SinkProbe.save, hfplug probe fit); None: a SinkProbe is handed over"},
    )
    records: str | None = field(
        default=None,
        metadata={
            "help": "JSONL of held-out questions: prompt, and answer with label (1: wrong), or reference, which the model then "
            "answers greedily. None: the rows of the evaluation set are judged as they pass, without labels"
        },
    )
    batch_size: int = field(default=8, metadata={"help": "records at a time"})
    chat: bool = field(default=False, metadata={"help": "put prompts in the tokenizer's chat template, as when fitting"})
    max_new_tokens: int = field(default=32, metadata={"help": "length of the answers to records without one"})
    model_name: str | None = field(
        default=None, metadata={"help": "name the probe knows the model by; None: the model's own, which its folder gives it"}
    )
    heatmap: bool = field(
        default=True, metadata={"help": "write layers x heads as a picture into output_dir/sink_probe/ (needs matplotlib)"}
    )

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("max_new_tokens", self.max_new_tokens)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
