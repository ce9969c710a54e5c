"""The callback: a fitted probe judges the model's answers at every evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from hfplug import ConfigError, HfplugError
from hfplug.callbacks.sink_probe.config import SinkProbeConfig
from hfplug.callbacks.sink_probe.evaluate import auroc
from hfplug.callbacks.sink_probe.extract import _scorer, extract, layout_of, prompt_ids
from hfplug.callbacks.sink_probe.features import FROM_TEXT, SINGLE, FeatureTable, attention_features
from hfplug.callbacks.sink_probe.heatmap import check_matplotlib, draw
from hfplug.callbacks.sink_probe.probe import SinkProbe
from hfplug.callbacks.sink_probe.records import is_wrong, read_records
from hfplug.calls import Call
from hfplug.probing import evaluating
from hfplug.recording import Recorder
from hfplug.seams.callback import HfplugCallback


class SinkProbeCallback(HfplugCallback):
    """Logs, at every evaluation of a training run, what a fitted :class:`~hfplug.callbacks.sink_probe.probe.SinkProbe` says.

    With ``records``, held-out questions: the model answers those that have none, greedily, and every answer is judged.
    Without, the rows of the evaluation set are judged in the evaluation's own forward. Training is bit for bit that of a run
    without the callback.

    Metrics, under the evaluation's prefix:

    * ``sink_probe/probability``: mean probability of label 1 (a wrong answer, as the probe was fitted).
    * ``sink_probe/auroc``: where records have labels of both kinds.
    * ``sink_probe/wrong``: share of wrong answers, where records have labels or references.

    A probe is fitted on one state of the model: as training goes on, features drift, and the AUROC says how far it still holds.

    Args:
        probe: a fitted probe, or the folder of one.
        config: a :class:`~hfplug.callbacks.sink_probe.config.SinkProbeConfig`, or give its options one by one.

    Raises:
        ConfigError: a bad option; when the ``Trainer`` is built, a probe that is missing, not fitted or of another model.
    """

    method = "sink_probe"
    config_class = SinkProbeConfig
    config: SinkProbeConfig
    state_attributes: ClassVar[tuple[str, ...]] = ("handed",)

    def __init__(
        self, probe: SinkProbe | str | Path | None = None, config: SinkProbeConfig | None = None, **options: Any
    ) -> None:
        if isinstance(probe, (str, Path)):
            options, probe = {**options, "probe": str(probe)}, None
        super().__init__(config, **options)
        if probe is not None and self.config.probe is not None:
            raise ConfigError("SinkProbeCallback: give a probe or its folder, not both")
        if probe is not None and probe.coef is None:
            raise ConfigError("SinkProbeCallback: this SinkProbe is not fitted")
        # As JSON and tensors, so that a checkpoint holds it; a folder is read again instead.
        self.handed: dict[str, Any] | None = None
        if probe is not None:
            about, arrays = probe.to_state()
            self.handed = {"about": about, "arrays": {name: torch.from_numpy(a) for name, a in arrays.items()}}
        self._probe: SinkProbe | None = None
        self._asked: list[dict[str, Any]] = []
        self._scored = False
        self._sum: np.ndarray | float = 0.0
        self._rows = 0

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse what cannot work before anything has run."""
        self._prepare(model, kwargs.get("processing_class"))

    def on_train_begin(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        """Load the probe; look on at evaluations, if there are no records."""
        probe = self._prepare(self.model, processing_class)
        self._forget()
        if not self.config.records:
            watcher = _Watcher(self, self.scope.stack, probe)
            self.ledger.run(watcher.__enter__, lambda _: watcher.__exit__())

    def on_prediction_step(self, args: Any, state: Any, control: Any, processing_class: Any = None, **kwargs: Any) -> None:
        """With the first batch of an evaluation, judge the records."""
        if self.config.records and not self._scored and self.model is not None:
            self._scored = True
            self._judge(processing_class)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the map."""
        probe, rows = self._probe, self._rows
        if probe is not None and rows and self.config.heatmap and state.is_world_process_zero:
            path = Path(args.output_dir) / "sink_probe" / f"step_{state.global_step:06d}.png"
            draw(probe, self._sum / rows, path, f"step {state.global_step}, {rows} answers")  # type: ignore[arg-type]
        self._forget()

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What ``predict()`` went through is no evaluation."""
        self._forget()

    # -- the work -----------------------------------------------------------------------------------------------------

    def _prepare(self, model: Any, tokenizer: Any) -> SinkProbe:
        if self.config.probe is not None:
            probe = SinkProbe.load(self.config.probe)
        elif self.handed is not None:
            probe = SinkProbe.from_state(self.handed["about"], {n: t.numpy() for n, t in self.handed["arrays"].items()})
        else:
            raise ConfigError("SinkProbeCallback: no probe; give a fitted SinkProbe, or the folder of one as probe=")
        if probe.layout is None:
            raise ConfigError("the probe was fitted on a bare array: which features of which model they are is not known")
        if not self.config.records and (probe.layout.feature in FROM_TEXT or probe.layout.span != "all"):
            told = f"feature={probe.layout.feature!r} with span={probe.layout.span!r}"
            raise ConfigError(f"{told} needs to know where the answer begins: give records=")
        if self.config.heatmap:
            check_matplotlib()
        try:
            chat = self.config.chat if self.config.records else probe.layout.prompt != "plain"
            own = layout_of(probe, model, tokenizer, chat, self.config.model_name)
            probe.layout.check(own)
        except HfplugError as error:  # the user can still give another one
            raise ConfigError(str(error)) from error
        if self.config.records:
            self._asked = read_records(self.config.records, answer=False)
            if tokenizer is None and any("prompt" in r for r in self._asked):
                raise ConfigError("records hold text, but the Trainer has no processing_class (tokenizer)")
        self._probe = probe
        return probe

    def _forget(self) -> None:
        self._scored, self._sum, self._rows = False, 0.0, 0

    def _judge(self, tokenizer: Any) -> None:
        assert self._probe is not None
        assert self.model is not None
        answered = [record if _has_answer(record) else self._answer(record, tokenizer) for record in self._asked]
        (table,) = extract(
            self.model, tokenizer, answered, [self._probe], batch_size=self.config.batch_size, chat=self.config.chat,
            name=self.config.model_name,
        )  # fmt: skip
        chances = self._take(table)
        known = [i for i, record in enumerate(answered) if record.get("label") is not None]
        labels = [int(answered[i]["label"]) for i in known]
        if known:
            self.log_metric("sink_probe/wrong", sum(labels), len(labels), mode="eval")
        if len(set(labels)) == 2:
            self.log_metric("sink_probe/auroc", auroc(labels, chances[known]), mode="eval")

    def _take(self, table: FeatureTable) -> np.ndarray:
        """Log the probabilities of some answers, and keep their features' sum."""
        assert self._probe is not None
        chances = self._probe.predict_proba(table)[:, 1]
        self.log_metric("sink_probe/probability", float(chances.sum()), len(chances), mode="eval")
        if table.layout.feature not in SINGLE:
            self._sum = self._sum + table.by_head().sum(axis=0)
            self._rows += len(table)
        return chances

    def _answer(self, record: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        assert self.model is not None
        ids = record.get("prompt_ids") or prompt_ids(record["prompt"], tokenizer, self.config.chat)
        model: Any = self.model
        inputs = torch.tensor([ids], device=next(model.parameters()).device)
        with evaluating(model):
            text = model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                max_new_tokens=self.config.max_new_tokens,
            )  # fmt: skip
        answer = text[0, len(ids) :].tolist()
        found = {**record, "prompt_ids": list(ids), "answer_ids": answer}
        if found.get("label") is None and found.get("reference") is not None and tokenizer is not None:
            found["label"] = int(is_wrong(tokenizer.decode(answer, skip_special_tokens=True), found["reference"]))
        return found


def _has_answer(record: dict[str, Any]) -> bool:
    return record.get("answer") is not None or record.get("answer_ids") is not None


class _Watcher(Recorder):
    """Records the rows of evaluations, each handed over at once and forgotten; its errors are the callback's."""

    def __init__(self, callback: SinkProbeCallback, stack: nn.Module, probe: SinkProbe) -> None:
        assert probe.layout is not None
        self._callback, self._stack, self._layout = callback, stack, probe.layout
        super().__init__(
            stack, probe.layout.layers, None, 256, probe.layout.feature == "log_det", probe.layout.value_norm == "mul", None,
            _scorer(),
        )  # fmt: skip

    def _begin(self, stack: nn.Module, args: Any) -> None:
        call = self._scope.current
        if call is not None and not call.training and not call.grad and call.past == 0:  # no training, no decoding steps
            self._callback.attempt("an evaluation row", super()._begin, stack, args)

    def _look(self, *what: Any) -> None:
        self._callback.attempt("an attention call", super()._look, *what)

    def _end(self, call: Call) -> None:
        self._callback.attempt("an evaluation row", self._finish, call)

    def _finish(self, call: Call) -> None:
        super()._end(call)
        for recording in self._recordings:
            values = attention_features(recording, self._layout)
            self._callback._take(FeatureTable(values, self._layout))
        self.clear()

    def _guard(self, cache: Any) -> None:
        """Nothing is continued, so nothing need be refused."""
