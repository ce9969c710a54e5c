"""``SADPOTrainer``: TRL's ``DPOTrainer`` with one more loss type.

With ``Delta`` the difference of the log ratios of both responses (policy over reference, summed over the response)::

    u = beta * Delta - gamma(x, y+, y-)        loss = mean Phi(u)

TRL's trainer computes everything else: log probabilities, references of every kind, metrics, further losses, the auxiliary
loss of mixtures of experts. Forward hooks keep the log probabilities of the two forwards it makes, the loss type ``sa_dpo`` is
taken off the list that TRL works through, and its term is added to what comes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor

from hfplug import ConfigError, UnsupportedError
from hfplug.seams.trainer import MethodTrainer, stock_trainer
from hfplug.trainers.sa_dpo.config import LOSS, SADPOConfig
from hfplug.trainers.sa_dpo.margins import check_values, missing, structure_margin
from hfplug.trainers.sa_dpo.surrogates import pair_losses

KEY = "sa_dpo_values"  # distances or margins of a batch, (n,) for n pairs; TRL would hand an unknown key to the model
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")


class PairValues:
    """A collator that adds one column of the examples, a number each, to what another collator makes: ``(n,)``, float32."""

    def __init__(self, inner: Any, column: str | None, most: float | None, *, without_reference: bool = False) -> None:
        self.inner, self.column, self.most, self.without_reference = inner, column, most, without_reference

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = self.inner(examples)
        if self.column is not None:
            for example in examples:
                if self.column not in example:
                    raise ConfigError(missing(self.column, example, "column"))
            values = [example[self.column] for example in examples]
            check_values(values, self.column, self.most)
            batch[KEY] = torch.tensor(values, dtype=torch.float32)
        if self.without_reference:
            batch |= {name: torch.zeros(len(examples)) for name in _REFERENCES}
        return batch


class SADPOTrainer(MethodTrainer, stock_trainer("dpo")):  # type: ignore[misc]
    """DPO with a margin and a choice of surrogates (arXiv 2604.27733; our reading of the abstract).

    The constructor takes what that of ``DPOTrainer`` takes; ``args`` is a :class:`SADPOConfig`, both datasets have the column
    that its margin is read from, and there is no ``ref_model`` with ``sa_dpo_reference_free``.

    Logged besides TRL's metrics, averaged over pairs: ``sa_dpo/margin`` (gamma), ``sa_dpo/satisfied_frac`` (pairs with
    ``beta * Delta >= gamma``) and ``sa_dpo/active_frac`` (pairs whose loss has a slope). TRL's ``rewards/...`` know no margin.

    Raises:
        ConfigError: ``args`` of another class, a missing column (naming the nearest), or a value in it that cannot be.
        UnsupportedError: a reference model together with ``sa_dpo_reference_free``.
    """

    method = "sa_dpo"
    config_class = SADPOConfig
    args: SADPOConfig
    _tag_names = ["trl", "dpo", "sa-dpo", "hfplug"]  # noqa: RUF012 (TRL's own form)
    _name = "SA-DPO"
    _paper = {  # noqa: RUF012
        "title": "Mind the Gap: Structure-Aware Consistency in Preference Learning",
        "id": "2604.27733",
        "citation": (
            "@article{mohri2026mind,\n    title = {{Mind the Gap: Structure-Aware Consistency in Preference Learning}},\n"
            "    author = {Mehryar Mohri and Yutao Zhong},\n    year = 2026,\n    journal = {arXiv preprint arXiv:2604.27733}\n}"
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as self._construction:
            super().__init__(*args, **kwargs)
        del self._construction
        config = self.args
        self._phi, self._column = config.build_surrogate(), config.value_column
        # What is left is TRL's to compute; its loop over an empty list gives 0, to which auxiliary losses are added.
        stock: Any = self  # whose attributes have no types
        weighted = list(zip(stock.loss_types, stock.loss_weights, strict=True))
        self._own_weight = dict(weighted)[LOSS]
        others = [(t, w) for t, w in weighted if t != LOSS]
        self.loss_types, self.loss_weights = [t for t, _ in others], [w for _, w in others]
        column = None if self._column is None else self._column[1]
        self.data_collator = PairValues(
            stock.data_collator, column, _most(config), without_reference=config.sa_dpo_reference_free
        )

    def check(self, config: SADPOConfig, given: Mapping[str, Any]) -> None:
        """Columns and their values, and that there is no reference where none is wanted."""
        if config.sa_dpo_reference_free:
            if given.get("ref_model") is not None:
                raise UnsupportedError(
                    "ref_model was given with sa_dpo_reference_free=True: there is no reference; leave one out"
                )
            # While TRL's constructor runs, so that it loads no reference and reads log probabilities, which are 0, from batches.
            self._construction.callback(setattr, config, "precompute_ref_log_probs", config.precompute_ref_log_probs)
            config.precompute_ref_log_probs = True
        for where in ("train_dataset", "eval_dataset"):
            _check_data(where, given.get(where), config)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if (column := self.args.value_column) is not None and column[1] not in self._signature_columns:
            self._signature_columns.append(column[1])

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # Without a reference its log probabilities are 0, which the collator says; there is nothing to compute.
        return dataset if self.args.sa_dpo_reference_free else super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """As ``DPOTrainer``; the margin's column stays out of the model's arguments."""
        return super().compute_ref_log_probs(model, {k: v for k, v in inputs.items() if k != KEY})

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As ``DPOTrainer``.

        Raises:
            ConfigError: a dataset without the margin's column.
            UnsupportedError: a new dataset after training, with ``sa_dpo_reference_free``.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            _check_data("eval_dataset", eval_dataset, self.args)
            if self.args.sa_dpo_reference_free and self.state.global_step > 0:
                raise UnsupportedError(
                    "evaluate(eval_dataset=...) after training with sa_dpo_reference_free=True: TRL takes new datasets before "
                    "training only when there is no reference model; give it as eval_dataset when the trainer is made"
                )
        found: dict[str, float] = super().evaluate(eval_dataset, *args, **kwargs)
        return found

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, **kwargs: Any) -> Any:
        inputs = dict(inputs)
        values = inputs.pop(KEY, None)
        # With an adapter the reference may be the same module: the policy is its first forward, the reference its last.
        reference = None if self.precompute_ref_logps else self.model if self.ref_model is None else self.ref_model
        with _log_probs(model) as policy, _log_probs(reference) as references:
            found = super()._compute_loss(model, inputs, return_outputs, **kwargs)
        rest, outputs = found if return_outputs else (found, None)

        mask = inputs["completion_mask"][:, 1:]

        def halves(log_probs: Tensor) -> tuple[Tensor, ...]:
            # Prompt learning puts virtual tokens in front.
            return log_probs[:, -mask.size(1) :].sum(dim=1).chunk(2, dim=0)

        chosen, rejected = halves(policy[0])
        ref_chosen, ref_rejected = (inputs[n] for n in _REFERENCES) if reference is None else halves(references[-1])
        chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
        if self.args.sa_dpo_length_normalized:
            lengths = inputs["completion_mask"].sum(dim=1).clamp(min=1.0).chunk(2, dim=0)
            chosen, rejected = chosen / lengths[0], rejected / lengths[1]
        rewards = self.beta * (chosen - rejected)
        margins = self._margins(rewards, values)
        losses = pair_losses(self._phi, rewards, margins, self.label_smoothing)
        self._log_margins(rewards.detach(), margins)
        loss = rest + losses.mean() * self._own_weight
        return (loss, outputs) if return_outputs else loss

    def _margins(self, rewards: Tensor, values: Tensor | None) -> Tensor:
        config = self.args
        if self._column is None:
            return torch.full_like(rewards, config.sa_dpo_gamma_max, requires_grad=False)
        if values is None:
            raise ConfigError(f"a batch came without {KEY!r}: data_collator was replaced; wrap the new one in PairValues")
        values = values.to(rewards.device)
        return structure_margin(values, config.sa_dpo_gamma_max, config.sa_dpo_tau) if _most(config) else values

    def _log_margins(self, rewards: Tensor, margins: Tensor) -> None:
        with torch.enable_grad():
            leaf = rewards.clone().requires_grad_()
            (slope,) = torch.autograd.grad(pair_losses(self._phi, leaf, margins, self.label_smoothing).sum(), leaf)
        pairs = rewards.numel()
        self.log_metric("margin", margins.sum(), pairs)
        self.log_metric("satisfied_frac", (rewards >= margins).sum(), pairs)
        self.log_metric("active_frac", (slope != 0).sum(), pairs)


@contextlib.contextmanager
def _log_probs(module: Any) -> Iterator[list[Tensor]]:
    """The per-token log probabilities of every forward of a module with TRL's fused head, while it is open."""
    kept: list[Tensor] = []
    if module is None:
        yield kept
        return

    def keep(_module: Any, _args: Any, outputs: Any) -> None:
        found = getattr(outputs, "log_probs", None)  # the plain forward behind return_outputs has none
        if found is not None:
            kept.append(found)

    handle = module.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def _most(config: SADPOConfig) -> float | None:
    """The largest value the column may hold: distances end at 1, margins nowhere."""
    return 1.0 if config.sa_dpo_margin == "structure" else None


def _check_data(where: str, given: Any, config: SADPOConfig) -> None:
    """Refuse a dataset, or one of a dict of them, without the column or with a value in it that cannot be."""
    if config.value_column is None or given is None:
        return
    option, column = config.value_column
    named = {f"{where}[{key!r}]": d for key, d in given.items()} if isinstance(given, Mapping) else {where: given}
    for name, dataset in named.items():
        if not isinstance(dataset, (Dataset, IterableDataset)):
            continue  # TRL refuses it
        present = dataset.column_names or list(next(iter(dataset)))
        if column not in present:
            raise ConfigError(f"{name}: {missing(column, present, option)}, and sa_dpo_margin='constant' needs none")
        if isinstance(dataset, Dataset):
            try:
                check_values(dataset.with_format(None)[column], column, _most(config))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
