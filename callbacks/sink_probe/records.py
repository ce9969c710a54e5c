"""Questions and answers: what a probe is fitted on and applied to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfplug import ConfigError
from hfplug.errors import nearest

FIELDS = ("prompt", "answer", "label", "question_id", "reference", "prompt_ids", "answer_ids")


def check_record(record: Any, where: str, *, answer: bool = True, label: bool = False) -> dict[str, Any]:
    """One question with its answer, checked.

    Args:
        record: ``prompt`` (text) or ``prompt_ids`` (token ids); ``answer`` or ``answer_ids``; ``label``, 1 for what the probe is
            to find (a wrong answer), else 0; ``question_id``, equal for answers to one question; ``reference``, the right answer.
            Further fields are kept.
        where: for messages, e.g. ``data.jsonl:3``.
        answer, label: whether it must have one.

    Raises:
        ConfigError: names the place and the field.
    """
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where}: {type(record).__name__} instead of an object with the fields prompt, answer, ...")
    found = dict(record)
    for name, needed in (("prompt", True), ("answer", answer)):
        text, ids = found.get(name), found.get(f"{name}_ids")
        if text is None and ids is None and needed:
            raise ConfigError(f"{where}: no field {name!r}{nearest(name, [k for k in found if isinstance(k, str)])}")
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{where}: {name}={text!r} must be text")
        if ids is not None and not (isinstance(ids, Sequence) and all(type(i) is int and i >= 0 for i in ids)):
            raise ConfigError(f"{where}: {name}_ids={ids!r} must be a list of token ids")
    if found.get("label") is None and label:
        raise ConfigError(f"{where}: no field 'label'{nearest('label', [k for k in found if isinstance(k, str)])}")
    if found.get("label") is not None:
        if not isinstance(found["label"], (int, float)) or found["label"] not in (0, 1):
            raise ConfigError(f"{where}: label={found['label']!r} must be 0, 1, true or false")
        found["label"] = int(found["label"])
    return found


def check_records(records: Any, where: str = "records", **needs: bool) -> list[dict[str, Any]]:
    """:func:`check_record` of each; at least one."""
    found = [check_record(record, f"{where}[{i}]", **needs) for i, record in enumerate(records)]
    if not found:
        raise ConfigError(f"{where}: there is no record")
    return found


def read_records(path: str | Path, **needs: bool) -> list[dict[str, Any]]:
    """Records from a JSONL file, one object per line; empty lines are passed over.

    Args:
        path: the file, UTF-8.
        needs: see :func:`check_record`.

    Raises:
        ConfigError: the file cannot be read or is empty; a line that is wrong, by ``file:line``.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        found.append(check_record(record, where, **needs))
    if not found:
        raise ConfigError(f"{path}: there is no record in it")
    return found


def groups_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must not be divided between folds: the question's id, or without one the prompt."""

    def group(record: Mapping[str, Any]) -> str:
        own = record.get("question_id")
        return repr(record.get("prompt") or record.get("prompt_ids")) if own is None else str(own)

    return [group(record) for record in records]


def is_wrong(answer: str, reference: str) -> bool:
    """Whether an answer is not the reference, but for case, spaces and a full stop at the end."""

    def plain(text: str) -> str:
        return " ".join(text.split()).rstrip(".").casefold()

    return plain(answer) != plain(reference)
