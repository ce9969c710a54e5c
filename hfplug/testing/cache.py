"""The contract of a cache method. A method joins it in one line::

    class TestKivi(CacheContract):
        method, options, window, long = "kivi", {"bits": 2, "group_size": 8, "residual": 16}, 16, 70

Every property is checked through transformers' own models, generation and cache calls, on tiny models built from configs,
or on one layer alone with random keys and values.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hfplug.testing.cache_runs import DIM, FAMILIES, HEADS, CacheRuns, off
from hfplug.testing.models import tiny_gpt2, tiny_llama


class CacheContract(CacheRuns):
    """What every cache method keeps; subclass it with a name that starts with ``Test``.

    Attributes:
        method: name in the catalogue.
        options: the options it is tested with, for models this small (heads of 8 and 16).
        window: number of tokens up to which everything is kept exactly; ``None``: always.
        long: tokens where something is stored in the method's form.
        rows_independent: whether what is stored of a row depends on that row alone.
        tolerance: for logits that must agree in fp32 but are summed in another order.
    """

    # -- equal to stock where everything is exact ---------------------------------------------------------------------------

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
    def test_b10_short_generations_equal_stock(self, family: str, settings: dict[str, Any]) -> None:
        """Within the window: tokens and logits of the stock cache, with left padding, greedy and by beams."""
        import torch

        model, batch = self.model(family), self.padded("left", 3, 6)
        settings = {**settings, "max_new_tokens": min(9, (self.window or 16) - 6)}
        found = self.generate(model, batch, cache=self.cache(model), **settings)
        stock = self.generate(model, batch, **settings)
        assert torch.equal(found.sequences, stock.sequences)
        assert all(off(a, b) <= self.tolerance for a, b in zip(found.logits, stock.logits, strict=True))

    def test_b24_every_way_to_pass_it(self) -> None:
        """As ``cache``, under its older name, to forward; and ``None`` is the stock cache."""
        import torch

        model, ids = self.model(), self.ids(1, 6)
        expected = self.logits(model, {"input_ids": ids})
        for name in ("cache", "past_key_values"):
            cache = self.cache(model)
            with torch.no_grad():
                out = model(input_ids=ids, **{name: cache})
            assert off(out.logits, expected) <= self.tolerance
            assert out.cache is cache
            assert cache.get_seq_length() == 6
            with torch.no_grad():
                assert off(model(input_ids=ids, **{name: None}).logits, expected) <= self.tolerance

    def test_the_method_is_there(self) -> None:
        """Long texts: what is read differs from what came in, unless the method is always exact; shape and dtype do not."""
        import torch

        for dtype in (torch.float32, torch.bfloat16):
            keys, values = (t.to(dtype) for t in self.states())
            layer = self.fill(keys, values)
            read = layer.read()
            for ours, theirs in zip(read, (keys, values), strict=True):
                assert ours.shape == theirs.shape
                assert ours.dtype == theirs.dtype
                assert ours.isfinite().all()
            if self.window is None:
                assert off(read[0], keys) == off(read[1], values) == 0
            elif dtype == torch.float32:
                assert max(off(read[0], keys), off(read[1], values)) > 1e-4, "nothing was stored in another form"

    def test_b41_the_window_is_bit_exact(self) -> None:
        """The tokens of a text as long as the window, and in a longer one those that can still be taken back."""
        import torch

        keys, values = self.states(tokens=min(self.window or self.long, self.long) - 1)
        assert all(torch.equal(a, b) for a, b in zip(self.fill(keys, values).read(), (keys, values), strict=True))
        keys, values = self.states()
        layer = self.fill(keys, values)
        last = slice(self.long - layer.removable(), None)
        assert all(torch.equal(a[:, :, last], b[:, :, last]) for a, b in zip(layer.read(), (keys, values), strict=True))

    def test_a_chunk_attends_to_itself_exactly(self) -> None:
        """What update returns: the past as it reads, then the chunk, untouched."""
        import torch

        keys, values = self.states(tokens=2 * self.long)
        cut = self.long
        layer = self.fill(keys[:, :, :cut], values[:, :, :cut])
        past = layer.read()
        found = layer.update(keys[:, :, cut:], values[:, :, cut:])
        for ours, before, new in zip(found, past, (keys, values), strict=True):
            assert torch.equal(ours[:, :, :cut], before)
            assert torch.equal(ours[:, :, cut:], new[:, :, cut:])

    # -- lengths and masks --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunk", [1, 7, 1000])
    def test_b42_lengths_and_mask_sizes_are_exact(self, chunk: int) -> None:
        """After every update, of chunks and single tokens: as many keys as the mask was told."""
        keys, values = self.states(rows=1)
        cache, layer = self.layer()
        for begin in range(0, self.long, chunk):
            part = slice(begin, begin + chunk)
            told = cache.get_mask_sizes(keys[:, :, part].shape[2], layer.index)
            found, _ = layer.update(keys[:, :, part], values[:, :, part])
            assert told == (found.shape[2], 0)
            assert layer.get_seq_length() == found.shape[2] == min(begin + chunk, self.long)
        assert layer.get_max_length() == -1
        assert not layer.is_sliding

    def test_chunked_prefill(self) -> None:
        """A model fed in chunks: stock's logits while all is exact; finite, and never the stock logits, when long."""
        import torch
        from transformers import DynamicCache

        model = self.model()
        for length in (min(self.window or 16, 16) - 1, 2 * self.long):
            ids, seen = self.ids(2, length), []
            for cache in (self.cache(model), DynamicCache(config=model.config)):
                with torch.no_grad():
                    seen.append(
                        torch.cat([model(input_ids=part, cache=cache).logits for part in ids.split(length // 2, dim=1)], dim=1)
                    )
            assert seen[0].isfinite().all()
            if length < self.long or self.window is None:
                assert off(*seen) <= self.tolerance
            else:
                assert off(*seen) > 1e-6

    # -- rows ---------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("operation", ["reorder", "repeat", "select"])
    @pytest.mark.parametrize("first", ["short", "long"])
    def test_b42_rows_move_with_everything_they_store(self, operation: str, first: str) -> None:
        """Beams and batch operations: bit for bit the cache of the new rows, at once and after more tokens."""
        import torch

        keys, values = self.states(tokens=2 * self.long)
        cut = min(self.window or 16, 16) - 3 if first == "short" else self.long
        order = {"reorder": [2, 0, 2], "repeat": [0, 0, 1, 1, 2, 2], "select": [1]}[operation]
        layer = self.fill(keys[:, :, :cut], values[:, :, :cut])
        before = layer.read()
        if operation == "reorder":
            layer.reorder_cache(torch.tensor(order))
        elif operation == "repeat":
            layer.batch_repeat_interleave(2)
        else:
            layer.batch_select_indices(torch.tensor(order))
        assert all(torch.equal(a, b[order]) for a, b in zip(layer.read(), before, strict=True))
        assert layer.rows == len(order)
        for begin in range(cut, 2 * self.long, 9):
            layer.update(keys[order][:, :, begin : begin + 9], values[order][:, :, begin : begin + 9])
        assert layer.length == 2 * self.long
        if not self.rows_independent:
            return
        fresh = self.fill(keys[order][:, :, :cut], values[order][:, :, :cut])
        for begin in range(cut, 2 * self.long, 9):
            fresh.update(keys[order][:, :, begin : begin + 9], values[order][:, :, begin : begin + 9])
        assert all(torch.equal(a, b) for a, b in zip(layer.read(), fresh.read(), strict=True))
        assert {n: t.shape for n, t in layer.state.items()} == {n: t.shape for n, t in fresh.state.items()}

    def test_rows_do_not_know_each_other(self) -> None:
        """A row of a batch is stored as it would be alone."""
        import torch

        if not self.rows_independent:
            pytest.skip("what is stored depends on the batch")
        keys, values = self.states()
        found, alone = self.fill(keys, values).read(), self.fill(keys[1:2], values[1:2]).read()
        assert all(torch.equal(a[1:2], b) for a, b in zip(found, alone, strict=True))

    def test_another_number_of_rows_is_refused(self) -> None:
        """By name, and nothing is stored."""
        from hfplug.errors import UnsupportedError

        layer = self.fill(*self.states())
        keys, values = self.states()
        before = {n: t.clone() for n, t in layer.state.items()}
        with pytest.raises(UnsupportedError, match="holds 3 rows"):
            layer.update(keys[:2], values[:2])
        self.unchanged(layer, before, self.long)

    # -- padding ------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("scale", [1e4, 1e-4, -1.0])
    def test_b26_what_is_kept_exactly_is_so_at_any_size(self, scale: float) -> None:
        """Very large, very small and negative keys: the last tokens keep their bits, the others their size."""
        import torch

        keys, values = self.states()
        keys[..., 1] /= 50
        layer = self.fill(scale * keys, values)
        last = slice(self.long - layer.removable(), None)
        read, _ = layer.read()
        assert torch.equal(read[:, :, last], scale * keys[:, :, last])
        assert off(read, scale * keys) <= 2 * off(scale * keys, torch.zeros(1))

    @pytest.mark.parametrize("chunk", [None, 9])
    def test_b41_padding_is_not_in_the_statistics(self, chunk: int | None) -> None:
        """Whatever stands in padding, also as the first block or all of a row: real tokens read the same bits, all is finite."""
        import torch

        keys, values = self.states(rows=4)
        mask = torch.ones(4, self.long, dtype=torch.bool)
        mask[1, :3], mask[2, : self.long - 2], mask[3] = False, False, False
        seen = []
        for scale in (0.0, 1e4):
            padded = [torch.where(mask[:, None, :, None], t, scale * (1 + t.abs())) for t in (keys, values)]
            layer = self.fill(*padded, mask=mask, chunk=chunk)
            assert all(t.isfinite().all() for t in layer.read())
            seen.append([torch.where(mask[:, None, :, None], t, 0) for t in layer.read()])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))

    def test_padding_is_read_off_the_positions_of_generate(self) -> None:
        """Left padding known from ``position_ids`` is stored as the same padding said by ``padding()``."""
        import torch

        model, batch = self.model(), self.padded("left", 3, self.long)
        told, read = self.cache(model), self.cache(model)
        told.padding(batch["attention_mask"])
        for cache in (told, read):
            self.generate(model, batch, cache=cache, max_new_tokens=2)
        for a, b in zip(told.own_layers, read.own_layers, strict=True):
            assert torch.equal(a.state["start"], torch.tensor([0, 2, 4]))
            assert all(torch.equal(a.state[n], b.state[n]) for n in a.state)

    def test_a_padded_batch_generates_like_its_rows(self) -> None:
        """Short texts: the tokens of every row alone."""
        import torch

        model, batch, new = self.model(), self.padded("left", 3, 8), min(6, (self.window or 16) - 8)
        together = self.generate(model, batch, cache=self.cache(model), max_new_tokens=new).sequences
        for i in range(3):
            row = {"input_ids": batch["input_ids"][i : i + 1, 2 * i :]}
            alone = self.generate(model, row, cache=self.cache(model), max_new_tokens=new).sequences
            assert torch.equal(alone[0, -new:], together[i, -new:])

    # -- life of a cache ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("chunk", [None, 1, 13])
    def test_what_is_committed_never_changes(self, chunk: int | None) -> None:
        """Bytes of what is stored in the method's form: later tokens are added behind them."""
        import torch

        keys, values = self.states(rows=2, tokens=3 * self.long)
        cache, layer = self.layer()
        layer.update(keys[:, :, : self.long], values[:, :, : self.long])
        grown = False
        for begin in range(self.long, 3 * self.long, chunk or self.long):
            before = {n: t.clone() for n, t in layer.committed().items()}
            part = slice(begin, begin + (chunk or self.long))
            layer.update(keys[:, :, part], values[:, :, part])
            for name, old in before.items():
                now = layer.committed()[name]
                assert torch.equal(now[:, :, : old.shape[2]], old), f"{name} was changed"
                grown |= now.shape[2] > old.shape[2]
        assert grown or self.window is None
        assert cache.get_seq_length() == 3 * self.long

    def test_bytes_are_those_of_the_formula(self) -> None:
        """Counted over the tensors, whole storages, against the published count; per token as well."""
        for tokens in (0, 1, min(self.window or 16, 16), self.long, 2 * self.long + 3):
            cache, layer = self.layer()
            if tokens:
                layer.update(*self.states(rows=2, tokens=tokens))
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layer.state.values() if t.numel()}
            assert layer.nbytes == (layer.formula(2, HEADS, DIM, DIM) if tokens else 0)
            assert sum(held.values()) == layer.nbytes, "tensors keep more alive than they show"
            if tokens:
                assert cache.bytes_per_token() * tokens * 2 == pytest.approx(cache.nbytes * len(cache.own_layers))

    def test_b42_two_questions_to_copies_of_one_prefix(self) -> None:
        """Each copy answers as if it were alone; the copied cache stays as it was."""
        import torch

        model, prefix = self.model(), self.ids(1, self.long, seed=1)
        cache = self.cache(model)
        with torch.no_grad():
            model(input_ids=prefix, cache=cache)
        before = {n: t.clone() for n, t in cache.own_layers[0].state.items()}
        for seed in (2, 3):
            asked = {"input_ids": torch.cat((prefix, self.ids(1, 5, seed)), dim=1)}
            alone = self.cache(model)
            with torch.no_grad():
                model(input_ids=prefix, cache=alone)
            found = self.generate(model, asked, cache=copy.deepcopy(cache))
            assert torch.equal(found.sequences, self.generate(model, asked, cache=alone).sequences)
            self.unchanged(cache.own_layers[0], before, self.long)

    def test_turns_of_a_conversation(self) -> None:
        """A second turn on the same cache goes on where the first ended, as by feeding the same chunks."""
        import torch

        cache = self.cache(model := self.model())
        first = self.generate(model, {"input_ids": self.ids(1, self.long)}, cache=cache, max_new_tokens=5).sequences
        assert cache.get_seq_length() == self.long + 4  # the last token was not seen yet
        asked = torch.cat((first, self.ids(1, 3, seed=4)), dim=1)
        by_hand = copy.deepcopy(cache)
        with torch.no_grad():
            expected = model(input_ids=asked[:, self.long + 4 :], cache=by_hand).logits[:, -1]
        found = self.generate(model, {"input_ids": asked}, cache=cache, max_new_tokens=3)
        assert off(found.logits[0], expected) <= self.tolerance
        assert cache.get_seq_length() == asked.shape[1] + 2

    def test_crop_inside_what_is_exact(self) -> None:
        """Tokens taken back are as if they had never come."""
        import torch

        keys, values = self.states(tokens=self.long + 3)
        layer = self.fill(keys, values)
        can = min(layer.removable(), 3)
        layer.crop(0)
        layer.crop(-can)
        assert layer.length == self.long + 3 - can
        expected = self.fill(keys, values)
        assert all(torch.equal(a, b[:, :, : layer.length]) for a, b in zip(layer.read(), expected.read(), strict=True))
        layer.update(keys[:, :, layer.length :], values[:, :, layer.length :])
        assert all(torch.equal(a, b) for a, b in zip(layer.read(), expected.read(), strict=True))

    def test_crop_past_the_window_is_refused(self) -> None:
        """Before anything is changed, in any layer; a positive number as well."""
        import torch

        from hfplug.errors import HfplugError

        model = self.model("gemma3")
        cache = self.cache(model)
        with torch.no_grad():
            model(input_ids=self.ids(1, self.long), cache=cache)
        layer, stock = cache.own_layers[0], cache.layers[0]
        before, kept = {n: t.clone() for n, t in layer.state.items()}, stock.keys.clone()
        wrong = [1] if self.window is None else [1, -layer.removable() - 1, -self.long]
        for tokens in wrong:
            for whole in (cache, layer):
                with pytest.raises(HfplugError, match=r"crop\("):
                    whole.crop(tokens)
        if layer.removable():
            with pytest.raises(HfplugError, match="window of 4 tokens"):  # the sliding layer cannot, so nobody does
                cache.crop(-1)
        self.unchanged(layer, before, self.long)
        assert torch.equal(stock.keys, kept)

    def test_reset_is_a_new_cache(self) -> None:
        """The same tokens give the same bits again."""
        import torch

        keys, values = self.states()
        expected = (layer := self.fill(keys, values)).read()
        layer.reset()
        assert (layer.length, layer.nbytes, layer.rows, layer.is_initialized) == (0, 0, 0, False)
        layer.update(keys, values)
        assert all(torch.equal(a, b) for a, b in zip(layer.read(), expected, strict=True))

    def test_offload_and_prefetch_lose_nothing(self) -> None:
        """Everything stored is moved, not the exact part alone."""
        import torch

        expected = (layer := self.fill(*self.states())).read()
        layer.offload()
        assert all(t.device.type == "cpu" for t in layer.state.values())
        layer.prefetch()
        assert all(torch.equal(a, b) for a, b in zip(layer.read(), expected, strict=True))
        layer.device = torch.device("meta")
        layer.prefetch()
        assert all(t.device.type == "meta" for t in layer.state.values())
        aside = [name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)]
        assert not aside, "tensors outside of state"

    def test_no_gradient_is_kept(self) -> None:
        """What is stored holds no graph; the chunk itself keeps its gradient."""
        keys, values = (t.requires_grad_() for t in self.states())
        cache, layer = self.layer()
        found, _ = layer.update(keys, values)
        assert found.requires_grad
        assert not any(t.requires_grad for t in layer.state.values())
        copy.deepcopy(cache)

    # -- refusals -----------------------------------------------------------------------------------------------------------

    def test_b10_static_caches_are_refused(self) -> None:
        """A layer in a static cache is an error, never other text; ``cache_implementation`` beside it is transformers' error."""
        from transformers import StaticCache

        from hfplug.errors import UnsupportedError

        cache = self.cache(model := self.model())
        assert not cache.is_compileable
        static = StaticCache(config=model.config, max_cache_len=64)
        static.layers[1] = type(cache.own_layers[1])(cache.options, model.config, 1)
        with pytest.raises(UnsupportedError, match="static cache"):
            self.generate(model, {"input_ids": self.ids(1, 6)}, cache=static)
        with pytest.raises(ValueError, match="cache_implementation"):
            self.generate(model, {"input_ids": self.ids(1, 6)}, cache=cache, cache_implementation="static")

    def test_assisted_decoding_is_refused(self) -> None:
        """It takes tokens back that may be stored already: transformers' error, before anything is generated."""
        model = self.model()
        with pytest.raises(ValueError, match="crop"):
            self.generate(model, {"input_ids": self.ids(1, 6)}, cache=self.cache(model), prompt_lookup_num_tokens=2)

    def test_b43_no_quantisation_backend_is_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With neither quanto nor hqq importable, whether or not they are installed."""
        import sys

        for name in ("optimum", "optimum.quanto", "quanto", "hqq"):
            monkeypatch.setitem(sys.modules, name, None)  # an import of it now fails
        model = self.model()
        cache = self.cache(model)
        self.generate(model, {"input_ids": self.ids(1, self.long)}, cache=cache, max_new_tokens=2)
        assert cache.get_seq_length() == self.long + 1

    def test_layer_types(self) -> None:
        """Sliding layers are transformers' own and hold the stock bits; types that keep something else are named and refused."""
        import torch
        from transformers import DynamicCache

        from hfplug.errors import UnsupportedError

        model = self.model("gemma3")
        ours, stock = self.cache(model), DynamicCache(config=model.config)
        assert type(ours.layers[0]) is type(stock.layers[0])
        assert len(ours.own_layers) == 1
        with torch.no_grad():
            for cache in (ours, stock):
                model(input_ids=self.ids(2, self.long), cache=cache)
        assert torch.equal(ours.layers[0].keys, stock.layers[0].keys)
        assert ours.get_mask_sizes(1, 0) == stock.get_mask_sizes(1, 0)
        config = copy.deepcopy(model.config)
        config.layer_types = ["full_attention", "hybrid"]
        with pytest.raises(UnsupportedError, match="'hybrid'"):
            self.cache(config)
        config.layer_types = ["sliding_attention"] * 2
        with pytest.raises(UnsupportedError, match="no layer with full attention"):
            self.cache(config)

    def test_wrong_arguments_are_named(self) -> None:
        """Options, models, masks."""
        from hfplug.errors import ConfigError
        from hfplug.seams.cache import config, make

        model = tiny_llama()
        known = next(iter(self.options), None)
        if known is not None:
            with pytest.raises(ConfigError, match=f"did you mean '{known}'"):
                make(self.method, model, **{f"{known}x": 1})
            with pytest.raises(ConfigError, match="give one of the two"):
                make(config(self.method, **self.options), model, **self.options)
        with pytest.raises(ConfigError, match=r"model\.config"):
            make(self.method, "llama", **self.options)
        with pytest.raises(ConfigError, match=r"\(rows, tokens\)"):
            self.cache(model).padding(self.ids(1, 4)[0])
        assert self.cache(tiny_gpt2()).get_seq_length() == 0


__all__ = ["DIM", "HEADS", "CacheContract"]
