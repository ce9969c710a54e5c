"""Positions of a batch and layers of a model, as losses and probes need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hfplug.calls import Call
from hfplug.errors import ConfigError, UnsupportedError

Pairs = Literal["labels", "all"]


def first_tensor(output: Any) -> Tensor:
    """The hidden states in what a layer or a token stack returns: a tensor, a tuple, or a ``ModelOutput``."""
    if isinstance(output, Tensor):
        return output
    hidden = getattr(output, "last_hidden_state", None)
    return hidden if hidden is not None else output[0]


def token_pairs(call: Call, inputs: Mapping[str, Any], pairs: Pairs, device: torch.device | None = None) -> Tensor:
    """Which positions ``t`` of a call form a pair with ``t + 1``.

    Both tokens are real and of one document. With ``pairs="labels"`` the label of ``t + 1`` is not -100, so these are the
    positions cross-entropy is taken over (except that of a left-padded row's first token, whose predecessor is padding).

    Returns:
        ``(batch, tokens - 1)`` bool. Tokens that prompt tuning put in front count as padding.
    """
    labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
    tokens = next((inputs[k] for k in ("input_ids", "inputs_embeds", "labels") if inputs.get(k) is not None), None)
    virtual = 0 if tokens is None else call.length - tokens.shape[1]
    if tokens is not None and (virtual < 0 or tokens.shape[0] != call.batch):
        raise UnsupportedError(
            f"the model was given {call.batch} x {call.length} tokens but the batch holds {tuple(tokens.shape[:2])}: "
            "this trainer does not pass its batch to the model unchanged, so labels cannot be assigned to positions"
        )
    if device is None:
        device = next((v.device for v in (labels, tokens) if isinstance(v, Tensor)), torch.device("cpu"))
    keep = torch.ones(call.batch, call.length - 1, dtype=torch.bool, device=device)
    if pairs == "labels":
        if shifted is not None:
            target = shifted[:, :-1]
        elif labels is not None:
            target = labels[:, 1:]
        else:
            raise ConfigError(
                f"pairs='labels' needs 'labels' in the batch, which holds {sorted(map(str, inputs))}; use pairs='all'"
            )
        keep[:, virtual:] &= (target != -100).to(device)
    if virtual:
        keep[:, :virtual] = False
    if call.attention_mask is not None:
        real = call.attention_mask.to(device)
        keep &= real[:, :-1] & real[:, 1:]
    if call.restarts is not None:
        keep &= ~call.restarts[:, 1:].to(device)
    return keep


def batch_pairs(batch: Any, pairs: Pairs) -> Tensor | None:
    """Number of :func:`token_pairs` of a batch that is passed to the model unchanged; ``None`` if it is not such a batch."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or (pairs == "labels" and not {"labels", "shift_labels"} & set(batch)):
        return None
    return token_pairs(Call(dict(batch), training=True), batch, pairs).sum()


def decoder_layers(stack: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a token stack: the outermost ``ModuleList`` as long as ``config.num_hidden_layers``.

    Raises:
        UnsupportedError: there is none, or more than one; the message says what was looked for and found.
    """
    config = getattr(stack, "config", None)
    depth = getattr(config.get_text_config() if config is not None else None, "num_hidden_layers", None)
    lists = {name: m for name, m in stack.named_modules() if isinstance(m, nn.ModuleList)}
    fits = [name for name, m in lists.items() if len(m) == depth]
    outermost = [name for name in fits if name.count(".") == min(n.count(".") for n in fits)]
    if len(outermost) != 1:
        found = {name: len(m) for name, m in lists.items()}
        raise UnsupportedError(
            f"looked in {type(stack).__name__} for one ModuleList of config.num_hidden_layers={depth} layers and found "
            f"{outermost or 'none'}; its lists: {found}"
        )
    return lists[outermost[0]]
