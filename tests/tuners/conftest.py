"""What the U-LoRA tests share: an adapter whose every part is switched on."""

from __future__ import annotations

import pytest
import torch

import hfplug
from hfplug.testing import models


class Kit:
    """Models with a stirred U-LoRA adapter, batches, and outputs."""

    pad = models.PAD

    @staticmethod
    def wrap(model, *, stir=0.0, seed=3, **options):
        """A U-LoRA adapter; ``stir`` > 0 makes every parameter and statistic of it random at that scale."""
        from peft import get_peft_model

        chosen = {"type": "ulora", "r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
        model = get_peft_model(model, hfplug.tuners.config(**chosen))
        if stir:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for layer in Kit.layers(model):
                    for name in layer.ulora_A:
                        parts = [layer.ulora_A[name].weight, layer.ulora_B[name].weight, *layer.ulora_gate[name].parameters()]
                        for part in parts:
                            part.add_(torch.randn(part.shape, generator=generator).to(part.dtype) * stir)
                        layer.ulora_ema[name].uniform_(0.5, 1.5, generator=generator)
                        layer.ulora_steps[name].fill_(3)
        return model

    @staticmethod
    def layers(model):
        """Every U-LoRA layer."""
        return [layer for _, layer in hfplug.tuners.tuner_layers(model, "ulora")]

    @staticmethod
    def ids(rows=2, length=10, seed=0):
        """Token ids without padding."""
        return torch.randint(3, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def logits(model, ids, **kwargs):
        """In evaluation mode, without gradients."""
        with torch.no_grad():
            return model.eval()(input_ids=ids, **kwargs).logits

    @staticmethod
    def off(found, expected):
        """The largest difference."""
        return (found - expected).abs().max().item()


@pytest.fixture(scope="session")
def kit():
    return Kit


@pytest.fixture(scope="session")
def molora():
    """The module ``molora_kit.py`` beside this file: LoRA folders for the tiny models, adapters made of them."""
    import molora_kit

    return molora_kit
