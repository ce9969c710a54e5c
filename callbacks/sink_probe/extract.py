"""Features of answers, from one forward pass over prompt and answer for all probes at once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfplug import ConfigError, HfplugError, Kind, catalogue
from hfplug.callbacks.sink_probe.features import FROM_TEXT, TOP_K, FeatureTable, Layout, attention_features
from hfplug.callbacks.sink_probe.probe import SinkProbe
from hfplug.callbacks.sink_probe.records import check_records
from hfplug.calls import token_stack
from hfplug.models import model_label
from hfplug.observe import attention_modules, choose_layers
from hfplug.plugins import load_dotted
from hfplug.probing import evaluating
from hfplug.recording import record
from hfplug.sinks import SinkScores, sink_scores


def extract(
    model: nn.Module,
    tokenizer: Any,
    records: Sequence[Mapping[str, Any]],
    probes: Sequence[SinkProbe],
    *,
    batch_size: int = 8,
    chat: bool = False,
    name: str | None = None,
) -> list[FeatureTable]:
    """Features for each probe, in the order of the records.

    Args:
        model: a causal language model, with any attention implementation; it is left as it was.
        tokenizer: its tokenizer; not needed where all records have ids.
        records: see :func:`~hfplug.callbacks.sink_probe.records.check_record`. Prompt and answer are tokenised one by one, so
            that the boundary is exact; with ids, those are taken.
        probes: fitted or not: their options say what is looked at.
        batch_size: texts at a time; texts of similar length go together. Padding changes nothing.
        chat: put the prompt to the model as a user's message in its chat template.
        name: the model's name, recorded by a probe and compared; ``None``: its own.

    Raises:
        ConfigError: a record, or no token in a prompt or answer; layers the model does not have.
        HfplugError: scores that are not finite.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be 1 or more")
    known = check_records(records)
    layouts = [layout_of(probe, model, tokenizer, chat, name) for probe in probes]
    texts = [tokenised(r, tokenizer, chat, f"records[{i}]") for i, r in enumerate(known)]
    values = [np.zeros((len(texts), layout.width)) for layout in layouts]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]) + len(texts[i][1]))
    with evaluating(model):
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            for into, found in zip(values, _batch(model, [texts[i] for i in rows], layouts), strict=True):
                into[rows] = found
    return [FeatureTable(v, layout) for v, layout in zip(values, layouts, strict=True)]


def layout_of(probe: SinkProbe, model: nn.Module, tokenizer: Any = None, chat: bool = False, name: str | None = None) -> Layout:
    """What a probe's features of a model are.

    Raises:
        ConfigError: layers the model does not have, or a chat template it does not have.
    """
    o = probe.options
    own, shape = identify(model, name)
    layout = Layout(o["feature"], own, shape, _prompt_format(tokenizer, chat))
    if o["feature"] in FROM_TEXT:
        return layout
    _, modules = attention_modules(token_stack(model))
    layers = tuple(sorted(choose_layers(o["layers"], modules.values())))
    layout = dataclasses.replace(layout, layers=layers, heads=_heads(model), span=o["span"])
    if o["feature"] in TOP_K:
        layout = dataclasses.replace(layout, k=o["k"], min_queries=o["min_queries"])
    if o["feature"] == "sink":
        layout = dataclasses.replace(layout, include_self=o["include_self"], value_norm=o["value_norm"])
    return layout


def identify(model: nn.Module, name: str | None = None) -> tuple[str, str]:
    """Name and shape of a model: what tells it from others without its weights, which training changes."""
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ConfigError(f"model is a {type(model).__name__} without a configuration")
    text = config.get_text_config()
    sizes = [text.num_hidden_layers, _heads(model), getattr(text, "num_key_value_heads", None), text.hidden_size, text.vocab_size]
    shape = f"{text.model_type} " + "x".join(str(s) for s in sizes)
    own = getattr(config, "_name_or_path", "") or ""
    return (name if name is not None else model_label(own) if own else ""), shape


def _heads(model: Any) -> int:
    return int(model.config.get_text_config().num_attention_heads)


def _prompt_format(tokenizer: Any, chat: bool) -> str:
    if not chat:
        return "plain"
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ConfigError("chat=True, but the tokenizer has no chat template")
    return "chat:" + hashlib.sha256(str(template).encode()).hexdigest()[:8]


def tokenised(record: Mapping[str, Any], tokenizer: Any, chat: bool, where: str) -> tuple[list[int], list[int]]:
    """Token ids of prompt and answer.

    Raises:
        ConfigError: one of them has no token; text without a tokenizer.
    """
    prompt, answer = record.get("prompt_ids"), record.get("answer_ids")
    if tokenizer is None and (prompt is None or (answer is None and record.get("answer") is not None)):
        raise ConfigError(f"{where}: text, but no tokenizer was given")
    if prompt is None:
        prompt = prompt_ids(record["prompt"], tokenizer, chat)
    if answer is None and record.get("answer") is not None:
        answer = tokenizer(record["answer"], add_special_tokens=False)["input_ids"]
    for what, ids in (("prompt", prompt), ("answer", answer)):
        if not ids and not (what == "answer" and ids is None):
            raise ConfigError(f"{where}: the {what} has no tokens")
    return list(prompt), list(answer or [])


def prompt_ids(prompt: str, tokenizer: Any, chat: bool) -> list[int]:
    """Token ids of a prompt, in the chat template or as it is."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])


@functools.cache
def _scorer() -> Callable[..., SinkScores]:
    """The op with kernels where it is installed, else the torch form of the core."""
    entry = catalogue().entries.get("sink_scores")
    if entry is None or entry.method.kind is not Kind.ATTENTION or entry.unmet():
        return sink_scores
    found: Callable[..., SinkScores] = load_dotted(entry.method.public_names["sink_scores"])
    return found


def _batch(model: nn.Module, texts: Sequence[tuple[list[int], list[int]]], layouts: Sequence[Layout]) -> list[np.ndarray]:
    """The features of some texts for each layout: one forward, one more for each further span."""
    device = next(model.parameters()).device
    width = max(len(p) + len(a) for p, a in texts)
    ids, mask, answer = (torch.zeros(len(texts), width, dtype=torch.long, device=device) for _ in range(3))
    for row, (prompt, reply) in enumerate(texts):
        length = len(prompt) + len(reply)
        ids[row, :length] = torch.tensor([*prompt, *reply])
        mask[row, :length], answer[row, len(prompt) : length] = 1, 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    found: dict[int, np.ndarray] = {}
    likely = [i for i, layout in enumerate(layouts) if layout.feature in ("nll", "perplexity")]
    spans = sorted({layout.span for layout in layouts if layout.layers})
    for turn, span in enumerate(spans):
        mine = [layout for layout in layouts if layout.layers and layout.span == span]
        with record(
            model, layers=sorted({layer for layout in mine for layer in layout.layers}),
            counted=answer.bool() if span == "answer" else None, score=_scorer(),
            log_diagonal=any(layout.feature == "log_det" for layout in mine),
            value_norms=any(layout.value_norm == "mul" for layout in mine),
        ) as recorded:  # fmt: skip
            logits = _logits(model, inputs, all_tokens=bool(likely) and turn == 0)
        found |= {i: attention_features(recorded.last, x) for i, x in enumerate(layouts) if x in mine}
        if turn == 0 and likely:
            found |= _likelihoods(logits, ids, answer, likely, layouts)
    if likely and not spans:
        found |= _likelihoods(_logits(model, inputs, all_tokens=True), ids, answer, likely, layouts)
    for i, layout in enumerate(layouts):
        if layout.feature in ("prompt_length", "answer_length"):
            found[i] = np.array([[float(len(text[layout.feature == "answer_length"]))] for text in texts])
    return [found[i] for i in range(len(layouts))]


def _logits(model: Any, inputs: dict[str, Tensor], all_tokens: bool) -> Tensor:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    spared = not all_tokens and "logits_to_keep" in inspect.signature(type(base).forward).parameters
    logits: Tensor = model(**inputs, use_cache=False, **({"logits_to_keep": 1} if spared else {})).logits
    return logits


def _likelihoods(
    logits: Tensor, ids: Tensor, answer: Tensor, wanted: Sequence[int], layouts: Sequence[Layout]
) -> dict[int, np.ndarray]:
    if not bool(answer.any(dim=1).all()):
        raise ConfigError("the likelihood of an answer needs an answer")
    out = []
    for row in range(len(ids)):  # row by row: the vocabulary in fp32 for a whole batch is much
        at = answer[row, 1:].bool().nonzero().flatten()
        out.append(torch.nn.functional.cross_entropy(logits[row, at].float(), ids[row, at + 1]).double())
    nll = torch.stack(out).cpu().numpy()[:, None]
    if not np.isfinite(nll).all():
        raise HfplugError("a likelihood that is not finite: the model's activations overflow")
    return {i: np.exp(nll) if layouts[i].feature == "perplexity" else nll for i in wanted}
