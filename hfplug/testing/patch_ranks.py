"""One rank of a training step of a patched model: ``patch_ranks.py ddp|fsdp2 METHOD OPTIONS FAMILY``."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hfplug.families import decoder_of
from hfplug.testing.patch_runs import PatchRuns, relative


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the mean loss over the batch, whole tensors."""
    model.zero_grad()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            found[name.removeprefix("module.")] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def main(how: str, method: str, options: str, family: str) -> None:
    """Compare with the whole batch in one process."""
    runs = type("Runs", (PatchRuns,), {"method": method, "options": json.loads(options)})()
    model = runs.patched(family).train()
    ids = runs.ids(4, 12)
    expected = gradients(model, {"input_ids": ids})
    for name, parameter in model.named_parameters():
        if name not in expected:  # a vision tower, which text does not reach: DDP would wait for its gradients
            parameter.requires_grad_(False)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert ranks == 2, ranks
    part = {"input_ids": ids[rank::ranks]}
    if how == "ddp":
        found = gradients(nn.parallel.DistributedDataParallel(model), part)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in decoder_of(model).layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        kinds = {type(p).__name__ for p in model.parameters()}
        assert kinds == {"DTensor"}, kinds
        found = gradients(model, part)
    assert found.keys() == expected.keys(), expected.keys() ^ found.keys()
    for name, gradient in expected.items():
        assert relative(found[name], gradient) <= 1e-5, name


if __name__ == "__main__":
    main(*sys.argv[1:])
