"""The sink monitor in training: its metrics against eager attention maps, and its behaviour as a callback."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import ClassVar

import pytest
import torch

from hfplug import ConfigError
from hfplug.callbacks import SinkMonitorCallback, SinkMonitorConfig
from hfplug.callbacks.sink_monitor.reference import reference_statistics
from hfplug.testing import models
from hfplug.testing.callback import CallbackContract, hfplug_warnings
from hfplug.testing.ranks import run_ranks

ROWS = [[1, 9, 23, 5, 40, 17, 8, 33, 12], [1, 30, 11, 52, 7, 6], [1, 21, 44]]


class TestSinkMonitorContract(CallbackContract):
    method, options = "sink_monitor", {"every": 1}


class TestEveryOptionContract(CallbackContract):
    """Also with everything it can log switched on, on a model with sliding windows."""

    method = "sink_monitor"
    options: ClassVar = dict(every=1, argmax_share=True, log_per_head=True, include_self=False, chunk=5, evaluate=True)  # noqa: C408
    make_model = staticmethod(models.tiny_gemma3)
    # The rest is a matter of the base; these meet other masks and other figures.
    test_b32_memory_does_not_grow_with_the_window = None
    test_b34_an_error_in_an_event_turns_it_off = None
    test_b52_two_steps_and_two_more_are_four = None


# -- in training -----------------------------------------------------------------------------------------------------


def values_of(model, batch):
    """``(batch, kv heads, tokens, dim)`` per layer, from the projections."""
    config, found, hooks = model.config, [], []
    for name, module in model.named_modules():
        if name.endswith(("v_proj", "attn.c_attn")):
            hooks.append(module.register_forward_hook(lambda _m, _a, out: found.append(out)))
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return attentions, [v[..., -heads * size :].unflatten(-1, (heads, size)).transpose(1, 2) for v in found]


def expected_metrics(name, batch, documents, **options):
    """The monitor's metrics of one forward, from the maps of an eager copy of the model, summed in fp64.

    A copy in fp64 would not do: transformers' eager softmax runs in fp32, where the fp64 mask becomes -inf and padding NaN.
    """
    attentions, values = values_of(models.TINY_MODELS[name](attn="eager").eval(), batch)
    out = {}
    for layer, (map_, value) in enumerate(zip(attentions, values, strict=True)):
        found = reference_statistics(map_, value, documents, **options)
        for key in ("mass", "value_norm", "argmax_share"):
            out[f"sink/{key}/layer_{layer:02d}"] = found[key]
        for head, mass in enumerate(found["per_head"]):
            out[f"sink/mass/layer_{layer:02d}/head_{head:02d}"] = mass
    return out


def train_once(model, rows, collator, callback=None, **args):
    import datasets

    data = datasets.Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])
    callback = callback or SinkMonitorCallback(argmax_share=True, log_per_head=True)
    settings = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": len(rows)} | args
    trainer = models.tiny_trainer(model, [callback], train_dataset=data, data_collator=collator, **settings)
    with hfplug_warnings() as warnings:
        trainer.train()
    assert not warnings, warnings
    return {k: v for k, v in trainer.state.log_history[0].items() if k.startswith("sink/")}, trainer


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", list(models.TINY_MODELS))
def test_b13_metrics_equal_eager_maps(name, side, attn):
    collator = models.PadTo(12, side)
    model = models.TINY_MODELS[name](attn=attn)
    found, _ = train_once(model, ROWS, collator, seed=3)
    assert model.config._attn_implementation == attn
    batch = collator([{"input_ids": row, "labels": row} for row in ROWS])
    documents = [[0 if real else -1 for real in row] for row in batch["attention_mask"].tolist()]
    expected = expected_metrics(name, {k: batch[k] for k in ("input_ids", "attention_mask")}, documents)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_documents_are_counted_one_by_one(name, include_self):
    rows = [*ROWS, [1]]  # a document of one token has no later query

    def pack(examples):
        tokens = [t for row in rows for t in row]
        positions = [i for row in rows for i in range(len(row))]
        return {k: torch.tensor([v]) for k, v in (("input_ids", tokens), ("labels", tokens), ("position_ids", positions))}

    callback = SinkMonitorCallback(argmax_share=True, log_per_head=True, include_self=include_self)
    found, _ = train_once(models.TINY_MODELS[name](), rows, pack, callback)
    batch = {k: v for k, v in pack(None).items() if k != "labels"}
    documents = [[i for i, row in enumerate(rows) for _ in row]]
    expected = expected_metrics(name, batch, documents, include_self=include_self)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


def test_sft_packing_equals_unpacked_documents():
    rows = [[1, 9, 23, 5], [1, 30, 11, 52], [1, 21, 44, 13], [1, 4, 3, 20]]
    alone, _ = train_once(models.tiny_llama(), rows, None)
    packed, trainer = train_once(
        models.tiny_llama(), rows, None, sft=True, packing=True, max_length=16, per_device_train_batch_size=1
    )
    assert len(trainer.train_dataset) == 1  # they were packed
    assert packed == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("every", [None, 3])
def test_b31_only_due_steps_are_measured_and_once(every, reentrant, monkeypatch):
    steps = []
    callback = SinkMonitorCallback(every=every)
    inner = SinkMonitorCallback._measure
    monkeypatch.setattr(
        SinkMonitorCallback, "_measure",
        lambda self, layer, *a: (steps.append((self.trainer_state.global_step + 1, layer)), inner(self, layer, *a))[1],
    )  # fmt: skip
    trainer = models.tiny_trainer(
        models.tiny_llama(), [callback], max_steps=6, logging_steps=2, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=1, logging_first_step=True, activation_checkpointing=reentrant is not None,
        activation_checkpointing_kwargs=None if reentrant is None else {"use_reentrant": reentrant},
    )  # fmt: skip
    trainer.train()
    due = [1, 2, 4, 6] if every is None else [3, 6]
    assert steps == [(step, layer) for step in due for _micro in range(2) for layer in range(2)]


def test_layers_and_rows_can_be_chosen():
    model = models.tiny_llama(num_hidden_layers=3)
    found, _ = train_once(model, ROWS, None, SinkMonitorCallback(layers=[-1, 0], value_norm=False))
    assert set(found) == {"sink/mass/layer_00", "sink/mass/layer_02"}
    one, _ = train_once(models.tiny_llama(), ROWS[:1], None, SinkMonitorCallback())
    first, _ = train_once(models.tiny_llama(), [ROWS[0]] * 3, None, SinkMonitorCallback(max_rows=1), dataloader_drop_last=True)
    assert first == pytest.approx(one, abs=1e-6)


def test_wrong_layers_are_refused_when_the_trainer_is_built():
    with pytest.raises(ConfigError, match=r"layers=\[5\].*\[0, 1\]"):
        models.tiny_trainer(models.tiny_llama(), [SinkMonitorCallback(layers=[5])])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"evry": 3}, "did you mean 'every'"),
        ({"every": 0}, "every=0"),
        ({"every": "often"}, "every='often'"),
        ({"chunk": 0}, "chunk=0"),
        ({"layers": [1, 1]}, "layers"),
        ({"config": SinkMonitorConfig(), "every": 3}, "alone"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        SinkMonitorCallback(**options)


def test_generation_and_reference_forwards_are_not_measured():
    from transformers import TrainerCallback

    class Generate(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():  # as GRPO does in training mode, within a step
                model(input_ids=torch.tensor([[1, 5, 9]]))
                model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=2)

    shared = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 1, "logging_steps": 1}
    logs = []
    for others in ([], [Generate()]):
        trainer = models.tiny_trainer(models.tiny_llama(), [SinkMonitorCallback(), *others], **shared)
        trainer.train()
        logs.append({k: v for k, v in trainer.state.log_history[0].items() if k.startswith("sink/")})
    assert logs[0] == logs[1]
    assert logs[0]


def test_evaluations_are_measured_on_request_but_decoding_is_not():
    from transformers import TrainerCallback

    class Decode(TrainerCallback):
        def on_prediction_step(self, args, state, control, model=None, **kwargs):
            cache = model(input_ids=torch.tensor([[1, 5, 9]]), use_cache=True).cache
            model(input_ids=torch.tensor([[7]]), cache=cache)

    found = []
    for others in ([], [Decode()]):
        callback = SinkMonitorCallback(evaluate=True, value_norm=False)
        trainer = models.tiny_trainer(models.tiny_llama(), [callback, *others], eval_strategy="steps", eval_steps=4)
        with hfplug_warnings() as warnings:
            trainer.train()
        assert not warnings
        found.append([set(e) for e in trainer.state.log_history])
    assert found[0] == found[1]
    names = {"sink/mass/layer_00", "sink/mass/layer_01"}
    assert names <= found[0][0]
    assert {f"eval_{name}" for name in names} <= found[0][2]


def test_another_model_with_the_same_configuration_object_is_not_measured():
    from transformers import LlamaForCausalLM

    model = models.tiny_llama()
    other = LlamaForCausalLM(model.config).train()
    # It runs inside the measured forward: a teacher, or a part of the same pipeline.
    model.model.layers[1].register_forward_pre_hook(lambda *_: other(input_ids=torch.tensor([[1, 5, 9]])) and None)
    found, _ = train_once(model, ROWS, None)
    alone, _ = train_once(models.tiny_llama(), ROWS, None)
    assert found == alone


def test_two_monitors_on_one_model_and_either_order_of_leaving():
    before = models.tiny_llama()
    both = [SinkMonitorCallback(layers=[0], value_norm=False), SinkMonitorCallback(layers=[1], value_norm=False)]
    for leaves_first in (0, 1):
        trainer = models.tiny_trainer(before, both, max_steps=1, logging_steps=1)
        for callback in both:
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
        both[leaves_first].detach()
        both[1 - leaves_first].detach()
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
        trainer.train()
        assert {k for k in trainer.state.log_history[0] if k.startswith("sink/")} == {
            "sink/mass/layer_00", "sink/mass/layer_01"
        }  # fmt: skip


def test_peft_model():
    from peft import LoraConfig, get_peft_model

    plain, _ = train_once(models.tiny_llama(), ROWS, None)
    model = get_peft_model(models.tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    found, trainer = train_once(model, ROWS, None)
    assert found == pytest.approx(plain, abs=1e-6)  # B starts at zero
    assert not vars(trainer.model.get_base_model().model).keys() & {"_hfplug_calls", "_hfplug_slots"}


def test_attention_that_bypasses_the_interface_is_reported():
    model = models.tiny_gpt2(attn="eager", reorder_and_upcast_attn=True)  # eager, by a function of its own
    trainer = models.tiny_trainer(model, [SinkMonitorCallback(every=1)])
    with hfplug_warnings() as warnings:
        trainer.train()
    assert len(warnings) == 2
    assert "layers [0, 1] were not seen in step 1" in warnings[0]


def test_custom_attention_is_refused_not_guessed():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("custom_for_test", sdpa_attention_forward)
    AttentionMaskInterface.register("custom_for_test", sdpa_mask)
    try:
        trainer = models.tiny_trainer(models.tiny_llama(attn="custom_for_test"), [SinkMonitorCallback(every=1)])
        with hfplug_warnings() as warnings:
            trainer.train()
    finally:
        del AttentionInterface._global_mapping["custom_for_test"]
        del AttentionMaskInterface._global_mapping["custom_for_test"]
    assert "attention implementation 'custom_for_test' is not one" in warnings[0]
    assert len(warnings) == 2


def test_prefix_tuning_is_refused():
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(models.tiny_llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    trainer = models.tiny_trainer(model, [SinkMonitorCallback(every=1)])
    with hfplug_warnings() as warnings:
        trainer.train()
    assert "attention to a cache or a prefix is not measured" in warnings[0]


def test_bf16_training_is_measured():
    found, _ = train_once(models.tiny_llama(), ROWS, None, SinkMonitorCallback(), bf16=True)
    plain, _ = train_once(models.tiny_llama(), ROWS, None, SinkMonitorCallback())
    assert found == pytest.approx(plain, rel=2e-2)
    assert found != plain


@pytest.mark.slow
def test_compiled_model_trains_and_says_that_nothing_is_seen():
    model = models.tiny_llama()
    callback = SinkMonitorCallback(every=1)
    plain = models.tiny_trainer(models.tiny_llama(), [], torch_compile=True, torch_compile_backend="eager")
    plain.train()
    trainer = models.tiny_trainer(model, [callback], torch_compile=True, torch_compile_backend="eager")
    with hfplug_warnings() as warnings:
        trainer.train()
    assert [e["loss"] for e in trainer.state.log_history[:2]] == [e["loss"] for e in plain.state.log_history[:2]]
    assert (callback.disabled is None) == bool(any(k.startswith("sink/") for k in trainer.state.log_history[0]))
    assert (callback.disabled is None) == (not warnings)


def test_options_are_documented():
    assert all(f.metadata.get("help") for f in dataclasses.fields(SinkMonitorConfig))


@pytest.mark.slow
def test_two_ranks_log_what_one_process_logs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys, torch
        from hfplug.callbacks import SinkMonitorCallback
        from hfplug.testing import models
        trainer = models.tiny_trainer(models.tiny_llama(), [SinkMonitorCallback(every=1)],
            per_device_train_batch_size=int(sys.argv[2]), ddp_backend=sys.argv[3] if len(sys.argv) > 3 else None)
        trainer.train()
        if trainer.is_world_process_zero():
            json.dump(trainer.state.log_history, open(sys.argv[1], "w"))
    """)
    )
    logs = []
    for ranks, args in ((1, ["4"]), (2, ["2", "gloo"])):
        out = tmp_path / f"{ranks}.json"
        run_ranks(script, str(out), *args, ranks=ranks)
        logs.append([{k: v for k, v in e.items() if k.startswith("sink/")} for e in json.loads(out.read_text())])
    assert logs[0][0]
    for one, two in zip(*logs, strict=True):
        assert two == pytest.approx(one, abs=1e-6)
