"""``DRIFTTrainer``: TRL's ``SFTTrainer`` with a weight per row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import torch
from torch import Tensor

from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.seams.trainer import MethodTrainer, stock_trainer
from hfplug.trainers.drift.config import DRIFTConfig
from hfplug.trainers.drift.data import NEEDED, to_drift_dataset

WEIGHT = "weight"


class DRIFTTrainer(MethodTrainer, stock_trainer("sft")):  # type: ignore[misc]
    """SFT in which row ``i`` counts ``w_i`` (arXiv 2605.31455; authors' code for the formulas).

    With ``l_it`` the cross entropy of labelled token ``t`` of row ``i``, the loss of an **optimizer step** is, by
    ``drift_normalization``,

        "sequence"   mean_i w_i mean_t l_it                 over the rows of the step (the paper's)
        "token"      sum_i w_i sum_t l_it / number of t     SFTTrainer's own where every w_i is 1
        "weight"     sum_i w_i mean_t l_it / sum_i w_i

    The denominator is taken over all micro-batches of the step and, as TRL does, over all ranks. A row without a label counts
    as a row of loss 0. Evaluation is TRL's own, without weights, so that ``eval_loss`` compares with any SFT.

    The training data are either rollouts (``messages``, ``turn_rewards``, ``prompt_id``; see :func:`to_drift_dataset`), which
    get their weights here, or rows with ``weight`` and ``prompt``/``completion`` or ``input_ids``/``labels``.

    Args:
        model: as for ``SFTTrainer``; the model the rollouts were collected with.
        args: a :class:`DRIFTConfig`.
        train_dataset: as above; a stream must bring its weights.
        eval_dataset: what ``SFTTrainer`` takes, or rollouts.
        data_collator: as for ``SFTTrainer``; it is shown the rows without their weights and must keep one row for each.
        **kwargs: as for ``SFTTrainer``.

    Raises:
        ConfigError: ``args`` of another class, missing columns, weights that are negative or not finite.
        UnsupportedError: packing, padding_free, and whatever else loses weights (see :meth:`DRIFTConfig.check`).
    """

    method = "drift"
    config_class = DRIFTConfig
    _tag_names = ("trl", "sft", "drift")
    _name = "DRIFT"
    data_collator: Any
    _signature_columns: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(stock_trainer("sft").__init__).bind(self, *args, **kwargs)
        if isinstance(config := given.arguments.get("args"), DRIFTConfig):  # else the base says what is wrong
            self.check(config, given.arguments)
            if (data := given.arguments.get("train_dataset")) is not None:
                given.arguments["train_dataset"] = with_weights(data, config)
            given.arguments["eval_dataset"] = evaluated(given.arguments.get("eval_dataset"))
        super().__init__(*given.args[1:], **given.kwargs)
        if (parts := self.get_tp_size() * self.get_cp_size() * self.get_sp_size()) > 1:
            raise UnsupportedError(f"drift: tensor, context or sequence parallelism ({parts} parts) is not supported")
        self.data_collator = WeightCollator(self.data_collator)
        if self.args.drift_normalization != "token":  # there training_step decides by what it knows of the model
            self.loss_is_scaled_for_ga = True

    def check(self, config: Any, given: Mapping[str, Any]) -> None:
        """Refuse what loses weights."""
        config.check()
        if given.get("compute_loss_func") is not None:
            raise UnsupportedError("drift: compute_loss_func is not supported: it would take the place of the weighted loss")

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if WEIGHT not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, WEIGHT]

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As ``SFTTrainer.evaluate``; takes rollouts too, of which the last answer counts."""
        return super().evaluate(evaluated(eval_dataset), *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The batches of one optimizer step, and the denominator of its loss in the place of the number of tokens."""
        batches, tokens = super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)
        kind = self.args.drift_normalization
        if kind == "token" or not batches:
            return batches, tokens
        weights = [_weights_of(batch) for batch in batches]
        total = torch.stack([w.double().sum() if kind == "weight" else w.new_tensor(float(len(w))).double() for w in weights])
        denominator = total.sum().to(self.args.device)
        if self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            denominator = self.accelerator.gather(denominator.reshape(1)).sum()
        return batches, denominator.float()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """The loss of a micro-batch.

        Args:
            model: the model, wrapped or not.
            inputs: a batch with ``weight`` ``(B,)``; in evaluation weights are left aside.
            return_outputs: whether to return the outputs too.
            num_items_in_batch: the denominator, as :meth:`get_batch_samples` gives it; ``None``: that of this batch alone.
            **kwargs: passed on to ``SFTTrainer.compute_loss``.
        """
        inputs = dict(inputs)
        weights = inputs.pop(WEIGHT, None)
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        if weights is None:
            raise ConfigError(f"drift: a training batch has no {WEIGHT!r}; it has {sorted(inputs)}")
        kind = self.args.drift_normalization
        if kind == "sequence" and num_items_in_batch is None:
            num_items_in_batch = torch.tensor(float(len(weights)), device=weights.device)
        elif kind == "weight":
            total = weights.double().sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch).double()
            # TRL divides by no less than 1, and a sum of weights may be less: it is divided by here.
            weights = torch.where(total > 0, weights.double() / total, 0.0).float()
            num_items_in_batch = torch.ones((), device=weights.device)
        weighted = _Weighted(model, weights, per_token=kind == "token")
        return super().compute_loss(weighted, inputs, return_outputs, num_items_in_batch, **kwargs)


class _Weighted:
    """A model whose fused LM head returns log-probabilities times the weight of their row.

    ``SFTTrainer.compute_loss`` sums them and divides by the denominator, so no line of it is repeated here; its other outputs
    (entropy, accuracy, MoE loss) stay as they are. tests/drift/test_drift_trainer.py watches that function.
    """

    def __init__(self, model: Callable[..., Any], weights: Tensor, *, per_token: bool) -> None:
        self.model, self.weights, self.per_token = model, weights, per_token

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.model(*args, **kwargs)
        if not kwargs.get("fused_lm_head"):
            return outputs
        log_probs, mask = outputs.log_probs, outputs.label_mask
        if len(log_probs) != len(self.weights):
            raise UnsupportedError(f"drift: a batch of {len(log_probs)} rows has {len(self.weights)} weights; one per row")
        scale = self.weights.to(log_probs.device)
        if not self.per_token:
            scale = scale / mask.sum(1).clamp(min=1)  # log_probs are 0 where there is no label: their number is not the length
        outputs.log_probs = log_probs * scale[:, None]
        return outputs


class WeightCollator:
    """Takes ``weight`` out of the rows, has the batch made of the rest, and adds the weights as float32 ``(B,)``."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, features: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> Any:
        found = [row[WEIGHT] for row in features if WEIGHT in row]
        batch = self.inner([{k: v for k, v in row.items() if k != WEIGHT} for row in features], *args, **kwargs)
        if not found:
            return batch
        if len(found) != len(features) or not all(_usable(w) for w in found):
            raise ConfigError(f"weights of a batch of {len(features)} rows: {found}; one per row is needed, finite and >= 0")
        batch[WEIGHT] = torch.tensor(found, dtype=torch.float32)
        return batch


def with_weights(data: Any, args: DRIFTConfig) -> Any:
    """Training data with a ``weight`` for each row.

    Raises:
        ConfigError: columns that are neither rollouts nor weighted rows, or weights that are none.
        UnsupportedError: images; rollouts as a stream.
    """
    columns = list(data.column_names or next(iter(data), {}))
    if images := {"image", "images"} & set(columns):
        raise UnsupportedError(f"drift: the column {min(images)!r}: images are not supported")
    if WEIGHT not in columns:
        if not set(NEEDED) <= set(columns):
            missing = [c for c in NEEDED if c not in columns]
            raise ConfigError(
                f"drift: train_dataset has no column {WEIGHT!r}{nearest(WEIGHT, columns)}, and is no set of rollouts: it "
                f"lacks {missing} (`hfplug drift collect` makes them); its columns: {columns}"
            )
        if not isinstance(data, datasets.Dataset):
            raise UnsupportedError("drift: rollouts as a stream: weights need all rollouts of a prompt; give a Dataset")
        rows = to_drift_dataset(
            data, beta=args.drift_beta, gamma=args.drift_gamma, repeat_coefficient=args.drift_repeat_penalty,
            max_weight=args.drift_max_weight, drop_zero_success=args.drift_drop_zero_success,
        )  # fmt: skip
        return datasets.Dataset.from_list(rows)
    if not ({"prompt", "completion"} <= set(columns) or {"input_ids", "labels"} <= set(columns)):
        raise ConfigError(
            f"drift: train_dataset needs 'prompt' and 'completion', or 'input_ids' and 'labels', beside {WEIGHT!r}: "
            f"only the completion is trained on; its columns: {columns}"
        )
    if isinstance(data, datasets.Dataset):
        for row, weight in enumerate(data[WEIGHT]):
            if not _usable(weight):
                raise ConfigError(f"drift: {WEIGHT}={weight!r} in row {row} of train_dataset must be finite and >= 0")
    return data


def evaluated(data: Any) -> Any:
    """Evaluation data as ``SFTTrainer`` takes them: of rollouts, prompt and last answer."""
    if isinstance(data, Mapping):
        parts = {name: evaluated(part) for name, part in data.items()}
        return datasets.DatasetDict(parts) if isinstance(data, datasets.DatasetDict) else parts
    if not isinstance(data, datasets.Dataset) or not set(NEEDED) <= set(data.column_names) or WEIGHT in data.column_names:
        return data
    return datasets.Dataset.from_list(to_drift_dataset(data)).remove_columns(WEIGHT)


def _usable(weight: Any) -> bool:
    return isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight) and weight >= 0


def _weights_of(batch: Mapping[str, Any]) -> Tensor:
    if WEIGHT not in batch:
        raise ConfigError(f"drift: a training batch has no {WEIGHT!r}; it has {sorted(batch)}")
    return batch[WEIGHT]
