"""A model with several trained-looking adapters, and what is done with it, for the tests of LRAgent."""

from __future__ import annotations

import itertools
from typing import Any

import peft
import torch
from transformers import DynamicCache

from hfplug.testing.models import tiny_gemma3, tiny_llama
from hfplug.testing.runs import Runs

RUNS = Runs()
AGENTS = ("planner", "actor", "critic")
HEADS, DIM, RANK = 2, 8, 4


def team(
    make: Any = tiny_llama, targets: Any = ("q_proj", "v_proj"), agents: tuple[str, ...] = AGENTS, *, same: bool = False,
    attn: str = "sdpa", loud: float = 0.5, **options: Any,
) -> Any:  # fmt: skip
    """A model with trained-looking adapters: every ``lora_B`` is random."""
    base = make(attn=attn, **({} if make is tiny_gemma3 else {"num_hidden_layers": 3})).eval()
    lora = {"r": RANK, "lora_alpha": 6, "target_modules": list(targets), **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**lora), adapter_name=agents[0])
    for name in agents[1:]:
        model.add_adapter(name, peft.LoraConfig(**lora))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                for factors in (module.lora_A, module.lora_B):
                    first = None
                    for weight in (factors[name].weight for name in agents if name in factors):
                        weight.copy_(
                            loud * torch.randn(weight.shape, generator=generator) if first is None or not same else first
                        )
                        first = weight
    return model.eval()


def act(model: Any, agent: str, cache: Any, ids: Any, **more: Any) -> Any:
    """Logits of a forward as ``agent``."""
    model.set_adapter(agent)
    with torch.no_grad():
        return model(input_ids=ids, cache=cache, **more).logits


def own(model: Any) -> Any:
    return DynamicCache(config=model.get_base_model().config)


def talk(model: Any, caches: dict[str, Any], rounds: int = 4, new: int = 3) -> list[Any]:
    """The agents take turns on one text; the logits of every turn."""
    text, seen = RUNS.ids(2, 9), []
    for agent in itertools.islice(itertools.cycle(caches), rounds):
        model.set_adapter(agent)
        batch = {"input_ids": text, "attention_mask": torch.ones_like(text)}  # what is generated may be the padding token
        out = RUNS.generate(model, batch, cache=caches[agent], max_new_tokens=new)
        text, seen = out.sequences, [*seen, torch.stack(out.logits)]
    return [text, *seen]
