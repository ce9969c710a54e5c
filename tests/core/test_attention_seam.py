"""The attention seam: masks, exact attention of any call, names, refusals, options. The contract's own test stands beside it."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_toys as toys
import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    sdpa_mask,
)
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_utils import AttentionInterface
from transformers.utils.generic import TransformersKwargs

from hfplug import training
from hfplug.attention import HANDLES, AttentionCall
from hfplug.errors import ConfigError, HfplugError, LedgerError, MissingPluginError, UnsupportedError
from hfplug.ledger import Ledger
from hfplug.plugins import catalogue
from hfplug.seams import attention as seam
from hfplug.testing import models
from hfplug.testing.attention_models import tiny_llava

NAME = "toy_exact"


@pytest.fixture
def toy() -> Iterator[str]:
    with toys.installed(NAME, toys.Exact):
        yield NAME


# -- names -------------------------------------------------------------------------------------------------------------

TABLES = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)


@pytest.mark.parametrize("name", ["my_flash", "org/muse", "sdpa", "my_sdpa", "flex_attention", "eager", "paged|muse", ""])
def test_names_that_mean_something_to_transformers_are_refused(name: str) -> None:
    before = [dict(table) for table in TABLES]
    with pytest.raises(ConfigError, match="cannot name an attention implementation"):
        seam.register(Ledger("x"), name, toys.Exact, override=True)
    assert [dict(table) for table in TABLES] == before


def test_b11_a_taken_name_needs_override_and_undo_gives_the_very_objects_back() -> None:
    before = [dict(table) for table in TABLES]
    first, second, third = (Ledger(name) for name in ("first", "second", "third"))
    seam.register(first, "toy_b11", toys.Exact)
    held = [table["toy_b11"] for table in TABLES]
    with pytest.raises(LedgerError, match="already registered by first"):
        seam.register(second, "toy_b11", toys.Exact)
    assert [table["toy_b11"] for table in TABLES] == held
    seam.register(second, "toy_b11", toys.Exact, override=True)
    seam.register(third, "toy_b11", sdpa_attention_forward, mask=sdpa_mask, override=True)
    second.undo()  # another plugin registered after it
    assert AttentionInterface._global_mapping["toy_b11"] is sdpa_attention_forward
    third.undo()
    assert all(table["toy_b11"] is value for table, value in zip(TABLES, held, strict=True))
    first.undo()
    after = [dict(table) for table in TABLES]
    assert after == before
    assert all(after[i][name] is before[i][name] for i in range(2) for name in before[i])


def test_a_function_and_its_mask_are_registered_together_or_not_at_all() -> None:
    with Ledger("mask only") as other:
        other.register(AttentionMaskInterface._global_mapping, "toy_half", sdpa_mask, what="attention mask")
        ledger = Ledger("x")
        with pytest.raises(LedgerError, match="attention mask 'toy_half' is already registered by mask only"):
            seam.register(ledger, "toy_half", toys.Exact)
        assert "toy_half" not in AttentionInterface._global_mapping
        assert len(ledger) == 0


def test_b09_a_plain_function_gets_a_mask_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = torch.arange(3, 23).reshape(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    with Ledger("x") as ledger, caplog.at_level(logging.WARNING, "hfplug"):
        seam.register(ledger, "toy_plain", sdpa_attention_forward)
        assert [r.message for r in caplog.records if "sdpa_mask" in r.message]
        found = models.tiny_llama(attn="toy_plain").eval()(ids, attention_mask=mask).logits
        assert torch.equal(found, models.tiny_llama().eval()(ids, attention_mask=mask).logits)
        caplog.clear()
        seam.register(ledger, "toy_masked", sdpa_attention_forward, mask=sdpa_mask)
        assert not caplog.records
        with pytest.raises(ConfigError, match="only plain functions"):
            seam.register(ledger, "toy_method", toys.Exact, mask=sdpa_mask)
        for wrong in (object, 3):
            with pytest.raises(ConfigError, match="attend"):
                seam.register(ledger, "toy_wrong", wrong)


@pytest.mark.parametrize("handles", [("softcap",), frozenset({"soft_cap"}), None])
def test_a_method_says_what_it_handles_in_known_names(handles: Any) -> None:
    class Wrong(toys.Exact):  # type: ignore[misc, name-defined]
        pass

    Wrong.handles = handles
    with Ledger("x") as ledger:
        seam.register(ledger, "toy_handles", Wrong)
        with pytest.raises(HfplugError, match="softcap" if handles else "None"):
            models.tiny_llama(attn="toy_handles")(torch.arange(3, 9)[None])


def test_methods_of_the_catalogue_are_registered_unimported_and_a_broken_one_is_left_out(toy: str) -> None:
    entry, found = catalogue().entries[toy], catalogue()
    made = {
        name: dataclasses.replace(entry, method=dataclasses.replace(entry.method, name=name, **changes))
        for name, changes in {
            "toy_lazy": {"target": "not_there:Toy"},
            "toy_flash": {},
            "toy_needs": {"requires": ("not-there>=1",)},
        }.items()
    }
    with pytest.MonkeyPatch.context() as patch, Ledger("x") as ledger:
        patch.setattr(found, "entries", made)
        patch.setattr(found, "problems", [])
        seam.activate(ledger)
        assert "toy_lazy" in AttentionInterface._global_mapping
        assert AttentionMaskInterface._global_mapping["toy_lazy"] is seam.segments_mask
        assert {p.method for p in found.problems} == {"toy_flash", "toy_needs"}
        assert list(found.entries) == ["toy_lazy"]
        with pytest.raises(ModuleNotFoundError, match="not_there"):
            models.tiny_llama(attn="toy_lazy")(torch.arange(3, 9)[None])
    assert "toy_lazy" not in AttentionInterface._global_mapping


# -- refusals ----------------------------------------------------------------------------------------------------------


def attended(mask: Any = None, queries: int = 4, keys: int = 4, layer: Any = None, **kwargs: Any) -> AttentionCall:
    """The call that reaches a method which handles everything."""
    seen: list[AttentionCall] = []

    class Method:
        handles = frozenset(HANDLES)

        def attend(self, call: AttentionCall) -> Any:
            seen.append(call)
            return call.exact()

    call = toys.random_call(queries, keys)
    function = seam.dispatcher("toy", Method)
    function(layer or torch.nn.Linear(1, 1), call.query, call.key, call.value, mask, **kwargs)
    return seen[0]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 4), "torch.float32 mask of shape (2, 4)"),
        (torch.ones(2, 4, dtype=torch.bool), "torch.bool mask of shape (2, 4)"),
        (torch.ones(2, 4, 4, dtype=torch.bool), "(2, 4, 4)"),
        (torch.ones(2, 1, 4, 4, dtype=torch.int64), "torch.int64"),
        ("causal", "mask str"),
        (torch.ones(2, 5, dtype=torch.int32), "4 keys under a mask of 5"),
    ],
)
def test_masks_nobody_knows_are_refused(mask: Any, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        attended(mask)
    assert words in str(caught.value)


def test_calls_that_would_be_silently_wrong_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="packed documents"):
        attended(cu_seq_lens_q=torch.tensor([0, 2, 4]))
    with pytest.raises(UnsupportedError, match="packed documents"):
        attended(position_ids=torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(UnsupportedError, match="9 queries to 4 keys"):
        attended(queries=9)
    assert attended(cu_seq_lens_q=torch.tensor([0, 4]), position_ids=torch.arange(4)[None]).uniform
    assert attended(torch.tensor([[1, 1, 2, 2]] * 2, dtype=torch.int32), position_ids=torch.tensor([[0, 1, 0, 1]])).rows()


def test_what_a_call_says() -> None:
    class Layer(torch.nn.Module):
        is_causal, layer_idx = False, 7

    sinks = torch.zeros(4)
    call = attended(
        torch.ones(2, 3, dtype=torch.int32), queries=2, keys=5, layer=Layer(), scaling=0.25, dropout=0.0, s_aux=sinks,
        softcap=3.0, sliding_window=9, use_cache=True, position_ids=torch.arange(2)[None], output_attentions=True,
    )  # fmt: skip
    assert (call.scaling, call.softcap, call.window, call.layer_idx, call.causal) == (0.25, 3.0, 9, 7, False)
    assert call.s_aux is sinks
    assert call.output_attentions
    assert call.key.shape[2] == call.value.shape[2] == 3  # the slots beyond the mask are unwritten
    assert attended(layer=Layer(), is_causal=True).causal
    assert attended(queries=4).scaling == 8**-0.5


def test_drift_harmless_arguments_are_what_transformers_passes_to_every_model() -> None:
    listed = set(TransformersKwargs.__annotations__) | set(FlashAttentionKwargs.__annotations__)
    treated = {"output_attentions", "is_causal"}
    assert listed - treated <= seam.HARMLESS, "read what the new argument means before it is ignored"
    assert not treated & seam.HARMLESS
    ours = {"cache", "cache_position", "past_key_values", "position_embeddings", "use_cache"}
    assert seam.HARMLESS - listed == ours, "transformers dropped an argument: drop it here"


def test_drift_a_static_cache_tells_its_length_by_a_tensor_that_counts_on() -> None:
    cache = StaticCache(models.tiny_llama().config, max_cache_len=8)
    states = torch.zeros(1, 2, 3, 8)
    cache.update(states, states, 0)
    length = cache.get_query_offset(0)
    assert isinstance(length, torch.Tensor)
    cache.update(states, states, 0)
    assert int(length) == 6
    assert isinstance(DynamicCache().get_query_offset(0), int)


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_are_strict_and_undone_in_any_order(toy: str) -> None:
    with toys.installed("toy_other", toys.Exact):
        model = models.tiny_llama()
        before = model.config.to_dict()
        assert seam.options_of(model.config, toy) == toys.ToyConfig()
        with pytest.raises(ConfigError, match=r"'levl' \(did you mean 'level'"):
            seam.configure(model, toy, levl=3)
        with pytest.raises(ConfigError, match="level='x'"):
            seam.configure(model, toy, level="x")
        with pytest.raises(ConfigError, match="unknown attention method"):
            seam.configure(model, "toy_exct")
        assert model.config.to_dict() == before
        first, second, third = (
            seam.configure(model, name, level=level) for name, level in ((toy, 2), ("toy_other", 5), (toy, 3))
        )
        assert [seam.options_of(model.config, name).level for name in (toy, "toy_other")] == [3, 5]
        first.undo()
        assert [seam.options_of(model.config, name).level for name in (toy, "toy_other")] == [3, 5]
        third.undo()
        assert [seam.options_of(model.config, name).level for name in (toy, "toy_other")] == [1, 5]
        second.undo()
        assert model.config.to_dict() == before
        assert not hasattr(model.config, "hfplug")


def test_other_records_of_a_configuration_stay(toy: str) -> None:
    model = models.tiny_llama()
    model.config.hfplug = {"patches": ["x"]}
    applied = seam.configure(model, toy, level=4)
    record = model.config.hfplug["attention"][toy]
    assert model.config.hfplug["patches"] == ["x"]
    assert record == {"plugin": toy, "distribution": "hfplug-toy", "version": "1.0", "format": 1, "options": {"level": 4}}
    json.dumps(model.config.to_dict()["hfplug"])
    applied.undo()
    assert model.config.hfplug == {"patches": ["x"]}


def test_damaged_and_newer_records_are_told(toy: str) -> None:
    model = models.tiny_llama()
    seam.configure(model, toy, level=4)
    record = model.config.hfplug["attention"][toy]
    for changes, error in (
        ({"format": 99}, UnsupportedError),
        ({"plugin": None}, MissingPluginError),
        ({"distribution": "another"}, MissingPluginError),
        ({"options": {"levl": 3}}, ConfigError),
        ({"options": 3}, ConfigError),
    ):
        model.config.hfplug = {"attention": {toy: {**record, **changes}}}
        with pytest.raises(error, match=toy):
            seam.options_of(model.config, toy)
    for damaged in ({"attention": {toy: 3}}, {"attention": 3}, 3):
        model.config.hfplug = damaged
        with pytest.raises(MissingPluginError, match="damaged"):
            seam.options_of(model.config, toy)
    with pytest.raises(ConfigError, match="damaged"):
        seam.configure(model, toy)


def test_options_go_where_they_are_read(toy: str) -> None:
    with pytest.raises(ConfigError, match="no layer of Linear"):
        seam.configure(torch.nn.Linear(1, 1), toy)
    with toys.installed("toy_narrow", toys.Narrow):
        model = tiny_llava("sdpa")
        seam.configure(model, "toy_narrow", level=2)  # nobody uses it: the layers that could
        assert seam.options_of(model.config.text_config, "toy_narrow").level == 2
        assert not hasattr(model.config.vision_config, "hfplug")
        assert not hasattr(model.config, "hfplug")
    model = tiny_llava({"text_config": "sdpa", "vision_config": toy})
    seam.configure(model, toy, level=2)  # those that use it
    assert seam.options_of(model.config.vision_config, toy).level == 2
    assert not hasattr(model.config.text_config, "hfplug")


# -- run files and namespaces ------------------------------------------------------------------------------------------


def test_a_run_file_chooses_attention_and_options(toy: str, tmp_path: Path) -> None:
    models.tiny_llama().save_pretrained(tmp_path / "model")
    models.tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"w{3 + i} ", "completion": f"w{5 + i} w{6 + i} w{7 + i}"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run: dict[str, Any] = {
        "model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path / "run"), "max_steps": 2, "bf16": False,
        "datasets": [{"path": "json", "data_files": str(tmp_path / "train.jsonl")}], "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "plugins": {"attention": {"type": toy, "level": 6}, "tuner": "ulora"},
    }  # fmt: skip
    for place, words in (
        ({"attn_implementation": "eager"}, "attn_implementation='eager'"),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, "model_init_kwargs.attn_implementation='eager'"),
        ({"plugins": {"attention": {"type": toy, "levl": 6}}}, "plugins.attention"),
        ({"plugins": {"attention": "toy_exct"}}, "toy_exact"),
    ):
        with pytest.raises(ConfigError, match=words):
            training.parse_sft({**run, **place})
    assert training.parse_sft({**run, "attn_implementation": toy}).plugins["attention"][0].options == {"level": 6}
    seen = []
    patch = pytest.MonkeyPatch()
    stock = toys.Exact.attend
    patch.setattr(toys.Exact, "attend", lambda self, call: [seen.append(call), stock(self, call)][1])
    try:
        result = training.train_sft(run)
    finally:
        patch.undo()
    assert len(seen) >= 4
    assert {seam.options_of(call.config, toy).level for call in seen} == {6}
    assert result.trainer.model.config._attn_implementation == toy


ORDER = """
import sys
{imports}
from hfplug.plugins import Kind, catalogue
from transformers.modeling_utils import AttentionInterface
names = [entry.method.name for entry in catalogue().of_kind(Kind.ATTENTION)]
assert names and set(names) <= set(AttentionInterface._global_mapping), names
targets = {{e.method.target.partition(":")[0] for e in catalogue().of_kind(Kind.ATTENTION)}}
assert not targets & set(sys.modules), "registering a name imported its method"
hfplug.activation.deactivate()
assert not set(names) & set(AttentionInterface._global_mapping)
print("ORDER")
"""


@pytest.mark.parametrize("imports", ["import hfplug, transformers.modeling_utils", "import transformers.modeling_utils, hfplug"])
def test_names_are_there_in_either_import_order_and_their_methods_are_not_imported(imports: str) -> None:
    code = ORDER.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ORDER" in done.stdout, done.stderr


MANIFEST = """
import sys
from hfplug import Kind, Method, Paper, hookimpl
from hfplug.namespace import lazy_method

METHOD = Method(name="toy", kind=Kind.ATTENTION, target="toy_work:Toy", config="toy_work:ToyConfig", summary="a toy",
                paper=Paper(title="t", venue="v", url="u", fidelity="our reading"), exports=("toy_work:configure",))

@hookimpl
def hfplug_methods():
    return [METHOD]

__getattr__, __dir__ = lazy_method(METHOD, __name__)
"""
USE = """
import sys
import hfplug
assert "toy" in hfplug.catalogue().entries, hfplug.catalogue().problems
import toy
assert "toy_work" not in sys.modules, "reading the catalogue imported the method"
assert {"Toy", "ToyConfig", "configure", "METHOD"} <= set(dir(toy))
from toy import ToyConfig
assert ToyConfig is sys.modules["toy_work"].ToyConfig and toy.configure() == 3
try:
    toy.Toi
except AttributeError as error:
    assert "did you mean 'Toy'" in str(error), error
else:
    raise AssertionError
assert "toy_too" in hfplug.catalogue().entries, hfplug.catalogue().problems  # the same names, each in its own module
print("LAZY")
"""


def test_a_manifest_offers_its_names_without_importing_them(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(MANIFEST)
    (tmp_path / "toy_work.py").write_text("class Toy: ...\nclass ToyConfig: ...\ndef configure(): return 3\n")
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hfplug]\ntoy = toy\ntoy_too = toy_too\n")
    (tmp_path / "toy_too.py").write_text(MANIFEST.replace('name="toy"', 'name="toy_too"').replace("toy_work", "toy_too_work"))
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "LAZY" in done.stdout, done.stderr
