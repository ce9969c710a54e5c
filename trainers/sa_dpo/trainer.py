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
from trl import DPOTrainer

from hfplug import ConfigError, UnsupportedError
from hfplug.metrics import metrics_of
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


class SADPOTrainer(DPOTrainer):
    """DPO with a margin and a choice of surrogates (arXiv 2604.27733; our reading of the abstract).

    Args:
        model: as ``DPOTrainer``.
        ref_model: as ``DPOTrainer``; none with ``reference_free``.
        args: a :class:`SADPOConfig`.
        data_collator: as ``DPOTrainer``; the margin's column is added to what it makes.
        train_dataset: preferences, with the column that ``args.margin`` needs.
        eval_dataset: the same, or a dict of them.
        **kwargs: further arguments of ``DPOTrainer``.

    Logged besides TRL's metrics, averaged over pairs: ``margins/required`` (gamma), ``margins/satisfied_frac`` (pairs with
    ``beta * Delta >= gamma``) and ``margins/active_frac`` (pairs whose loss has a slope).

    Raises:
        ConfigError: ``args`` of another class, a missing column (naming the nearest), or a value in it that cannot be.
        UnsupportedError: a reference model together with ``reference_free``.
    """

    args: SADPOConfig
    data_collator: Any
    loss_types: list[str]
    loss_weights: list[float]
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

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: SADPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path or "model"
            args = SADPOConfig(f"{name.rstrip('/').split('/')[-1]}-SA-DPO")
        if not isinstance(args, SADPOConfig):
            raise ConfigError(f"args must be a SADPOConfig, got {type(args).__name__}; it takes every field of DPOConfig")
        if args.reference_free and ref_model is not None:
            raise UnsupportedError("ref_model was given with reference_free=True: there is no reference; leave one of them out")
        self._phi, self._column = args.build_surrogate(), args.value_column
        self._most = 1.0 if args.margin == "structure" else None
        for where, dataset in _datasets(train_dataset, eval_dataset):
            self._check_dataset(dataset, where, args)
        self._own_weight = dict(zip(args.loss_type, args.loss_weights or [1.0] * len(args.loss_type), strict=True))[LOSS]
        data = {"data_collator": data_collator, "train_dataset": train_dataset, "eval_dataset": eval_dataset}
        asked, args.precompute_ref_log_probs = args.precompute_ref_log_probs, args.precompute_ref_log_probs or args.reference_free
        try:  # so that TRL loads no reference and reads its log probabilities, which are 0, from the batch
            super().__init__(model, ref_model, args, **data, **kwargs)
        finally:
            args.precompute_ref_log_probs = asked
        # What is left is TRL's to compute; its loop over an empty list gives 0, to which auxiliary losses are added.
        others = [(t, w) for t, w in zip(self.loss_types, self.loss_weights, strict=True) if t != LOSS]
        self.loss_types, self.loss_weights = [t for t, _ in others], [w for _, w in others]
        self.data_collator = PairValues(self.data_collator, self._column, self._most, without_reference=args.reference_free)

    def _check_dataset(self, dataset: Any, where: str, args: SADPOConfig) -> None:
        if self._column is None:
            return
        option = "distance_column" if args.margin == "structure" else "margin_column"
        present = dataset.column_names or list(next(iter(dataset)))
        if self._column not in present:
            raise ConfigError(f"{where}: {missing(self._column, present, option)}, and margin='constant' needs none")
        if isinstance(dataset, Dataset):
            try:
                check_values(dataset.with_format(None)[self._column], self._column, self._most)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._column is not None and self._column not in self._signature_columns:
            self._signature_columns.append(self._column)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # Without a reference its log probabilities are 0, which the collator says; there is nothing to compute.
        return dataset if self.args.reference_free else super()._precompute_ref_logps(dataset, name, batch_size)

    def compute_ref_log_probs(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """As ``DPOTrainer``; the margin's column stays out of the model's arguments."""
        return super().compute_ref_log_probs(model, {k: v for k, v in inputs.items() if k != KEY})

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As ``DPOTrainer``.

        Raises:
            ConfigError: a dataset without the margin's column.
            UnsupportedError: a new dataset after training, with ``reference_free``.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            for where, dataset in _datasets(None, eval_dataset):
                self._check_dataset(dataset, where, self.args)
            if self.args.reference_free and self.state.global_step > 0:
                raise UnsupportedError(
                    "evaluate(eval_dataset=...) after training with reference_free=True: TRL takes new datasets before training "
                    "only when there is no reference model; give it as eval_dataset when the trainer is made"
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
        if self.args.length_normalized:
            lengths = inputs["completion_mask"].sum(dim=1).clamp(min=1.0).chunk(2, dim=0)
            chosen, rejected = chosen / lengths[0], rejected / lengths[1]
        rewards = self.beta * (chosen - rejected)
        margins = self._margins(rewards, values)
        losses = pair_losses(self._phi, rewards, margins, self.label_smoothing)
        self._log_margins(rewards.detach(), margins)
        loss = rest + losses.mean() * self._own_weight
        return (loss, outputs) if return_outputs else loss

    def _margins(self, rewards: Tensor, values: Tensor | None) -> Tensor:
        if self._column is None:
            return torch.full_like(rewards, self.args.gamma_max, requires_grad=False)
        if values is None:
            raise ConfigError(f"a batch came without {KEY!r}: the collator was replaced; wrap it as SADPOTrainer's own is")
        values = values.to(rewards.device)
        return structure_margin(values, self.args.gamma_max, self.args.tau) if self.args.margin == "structure" else values

    def _log_margins(self, rewards: Tensor, margins: Tensor) -> None:
        with torch.enable_grad():
            leaf = rewards.clone().requires_grad_()
            (slope,) = torch.autograd.grad(pair_losses(self._phi, leaf, margins, self.label_smoothing).sum(), leaf)
        pending, pairs = metrics_of(self.state), rewards.numel()
        mode: Any = "train" if self.model.training else "eval"
        pending.add("margins/required", margins.sum(), pairs, mode)
        pending.add("margins/satisfied_frac", (rewards >= margins).sum(), pairs, mode)
        pending.add("margins/active_frac", (slope != 0).sum(), pairs, mode)


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


def _datasets(train: Any, evaluation: Any) -> Iterator[tuple[str, Any]]:
    for where, given in (("train_dataset", train), ("eval_dataset", evaluation)):
        named = {f"{where}[{key!r}]": d for key, d in given.items()} if isinstance(given, Mapping) else {where: given}
        yield from ((name, d) for name, d in named.items() if isinstance(d, (Dataset, IterableDataset)))
