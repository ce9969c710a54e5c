"""What ``trainers/drift`` relies on in TRL's ``SFTTrainer``. Red: upstream changed, re-derive ``_Weighted`` and its callers."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap

from transformers import Trainer
from trl import SFTTrainer

# Each is called through super(), and this is what was read when the weights were put into it.
READ = {
    "SFTTrainer.compute_loss": (SFTTrainer.compute_loss, "0344a47174658920"),
    "SFTTrainer._set_signature_columns_if_needed": (SFTTrainer._set_signature_columns_if_needed, "60d94fb961241497"),
    "Trainer.get_batch_samples": (Trainer.get_batch_samples, "ce1d3f8e633c3fb4"),
    "Trainer.training_step": (Trainer.training_step, "4af68cc5a846d3c2"),
}


def digest(function: object) -> str:
    """Of the code alone: comments, docstrings and line breaks say nothing."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    body = tree.body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def test_b38_the_code_is_the_one_that_was_read() -> None:
    found = {name: digest(function) for name, (function, _) in READ.items()}
    expected = {name: known for name, (_, known) in READ.items()}
    assert found == expected, "upstream changed: re-derive trainers/drift/trainer.py, then note the new digests"


def test_the_loss_is_the_sum_of_the_fused_log_probabilities() -> None:
    """The two lines that carry the weights, and the one that a denominator of 1 is for."""
    text = " ".join(inspect.getsource(SFTTrainer.compute_loss).split())
    assert "per_token_loss = -outputs.log_probs" in text
    assert "per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)" in text
    assert "num_tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch" in text
