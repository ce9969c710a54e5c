"""The callback: it looks on at the attention calls of a training step, and leaves their results untouched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hfplug import UnsupportedError
from hfplug.callbacks.sink_monitor.config import SinkMonitorConfig
from hfplug.calls import token_stack
from hfplug.observe import Observer, attention_arguments, attention_modules, choose_layers, observe
from hfplug.seams.callback import HfplugCallback
from hfplug.sinks import SinkScores, sink_scores, value_norm_ratio

_WITHOUT_STEP_LOGS = 100  # steps between measurements where the trainer does not log by steps


class SinkMonitorCallback(HfplugCallback):
    """Logs how much attention the first token of every document draws, per layer, while a model trains.

    Works with fused attention and without ``output_attentions``: each attention module asks its ``AttentionInterface`` for
    the function of its implementation, and in a measured step it is given that same function with an observer behind it,
    which scores the queries and keys in chunks (:func:`~hfplug.sinks.sink_scores`). The attention's
    output, the gradients, the random state and the configuration are those of a run without the callback.

    Metrics, means over heads and over all documents of the measured steps (padding never counts):

    * ``sink/mass/layer_00``: sink score of the first token, the mean attention it gets from the queries that can see it.
    * ``sink/value_norm/layer_00``: ``||v_first|| / median ||v||``.
    * ``sink/argmax_share/layer_00``, ``sink/mass/layer_00/head_00``: on request.

    Only forwards in training mode with gradients enabled are measured: not generation, not reference models.

    Args:
        config: a :class:`~hfplug.callbacks.sink_monitor.config.SinkMonitorConfig`, or give its options one by one.

    Raises:
        ConfigError: a bad option; when the ``Trainer`` is built, ``layers`` the model does not have.
    """

    method = "sink_monitor"
    config_class = SinkMonitorConfig
    config: SinkMonitorConfig

    def __init__(self, config: SinkMonitorConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._layers: dict[int, int] = {}  # id of an attention module -> index of its layer
        self._wanted: frozenset[int] = frozenset()
        self._due = False
        self._measured: set[int] = set()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse a wrong ``layers`` before anything has run."""
        _, indices = attention_modules(token_stack(model))
        choose_layers(self.config.layers, indices.values())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to look on."""
        stack = self.scope.stack
        interfaces, self._layers = attention_modules(stack)
        self._wanted = choose_layers(self.config.layers, self._layers.values())
        self._due, self._measured = False, set()
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            raise UnsupportedError("encoder-decoder models are not measured")
        self.hook(stack, "forward_pre", self._mark)
        observe(self.ledger, interfaces, self._observer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether this optimiser step, with all its micro-batches, is measured."""
        self._due = self._is_due(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close a measured step; one that measured nothing is an error, not a gap in a chart."""
        due, self._due = self._due, False
        missing = self._wanted - self._measured
        if due and missing and (self.config.layers is not None or not self._measured):
            raise UnsupportedError(
                f"layers {sorted(missing)} were not seen in step {state.global_step}: their attention did not ask "
                "transformers' AttentionInterface for its function (own attention code, or torch.compile)"
            )

    def _is_due(self, args: Any, state: Any) -> bool:
        step, every = state.global_step + 1, self.config.every
        if every is not None:
            return bool(step % every == 0)
        if args.logging_strategy != "steps":
            return bool(step % _WITHOUT_STEP_LOGS == 0)
        return bool(step % state.logging_steps == 0 or (step == 1 and args.logging_first_step))

    def _mark(self, stack: nn.Module, args: Any) -> None:
        # Noted on the call, where the recomputation and other threads find it. Whether gradients are enabled cannot be
        # asked later: reentrant checkpointing disables them inside the layers.
        call = self.scope.current
        if call is None:
            return
        in_training = self._due and torch.is_grad_enabled()
        in_evaluation = self.config.evaluate and call.past == 0  # not the single tokens of a generation
        if in_training if stack.training else in_evaluation:
            call.memo[self] = True

    def _observer(self) -> Observer | None:
        call = None if self._scope is None else self._scope.current
        if self._scope is None or call is None or self not in call.memo or self._scope.recompute:
            return None
        return self._look

    def _look(self, implementation: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
              options: dict[str, Any]) -> None:  # fmt: skip
        layer = self._layers.get(id(module))
        if layer in self._wanted:
            self.attempt(f"layer {layer}", self._measure, layer, implementation, module, query, key, value, mask, options)

    @torch.no_grad()
    def _measure(self, layer: int, implementation: str, module: Any, query: Tensor, key: Tensor, value: Tensor,
                 mask: Any, options: dict[str, Any]) -> None:  # fmt: skip
        found = attention_arguments(implementation, module, query, key, mask, options)
        scaling, rows = options.get("scaling"), self.config.max_rows
        if rows is not None:
            query, key, value = query[:rows], key[:rows], value[:rows]
            for name in ("mask", "documents"):
                if found.get(name) is not None:
                    found[name] = found[name][:rows]
        scored = sink_scores(query, key, scaling=scaling, chunk=self.config.chunk, argmax=self.config.argmax_share, **found)
        self._measured.add(layer)
        self._log(layer, scored)
        if self.config.value_norm:
            total, count = value_norm_ratio(value, scored.real, scored.starts)
            self.log_metric(f"sink/value_norm/layer_{layer:02d}", total, count)

    def _log(self, layer: int, scored: SinkScores) -> None:
        include_self = self.config.include_self
        scores = scored.scores(include_self)
        # A document of one token has no later query: with include_self=False it has no score.
        counted = (scored.starts & (scored.count(include_self).amax(dim=1) > 0)).float()
        documents = counted.sum()
        per_head = (scores * counted[:, None]).sum(dim=(0, 2))
        name = f"sink/mass/layer_{layer:02d}"
        self.log_metric(name, per_head.mean(), documents)
        if self.config.log_per_head:
            for head, total in enumerate(per_head):
                self.log_metric(f"{name}/head_{head:02d}", total, documents)
        if scored.argmax is not None:
            wins = (scored.argmax * scored.starts[:, None]).sum()
            pairs = scored.real.sum() * scored.argmax.shape[1]
            self.log_metric(f"sink/argmax_share/layer_{layer:02d}", wins, pairs)
