"""What a verifier says of an answer, and a plain one for questions with a known answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfplug.errors import ConfigError

_SAID = re.compile(r"(?:answer is|answer:|####)\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one turn.

    Attributes:
        reward: of this turn; at least the collector's ``success_reward`` ends the rollout.
        answer: the answer in a normal form; ``""``: none was found, the turn is badly formatted; ``None``: the verifier does not
            look for one, so neither repetition nor format is judged.
    """

    reward: float
    answer: str | None = None


def answer_match(completion: str, row: Mapping[str, Any]) -> Verdict:
    r"""1 where the answer in ``completion`` is ``row["answer"]``, else 0 (our reading of a verifier for short answers).

    The answer is what stands in the last ``\boxed{…}``, or after the last "answer is", "answer:" or "####" to the end of its
    line; spaces, "$", thousands commas, capitals and a final full stop do not count.

    Raises:
        ConfigError: the prompt has no ``answer``.
    """
    if row.get("answer") is None:
        raise ConfigError(f"answer_match needs 'answer' with each prompt; this one has {sorted(row)}")
    boxed = _boxed(completion)
    said = _SAID.findall(completion)
    found = normal_form(boxed if boxed is not None else said[-1] if said else "")
    return Verdict(float(found != "" and found == normal_form(str(row["answer"]))), found)


def normal_form(text: str) -> str:
    """An answer without spaces, "$", thousands commas, capitals and final full stop."""
    text = re.sub(r"[\s$]", "", text).lower().rstrip(".")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None  # the box was cut off
