"""Semantic distances of response pairs, computed once and kept as a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfplug import ConfigError
from hfplug.errors import nearest

Encoder = Callable[[Sequence[str], Sequence[str]], Any]


class HiddenStateEncoder:
    """Mean-pooled hidden states of a causal language model over the tokens of the response, read after its prompt.

    Args:
        model: a causal language model of transformers, usually the reference; it is read in evaluation mode, and left as it was.
        tokenizer: its tokenizer.
        layer: which of ``hidden_states``: 0 the embeddings, -1 the last.
        max_length: tokens of prompt and response together; the prompt is cut from the left, then the response from the right.

    Raises:
        ConfigError: ``max_length`` below 2.
    """

    def __init__(self, model: Any, tokenizer: Any, *, layer: int = -1, max_length: int = 1024) -> None:
        if max_length < 2:
            raise ConfigError(f"max_length={max_length!r} must be at least 2: one token of the prompt and one of the response")
        self.model, self.tokenizer, self.layer, self.max_length = model, tokenizer, layer, max_length

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        """Vectors ``(n, d)`` in float64, one per pair of strings. A response without tokens gives the vector of its prompt."""
        rows, spans = [], []
        for prompt, response in zip(prompts, responses, strict=True):
            # A prompt that a chat template rendered may begin with the special token already.
            begun = bool(self.tokenizer.bos_token) and prompt.startswith(self.tokenizer.bos_token)
            before = self.tokenizer(prompt, add_special_tokens=not begun)["input_ids"]
            after = self.tokenizer(response, add_special_tokens=False)["input_ids"][: self.max_length - 1]
            before = before[-(self.max_length - len(after)) :]
            rows.append([*before, *after])
            spans.append((len(before) if after else 0, len(rows[-1])))
        width = max(map(len, rows))
        fill = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                device = self.model.device
                out = self.model(
                    input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False
                )
        finally:
            self.model.train(training)
        states = out.hidden_states[self.layer].double().cpu()
        return torch.stack([state[first:last].mean(dim=0) for state, (first, last) in zip(states, spans, strict=True)])


def distances(chosen: Tensor, rejected: Tensor, mean: Tensor | None = None) -> Tensor:
    """``d = (1 - cos) / 2`` of the rows of two ``(n, d)`` tensors, after ``mean`` is taken off both: ``(n,)`` in [0, 1].

    As ``|a - b|^2 / 4`` of the unit vectors, which is symmetric and exactly 0 for equal rows. A zero vector is at 1/4 of every
    unit vector and at 0 of itself.
    """
    shift: Any = 0.0 if mean is None else mean
    first, second = (torch.nn.functional.normalize(rows.double() - shift, dim=-1) for rows in (chosen, rejected))
    return ((first - second).square().sum(dim=-1) / 4).clamp(0, 1)


def add_semantic_distance(
    dataset: Any,
    encoder: Encoder,
    *,
    tokenizer: Any = None,
    column: str = "semantic_distance",
    batch_size: int = 16,
    center: bool = True,
    quantile: float | None = None,
) -> Any:
    """Add the column of distances that the structure margin reads.

    Args:
        dataset: a ``datasets.Dataset`` of preferences (``chosen``, ``rejected`` and, in it or before both, ``prompt``), standard
            or conversational, or a dict of them, whose first split then gives the mean and the quantile for all.
        encoder: ``(prompts, responses) -> (n, d)`` vectors: :class:`HiddenStateEncoder`, or any text encoder, e.g.
            ``lambda prompts, responses: sentence_model.encode(responses)``. Responses come without template tokens, which all
            responses share and which would push every cosine towards 1.
        tokenizer: renders conversational prompts by its chat template; without it their messages are joined by line breaks.
        column: the column to write.
        batch_size: pairs per call of the encoder, which gets twice as many strings.
        center: take the mean vector of all responses off first: states of language models share a large common part.
        quantile: divide by this quantile of the distances, so that it becomes 1 and what lies beyond is cut there; ``None``:
            leave them. Not for data whose pairs are all alike.

    Raises:
        ConfigError: no rows, a column that is there already or one that is missing, a quantile outside (0, 1], a ``batch_size``
            below 1, a stream, or an encoder that does not give one finite vector per response.
    """
    if quantile is not None and not 0 < quantile <= 1:
        raise ConfigError(f"quantile={quantile!r} must be in (0, 1]")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r} must be at least 1: pairs per call of the encoder")
    splits: dict[Any, Any] = dict(dataset) if isinstance(dataset, Mapping) else {"": dataset}
    mean, scale = None, 1.0
    done = {}
    for index, (name, split) in enumerate(splits.items()):
        if not hasattr(split, "__len__"):
            raise ConfigError(
                f"dataset is a {type(split).__name__}: the mean of its responses is known after the last row only; "
                "give a datasets.Dataset, or write the column yourself"
            )
        if column in split.column_names:
            raise ConfigError(f"column={column!r} is in the dataset already; remove it or choose another name")
        chosen, rejected = _encode(split, encoder, tokenizer, batch_size)
        if index == 0 and center:
            mean = torch.cat([chosen, rejected]).mean(dim=0)
        found = distances(chosen, rejected, mean)
        if index == 0 and quantile is not None:
            scale = float(torch.quantile(found, quantile))
            if scale == 0:
                raise ConfigError(f"quantile={quantile!r} of the distances is 0: most pairs are the same answer twice")
        done[name] = split.add_column(column, (found / scale).clamp(max=1).tolist())
    like: Any = type(dataset)
    return like(done) if isinstance(dataset, Mapping) else done[""]


def _encode(dataset: Any, encoder: Encoder, tokenizer: Any, batch_size: int) -> tuple[Tensor, Tensor]:
    from trl import extract_prompt

    if len(dataset) == 0:
        raise ConfigError("dataset has no rows: there is nothing to take distances of")
    absent = sorted({"chosen", "rejected"} - set(dataset.column_names))
    if absent:
        raise ConfigError(
            f"dataset has no column {absent[0]!r}, which preferences need{nearest(absent[0], dataset.column_names)}"
        )
    rows = [row if "prompt" in row else extract_prompt(row) for row in dataset]
    halves = []
    for which in ("chosen", "rejected"):
        vectors = []
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            made = encoder([_prompt(row["prompt"], tokenizer) for row in part], [_text(row[which]) for row in part])
            vectors.append(_vectors(made, len(part)))
        halves.append(torch.cat(vectors))
    return halves[0], halves[1]


def _vectors(made: Any, count: int) -> Tensor:
    found = torch.as_tensor(made).double().cpu()
    if found.ndim != 2 or len(found) != count or not bool(found.isfinite().all()):
        raise ConfigError(
            f"encoder gave a tensor of shape {tuple(found.shape)} for {count} responses, which must be ({count}, d) and finite"
        )
    return found


def _text(response: Any) -> str:
    return response if isinstance(response, str) else "\n".join(str(message["content"]) for message in response)


def _prompt(prompt: Any, tokenizer: Any) -> str:
    if isinstance(prompt, str) or tokenizer is None:
        return _text(prompt)
    rendered: str = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return rendered
