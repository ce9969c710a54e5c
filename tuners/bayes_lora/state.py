"""What the layers of one model share: the weight sample that is asked for, and the KL term of each optimizer step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.optimization import watch_optimizer_steps
from hfplug.positions import batch_pairs
from hfplug.tuners.bayes_lora.prior import kl


class _Chosen(threading.local):
    sample: int | Literal["mean"] | None = None


class ModelState:
    """One per model.

    Attributes:
        layers: the layers of the model.
        counted: adapter -> ``train_size`` as :meth:`prepare` counted it for the run at hand.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.counted: dict[str, int] = {}
        self._fresh()
        watch_optimizer_steps(self)

    def _fresh(self) -> None:
        self._chosen = _Chosen()  # of this thread: another one may serve another sample of the same model
        self._ran: set[tuple[int, str]] = set()  # layers and adapters that ran in training since their last step
        self._logged: dict[tuple[int, str], torch.Tensor] = {}  # their KL at the last step
        self._by: dict[int, int] = {}  # parameter -> optimizer whose step it is in
        self._stepped: dict[tuple[int, str], set[int]] = {}  # parameters stepped since the last new weights
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "counted": self.counted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()
        watch_optimizer_steps(self)  # a copy or an unpickled model trains too

    @property
    def chosen(self) -> int | Literal["mean"] | None:
        """The sample :func:`hfplug.tuners.posterior` asks for in this thread, ``"mean"``, or ``None``: as configured."""
        return self._chosen.sample

    @chosen.setter
    def chosen(self, sample: int | Literal["mean"] | None) -> None:
        self._chosen.sample = sample

    def ran(self, layer: Any, name: str) -> None:
        """An adapter of a layer takes part in a training forward."""
        self._ran.add((id(layer), name))

    def _stepping(self, ids: set[int]) -> Iterator[tuple[Any, str, list[tuple[str, Any, Any, list[Any]]]]]:
        """Layers and adapters with factors of which this optimizer holds something that has a gradient."""
        for layer in self.layers:
            for name in layer.bayes_lora_config:
                if (id(layer), name) not in self._ran:
                    continue
                found = []
                for factor, mean, rho in layer.factors(name):
                    held = [p for p in (mean, rho.rho) if id(p) in ids and p.requires_grad and p.grad is not None]
                    if held:
                        found.append((factor, mean, rho.rho, held))
                if found:
                    yield layer, name, found

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, ids: set[int]) -> None:
        """Add the gradient of the KL, once for all micro-batches, to those of the data.

        Here the gradients of the data are complete (accumulated, averaged over ranks, unscaled, clipped), so nothing can
        count the prior twice, and trainers that ignore extra loss terms have it too. An optimizer that wraps another
        (``ZeroRedundancyOptimizer``) steps it inside its own step, where the parameters are taken already.
        """
        # A fused optimizer unscales inside its step, so the gradients it holds now are still multiplied.
        scale = getattr(optimizer, "grad_scale", None)
        for layer, name, found in list(self._stepping(ids)):
            config = layer.bayes_lora_config[name]
            coefficient = config.kl_coefficient(layer.steps(name), self.counted.get(name))
            logged = None
            for factor, mean, rho, held in found:
                mine = [p for p in held if self._by.setdefault(id(p), id(optimizer)) == id(optimizer)]
                if not mine or not coefficient:
                    continue
                value, gradients = kl_and_gradients(layer, name, factor, mean, rho)
                logged = value if logged is None else logged + value
                for parameter, gradient in zip((mean, rho), gradients, strict=True):
                    # Trained on the mean, nothing of the data acts on rho: the prior alone would blow it up to its own width.
                    if any(parameter is p for p in mine) and (parameter is mean or config.train_mode == "sample"):
                        scaled = gradient * coefficient if scale is None else gradient * coefficient * scale.to(gradient)
                        _local(parameter.grad).add_(scaled.to(parameter.dtype))
            if logged is not None:
                self._logged[id(layer), name] = logged
            self._warn(optimizer, [rho for _, _, rho, _ in found])

    def _warn(self, optimizer: torch.optim.Optimizer, rhos: list[Any]) -> None:
        if self._warned:
            return
        self._warned = True
        ids = {id(rho) for rho in rhos}
        if any(g.get("weight_decay") and ids & {id(p) for p in g["params"]} for g in optimizer.param_groups):
            warnings.warn(
                "bayes_lora: weight decay acts on rho, which pulls every standard deviation to 0.69; call "
                "hfplug.tuners.prepare(trainer) before train(), or hfplug.tuners.apply_optimizer_groups(optimizer, model)",
                stacklevel=2,
            )

    def after_optimizer_step(self, ids: set[int]) -> None:
        """The next step draws other weights, once for all the optimizers an adapter has."""
        for layer, name, found in list(self._stepping(ids)):
            mine = {id(p) for *_, held in found for p in held if self._by.pop(id(p), None) is not None}
            if not mine:  # the step was that of an optimizer inside this one
                continue
            stepped = self._stepped.setdefault((id(layer), name), set())
            if not stepped or stepped & mine:
                layer.bayes_lora_steps[name] += 1
                stepped.clear()
            stepped |= mine
            random = {id(p) for _, mean, rho in layer.factors(name) for p in (mean, rho.rho) if p.requires_grad}
            if random <= stepped:
                self._ran.discard((id(layer), name))

    def totals(self, layer: Any) -> dict[str, float]:
        """The KL of a layer's adapters at the last step, in nats."""
        found = [float(value) for (owner, _), value in self._logged.items() if owner == id(layer)]
        return {"bayes_lora/kl": sum(found)} if found else {}

    def prepare(self, trainer: Any, layer: Any) -> None:
        """Count the training terms for the adapters that train and lack a ``train_size``: one pass over the collated data."""
        sharded = getattr(trainer, "is_deepspeed_enabled", False) or (
            getattr(trainer, "is_fsdp_enabled", False) and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 2) < 2
        )
        if sharded:
            raise UnsupportedError(
                "bayes_lora: DeepSpeed and FSDP1 step copies of the parameters, which the KL could not reach; use DDP or FSDP2"
            )
        if layer is not self.layers[0]:
            return
        self.counted = {}
        for name, config in layer.bayes_lora_config.items():
            if config.train_size is None and config.kl_weight and layer.bayes_lora_A[name].weight.requires_grad:
                self.counted[name] = count_terms(trainer)


def factor_kl(layer: Any, name: str, factor: str, mean: torch.Tensor, rho: torch.Tensor, *stream: object) -> torch.Tensor:
    """The KL of one factor from its prior at the present step, in nats, 0-d; ``mean`` and ``rho`` float32 or wider.

    Its noise is a stream of its own: the sample that the data's term uses is not used again, so that the two estimates are
    independent. Trained on the mean there is no noise: the most probable weights are those of the prior's density at the mean.
    """
    config = layer.bayes_lora_config[name]
    if config.train_mode == "mean":
        eps = torch.zeros_like(rho)
    else:
        eps = layer.noise(name, factor, ("kl", layer.steps(name), *stream), rho)
    return kl(mean, torch.nn.functional.softplus(rho), eps, config)


def kl_and_gradients(
    layer: Any, name: str, factor: str, mean: torch.Tensor, rho: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """:func:`factor_kl` of one factor and its gradients for mean and rho, float32 or wider.

    Of a sharded parameter (FSDP2) it is this rank's shard's, times the number of shards in the value, whose mean is logged.
    """
    wide = torch.promote_types(mean.dtype, torch.float32)
    leaves = [_local(t.detach()).to(wide).requires_grad_() for t in (mean, rho)]
    shard = _shard(mean)
    with torch.enable_grad():
        value = factor_kl(layer, name, factor, leaves[0], leaves[1], *shard[:1])
        gradients = torch.autograd.grad(value, leaves)
    return value.detach() * (shard[1] if shard else 1), gradients


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shard(tensor: Any) -> tuple[int, ...]:
    """Which shard this rank holds, and of how many; empty for a tensor that is not sharded. Replicas hold the same shard."""
    mesh, index, count = getattr(tensor, "device_mesh", None), 0, 1
    if mesh is None:
        return ()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard():
            index = index * mesh.size(dimension) + mesh.get_local_rank(dimension)
            count *= mesh.size(dimension)
    return index, count


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
    bare = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    causal = type(bare).__name__.endswith(("ForCausalLM", "LMHeadModel"))  # these predict the next token, others the labelled one
    with torch.random.fork_rng(devices=[]):  # a collator may draw
        for start in range(0, len(dataset), size):
            batch = trainer.data_collator([dataset[i] for i in range(start, min(start + size, len(dataset)))])
            labels = batch.get("labels")
            if labels is None:
                raise UnsupportedError(
                    "bayes_lora: the batches of this trainer have no 'labels' to count; set train_size= to the number of terms "
                    "its loss is a mean over in one pass of the data (pairs for DPO, completion tokens for GRPO)"
                )
            pairs = batch_pairs(batch, "labels") if causal and labels.dim() == 2 else None
            if pairs is None:
                pairs = labels.numel() if labels.dim() == 1 or labels.is_floating_point() else (labels != -100).sum()
            total += int(pairs)
    if total == 0:
        raise ConfigError("bayes_lora: the training data has no label at all; check the labels, or set train_size=...")
    return total
