"""What the loss seam, ``hfplug.calls`` and ``hfplug.metrics`` rely on in transformers and TRL, beyond documented names.

The dotted names, with owner and condition for deletion, stand in :mod:`hfplug.upstream`; here is what a name cannot say:
attributes of instances, who calls what, and a decision that is mirrored. A red test means: read the upstream change, then
re-derive what its owner does.
"""

from __future__ import annotations

import inspect
import json
import re

import pytest
import transformers
import trl
from transformers import Trainer, TrainerState
from transformers.modeling_layers import GradientCheckpointingLayer

from hfplug.plugins import load_dotted
from hfplug.testing.models import tiny_llama, tiny_trainer
from hfplug.upstream import UPSTREAM

OWNERS = ("loss seam", "hfplug.calls", "hfplug.metrics")

# attribute of a built Trainer -> (owner, until)
TRAINER_ATTRIBUTES = {
    "optimizer": ("loss seam", "a trainer can be asked for the parameters its optimizer will take"),
    "model_init": ("loss seam", "a trainer with model_init tells when it has built its model"),
    "model_accepts_loss_kwargs": ("loss seam", "Trainer offers added loss terms"),
    "compute_loss_func": ("loss seam", "Trainer offers added loss terms"),
    "loss_is_scaled_for_ga": ("loss seam", "Trainer offers added loss terms"),
    "is_fsdp_enabled": ("loss seam", "FSDP is supported"),
    "is_deepspeed_enabled": ("loss seam", "DeepSpeed is supported"),
    "callback_handler": ("loss seam", "remove_callback takes an instance back without touching others"),
    "accelerator": ("loss seam", "Trainer offers added loss terms"),
}


def source(function) -> str:
    """Source in one line, as comments and line breaks say nothing."""
    text = re.sub(r"#.*", "", inspect.getsource(function))
    return re.sub(r"\s+", " ", text)


def resolve(name: str):
    module, _, path = name.partition(":")
    head, *rest = path.split(".")
    found = load_dotted(f"{module}:{head}")
    for attribute in rest:
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("entry", [u for u in UPSTREAM if u.owner in OWNERS], ids=lambda u: u.name)
def test_names_exist_with_their_parameters(entry):
    found = resolve(entry.name)
    assert entry.until
    if entry.parameters:
        missing = set(entry.parameters) - set(inspect.signature(found).parameters)
        assert not missing, f"{entry.name}, needed by the {entry.owner}, lost {sorted(missing)}"


def test_every_owner_is_covered():
    assert {u.owner for u in UPSTREAM} >= set(OWNERS)


@pytest.mark.parametrize("name", TRAINER_ATTRIBUTES)
def test_attributes_of_a_built_trainer(name):
    for sft in (False, True):
        assert hasattr(tiny_trainer(tiny_llama(), sft=sft), name), f"needed by the {TRAINER_ATTRIBUTES[name][0]}"


def test_b36_compute_loss_takes_the_same_arguments_everywhere():
    for trainer in (Trainer, trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.RewardTrainer, trl.KTOTrainer):
        names = list(inspect.signature(trainer.compute_loss).parameters)
        assert names[:5] == ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]


def test_the_decision_to_divide_by_accumulation_steps():
    """``_Attached._scale`` mirrors it."""
    text = source(Trainer.training_step)
    assert "if self.loss_is_scaled_for_ga is not None: loss_is_scaled_for_ga = self.loss_is_scaled_for_ga else:" in text
    assert "( self.model_accepts_loss_kwargs and num_items_in_batch is not None ) or self.compute_loss_func is not None" in text
    assert "if not loss_is_scaled_for_ga: loss = loss / self.current_gradient_accumulation_steps" in text
    assert "self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)" in text


def test_the_window_is_known_before_its_first_batch_runs():
    text = source(Trainer._run_epoch)
    window = text.index("= self.get_batch_samples(")
    steps = text.index("self.current_gradient_accumulation_steps = len(batch_samples)")
    assert window < steps < text.index("self.training_step(")
    assert "self.accelerator.gather(num_items_in_batch.to(device)).sum()" in source(Trainer._get_num_items_in_batch)


def test_no_trl_trainer_replaces_what_is_wrapped_on_the_instance():
    for trainer in (trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.RewardTrainer, trl.KTOTrainer):
        for name in ("get_batch_samples", "_save_optimizer_and_scheduler", "_load_from_checkpoint"):
            assert getattr(trainer, name) is getattr(Trainer, name)


def test_checkpoints_are_written_and_read_through_the_wrapped_methods():
    assert "self._save_optimizer_and_scheduler(output_dir)" in source(Trainer._save_checkpoint)
    assert "self._load_from_checkpoint(resume_from_checkpoint)" in source(Trainer.train)
    # The optimizer is made after the seam's module is in the model and before on_train_begin looks at it.
    loop = source(Trainer._inner_training_loop)
    prepared, begun = loop.index("self._prepare_for_training("), loop.index("callback_handler.on_train_begin(")
    assert prepared < begun < loop.index("self._run_epoch(")
    assert "self.callback_handler.on_train_end(" in source(Trainer._finalize_training)


def test_trl_runs_the_token_stack_below_its_fused_head():
    text = source(trl.trainer.utils.add_fused_lm_head)
    assert 'backbone_attr = "base_model"' in text
    assert "getattr(self, backbone_attr)(*args, **kwargs)" in text
    assert "backbone_outputs.last_hidden_state" in text


def test_hooks_stay_outside_the_checkpointed_layer():
    """So a hook on a layer fires once, with a gradient, reentrant or not."""
    assert "self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)" in source(
        GradientCheckpointingLayer.__init_subclass__
    )


def test_metrics_relay_comes_before_the_trackers_and_state_is_a_dataclass(tmp_path):
    text = source(Trainer.__init__)
    assert "DEFAULT_CALLBACKS + get_reporting_integration_callbacks(self.args.report_to)" in text
    state = TrainerState()
    object.__setattr__(state, "_hfplug_metrics", object())
    state.save_to_json(str(tmp_path / "state.json"))
    assert "_hfplug_metrics" not in json.loads((tmp_path / "state.json").read_text())
    log = source(Trainer.log)
    assert log.index("self.state.log_history.append(") < log.index("self.callback_handler.on_log(")
    assert '_runtime": round(runtime' in source(transformers.trainer_utils.speed_metrics)
