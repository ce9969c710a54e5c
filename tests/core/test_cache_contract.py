"""The contract of cache methods holds for a toy cache, and each fault turns the test that is named for it red."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_toys import Halved, ToyCacheConfig, installed

import hfplug
from hfplug.errors import ConfigError, HfplugError
from hfplug.testing.cache import CacheContract


class TestToy(CacheContract):
    method, options, window, long = "toy_cache", {"block": 16}, 16, 40

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed():
            yield


# -- faults ------------------------------------------------------------------------------------------------------------


def _half(layer: Any, change: Any) -> None:
    for name in ("keys_half", "values_half"):
        layer.state[name] = change(layer.state[name])


class ReordersTheWindowOnly(Halved):
    def reorder_cache(self, beam_idx: Any) -> None:
        kept = {n: t for n, t in self.state.items() if n.endswith("_half")}
        super().reorder_cache(beam_idx)
        self.state |= kept


class RepeatsTheWindowOnly(Halved):
    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        _half(self, lambda t: t.repeat_interleave(1, 0).roll(1, 0))


class SelectsOthers(Halved):
    def batch_select_indices(self, indices: Any) -> None:
        super().batch_select_indices((indices + 1) % self.rows)


class StoresAgain(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        _half(self, lambda t: t * 0.9)
        super().append(keys, values, real)


class MasksOneMore(Halved):
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length + 1, 0


class CountsThePast(Halved):
    def get_seq_length(self) -> int:
        return self.state["keys_half"].shape[2] if self.state else 0


class MixesRows(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        super().append(keys + 1e-3 * keys.mean(0, keepdim=True), values, real)


class CountsPadding(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        super().append(keys + 0 * keys + 1e-6 * keys.mean(2, keepdim=True), values, real)


class IgnoresPositions(Halved):
    def _real(self, attention: Any, rows: int, new: int) -> Any:
        return super()._real({}, rows, new)


class KeepsStoragesAlive(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        super().append(keys, values, real)
        self.state["keys"] = torch.cat((self.state["keys_half"].to(keys.dtype), self.state["keys"]), dim=2)[
            :, :, self.state["keys_half"].shape[2] :
        ]


class CountsWrong(Halved):
    def formula(self, *sizes: int) -> int:
        return super().formula(*sizes) + (self.length > 20)


class HoldsATensorOutside(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        super().append(keys, values, real)
        self.state |= {"values": self.state["values"]}
        self.aside = self.state.pop("keys")

    def read(self) -> Any:
        self.state["keys"] = self.aside
        found = super().read()
        del self.state["keys"]
        return found


class CropsAnything(Halved):
    def check_crop(self, tokens_to_remove: int) -> None:
        return


class CropsWrongly(Halved):
    def remove(self, tokens: int) -> None:
        super().remove(tokens)
        self.state["keys"] = self.state["keys"] + 1


class KeepsAfterReset(Halved):
    def reset(self) -> None:
        self.length = 0


class Everywhere(Halved):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.owned = True
        return super().update(*args, **kwargs)


class SaysItCompiles(Halved):
    is_compileable = True


class StoresNothing(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        block, self.options = self.options.block, ToyCacheConfig(10**6)
        super().append(keys, values, real)
        self.options = ToyCacheConfig(block)


class RoundsTheWindow(Halved):
    def append(self, keys: Any, values: Any, real: Any) -> None:
        super().append(keys.bfloat16().to(keys.dtype), values, real)


class RoundsTheChunk(Halved):
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys.bfloat16().to(keys.dtype), values


class KeepsTheGraph(Halved):
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().update(key_states, value_states, *args, **kwargs)
        self.state["keys"] = self.state["keys"] + 0 * key_states.sum()
        return found


class TakesAnyRows(Halved):
    rows = property(lambda self: 10**6 if self.state else 0)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.length:
            self.state = {n: t[: key_states.shape[0]] for n, t in self.state.items()}
        self.rows_now = key_states.shape[0]
        return super().update(key_states, value_states, *args, **kwargs)


FAULTS = [
    (ReordersTheWindowOnly, "test_b42_rows_move_with_everything_they_store", ("reorder", "long")),
    (RepeatsTheWindowOnly, "test_b42_rows_move_with_everything_they_store", ("repeat", "long")),
    (SelectsOthers, "test_b42_rows_move_with_everything_they_store", ("select", "short")),
    (StoresAgain, "test_what_is_committed_never_changes", (None,)),
    (MasksOneMore, "test_b42_lengths_and_mask_sizes_are_exact", (7,)),
    (CountsThePast, "test_b42_lengths_and_mask_sizes_are_exact", (7,)),
    (MixesRows, "test_rows_do_not_know_each_other", ()),
    (CountsPadding, "test_b41_padding_is_not_in_the_statistics", (None,)),
    (IgnoresPositions, "test_padding_is_read_off_the_positions_of_generate", ()),
    (KeepsStoragesAlive, "test_bytes_are_those_of_the_formula", ()),
    (CountsWrong, "test_bytes_are_those_of_the_formula", ()),
    (HoldsATensorOutside, "test_offload_and_prefetch_lose_nothing", ()),
    (CropsAnything, "test_crop_past_the_window_is_refused", ()),
    (CropsWrongly, "test_crop_inside_what_is_exact", ()),
    (KeepsAfterReset, "test_reset_is_a_new_cache", ()),
    (Everywhere, "test_b10_static_caches_are_refused", ()),
    (SaysItCompiles, "test_b10_static_caches_are_refused", ()),
    (StoresNothing, "test_the_method_is_there", ()),
    (RoundsTheWindow, "test_b41_the_window_is_bit_exact", ()),
    (RoundsTheChunk, "test_a_chunk_attends_to_itself_exactly", ()),
    (KeepsTheGraph, "test_no_gradient_is_kept", ()),
    (TakesAnyRows, "test_another_number_of_rows_is_refused", ()),
]


@pytest.mark.parametrize(("fault", "test", "arguments"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_a_fault_turns_its_test_red(fault: Any, test: str, arguments: tuple[Any, ...]) -> None:
    class Contract(CacheContract):
        method, options, window, long = "toy_cache", {"block": 16}, 16, 40

    with installed(fault), pytest.raises((AssertionError, HfplugError, RuntimeError, pytest.fail.Exception)):
        getattr(Contract(), test)(*arguments)


def test_a_cache_that_replaces_sliding_layers_is_found() -> None:
    with installed() as cls:

        class Contract(CacheContract):
            method, options, window, long = "toy_cache", {"block": 16}, 16, 40

            def cache(self, model: Any, **options: Any) -> Any:
                made = super().cache(model, **options)
                if len(made.own_layers) < len(made.layers):
                    made.layers[0] = cls.layer_class(made.options, made.own_layers[0].config, 0)
                    made.layers[0].owned = True
                return made

        with pytest.raises(AssertionError):
            Contract().test_layer_types()


# -- the seam ----------------------------------------------------------------------------------------------------------


def test_caches_by_name_and_configuration() -> None:
    from hfplug.testing.models import tiny_llama

    with installed() as cls:
        made = hfplug.caches.make("toy_cache", tiny_llama(), block=32)
        assert type(made) is cls
        assert made.options == hfplug.caches.config("toy_cache", block=32)
        assert type(hfplug.caches.make(made.options, tiny_llama().config)) is cls
        assert hfplug.caches.ToyCache is cls
        assert "ToyCacheConfig" in dir(hfplug.caches)
        assert "block=32" in repr(made)
        with pytest.raises(ConfigError, match="did you mean 'toy_cache'"):
            hfplug.caches.make("toy_cach", tiny_llama())
        with pytest.raises(ConfigError, match="neither the name"):
            hfplug.caches.make(3, tiny_llama())
        with pytest.raises(ConfigError, match="takes one ToyCacheConfig"):
            cls(tiny_llama().config, ToyCacheConfig(), block=3)
        with pytest.raises(ConfigError, match=r"block='x' \(str\)"):
            hfplug.caches.config("toy_cache", block="x")


def test_a_failing_append_leaves_everything_as_it_was() -> None:
    class Fails(Halved):
        def append(self, keys: Any, values: Any, real: Any) -> None:
            super().append(keys, values, real)
            if keys.shape[2] == 5:
                raise ValueError("no")

    class Contract(CacheContract):
        method, options = "toy_cache", {"block": 16}

    with installed(Fails):
        kit = Contract()
        layer = kit.fill(*kit.states(tokens=20))
        before = {n: t.clone() for n, t in layer.state.items()}
        with pytest.raises(ValueError, match="no"):
            layer.update(*kit.states(tokens=5))
        kit.unchanged(layer, before, 20)
        _, fresh = kit.layer()
        with pytest.raises(ValueError, match="no"):
            fresh.update(*kit.states(tokens=5))
        assert not fresh.is_initialized
        assert not fresh.state
