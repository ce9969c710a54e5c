"""Rollouts as rows: JSONL in and out, and the rows that are trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hfplug.errors import ConfigError, nearest
from hfplug.trainers.drift.weights import discounted_return, drift_weights, number, repeat_penalty

NEEDED = ("messages", "turn_rewards", "prompt_id")
_TURN = re.compile(r"t(\d+)")


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """Rollouts from a JSONL file, each checked as in :func:`to_drift_dataset`.

    Raises:
        ConfigError: no such file, or a line that is no rollout; names the line.
    """
    rows = read_lines(path)
    for line, row in rows:
        _checked(row, f"{path}:{line}")
    return [row for _, row in rows]


def read_lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; empty lines are passed over.

    Raises:
        ConfigError: no such file, or a line that is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} does not exist or is no file")
    rows = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}:{line}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{line}: expected an object, found {type(row).__name__}")
        rows.append((line, row))
    return rows


def write_rollouts(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write rollouts as JSONL, one line as soon as each is there; returns them.

    Raises:
        ConfigError: the file exists already.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with path.open("x", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            written.append(dict(row))
    return written


def to_drift_dataset(
    rows: Iterable[Mapping[str, Any]],
    *,
    beta: float = 0.1,
    gamma: float = 0.9,
    repeat_coefficient: float = 0.5,
    max_weight: float | None = None,
    drop_zero_success: bool = False,
    success_reward: float = 1.0,
) -> list[dict[str, Any]]:
    """The rows to train on: ``prompt`` (all messages but the last), ``completion`` (the last one), ``weight``.

    ``R = sum_t gamma^(t-1) r_t + format_penalty - repeat_coefficient (1 - n_new / n_turns)``, weighted within each prompt over
    all rows given. Only the last answer is trained on; earlier ones are context.

    Args:
        rows: rollouts: ``messages`` (chat messages, the last one the assistant's), ``turn_rewards`` (a list, or ``{"t1": …}``),
            ``prompt_id``, and where known ``answer_norms`` (one per turn; see :func:`repeat_penalty`) and ``format_penalty``
            (the rollout's own, <= 0).
        beta: see :func:`drift_weights`.
        gamma: see :func:`discounted_return`.
        repeat_coefficient: see :func:`repeat_penalty`.
        max_weight: see :func:`drift_weights`.
        drop_zero_success: leave out prompts without a rollout of which some turn earned ``success_reward`` (ours; the authors'
            code keeps them, with mean weight 1).
        success_reward: what a turn must earn to count as solved.

    Raises:
        ConfigError: a row that is no rollout, no rows, or none left; names the row and the field.
    """
    checked = [_checked(row, f"row {i}") for i, row in enumerate(rows)]
    if not checked:
        raise ConfigError("no rollouts")
    returns = [
        discounted_return(rewards, gamma) + penalty + repeat_penalty(answers, repeat_coefficient)
        for _, rewards, _, answers, penalty in checked
    ]
    groups = [prompt for _, _, prompt, _, _ in checked]
    weights = drift_weights(returns, groups, beta, max_weight)
    solved = {prompt for _, rewards, prompt, _, _ in checked if max(rewards) >= success_reward}
    made = [
        {"prompt": messages[:-1], "completion": messages[-1:], "weight": weight}
        for (messages, _, prompt, _, _), weight in zip(checked, weights, strict=True)
        if prompt in solved or not drop_zero_success
    ]
    if not made:
        raise ConfigError(f"drop_zero_success=True leaves no row: none of {len(set(groups))} prompts was solved")
    return made


def _checked(row: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[float], Any, list[str], float]:
    """Messages, rewards by turn, prompt, answers, format penalty of one rollout."""
    for key in NEEDED:
        if row.get(key) is None:
            raise ConfigError(f"{where}: a rollout needs {key!r}{nearest(key, row)}; it has {sorted(row)}")
    messages = row["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) < 2:
        raise ConfigError(f"{where}: messages={messages!r:.80} must be a list of at least a question and an answer")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ConfigError(f"{where}: messages[{i}]={message!r:.80} must hold 'role' and 'content', both strings")
    if messages[-1]["role"] != "assistant":
        raise ConfigError(f"{where}: the last message is {messages[-1]['role']!r}'s; it must be the 'assistant''s, to train on")
    rewards = _turns(row["turn_rewards"], where)
    answers = row.get("answer_norms") or []
    if not isinstance(answers, Sequence) or isinstance(answers, str) or any(not isinstance(a, str | None) for a in answers):
        raise ConfigError(f"{where}: answer_norms={answers!r:.80} must be a list of strings, one per turn")
    if answers and len(answers) != len(rewards):
        raise ConfigError(f"{where}: {len(answers)} answer_norms for {len(rewards)} turns; one per turn, or none at all")
    penalty = number(row.get("format_penalty") or 0.0, f"{where}: format_penalty")
    if penalty > 0:
        raise ConfigError(f"{where}: format_penalty={penalty} must be <= 0; it is added to the return")
    prompt = row["prompt_id"]
    if not isinstance(prompt, (str, int)):
        raise ConfigError(f"{where}: prompt_id={prompt!r:.80} must be a string or an integer")
    return [dict(m) for m in messages], rewards, prompt, list(answers), penalty


def _turns(found: Any, where: str) -> list[float]:
    place = f"{where}: turn_rewards"
    if isinstance(found, Mapping):  # the authors' form; a table fills the turns that a row does not have with None
        given = {key: value for key, value in found.items() if value is not None}
        numbers = {int(m[1]): v for k, v in given.items() if (m := _TURN.fullmatch(k))}
        if len(numbers) != len(given) or sorted(numbers) != list(range(1, len(given) + 1)):
            raise ConfigError(f"{place}={found!r:.80} must have the keys t1, t2, … without a gap")
        found = [numbers[t] for t in sorted(numbers)]
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ConfigError(f"{place}={found!r:.80} must hold a reward for each turn: [0, 1] or {{'t1': 0, 't2': 1}}")
    return [number(value, f"{place}[{t}]") for t, value in enumerate(found)]
