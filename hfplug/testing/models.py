"""Small models, data and trainers for contract tests: built from configs, no files, no network, seconds at most."""

from __future__ import annotations

import atexit
import functools
import gc
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

VOCAB = 64
PAD, BOS, EOS = 0, 1, 2
_SHARED = {
    "vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "max_position_embeddings": 128,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def _build(model_class: str, config_class: str, seed: int, attn: str, options: dict[str, Any]) -> Any:
    import torch
    import transformers

    # Attribute access on the package picks the one class asked for; the global generator is left as it was.
    config = getattr(transformers, config_class)(**options, attn_implementation=attn)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, model_class)(config).float()


def tiny_llama(seed: int = 0, attn: str = "sdpa", **options: Any) -> Any:
    """A ``LlamaForCausalLM``: 2 layers, 4 query heads on 2 key-value heads, fp32."""
    base = {"intermediate_size": 48, "num_key_value_heads": 2, **_SHARED}
    return _build("LlamaForCausalLM", "LlamaConfig", seed, attn, {**base, **options})


def tiny_qwen3(seed: int = 0, attn: str = "sdpa", **options: Any) -> Any:
    """A ``Qwen3ForCausalLM``: grouped queries, norms on queries and keys, head size not ``hidden / heads``."""
    base = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, **_SHARED}
    return _build("Qwen3ForCausalLM", "Qwen3Config", seed, attn, {**base, **options})


def tiny_gemma3(seed: int = 0, attn: str = "sdpa", **options: Any) -> Any:
    """A ``Gemma3ForCausalLM``: a layer with a window of 4 tokens, then one with full attention."""
    base = {
        "intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 8, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"], **_SHARED,
    }  # fmt: skip
    return _build("Gemma3ForCausalLM", "Gemma3TextConfig", seed, attn, {**base, **options})


def tiny_gpt2(seed: int = 0, attn: str = "sdpa", **options: Any) -> Any:
    """A ``GPT2LMHeadModel``: fused ``Conv1D`` projections, learned positions; dropout 0 unless given."""
    base: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_SHARED}
    return _build("GPT2LMHeadModel", "GPT2Config", seed, attn, {**base, **options})


TINY_MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3, "gpt2": tiny_gpt2}


def tiny_lm_dataset(rows: int = 16, seed: int = 0, shortest: int = 5, longest: int = 14) -> Any:
    """A ``datasets.Dataset`` of token rows of different lengths: ``input_ids`` and equal ``labels``, nothing padded."""
    import datasets
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator).tolist()
    tokens = [[BOS, *torch.randint(3, VOCAB, (n - 1,), generator=generator).tolist()] for n in lengths]
    return datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])


class PadTo:
    """A collator that pads to a fixed length, or to the longest row.

    Args:
        length: tokens per row; ``None``: the longest of the batch.
        side: ``"right"`` or ``"left"``.
    """

    def __init__(self, length: int | None = None, side: str = "right") -> None:
        self.length, self.side = length, side

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        import torch

        width = self.length or max(len(row["input_ids"]) for row in rows)

        def padded(values: Sequence[int], fill: int) -> list[int]:
            filler = [fill] * (width - len(values))
            return [*values, *filler] if self.side == "right" else [*filler, *values]

        return {
            "input_ids": torch.tensor([padded(row["input_ids"], PAD) for row in rows]),
            "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
            "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
        }


def tiny_tokenizer() -> Any:
    """A word-level tokenizer over the vocabulary of the tiny models, made in memory (``SFTTrainer`` needs one)."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, **{f"w{i}": i for i in range(3, VOCAB)}}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def tiny_trainer(
    model: Any,
    callbacks: Iterable[Any] = (),
    *,
    sft: bool = False,
    output_dir: str | Path | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    data_collator: Any = None,
    trainer_class: type[Any] | None = None,
    **args: Any,
) -> Any:
    """A ``Trainer`` (or TRL's ``SFTTrainer``) for four quick CPU steps in fp32, which logs and reports nothing elsewhere.

    Args:
        model: any causal language model over :data:`VOCAB` tokens.
        callbacks: the callbacks.
        sft: ``True``: ``SFTTrainer``, with its own collator and loss.
        output_dir: ``None``: a folder that goes when the trainer does.
        train_dataset: default :func:`tiny_lm_dataset`.
        eval_dataset: default another draw of it.
        data_collator: default :class:`PadTo` (plain ``Trainer``) or TRL's.
        trainer_class: in place of the two classes.
        args: fields of ``TrainingArguments`` or ``SFTConfig``. The optimiser is SGD by default: Adam's first step is the
            sign of the gradient, which turns rounding noise into differences of the size of the learning rate.
    """
    import transformers

    _set_imports_aside(sft)
    owned = tempfile.TemporaryDirectory() if output_dir is None else None
    settings: dict[str, Any] = {
        "output_dir": str(output_dir if owned is None else owned.name),
        "max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": [],
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "seed": 0, "activation_checkpointing": False,
    } | args  # fmt: skip
    options: dict[str, Any] = {
        "model": model,
        "train_dataset": tiny_lm_dataset() if train_dataset is None else train_dataset,
        "eval_dataset": tiny_lm_dataset(8, seed=1) if eval_dataset is None else eval_dataset,
        "callbacks": list(callbacks),
    }
    if sft:
        import trl

        made, default = trl.SFTConfig(**settings), trl.SFTTrainer
        options |= {"processing_class": tiny_tokenizer(), "data_collator": data_collator}
    else:
        made, default = transformers.TrainingArguments(**settings), transformers.Trainer
        options["data_collator"] = data_collator or PadTo()
    trainer = (trainer_class or default)(args=made, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.hfplug_output = owned  # lives as long as the trainer
    return trainer


@functools.cache
def _set_imports_aside(sft: bool) -> None:
    # Trainer collects garbage at the start of every training; going through all that torch, transformers and trl ever
    # imported takes ten times as long as the four steps. What is alive now is not garbage and need not be looked at again.
    if sft:
        import trl  # noqa: F401
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules look for leaks when the process ends


@functools.cache
def recording_tracker() -> type[Any]:
    """A callback class that stands for a tracker (W&B, TensorBoard): keeps every ``logs`` dict it is shown, in ``seen``."""
    from transformers import TrainerCallback

    class Tracker(TrainerCallback):
        """Keeps what it is shown."""

        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Keep a copy, as a tracker sends one."""
            self.seen.append({**logs, "step": state.global_step})

    return Tracker
