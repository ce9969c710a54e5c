"""The callback: counts the tokens that are not padding."""

from dataclasses import dataclass, field
from typing import Any

from hfplug.callbacks import HfplugCallback


@dataclass
class TokenCounterConfig:
    """Options of the token counter."""

    prefix: str = field(default="tokens", metadata={"help": "first part of the metrics' names"})


class TokenCounterCallback(HfplugCallback):
    """Logs real tokens per row of the window, and how many were seen since training began, over resumes."""

    method = "token_counter"
    config_class = TokenCounterConfig
    state_attributes = ("seen",)

    def __init__(self, config: TokenCounterConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.seen = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to look on."""
        self.hook(self.scope.stack, "forward_pre", self.count)

    def count(self, stack: Any, args: Any) -> None:
        """One forward."""
        call = self.scope.current
        if call is None or not call.training:
            return
        tokens = call.batch * call.length if call.attention_mask is None else int(call.attention_mask.sum())
        self.seen += tokens
        self.log_metric(f"{self.config.prefix}/per_row", tokens, call.batch)
