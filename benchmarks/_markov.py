"""A language whose next-token distribution is known: half of its words have one successor, half have eight equal ones.

The teacher is that table as a model, exactly; a student is a small Llama. So what a student should say after every word is
known, and how far it is from that is computed, not estimated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hfplug.testing.models import VOCAB

FIRST, BRANCHES, UNLIKELY = 3, 8, -12.0  # first word (below it: padding, start, end); successors; logit of all other words


def table(seed: int) -> tuple[Tensor, Tensor]:
    """Probabilities ``(VOCAB, VOCAB)`` of the next word, and which words have many successors ``(VOCAB,)``."""
    draw = torch.Generator().manual_seed(seed)
    many = torch.zeros(VOCAB, dtype=torch.bool)
    logits = torch.full((VOCAB, VOCAB), UNLIKELY, dtype=torch.float64)
    for word in range(VOCAB):
        many[word] = word >= FIRST and word % 2 == 0
        next_words = FIRST + torch.randperm(VOCAB - FIRST, generator=draw)[: BRANCHES if many[word] else 1]
        logits[word, next_words] = 0.0
    logits[:, :FIRST] = 2 * UNLIKELY  # no word ends the text
    return logits.softmax(-1), many


def teacher(probabilities: Tensor) -> Any:
    """A Llama whose logits are the logarithms of the table: embeddings of one entry each, a layer that adds nothing."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=VOCAB, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # The norm makes the one entry sqrt(VOCAB).
        model.lm_head.weight.copy_((probabilities.log().T / math.sqrt(VOCAB)).float())
    found = next_word(model)[FIRST:]
    assert float((found - probabilities[FIRST:]).abs().max()) < 1e-4
    return model.eval()


def student(seed: int, width: int = 16) -> Any:
    """A Llama of two layers, too narrow for the table to be easy."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def walk(probabilities: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """Texts of the language ``(rows, length)``; the first word is any."""
    draw = torch.Generator().manual_seed(seed)
    words = [torch.randint(FIRST, VOCAB, (rows,), generator=draw)]
    for _ in range(length - 1):
        words.append(torch.multinomial(probabilities[words[-1]], 1, generator=draw)[:, 0])
    return torch.stack(words, 1)


@torch.no_grad()
def next_word(model: Any, prefixes: Tensor | None = None) -> Tensor:
    """Probabilities ``(VOCAB, VOCAB)`` of the next word by the last word, in fp64, averaged over the places it stands in.

    Args:
        prefixes: texts; ``None``: each word alone.
    """
    training = model.training
    model.eval()
    texts = torch.arange(VOCAB)[:, None] if prefixes is None else prefixes
    p = model(input_ids=texts).logits.double().softmax(-1).flatten(0, 1)
    model.train(training)
    sums = torch.zeros(VOCAB, VOCAB, dtype=torch.float64).index_add_(0, texts.flatten(), p)
    return sums / torch.bincount(texts.flatten(), minlength=VOCAB).clamp(min=1)[:, None]


@torch.no_grad()
def texts_of(model: Any, rows: int, length: int, seed: int) -> Tensor:
    """Texts sampled from a model at temperature 1 ``(rows, length)``; the first word is any."""
    draw = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    words = torch.randint(FIRST, VOCAB, (rows, 1), generator=draw)
    for _ in range(length - 1):
        p = model(input_ids=words).logits[:, -1].double().softmax(-1)
        words = torch.cat([words, torch.multinomial(p, 1, generator=draw)], 1)
    model.train(training)
    return words


def compare(model: Any, probabilities: Tensor, many: Tensor, seed: int) -> dict[str, float]:
    """A student against the table, over the contexts of 256 texts of the language and 512 of its own.

    Returns:
        ``entropy_many``: nats after words with eight successors (the table: log 8 = 2.08); ``forward_kl_many``,
        ``forward_kl_one``: KL(table‖student) there and after words with one; ``right_one``: probability of the one
        successor; ``coverage``: exp(entropy of the student over the eight) / 8; ``legal``: share of its own texts of 12
        words without a wrong step after a word with one successor; ``legal_all``: without any wrong step;
        ``distinct``: different windows of 4 words in its own texts, over those in as many of the language.
    """
    texts = walk(probabilities, 256, 12, 1000 + seed)
    q, p = next_word(model, texts), probabilities
    seen = torch.bincount(texts.flatten(), minlength=VOCAB) > 0
    often, single = many & seen, ~many & seen
    single[:FIRST] = False
    kl = (p * (p.log() - q.clamp(min=1e-300).log())).sum(-1)
    entropy = -(q * q.clamp(min=1e-300).log()).sum(-1)
    inside = torch.where(p > 1e-3, q, 0.0)
    share = inside / inside.sum(-1, keepdim=True).clamp(min=1e-300)
    spread = torch.exp(-(share * share.clamp(min=1e-300).log()).sum(-1)) / BRANCHES
    own = texts_of(model, 512, 12, 2000 + seed)
    fine = p[own[:, :-1], own[:, 1:]] > 1e-3
    windows = [len({tuple(w) for row in t.tolist() for w in zip(*(row[i:] for i in range(4)), strict=False)})
               for t in (own, walk(probabilities, 512, 12, 3000 + seed))]  # fmt: skip
    return {
        "entropy_many": float(entropy[often].mean()), "forward_kl_many": float(kl[often].mean()),
        "forward_kl_one": float(kl[single].mean()), "right_one": float((p * q).sum(-1)[single].mean()),
        "coverage": float(spread[often].mean()), "legal": float((fine | many[own[:, :-1]]).all(1).double().mean()),
        "legal_all": float(fine.all(1).double().mean()), "distinct": windows[0] / windows[1],
    }  # fmt: skip
