"""The reward of examples/tgpo.yaml: answers in short words."""

from __future__ import annotations

from typing import Any


def short_words(completions: list[str], **_: Any) -> list[float]:
    """Share of the words of each answer that have at most four letters."""
    rows = [text.split() for text in completions]
    return [sum(len(word) <= 4 for word in words) / max(len(words), 1) for words in rows]
