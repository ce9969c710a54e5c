"""What the layers of one model share: the weight sample that is asked for, and the KL term of each optimizer step."""

from __future__ import annotations

from typing import Any, Literal

import torch

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.optimization import watch_optimizer_steps
from hfplug.positions import batch_pairs
from hfplug.tuners.bayes_lora.prior import kl


class ModelState:
    """One per model.

    Attributes:
        layers: the layers of the model.
        chosen: the sample :func:`hfplug.tuners.posterior` asks for, ``"mean"``, or ``None`` where the configuration decides.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.chosen: int | Literal["mean"] | None = None
        self._logged: dict[int, torch.Tensor] = {}  # id of layer -> KL at the last step
        self._taking_part: list[tuple[Any, str]] = []  # layers and adapters of the step that is being taken
        watch_optimizer_steps(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _logged={}, _taking_part=[])
        watch_optimizer_steps(self)  # a copy or an unpickled model trains too

    def _stepping(self, ids: set[int]) -> list[tuple[Any, str]]:
        return [
            (layer, name)
            for layer in self.layers
            for name in layer.bayes_lora_config
            if any(id(mean) in ids for _, mean, _ in layer.factors(name))
        ]

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, ids: set[int]) -> None:
        """Add the gradient of the KL, once for all micro-batches, to those of the data.

        Here the gradients of the data are complete (accumulated, averaged over ranks, unscaled, clipped), so nothing can
        count the prior twice, and trainers that ignore extra loss terms have it too.
        """
        # A fused optimizer unscales inside its step, so the gradients it holds now are still multiplied.
        scale = getattr(optimizer, "grad_scale", None)
        taking_part: list[tuple[Any, str]] = []
        for layer, name in self._stepping(ids):
            means = [mean for _, mean, _ in layer.factors(name)]
            if all(mean.grad is None for mean in means):  # not part of this step
                continue
            taking_part.append((layer, name))
            config = layer.bayes_lora_config[name]
            coefficient = config.kl_coefficient(layer.steps(name))
            total = torch.zeros((), device=means[0].device)
            for factor, mean, rho in layer.factors(name):
                value, gradients = kl_and_gradients(layer, name, factor, mean, rho.rho)
                total = total + value
                for parameter, gradient in zip((mean, rho.rho), gradients, strict=True):
                    if coefficient and parameter.requires_grad:
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
                        scaled = gradient * coefficient if scale is None else gradient * coefficient * scale.to(gradient)
                        _local(parameter.grad).add_(scaled.to(parameter.dtype))
            self._logged[id(layer)] = total
        self._taking_part = taking_part

    def after_optimizer_step(self, ids: set[int]) -> None:
        """The next step draws other weights."""
        for layer, name in self._taking_part:
            layer.bayes_lora_steps[name] += 1
        self._taking_part = []

    def totals(self, layer: Any) -> dict[str, float]:
        """The KL of a layer at the last step, in nats."""
        return {"bayes_lora/kl": float(self._logged[id(layer)])} if id(layer) in self._logged else {}

    def prepare(self, trainer: Any, layer: Any) -> None:
        """Set ``train_size`` of the adapters that train and lack it, by one pass over the collated training data."""
        for name, config in layer.bayes_lora_config.items():
            if config.train_size is None and config.kl_weight and layer.bayes_lora_A[name].weight.requires_grad:
                config.train_size = count_terms(trainer)


def kl_and_gradients(
    layer: Any, name: str, factor: str, mean: torch.Tensor, rho: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The KL of one factor, in nats (0-d), and its gradients for mean and rho, float32 or wider.

    Of a sharded parameter (FSDP2) it is this rank's shard's, times the number of shards in the value, whose mean is logged.
    """
    wide = torch.promote_types(mean.dtype, torch.float32)
    leaves = [_local(t.detach()).to(wide).requires_grad_() for t in (mean, rho)]
    shard = _shard(mean)
    # A stream of its own: the sample that the data's term uses is not used again, so the two estimates are independent.
    eps = layer.noise(name, factor, ("kl", layer.steps(name), *shard[:1]), leaves[1])
    with torch.enable_grad():
        value = kl(leaves[0], torch.nn.functional.softplus(leaves[1]), eps, layer.bayes_lora_config[name])
        gradients = torch.autograd.grad(value, leaves)
    return value.detach() * (shard[1] if shard else 1), gradients


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shard(tensor: Any) -> tuple[int, ...]:
    """Rank and number of ranks of a sharded tensor; empty for an ordinary one."""
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else (mesh.get_rank(), mesh.size())


def count_terms(trainer: Any) -> int:
    """Terms the loss is a mean over in one pass of the training data: label tokens, or examples where labels are 1-D.

    Raises:
        ConfigError: there are none.
        UnsupportedError: the dataset has no length, or its batches have no labels.
    """
    dataset = trainer.train_dataset
    if dataset is None or not hasattr(dataset, "__len__"):
        raise UnsupportedError(
            f"bayes_lora: cannot count the label tokens of a {type(dataset).__name__} without a length; set train_size=..."
        )
    columns = getattr(trainer, "_remove_unused_columns", None)
    dataset = columns(dataset, description="training") if columns is not None and hasattr(dataset, "column_names") else dataset
    size, total = trainer.args.per_device_train_batch_size, 0
    with torch.random.fork_rng(devices=[]):  # a collator may draw
        for start in range(0, len(dataset), size):
            batch = trainer.data_collator([dataset[i] for i in range(start, min(start + size, len(dataset)))])
            labels = batch.get("labels")
            if labels is None:
                raise UnsupportedError("bayes_lora: the batches of this trainer have no 'labels' to count; set train_size=...")
            pairs = labels.numel() if labels.dim() == 1 else batch_pairs(batch, "labels")
            total += int(pairs) if pairs is not None else 0
    if total == 0:
        raise ConfigError("bayes_lora: the training data has no label at all; check the labels, or set train_size=...")
    return total
