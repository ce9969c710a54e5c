"""Multi-turn rollouts of a fixed model: answer, verdict, feedback, again, until solved or out of turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hfplug.errors import ConfigError
from hfplug.trainers.drift.verify import Verdict
from hfplug.trainers.drift.weights import number

logger = logging.getLogger(__name__)
Message = dict[str, str]
Verifier = Callable[[str, Mapping[str, Any]], "Verdict | float"]


class Generator(Protocol):
    """Whatever answers conversations: :class:`ModelGenerator`, :class:`VLLMGenerator`, or a function around an endpoint."""

    def __call__(self, conversations: Sequence[Sequence[Message]], *, seed: int) -> Sequence[str]:
        """One sampled answer per conversation, the same ones for the same seed."""


class DriftRolloutCollector:
    """Samples rollouts of a fixed model (authors' defaults: 16 per prompt, 5 turns at most).

    Each prompt is answered ``n`` times on its own. After a turn whose reward is below ``success_reward`` the answer and
    ``feedback`` are added to the conversation, and the model answers again.

    Args:
        generate: answers conversations; see :class:`Generator`. It must be the model that training will start from.
        verifier: ``(completion, prompt row) -> Verdict``, or a plain reward.
        n: rollouts per prompt, >= 1.
        max_turns: >= 1.
        feedback: the user's message after a failure.
        format_penalty: added to the rollout's return for each turn whose verdict has the answer ``""``, <= 0.
        success_reward: the reward from which on a turn is a success.
        prompts_per_call: how many prompts are under way together: ``n`` times as many conversations reach ``generate``.
        seed: of all that ``generate`` draws.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        generate: Generator,
        verifier: Verifier,
        *,
        n: int = 16,
        max_turns: int = 5,
        feedback: str = "Incorrect. Please think again.",
        format_penalty: float = -0.1,
        success_reward: float = 1.0,
        prompts_per_call: int = 8,
        seed: int = 0,
    ) -> None:
        for name, value in (("generate", generate), ("verifier", verifier)):
            if not callable(value):
                raise ConfigError(f"{name}={value!r} is not callable")
        for name, count in (("n", n), ("max_turns", max_turns), ("prompts_per_call", prompts_per_call)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name}={count!r} must be an integer >= 1")
        if number(format_penalty, "format_penalty") > 0:
            raise ConfigError(f"format_penalty={format_penalty!r} must be <= 0; it is added to the return")
        number(success_reward, "success_reward")
        self.generate, self.verifier = generate, verifier
        self.n, self.max_turns, self.feedback = n, max_turns, feedback
        self.format_penalty, self.success_reward = format_penalty, success_reward
        self.prompts_per_call, self.seed = prompts_per_call, seed

    def collect(self, prompts: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Rollouts, those of a prompt one after the other; see :func:`to_drift_dataset` for the fields.

        Args:
            prompts: each with ``prompt`` (a string, or chat messages) and, for the verifier, whatever it reads (``answer``, …).
                ``prompt_id`` names it; default: its number.

        Raises:
            ConfigError: a prompt of another form, two with one ``prompt_id``, an answer or verdict that is none.
        """
        rows = [self._opened(row, i) for i, row in enumerate(prompts)]
        seen: dict[Any, int] = {}
        for i, (_, prompt_id, _) in enumerate(rows):
            if (first := seen.setdefault(prompt_id, i)) != i:
                raise ConfigError(f"prompts {first} and {i} both have prompt_id={prompt_id!r}; weights are normalised by it")
        for start in range(0, len(rows), self.prompts_per_call):
            yield from self._together(rows[start : start + self.prompts_per_call], start)
            logger.info("collected %d of %d prompts", min(start + self.prompts_per_call, len(rows)), len(rows))

    def _opened(self, row: Mapping[str, Any], index: int) -> tuple[list[Message], Any, Mapping[str, Any]]:
        prompt = row.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, Sequence) or not messages or not all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
        ):  # fmt: skip
            raise ConfigError(f"prompt {index}: prompt={prompt!r:.80} must be a string or a list of chat messages")
        if messages[-1]["role"] == "assistant":
            raise ConfigError(f"prompt {index}: its last message is the assistant's; there is nothing to answer")
        return [dict(m) for m in messages], row.get("prompt_id", index), row

    def _together(self, rows: Sequence[tuple[list[Message], Any, Mapping[str, Any]]], start: int) -> Iterator[dict[str, Any]]:
        rollouts = [
            {"messages": list(messages), "turn_rewards": [], "answer_norms": [], "prompt_id": prompt_id, "format_penalty": 0.0}
            for messages, prompt_id, _ in rows
            for _ in range(self.n)
        ]
        known = [True] * len(rollouts)  # whether the verifier told an answer in every turn
        live = list(range(len(rollouts)))
        for turn in range(self.max_turns):
            seed = (self.seed * 1_000_003 + start) * 1_000 + turn
            answers = self.generate([rollouts[i]["messages"] for i in live], seed=seed % 2**31)
            if len(answers) != len(live):
                raise ConfigError(f"generate gave {len(answers)} answers for {len(live)} conversations")
            failed = []
            for i, answer in zip(live, answers, strict=True):
                rollout = rollouts[i]
                verdict = self._verdict(answer, rows[i // self.n][2])
                rollout["messages"].append({"role": "assistant", "content": answer})
                rollout["turn_rewards"].append(verdict.reward)
                rollout["answer_norms"].append(verdict.answer)
                known[i] &= verdict.answer is not None
                if verdict.answer == "":
                    rollout["format_penalty"] += self.format_penalty
                if verdict.reward < self.success_reward:
                    failed.append(i)
            live = failed
            if not live:
                break
            if turn + 1 < self.max_turns:
                for i in live:
                    rollouts[i]["messages"].append({"role": "user", "content": self.feedback})
        for rollout, told in zip(rollouts, known, strict=True):
            yield rollout if told else {**rollout, "answer_norms": []}

    def _verdict(self, answer: Any, row: Mapping[str, Any]) -> Verdict:
        if not isinstance(answer, str):
            raise ConfigError(f"generate gave {answer!r:.80} ({type(answer).__name__}) for an answer; it must be a string")
        verdict = self.verifier(answer, row)
        if not isinstance(verdict, Verdict):
            verdict = Verdict(verdict)
        if verdict.answer is not None and not isinstance(verdict.answer, str):
            raise ConfigError(f"the verifier's answer={verdict.answer!r:.80} must be a string or None")
        return Verdict(
            number(float(verdict.reward) if isinstance(verdict.reward, bool) else verdict.reward, "reward"), verdict.answer
        )


__all__ = ["DriftRolloutCollector", "Generator", "Verdict"]
