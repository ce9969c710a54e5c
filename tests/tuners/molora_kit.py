"""What the MoLoRA tests share: trained-like LoRA folders for the tiny models, adapters made of them, outputs."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch

import hfplug
from hfplug.testing import models

# Own ranks, alphas and patterns; "talk" misses targets.
SETTINGS: dict[str, dict[str, Any]] = {
    "math": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "code": {"r": 2, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear", "rank_pattern": {"layers.1.*": 3}},
    "talk": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "up_proj"], "alpha_pattern": {"v_proj": 12}},
}  # fmt: skip
GPT2 = {"talk": ["c_attn"]}
FAMILY = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "GPT2LMHeadModel": "gpt2", "Gemma3ForCausalLM": "gemma3"}


def family_of(model: Any) -> str:
    """The name under which the experts of a tiny model are kept."""
    return FAMILY[type(model).__name__] + ("-wide" if model.config.hidden_size == 64 else "")


def folder() -> Path:
    """A temporary folder that goes with the process."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@functools.cache
def _folder(family: str) -> Path:
    return folder()


@functools.cache
def expert(family: str, name: str) -> str:
    """The folder of a random LoRA adapter, saved by PEFT."""
    settings = dict(SETTINGS[name])
    sizes: dict[str, Any] = {}
    if family.endswith("-wide"):  # as bitsandbytes wants them on a CPU
        family = family.removesuffix("-wide")
        sizes = {"hidden_size": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 64}
        sizes |= {"head_dim": 64} if family == "gemma3" else {}
    if family == "gpt2" and name in GPT2:
        settings |= {"target_modules": GPT2[name], "alpha_pattern": {}}
    place = _folder(f"{family}-{len(sizes)}") / name
    make_lora(models.TINY_MODELS[family](**sizes), place, seed=1 + sorted(SETTINGS).index(name), **settings)
    return str(place)


def make_lora(model: Any, place: Path, seed: int = 0, scale: float = 0.15, **settings: Any) -> Path:
    """Save a LoRA adapter with random factors."""
    settings = {"task_type": "CAUSAL_LM", "lora_dropout": 0.5, **settings}
    lora = peft.get_peft_model(model, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    lora.save_pretrained(place, save_embedding_layers=False)
    return place


def experts(family: str = "llama", names: tuple[str, ...] = ("math", "code", "talk")) -> dict[str, Any]:
    """Name -> folder."""
    return {name: expert(family, name) for name in names}


def config(family: str = "llama", **options: Any) -> Any:
    """A configuration over the three experts of a family."""
    return hfplug.tuners.config(**{"type": "molora", "task_type": "CAUSAL_LM", "experts": experts(family), **options})


def wrap(model: Any, *, seed: int = 0, **options: Any) -> Any:
    """The model with an adapter whose routers are random, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return stir(peft.get_peft_model(model, config(FAMILY[type(model).__name__], **options)))


def stir(model: Any) -> Any:
    """Spread the tokens over the slots: random last rows in every router."""
    for name, parameter in model.named_parameters():
        if "molora_router" in name and name.endswith("w2"):
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def lora(model: Any, name: str) -> Any:
    """The model with one of the experts in plain PEFT."""
    return peft.PeftModel.from_pretrained(model, expert(FAMILY[type(model).__name__], name))


def layers(model: Any) -> list[Any]:
    """Every MoLoRA layer."""
    return [layer for _, layer in hfplug.tuners.tuner_layers(model, "molora")]


def ids(rows: int = 2, length: int = 10, seed: int = 0) -> torch.Tensor:
    """Token ids without padding."""
    return torch.randint(3, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """In evaluation mode, without gradients."""
    with torch.no_grad():
        return model.eval()(input_ids=tokens, **kwargs).logits


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference."""
    return (found - expected).abs().max().item()
