"""The demo's data: questions about Python, answered by the text that ships with Python itself.

`pydoc_data.topics` is what `help("assert")` prints: the language reference as plain text, in every CPython.
This file turns it into question/answer rows for TRL's `SFTTrainer`; it needs neither hfplug nor the network:

    python examples/demo_data.py --out data --tokenizer MODEL_FOLDER

writes data/train.jsonl and data/test.jsonl (the held-out part, under TRL's name for it). A row is in TRL's
conversational prompt-completion form (`{"prompt": [...], "completion": [...], "topic": ...}`), for which
SFTTrainer takes the loss on the answer only. `load_dataset("data")` reads the two files as two splits.

Leakage: the reference repeats itself (the topic "compound" holds the whole of "if", "for", "try", ...;
"break" and "continue" share sentences), so splitting by topic is not enough. Each paragraph belongs to the
shortest topic that holds it and is used nowhere else; the topics are then split by a hash of their name, and
training answers that share a run of `SHARED_RUN` words with any held-out answer are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import DatasetDict

Row = dict[str, Any]
CountTokens = Callable[[str], int]

QUESTION = "What does the Python language reference say about {}?"
FOLLOW_UP = "What else does the Python language reference say about {}?"
MAX_ANSWER_TOKENS = 80
MIN_ANSWER_WORDS = 12  # shorter leftovers ("See also section Calls.") teach nothing
EVAL_SHARE = 5  # one topic in five is held out
SHARED_RUN = 8  # words in a row that a training answer may not share with a held-out one
MAX_EVAL_ROWS = 16  # keeps an evaluation near 8 s on two cores

_UNDERLINE = re.compile(r"^([*=\-~^])\1{2,}$")
_SIGNATURE = re.compile(r"^(class )?[A-Za-z_][\w.]*\([^()]*\)$")
_VERSION_NOTE = re.compile(r"^(Changed|New|Added|Deprecated)\b.* version ")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“(])")


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of prose: what it is about, and its text on one line."""

    subject: str
    text: str


def _clean(lines: list[str]) -> str:
    """Join wrapped lines, also those wrapped at a hyphen; drop emphasis, bullets and footnote marks."""
    text = "\n".join(line.strip() for line in lines)
    text = re.sub(r"(?<=[A-Za-z])-\n(?=[A-Za-z])", "-", text)
    text = re.sub(r"(?<![\w*])\*{1,2}([A-Za-z_][^*]*?)\*{1,2}(?![\w*])", r"\1", text)
    text = re.sub(r"\s*\[\d+\]", "", text)
    text = re.sub(r"^(?:[*•]|\d+\.|Note:)\s+", "", text)
    return re.sub(r"\s+", " ", text).strip()


def _is_prose(text: str) -> bool:
    """True for finished sentences in words: no grammar, no doctest, nothing that ends in a colon."""
    if "::=" in text or ">>>" in text or _VERSION_NOTE.match(text) or text.endswith(":"):
        return False
    if not text or not text.rstrip("\"”')").endswith((".", "!", "?")):
        return False
    letters = sum(c.isalpha() or c.isspace() for c in text)
    return letters / len(text) > 0.8 and len(text.split()) >= 6


def _sentence_case(title: str) -> str:
    """'The "assert" statement' -> 'the "assert" statement'; titles with further capitals stay as they are."""
    head, tail = title[:1], title[1:]
    return head.lower() + tail if tail == tail.lower() or title.startswith("The ") else title


def paragraphs(document: str) -> Iterator[Paragraph]:
    """The prose paragraphs of one topic; the nearest heading or signature above each is its subject."""
    subject = heading = ""
    for block in re.split(r"\n\s*\n", document.strip("\n")):
        lines = block.split("\n")
        if len(lines) >= 2 and _UNDERLINE.match(lines[1].strip()) and lines[0].strip():
            subject = heading = _sentence_case(lines[0].strip())
            lines = lines[2:]
        if not lines:
            continue
        indented = lines[0].startswith("  ")
        text = _clean(lines)
        if not indented and all(_SIGNATURE.match(line.strip()) for line in lines):
            subject = f'"{lines[0].strip()}"'
            continue
        if not indented:
            subject = heading  # back out of the indented body of a signature
        if subject and _is_prose(text):
            yield Paragraph(subject, text)


def owned_paragraphs(documents: Mapping[str, str]) -> dict[str, list[Paragraph]]:
    """Topic -> its paragraphs, each paragraph of the whole reference kept once, under the shortest topic."""
    seen: set[str] = set()
    owned: dict[str, list[Paragraph]] = {}
    for topic in sorted(documents, key=lambda name: (len(documents[name]), name)):
        owned[topic] = []
        for paragraph in paragraphs(documents[topic]):
            if paragraph.text not in seen:
                seen.add(paragraph.text)
                owned[topic].append(paragraph)
    return {topic: owned[topic] for topic in sorted(owned) if owned[topic]}


def _passages(items: list[Paragraph], count: CountTokens, limit: int) -> Iterator[tuple[str, str]]:
    """(subject, answer) pairs of whole sentences, `count(answer) <= limit`; longer sentences are left out."""
    subject, sentences = "", list[str]()

    def finished() -> Iterator[tuple[str, str]]:
        answer = " ".join(sentences)
        if len(answer.split()) >= MIN_ANSWER_WORDS:
            yield subject, answer

    for item in items:
        if item.subject != subject:
            yield from finished()
            subject, sentences = item.subject, []
        for sentence in _SENTENCE_END.split(item.text):
            if count(sentence) > limit or re.fullmatch(r"\(.*\)", sentence):  # asides: "(See section ...)"
                continue
            if sentences and count(" ".join([*sentences, sentence])) > limit:
                yield from finished()
                sentences = []
            sentences.append(sentence)
    yield from finished()


def is_held_out(topic: str) -> bool:
    """Whether a topic is in the test split: depends on its name alone, so it is the same everywhere."""
    return int.from_bytes(hashlib.sha256(topic.encode()).digest()[:4], "big") % EVAL_SHARE == 0


def estimate_tokens(text: str) -> int:
    """Stands in for a tokenizer: 1.6 tokens a word. Not a bound: code-like words can take three."""
    return round(1.6 * len(text.split()))


def build_rows(
    count: CountTokens = estimate_tokens,
    max_answer_tokens: int = MAX_ANSWER_TOKENS,
    documents: Mapping[str, str] | None = None,
) -> dict[str, list[Row]]:
    """{"train": rows, "test": rows}, the same on every run.

    `count` gives the number of tokens of a text; no answer has more than `max_answer_tokens`. `documents`
    is topic -> text, by default the topics of this Python. The test split takes up to `MAX_EVAL_ROWS` rows,
    in rounds over the held-out topics (the first passage of each, then the second, ...).
    """
    if max_answer_tokens < 16:
        raise ValueError(f"max_answer_tokens={max_answer_tokens}: a sentence needs at least 16 tokens")
    if documents is None:
        from pydoc_data.topics import topics

        documents = topics
    by_topic: dict[str, list[Row]] = {}
    asked: set[str] = set()
    for topic, items in owned_paragraphs(documents).items():
        rows = []
        for subject, answer in _passages(items, count, max_answer_tokens):
            question = (FOLLOW_UP if subject in asked else QUESTION).format(subject)
            asked.add(subject)
            rows.append(
                {
                    "prompt": [{"role": "user", "content": question}],
                    "completion": [{"role": "assistant", "content": answer}],
                    "topic": topic,
                }
            )
        if rows:
            by_topic[topic] = rows
    held_out = [rows for topic, rows in by_topic.items() if is_held_out(topic)]
    rounds = max(map(len, held_out), default=0)
    evaluation = [rows[i] for i in range(rounds) for rows in held_out if i < len(rows)]
    reserved = {run for rows in held_out for row in rows for run in word_runs(answer_of(row))}
    train = [
        row
        for topic, rows in by_topic.items()
        if not is_held_out(topic)
        for row in rows
        if reserved.isdisjoint(word_runs(answer_of(row)))
    ]
    return {"train": train, "test": evaluation[:MAX_EVAL_ROWS]}


def word_runs(text: str, length: int = SHARED_RUN) -> set[str]:
    """Every run of `length` words in a row; the whole text where it is shorter."""
    words = text.split()
    return {" ".join(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def answer_of(row: Row) -> str:
    """The answer text of a row."""
    return str(row["completion"][0]["content"])


def token_counter(tokenizer: Any) -> CountTokens:
    """Tokens of a text under a Hugging Face tokenizer, without special tokens."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def build(tokenizer: Any = None, max_answer_tokens: int = MAX_ANSWER_TOKENS) -> DatasetDict:
    """The rows of `build_rows` as a `datasets.DatasetDict` with the splits "train" and "test"."""
    from datasets import Dataset, DatasetDict

    count = estimate_tokens if tokenizer is None else token_counter(tokenizer)
    rows = build_rows(count, max_answer_tokens)
    return DatasetDict({split: Dataset.from_list(items) for split, items in rows.items()})


def write_jsonl(rows: Mapping[str, list[Row]], folder: Path) -> dict[str, Path]:
    """Write one `<split>.jsonl` per split into `folder` (made if missing) and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, items in rows.items():
        paths[split] = folder / f"{split}.jsonl"
        with paths[split].open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in items)
    return paths


def main() -> None:
    """Write the two files and say how many rows they hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for the two files")
    parser.add_argument("--tokenizer", help="model folder; its tokenizer bounds the answers")
    parser.add_argument("--max-answer-tokens", type=int, default=MAX_ANSWER_TOKENS)
    options = parser.parse_args()
    count = estimate_tokens
    if options.tokenizer:
        from transformers import AutoTokenizer

        count = token_counter(AutoTokenizer.from_pretrained(options.tokenizer))
    rows = build_rows(count, options.max_answer_tokens)
    for split, path in write_jsonl(rows, options.out).items():
        print(f"{path}: {len(rows[split])} rows from {len({row['topic'] for row in rows[split]})} topics")


if __name__ == "__main__":
    main()
