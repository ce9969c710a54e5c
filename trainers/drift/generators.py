"""What answers conversations: a transformers model, or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hfplug.errors import ConfigError, UnsupportedError
from hfplug.probing import evaluating

Message = dict[str, str]


class ModelGenerator:
    """Answers with ``model.generate``; the random numbers of the caller are left as they were.

    The same seed gives the same answers for the same conversations and ``batch_size``.

    Args:
        model: a causal language model; its mode and its weights are left as they are.
        tokenizer: with a chat template.
        max_new_tokens: of one answer (authors: 512).
        temperature: > 0 (authors: 1).
        top_p: in (0, 1] (authors: 1).
        batch_size: conversations at a time.

    Raises:
        ConfigError: a value out of range, or a tokenizer without a chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        batch_size: int = 16,
    ) -> None:
        check_sampling(max_new_tokens, temperature, top_p)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r} must be an integer >= 1")
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"{type(tokenizer).__name__} has no chat template, so a conversation cannot be put to the model")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.options = {"max_new_tokens": max_new_tokens, "temperature": float(temperature), "top_p": float(top_p)}

    def __call__(self, conversations: Sequence[Sequence[Message]], *, seed: int) -> list[str]:
        """One answer per conversation."""
        device = self.model.device
        with evaluating(self.model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            starts = range(0, len(conversations), self.batch_size)
            return [text for s in starts for text in self._answers(conversations[s : s + self.batch_size])]

    def _answers(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        tokenizer = self.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = [
            tokenizer.apply_chat_template(list(c), add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
            for c in conversations
        ]
        width = max(map(len, ids))
        rows = [[pad] * (width - len(row)) + row for row in ids]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
        done = self.model.generate(
            input_ids=torch.tensor(rows, device=self.model.device),
            attention_mask=torch.tensor(mask, device=self.model.device),
            do_sample=True, top_k=0, pad_token_id=pad, eos_token_id=_stops(self.model, tokenizer), **self.options,
        )  # fmt: skip
        return tokenizer.batch_decode(done[:, width:], skip_special_tokens=True)


class VLLMGenerator:
    """Answers with vLLM's offline ``LLM.chat``. vLLM is no dependency of hfplug and was not at hand when this was written.

    Args:
        model: folder or Hub id.
        max_new_tokens: as for :class:`ModelGenerator`.
        temperature: as for :class:`ModelGenerator`.
        top_p: as for :class:`ModelGenerator`.
        engine: keyword arguments of ``vllm.LLM``.

    Raises:
        ConfigError: a value out of range.
        UnsupportedError: vLLM is not installed.
    """

    def __init__(
        self, model: str, *, max_new_tokens: int = 512, temperature: float = 1.0, top_p: float = 1.0, **engine: Any
    ) -> None:
        check_sampling(max_new_tokens, temperature, top_p)
        try:
            import vllm  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise UnsupportedError(
                f"collecting with vLLM needs the package vllm, which cannot be imported ({error}); `pip install vllm`, "
                "or collect with the model itself (ModelGenerator; --backend model)"
            ) from error
        self.engine = vllm.LLM(model=model, **engine)
        self.sampling = vllm.SamplingParams
        self.options = {"max_tokens": max_new_tokens, "temperature": float(temperature), "top_p": float(top_p)}

    def __call__(self, conversations: Sequence[Sequence[Message]], *, seed: int) -> list[str]:
        """One answer per conversation."""
        # Requests with one seed and one prompt would give one answer n times.
        options = [self.sampling(n=1, seed=(seed + i) % 2**31, **self.options) for i in range(len(conversations))]
        done = self.engine.chat([list(c) for c in conversations], options, use_tqdm=False)
        return [request.outputs[0].text for request in done]


def check_sampling(max_new_tokens: Any, temperature: Any, top_p: Any) -> None:
    """ConfigError for a sampling option out of range."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens!r} must be an integer >= 1")
    if not isinstance(temperature, (int, float)) or not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature={temperature!r} must be > 0: rollouts are samples")
    if not isinstance(top_p, (int, float)) or not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p!r} must be in (0, 1]")


def _stops(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: those of the model's generation settings and the tokenizer's own."""
    found = model.generation_config.eos_token_id
    ids = list(found) if isinstance(found, (list, tuple)) else [found]
    return sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
