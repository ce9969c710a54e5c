"""The contract of a model patch. A patch joins it in one line::

    class TestSimpleNorm(PatchContract):
        method = "simplenorm"

Every property is checked on tiny models of every family the patch knows, through transformers' own loading, caches,
generation and training.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

from hfplug.testing.patch_files import PatchFiles
from hfplug.testing.patch_models import FAMILIES, NO_PACKING, behaviours, over
from hfplug.testing.patch_runs import portrait, relative
from hfplug.testing.ranks import run_ranks
from hfplug.testing.runs import off


class PatchContract(PatchFiles):
    """What every patch keeps; subclass it with a name that starts with ``Test``.

    Attributes:
        method: name in the catalogue.
        options: the options it is tested with.
        families: names of the families it is tested on, all unless a class says otherwise; the patch may know more.
        compiles: whether ``torch.compile(fullgraph=True)`` takes it; else graph breaks are allowed.
        embeds: whether ``inputs_embeds`` may stand in place of ``input_ids``; else they are refused.
        packs: whether packed documents do not see each other; else they are refused.
        tolerance: of logits that must agree but are summed in another order, relative to the largest one. Weights are fp64
            there, so that rounding does not hide what a patch does; norms and rotations of transformers stay fp32.
    """

    # -- applying and undoing -------------------------------------------------------------------------------------------

    @over(FAMILIES)
    def test_the_plan_is_what_apply_does(self, family: str) -> None:
        """Modules, tensors, bytes; and planning leaves the model as it was."""
        import hfplug

        model = self.stock(family)
        before = portrait(model)
        plan = hfplug.plan(model, self.method, **self.options)
        assert portrait(model) == before, "planning changed the model"
        size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        count = sum(p.numel() for p in model.parameters())
        handle = self.apply(model)
        assert handle.plan == plan
        assert sum(p.numel() for p in model.parameters()) - count == plan.parameters
        after = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        assert after - size == plan.bytes
        assert str(plan.depth) in str(plan)

    @over(FAMILIES)
    def test_a_fresh_patch_is_the_identity_where_promised(self, family: str) -> None:
        """Bit for bit; and a patch that acts changes the logits."""
        import torch

        model, batch = self.stock(family), self.batch(family)
        before = self.logits(model, batch)
        handle = self.apply(model)
        fresh = self.logits(model, batch)
        if self.target.identity:
            assert torch.equal(fresh, before), f"off by {off(fresh, before):.2e}"
        self.stir(model, handle)
        found = self.logits(model, batch)
        assert found.isfinite().all()
        assert relative(found, before) > 1e-3, "the patch does nothing"

    @over(FAMILIES)
    def test_b07_removing_restores_everything(self, family: str) -> None:
        """Modules, tensors, hooks and attributes by identity, the configuration, the logits; applying again works."""
        import torch

        model, batch = self.stock(family), self.batch(family)
        expected = self.logits(model, batch)
        before = portrait(model)
        for _ in range(2):
            handle = self.apply(model)
            self.stir(model, handle)
            self.logits(model, batch)
            handle.remove()
            after = portrait(model)
            assert after == before, {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
            assert not handle.active
            handle.remove()  # twice does nothing
        assert torch.equal(self.logits(model, batch), expected)

    @over(FAMILIES)
    def test_removing_follows_the_model(self, family: str) -> None:
        """In another dtype than when it was patched: the stock model in that dtype, bit for bit."""
        import torch

        model, stock, batch = self.stock(family), self.stock(family).to(torch.bfloat16), {"input_ids": self.ids()}
        handle = self.apply(model)
        model.to(torch.bfloat16)
        handle.remove()
        assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in stock.named_parameters()}
        assert torch.equal(self.logits(model, batch), self.logits(stock, batch))

    def test_b06_twice_is_refused(self) -> None:
        """And changes nothing."""
        from hfplug.errors import LedgerError

        model = self.patched(self.known())
        before = portrait(model)
        with pytest.raises(LedgerError, match=self.method):
            self.apply(model)
        assert portrait(model) == before

    @over(FAMILIES)
    def test_b19_weights_stay_the_models_own(self, family: str) -> None:
        """Parameters that stay are the same objects; what is added has the dtype and device of its neighbours."""
        import torch

        model = self.stock(family).to(torch.bfloat16)
        model.get_input_embeddings().weight.requires_grad_(False)
        before = dict(model.named_parameters())
        handle = self.apply(model)
        after = dict(model.named_parameters())
        removed, added = ({s.name for s in group} for group in (handle.plan.removed, handle.plan.added))
        for name, parameter in before.items():
            assert name in removed or after[name] is parameter, f"{name} is another object"
        for name in added & after.keys():
            assert after[name].dtype in (torch.bfloat16, torch.float32), name
            assert after[name].requires_grad, name
        assert not model.get_input_embeddings().weight.requires_grad
        assert self.logits(model, {"input_ids": self.ids()}).isfinite().all()

    def test_b18_other_models_stay_stock(self) -> None:
        """A teacher of the same configuration, before and after; a copy of the patched model is patched by itself."""
        import torch

        import hfplug

        family = self.known()
        batch = self.batch(family)
        early = self.stock(family)
        expected = self.logits(early, batch)
        student = copy.deepcopy(early)
        config = early.config
        student_config = student.config
        forwards = {type(m): type(m).forward for m in student.modules()}
        handle = self.apply(student)
        self.stir(student, handle)
        late, shared = self.stock(family), type(early)(student_config)
        assert hfplug.applied(late) == hfplug.applied(early) == hfplug.applied(shared) == ()
        for cls, forward in forwards.items():
            assert cls.forward is forward, f"{cls.__name__}.forward was replaced for every model"
        for teacher in (early, late):
            assert torch.equal(self.logits(teacher, batch), expected)
            assert not hasattr(teacher.config, "hfplug")
        shared.load_state_dict(early.state_dict())
        assert torch.equal(self.logits(shared.eval(), batch), expected)
        assert early.config is config
        acting = self.logits(student, batch)
        twin = copy.deepcopy(student)
        assert torch.equal(self.logits(twin, batch), acting)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.1)
        assert torch.equal(self.logits(student, batch), acting), "the original changes with its copy"
        twin, original = copy.deepcopy(student), copy.deepcopy(student.state_dict())
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(0.1)
        assert torch.equal(self.logits(twin, batch), acting), "the copy changes with its original"
        student.load_state_dict(original)
        twin = copy.deepcopy(student)
        hfplug.applied(twin)[0].remove()
        assert torch.equal(self.logits(twin, batch), expected)
        assert torch.equal(self.logits(student, batch), acting)
        handle.remove()
        assert torch.equal(self.logits(student, batch), expected)

    # -- order ---------------------------------------------------------------------------------------------------------------

    def test_what_cannot_be_patched_is_refused(self) -> None:
        """An unknown family, an optimizer, an adapter, a compiled or wrapped model, replaced code: an error, and no change."""
        import torch
        import transformers
        from peft import LoraConfig, get_peft_model

        from hfplug.errors import ConfigError, UnsupportedError
        from hfplug.families import decoder_of

        family = self.known()
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64
        )
        with pytest.raises(UnsupportedError, match="known: .*" + family):
            self.apply(transformers.BertModel(config))
        with pytest.raises(ConfigError, match="model="):
            self.apply("a model")
        model = self.stock(family)
        with pytest.raises(UnsupportedError, match="compile"):
            self.apply(torch.compile(model))
        before = portrait(model)
        handle = self.apply(model)
        changes = any(s.parameter for s in (*handle.plan.added, *handle.plan.removed))
        handle.remove()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if changes and "optimizer" not in self.target.works_with:
            with pytest.raises(UnsupportedError, match="SGD"):
                self.apply(model)
            assert portrait(model) == before
        del optimizer
        layer: Any = decoder_of(model).layers[0]
        stock = layer.forward
        layer.forward = functools.partial(stock)
        with pytest.raises(UnsupportedError, match="replaced by"):
            self.apply(model)
        self.apply(model, force=True).remove()
        del layer.forward
        if "peft" not in self.target.works_with:
            adapted = get_peft_model(self.stock(family), LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM"))
            with pytest.raises(UnsupportedError, match="first, then PEFT"):
                self.apply(adapted)

    def test_an_option_is_checked(self) -> None:
        """An unknown one, naming the nearest."""
        import dataclasses

        import hfplug
        from hfplug.errors import ConfigError

        model = self.stock(self.known())
        with pytest.raises(ConfigError, match="no option 'nonsense_'"):
            hfplug.apply(model, self.method, nonsense_=1)
        fields = [f.name for f in dataclasses.fields(self.target)]
        if fields:
            with pytest.raises(ConfigError, match=f"did you mean '{fields[0]}'"):
                hfplug.plan(model, self.method, **{fields[0] + "x": 1})
        assert hfplug.applied(model) == ()

    # -- caches, padding, packing ----------------------------------------------------------------------------------------------

    @over(behaviours())
    def test_b10_decoding_is_recomputation(self, family: str) -> None:
        """Left-padded greedy decoding with a cache: tokens and logits of recomputing every step without one."""
        cache = "static" if family == "Qwen3" else "dynamic"
        model, batch = self.exact(family), self.padded("left", 3, 10)
        self._generates_the_same(model, batch, {"cache_implementation": cache}, {"use_cache": False})

    def _generates_the_same(self, model: Any, batch: Any, one: dict[str, Any], other: dict[str, Any]) -> None:
        import torch

        found, expected = self.generate(model, batch, **one), self.generate(model, batch, **other)
        assert torch.equal(found.sequences, expected.sequences), "other tokens"
        for a, b in zip(found.logits, expected.logits, strict=True):
            self.same(a, b, "logits of a step")

    def test_beams(self) -> None:
        """Beam search reorders the cache: the same tokens and scores as by recomputation."""
        batch = self.padded("left", 3, 10)
        self._generates_the_same(
            self.exact(self.known()), batch, {"num_beams": 3, "use_cache": True}, {"num_beams": 3, "use_cache": False}
        )

    def test_assisted_decoding(self) -> None:
        """Several drafted tokens at a time, some of which are taken back: the tokens of plain greedy decoding."""
        import torch

        model, ids = self.patched(self.known()), self.ids(1, 4).repeat(1, 3)
        expected = self.generate(model, {"input_ids": ids}).sequences
        assert torch.equal(self.generate(model, {"input_ids": ids}, prompt_lookup_num_tokens=3).sequences, expected)

    @over(behaviours())
    def test_a_prefill_in_chunks_is_one_prefill(self, family: str) -> None:
        """With left padding; the last chunk is a single token."""
        import torch
        from transformers import DynamicCache

        model, batch = self.exact(family), self.padded("left", 3, 14)
        cache, found, at = DynamicCache(config=model.config.get_text_config()), [], 0
        for size in (5, 1, 7, 1):
            piece = {k: batch[k][:, at : at + size] for k in ("input_ids", "position_ids")}
            at += size
            found.append(self.logits(model, {**piece, "attention_mask": batch["attention_mask"][:, :at], "cache": cache}))
        real = batch["attention_mask"].bool()
        self.same(torch.cat(found, 1)[real], self.logits(model, batch)[real], "logits")

    @pytest.mark.parametrize("side", ["left", "right"])
    @over(behaviours())
    def test_padding_and_batch_do_not_count(self, family: str, side: str) -> None:
        """Real tokens of padded rows have the logits of the row alone."""
        model, batch = self.exact(family), self.padded(side)
        together = self.logits(model, batch)
        for row, real in enumerate(batch["attention_mask"].bool()):
            alone = self.logits(model, {"input_ids": batch["input_ids"][row : row + 1, real]})[0]
            self.same(together[row, real], alone, f"row {row}")

    @over(behaviours(NO_PACKING))
    def test_b12_packed_documents_do_not_see_each_other(self, family: str) -> None:
        """Each document of a packed row has the logits it has alone; or the patch refuses packed rows."""
        from hfplug.errors import UnsupportedError

        model, lengths = self.exact(family), (5, 3, 6)
        batch = self.packed(lengths)
        if not self.packs:
            with pytest.raises(UnsupportedError, match="packed"):
                self.logits(model, batch)
            return
        together, start = self.logits(model, batch)[0], 0
        for n in lengths:
            alone = self.logits(model, {"input_ids": batch["input_ids"][:, start : start + n]})[0]
            self.same(together[start : start + n], alone, f"the document of {n} tokens at {start}")
            start += n

    @over(behaviours())
    def test_nothing_flows_back_from_later_tokens(self, family: str) -> None:
        """Other last tokens leave earlier logits alone."""
        model, ids = self.patched(family), self.ids(2, 14)
        other = ids.clone()
        other[:, 9:] = self.ids(2, 5, seed=1)
        found, changed = (self.logits(model, {"input_ids": each}) for each in (ids, other))
        self.same(changed[:, :9], found[:, :9], "earlier logits")
        assert relative(changed[:, 9:], found[:, 9:]) > 1e-3

    def test_b16_arguments_pass_through(self) -> None:
        """Hidden states of every layer, embeddings in place of tokens, the cache under its old name."""
        import warnings

        import torch
        from transformers import DynamicCache

        from hfplug.errors import UnsupportedError

        model, ids = self.patched(self.known()), self.ids()
        expected = self.logits(model, {"input_ids": ids})
        with torch.no_grad():
            found = model(ids, output_hidden_states=True)
            assert len(found.hidden_states) == model.config.get_text_config().num_hidden_layers + 1
            assert torch.equal(found.logits, expected)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                old = model(input_ids=ids, past_key_values=DynamicCache(config=model.config.get_text_config()))
        assert old.cache.get_seq_length() == ids.shape[1]
        self.same(old.logits, expected, "logits")
        embedded = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
        if self.embeds:
            self.same(self.logits(model, embedded), expected, "logits")
        else:
            with pytest.raises(UnsupportedError, match="input_ids"):
                self.logits(model, embedded)

    # -- training ----------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    @over(behaviours())
    def test_b56_checkpointing_changes_no_gradient(self, family: str, reentrant: bool) -> None:
        """And every tensor that the patch added is trained."""
        import hfplug

        model, batch = self.patched(family).train(), self.padded("right")
        expected = self.gradients(model, batch)
        for stored in hfplug.applied(model)[0].plan.added:
            if stored.parameter:
                assert stored.name in expected, f"no gradient reaches {stored.name}"
                assert expected[stored.name].abs().max() > 0, f"the gradient of {stored.name} is 0"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        found = self.gradients(model, batch)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.isfinite().all(), name
            assert relative(found[name], gradient) <= 1e-6, name

    def test_the_same_twice(self) -> None:
        """Logits and gradients are the same bits in a second run."""
        import torch

        model, batch = self.patched(self.known()), self.padded("left")
        assert torch.equal(self.logits(model, batch), self.logits(model, batch))
        first, second = (self.gradients(model.train(), batch) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_compiled(self) -> None:
        """``torch.compile``: the values of eager mode, with and without padding."""
        import torch

        model = self.patched(self.known())
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=self.compiles)
        try:
            for batch in ({"input_ids": self.ids()}, self.padded("left")):
                real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                self.same(self.logits(compiled, batch)[real], self.logits(model, batch)[real], "logits")
        finally:
            torch._dynamo.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["ddp", "fsdp2"])
    def test_b58_two_ranks_train_as_one_process(self, how: str, tmp_path: Path) -> None:
        """One step on two gloo ranks gives the gradients of the whole batch on one; FSDP2 shards what the patch added."""
        import json

        script = Path(__file__).with_name("patch_ranks.py")
        run_ranks(script, how, self.method, json.dumps(dict(self.options)), self.known())
