"""Loads a trained adapter the way any program would, and shows that it is the model that was trained.

    python examples/reload.py runs/demo

Beside `import hfplug` everything is stock transformers and TRL: the adapter is loaded by
`AutoModelForCausalLM.from_pretrained`, answers a question, and is evaluated on the held-out rows of its run
(`run.yaml` in the folder, which `examples/demo.py` writes).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hfplug  # noqa: F401  makes the adapter's type known to peft

MAX_NEW_TOKENS = 96
Row = Mapping[str, Any]


def question_of(row: Row) -> str:
    """What a row of a TRL dataset asks: its last user message, its prompt, or the start of its text."""
    prompt = row.get("prompt") or row.get("messages") or row.get("text") or ""
    if isinstance(prompt, str):
        return prompt if row.get("prompt") else " ".join(prompt.split()[:12])
    return str([message["content"] for message in prompt if message["role"] == "user"][-1])


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """Greedy answer of a causal language model to one question, through its chat template where it has one."""
    import torch

    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    else:
        inputs = tokenizer(question, return_tensors="pt")
    model.eval()
    with torch.no_grad():
        output = model.generate(**inputs.to(model.device), do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def load_data(run: Any) -> Any:
    """The data of a checked run file (`hfplug.training.parse_sft`), by split."""
    from datasets import load_dataset
    from trl import get_dataset

    script, mixture = run.arguments["script"], run.arguments["dataset"]
    if mixture.datasets:
        return get_dataset(mixture)
    return load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)


def held_out_loss(model: Any, tokenizer: Any, run: Any) -> float | None:
    """Mean loss per token of the held-out rows, as the stock SFTTrainer evaluates them; None without such rows."""
    from trl import SFTTrainer

    rows = load_data(run).get(run.arguments["script"].dataset_test_split)
    if rows is None:
        return None
    trainer = SFTTrainer(
        model=model,
        args=run.arguments["training"],
        train_dataset=rows,  # not trained on; the trainer wants one
        eval_dataset=rows,
        processing_class=tokenizer,
    )
    return float(trainer.evaluate()["eval_loss"])


def main() -> None:
    """Load, answer, evaluate; with --out, write the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("adapter", type=Path, help="folder of a trained adapter")
    parser.add_argument("--question", help="default: the first question of the held-out rows")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hfplug.training import parse_sft, read_run

    run = parse_sft(read_run(options.adapter / "run.yaml"))
    model = AutoModelForCausalLM.from_pretrained(options.adapter)
    tokenizer = AutoTokenizer.from_pretrained(options.adapter)
    question = options.question
    if question is None:
        question = question_of(load_data(run)[run.arguments["script"].dataset_test_split][0])
    print(f"{question}\n")
    text = answer(model, tokenizer, question)
    print(f"{text}\n")
    loss = held_out_loss(model, tokenizer, run)
    if loss is not None:
        print(f"held-out loss of the reloaded model: {loss:.6f}")
    if options.out is not None:
        options.out.write_text(json.dumps({"question": question, "answer": text, "loss": loss}), encoding="utf-8")


if __name__ == "__main__":
    main()
