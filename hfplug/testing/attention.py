"""The contract of an attention method. A method joins it in one line::

    class TestMuSe(AttentionContract):
        method, options, exact_when_short = "muse", {"clusters": 4}, 64

Every property is checked through transformers' own models, masks, caches and generation, on tiny models built from configs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hfplug.testing.attention_models import FAMILIES, IMAGE, NO_PACKING, real_queries, tiny_llava
from hfplug.testing.attention_models import reference as exact_reference
from hfplug.testing.attention_runs import LAYOUTS, AttentionRuns, off
from hfplug.testing.kernels import assert_rms

if TYPE_CHECKING:
    from hfplug.ledger import Ledger


class AttentionContract(AttentionRuns):
    """What every attention method keeps; subclass it with a name that starts with ``Test``.

    Attributes:
        method: name in the catalogue.
        options: the options it is tested with, for lengths this small.
        exact_when_short: number of keys up to which it equals exact attention (at least 32); ``None``: always.
        long: tokens where it has to differ from exact attention, and is compared with :meth:`reference`.
        causal: whether nothing flows from later tokens to earlier ones.
        compiles: whether ``torch.compile(fullgraph=True)`` takes it; else graph breaks are allowed.
        tolerance: for logits that must agree in fp32 but are summed in another order.
        rms, rms_gradient: RMS error of outputs and of gradients, relative to the fp64 reference.
    """

    # -- values -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_b09_every_call_equals_the_reference(self, family: str, layout: str) -> None:
        """What the layers of a model ask for, against exact attention in fp64 from the definition, on short texts."""
        model = self.supported(family)
        if layout == "packed" and family in NO_PACKING:
            pytest.skip(f"{family} does not tell packed documents apart")
        with self.recorded() as calls:
            self.run(model, layout)
        assert len(calls) >= model.config.num_hidden_layers
        for call, found in calls:
            real = real_queries(call)
            assert found.isfinite().all(), "not finite"
            assert_rms(found[real], exact_reference(call)[real], self.rms, f"{layout}, layer {call.layer_idx}")

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_long_calls_equal_the_methods_own_reference(self, layout: str) -> None:
        """Above ``exact_when_short``; and the method is there: exact attention would give something else."""
        model, seen = self.model(max_position_embeddings=2 * self.long), 0.0
        with self.recorded() as calls:
            self.run(model, layout, self.long)
        for call, found in calls:
            real, own = real_queries(call), self.reference(call)
            if own is not None:
                assert_rms(found[real], own[real], self.rms, f"{layout}, layer {call.layer_idx}")
            exact, _ = dataclasses.replace(call, output_attentions=False).exact()
            seen = max(seen, off(found[real], exact[real]))
        if self.exact_when_short is None:
            assert seen <= self.tolerance
        elif layout == "plain":
            assert seen > 1e-4, "the method does nothing that exact attention does not"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradients_equal_the_reference(self, layout: str) -> None:
        """Of queries, keys and values, in fp64 from the definition; on long texts too, where the own reference has gradients."""
        import torch

        model = self.model(max_position_embeddings=2 * self.long)
        for length in (14, self.long):
            with self.recorded() as calls:
                self.run(model, layout, length)
            call, _ = calls[-1]
            leaves = {name: getattr(call, name).detach().clone().requires_grad_() for name in ("query", "key", "value")}
            call = dataclasses.replace(call, **leaves)
            expected = exact_reference(call) if length == 14 or self.exact_when_short is None else self.reference(call)
            if expected is None or not expected.requires_grad:
                continue
            real = real_queries(call)[:, :, None, None]
            weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape).cos() * real
            wanted = torch.autograd.grad((expected * weight).sum(), list(leaves.values()))
            score = (self.target().attend(call)[0] * weight.float()).sum()
            found = torch.autograd.grad(score, list(leaves.values()), allow_unused=True)
            for name, ours, theirs in zip(leaves, found, wanted, strict=True):
                assert ours is not None, f"no gradient reaches {name}"
                assert_rms(ours, theirs, self.rms_gradient, f"{layout}, {length} tokens, the gradient of {name}")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_b14_a_family_equals_stock_or_is_refused(self, family: str) -> None:
        """Sinks, softcap, windows: the stock logits, or an error that names what is not handled; with and without padding."""
        import torch

        from hfplug.errors import UnsupportedError

        model, stock = self.model(family), FAMILIES[family][0](attn=FAMILIES[family][1]).eval()
        for batch in ({"input_ids": self.ids()}, self.padded("left"), self.padded("right")):
            if self.lacks(family):
                with pytest.raises(UnsupportedError, match="|".join(self.lacks(family))) as caught:
                    self.logits(model, batch)
                assert self.method in str(caught.value)
                continue
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            assert off(self.logits(model, batch)[real], self.logits(stock, batch)[real]) <= self.tolerance

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_b09_padding_does_not_count(self, family: str, side: str) -> None:
        """Real tokens of padded rows have the logits of the row alone; short, and long where the method approximates."""
        model = self.supported(family)
        for length in (14, min(self.long, 100)):
            batch = self.padded(side, 3, length)
            together = self.logits(model, batch)
            for row, real in enumerate(batch["attention_mask"].bool()):
                alone = self.logits(model, {"input_ids": batch["input_ids"][row : row + 1, real]})[0]
                difference = off(together[row, real], alone)
                assert difference <= self.tolerance, f"row {row} of {length} tokens: {difference:.2e}"

    @pytest.mark.parametrize("family", FAMILIES)
    def test_b12_packed_documents_do_not_see_each_other(self, family: str) -> None:
        """Each document of a packed row has the logits it has alone; refused where the model does not say which they are."""
        from hfplug.errors import UnsupportedError

        model = self.supported(family)
        if family in NO_PACKING:
            with pytest.raises(UnsupportedError, match="packed documents"):
                self.logits(model, self.packed())
            return
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            self.logits(model, {**self.packed(), "use_cache": True})
        for lengths in ((5, 3, 6), (40, 1, 50)):
            batch = self.packed(lengths)
            together, start = self.logits(model, batch)[0], 0
            for n in lengths:
                alone = self.logits(model, {"input_ids": batch["input_ids"][:, start : start + n]})[0]
                difference = off(together[start : start + n], alone)
                assert difference <= self.tolerance, f"the document of {n} tokens at {start}: {difference:.2e}"
                start += n

    def test_grouped_queries_are_repeated_keys(self) -> None:
        """A call with few key heads equals the call with each of them repeated."""
        model = self.model(max_position_embeddings=2 * self.long)
        for length in (14, self.long):
            with self.recorded() as calls:
                self.run(model, "plain", length)
            call, found = calls[0]
            groups = call.query.shape[1] // call.key.shape[1]
            assert groups > 1
            key, value = (t.repeat_interleave(groups, dim=1) for t in (call.key, call.value))
            repeated, _ = self.target().attend(dataclasses.replace(call, key=key, value=value))
            assert off(repeated, found) <= self.tolerance

    def test_nothing_flows_back_from_later_tokens(self) -> None:
        """Other last tokens leave earlier logits alone; earlier logits have no gradient to later embeddings."""
        import torch

        if not self.causal:
            pytest.skip("causal is False for this method")
        model, ids = self.model(max_position_embeddings=2 * self.long), self.ids(1, self.long)
        other, cut = ids.clone(), self.long - 17
        other[:, cut:] = self.ids(1, 17, seed=1)
        found, changed = (self.logits(model, {"input_ids": each}) for each in (ids, other))
        assert off(found[:, :cut], changed[:, :cut]) <= self.tolerance
        assert off(found[:, cut:], changed[:, cut:]) > 1e-3
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[:, :cut].square().sum(), embedded)
        assert gradient[:, cut:].abs().max() <= 1e-6
        assert gradient[:, :cut].abs().max() > 1e-3

    def test_the_same_twice(self) -> None:
        """Outputs and gradients are the same bits in a second run."""
        import torch

        model = self.model(max_position_embeddings=2 * self.long)
        batch = {"input_ids": self.ids(2, self.long)}
        assert torch.equal(self.logits(model, batch), self.logits(model, batch))
        first, second = (self.gradients(model, batch) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    # -- caches and generation ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_b10_decoding_is_recomputation(self, family: str, cache: str) -> None:
        """Left-padded greedy decoding with a cache: tokens and logits of recomputing every step without one."""
        from hfplug.errors import UnsupportedError

        model, batch = self.supported(family), self.padded("left", 3, 10)
        if cache == "static" and "dense_mask" not in self.handles:
            with pytest.raises(UnsupportedError, match="dense_mask"):
                self.generate(model, batch, cache_implementation="static")
            return
        self._same(self.generate(model, batch, cache_implementation=cache), self.generate(model, batch, use_cache=False))

    def _same(self, found: Any, expected: Any) -> None:
        import torch

        assert torch.equal(found.sequences, expected.sequences), "other tokens"
        difference = max(off(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
        assert difference <= self.tolerance, f"the logits are off by {difference:.2e}"

    def test_a_prefill_in_chunks_is_one_prefill(self) -> None:
        """Queries that are fewer than the keys stand at their end."""
        import torch
        from transformers import DynamicCache

        model, batch = self.model(), self.padded("left", 3, 20)
        cache, found, at = DynamicCache(config=model.config), [], 0
        for size in (7, 1, 8, 4):
            piece = {k: batch[k][:, at : at + size] for k in ("input_ids", "position_ids")}
            at += size
            found.append(self.logits(model, {**piece, "attention_mask": batch["attention_mask"][:, :at], "cache": cache}))
        real = batch["attention_mask"].bool()
        assert off(torch.cat(found, 1)[real], self.logits(model, batch)[real]) <= self.tolerance

    def test_beams(self) -> None:
        """Beam search reorders the cache: the same tokens and scores as by recomputation."""
        model, batch = self.model(), self.padded("left", 3, 10)
        self._same(*(self.generate(model, batch, num_beams=3, use_cache=use) for use in (True, False)))

    def test_assisted_decoding(self) -> None:
        """Several drafted tokens at a time, some of which are taken back: the tokens of plain greedy decoding."""
        import torch

        model, ids = self.model(), self.ids(1, 4).repeat(1, 3)
        expected = self.generate(model, {"input_ids": ids}).sequences
        found = self.generate(model, {"input_ids": ids}, prompt_lookup_num_tokens=3).sequences
        assert torch.equal(found, expected)

    # -- training -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
    def test_b56_checkpointing_changes_no_gradient(self, reentrant: bool) -> None:
        """Short and long, with padding."""
        for length in (14, self.long):
            model, batch = self.model(max_position_embeddings=2 * self.long).train(), self.padded("right", 3, length)
            expected = self.gradients(model, batch)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
            found = self.gradients(model, batch)
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                assert gradient.isfinite().all(), name
                assert off(found[name], gradient) <= 1e-6, name

    def test_dropout_is_applied_or_refused(self) -> None:
        """In training alone; where it is handled, the seed decides."""
        import torch

        from hfplug.errors import UnsupportedError

        model, batch = self.model(attention_dropout=0.3), {"input_ids": self.ids()}
        expected = self.logits(self.model(), batch)
        assert torch.equal(self.logits(model, batch), expected)
        model.train()
        if "dropout" not in self.handles:
            with pytest.raises(UnsupportedError, match=r"dropout=0\.3"):
                self.logits(model, batch)
            return
        found = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            found.append(self.logits(model, batch))
        assert torch.equal(found[0], found[1])
        assert off(found[0], found[2]) > 1e-4
        assert off(found[0], expected) > 1e-4

    def test_compiled(self) -> None:
        """``torch.compile``: the values of eager mode, short and long, with and without padding; or a stated refusal."""
        import torch

        model = self.model(max_position_embeddings=2 * self.long)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=self.compiles)
        try:
            if "dense_mask" not in self.handles:
                with pytest.raises(Exception, match="dense_mask"):
                    self.logits(compiled, {"input_ids": self.ids()})
                return
            for batch in ({"input_ids": self.ids()}, self.padded("left")):
                real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                assert off(self.logits(compiled, batch)[real], self.logits(model, batch)[real]) <= self.tolerance
        finally:
            torch._dynamo.reset()

    # -- arguments and names ------------------------------------------------------------------------------------------

    def test_b14_an_unknown_argument_is_refused(self) -> None:
        """One that arrives with a value; ``None`` asks for nothing."""
        from hfplug.errors import UnsupportedError

        model, ids = self.model(), self.ids()
        with pytest.raises(UnsupportedError, match="sentinel=3") as caught:
            model(ids, sentinel=3)
        assert self.method in str(caught.value)
        assert "LlamaAttention" in str(caught.value)
        assert off(model(ids, sentinel=None).logits, model(ids).logits) == 0.0

    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_b13_attention_weights_are_real_or_refused(self, family: str) -> None:
        """Never an empty tuple, which is what transformers makes of weights that are not returned."""
        from hfplug.errors import UnsupportedError

        model, ids = self.model(family), self.ids()
        if "output_attentions" not in self.handles:
            with pytest.raises(UnsupportedError, match="output_attentions"):
                model(ids, output_attentions=True)
            return
        found = model(ids, output_attentions=True).attentions
        expected = FAMILIES[family][0](attn="eager").eval()(ids, output_attentions=True).attentions
        assert len(found) == len(expected) > 0
        assert max(off(a, b) for a, b in zip(found, expected, strict=True)) <= self.tolerance

    def test_b09_b11_the_name_has_its_mask_and_is_taken(self) -> None:
        """Both tables of transformers hold the name; nobody else gets it by chance."""
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        from hfplug.errors import LedgerError
        from hfplug.ledger import Ledger
        from hfplug.seams.attention import register, segments_mask

        held = AttentionInterface._global_mapping[self.method]
        assert AttentionMaskInterface._global_mapping[self.method] is segments_mask
        ledger = Ledger("another plugin")
        with pytest.raises(LedgerError, match="already registered"):
            register(ledger, self.method, self.target)
        assert len(ledger) == 0
        assert AttentionInterface._global_mapping[self.method] is held

    def test_a_part_of_a_model(self) -> None:
        """The text part of a vision-language model alone; a plain string meets the vision tower, which it handles or refuses."""
        import torch

        from hfplug.errors import UnsupportedError

        ids = torch.tensor([[1, IMAGE, IMAGE, IMAGE, IMAGE, 5, 6, 7]])
        batch = {"input_ids": ids, "pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)}
        expected = self.logits(tiny_llava("sdpa"), batch)
        parts = tiny_llava({"text_config": self.method, "vision_config": "sdpa"})
        with self.recorded() as calls:
            found = self.logits(parts, batch)
        assert len(calls) == 2
        assert off(found, expected) <= self.tolerance
        if "bidirectional" in self.handles:
            assert off(self.logits(tiny_llava(self.method), batch), expected) <= self.tolerance
            return
        with pytest.raises(UnsupportedError, match=r"CLIPAttention.*vision_config"):
            self.logits(tiny_llava(self.method), batch)

    # -- options ------------------------------------------------------------------------------------------------------

    def configured(self, model: Any, **options: Any) -> Ledger:
        """Options on top of those of the contract."""
        from hfplug.seams.attention import configure

        return configure(model, self.method, **{**self.options, **options})

    def test_options_are_saved_with_the_model(self, tmp_path: Path) -> None:
        """Reloaded under the method: the same bits; reloaded plainly: a stock model. Undone: as before."""
        import torch
        import transformers

        from hfplug.seams.attention import options_of

        model, batch = self.model(), {"input_ids": self.ids(2, self.long)}
        model.save_pretrained(tmp_path)
        load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
        again = load(tmp_path, attn_implementation=self.method)
        assert options_of(again.config, self.method) == options_of(model.config, self.method)
        assert torch.equal(self.logits(again, batch), self.logits(model, batch))
        assert load(tmp_path).config._attn_implementation == "sdpa"
        record = again.config.hfplug["attention"][self.method]
        assert record["plugin"] == self.method
        before = copy.deepcopy(again.config.to_dict())
        self.configured(again).undo()
        assert again.config.to_dict() == before
        self.kept.undo()
        assert not hasattr(model.config, "hfplug")

    def test_b18_copies_are_independent(self) -> None:
        """A deep copy answers the same; its options are its own."""
        import torch

        model, batch = self.model(), {"input_ids": self.ids(2, self.long)}
        twin, before = copy.deepcopy(model), copy.deepcopy(model.config.to_dict())
        assert torch.equal(self.logits(twin, batch), self.logits(model, batch))
        twin.config.hfplug["attention"].clear()
        assert model.config.to_dict() == before
