"""The contract of attention methods holds for exact attention, and each fault turns the test that is named for it red."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from attention_toys import Exact, Local, Narrow, blocks, installed

from hfplug.attention import HANDLES, AttentionCall
from hfplug.testing.attention import AttentionContract
from hfplug.testing.attention_models import reference


class _Toy(AttentionContract):
    toy: Any = Exact

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed(self.method, self.toy):
            yield


class TestExact(_Toy):
    method = "toy_exact"
    options: ClassVar[dict[str, Any]] = {"level": 3}


class TestNarrow(_Toy):
    method = "toy_narrow"
    toy = Narrow


class TestLocal(_Toy):
    method = "toy_local"
    toy = Local
    exact_when_short = 32

    def reference(self, call: AttentionCall) -> torch.Tensor:
        whole = call.mask is not None or call.query.shape[2] < call.key.shape[2] or call.key.shape[2] <= 32
        return reference(call if whole else dataclasses.replace(call, segments=blocks(call)))


# -- faults ------------------------------------------------------------------------------------------------------------


def _replaced(**changes: Any) -> Any:
    """Exact attention of a call that was read wrongly: each change is a function of the call."""

    class Mutant:
        handles = frozenset(HANDLES)

        def attend(self, call: AttentionCall) -> Any:
            return dataclasses.replace(call, **{name: change(call) for name, change in changes.items()}).exact()

    return Mutant


def _top_left(call: AttentionCall) -> torch.Tensor | None:
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.mask is not None or queries in (1, keys):
        return call.mask
    return torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]


def _all_one(call: AttentionCall) -> torch.Tensor | None:
    return None if call.segments is None else call.segments.clamp(max=1)


class _Noisy(Exact):
    def attend(self, call: AttentionCall) -> Any:
        out, weights = call.exact()
        return out + 1e-6 * torch.randn_like(out), weights


class _Detached(Exact):
    def attend(self, call: AttentionCall) -> Any:
        return dataclasses.replace(call, key=call.key.detach()).exact()


class _Lazy(Exact):
    def attend(self, call: AttentionCall) -> Any:
        return call.exact()[0], None


class _Tiled(Exact):
    """Query head h on key head h % kv_heads, where it is h // groups."""

    def attend(self, call: AttentionCall) -> Any:
        groups = call.query.shape[1] // call.key.shape[1]
        return dataclasses.replace(call, key=call.key.repeat(1, groups, 1, 1), value=call.value.repeat(1, groups, 1, 1)).exact()


class _Absorbing(Exact):
    """Keeps what a call left behind: the second call is not the first."""

    def attend(self, call: AttentionCall) -> Any:
        self.level = getattr(self, "level", 0.0) + 1e-4
        out, weights = call.exact()
        return out + self.level, weights


FAULTS: list[tuple[str, Any, str, tuple[Any, ...]]] = [
    ("padding", _replaced(segments=lambda c: None), "test_b09_padding_does_not_count", ("llama", "left")),
    ("padding", _replaced(segments=lambda c: None), "test_b09_every_call_equals_the_reference", ("qwen3", "left-padded")),
    ("padding", _replaced(segments=lambda c: None), "test_b14_a_family_equals_stock_or_is_refused", ("gpt2",)),
    ("sinks", _replaced(s_aux=lambda c: None), "test_b14_a_family_equals_stock_or_is_refused", ("gpt_oss",)),
    ("sinks", _replaced(s_aux=lambda c: None), "test_b09_every_call_equals_the_reference", ("gpt_oss", "plain")),
    ("softcap", _replaced(softcap=lambda c: None), "test_b14_a_family_equals_stock_or_is_refused", ("gemma2",)),
    ("windows", _replaced(mask=lambda c: None), "test_b14_a_family_equals_stock_or_is_refused", ("gemma3",)),
    ("windows", _replaced(mask=lambda c: None), "test_b10_decoding_is_recomputation", ("gemma3", "static")),
    ("alignment", _replaced(mask=_top_left), "test_a_prefill_in_chunks_is_one_prefill", ()),
    ("alignment", _replaced(mask=_top_left), "test_b09_every_call_equals_the_reference", ("llama", "chunked")),
    ("alignment", _replaced(mask=_top_left), "test_assisted_decoding", ()),
    ("documents", _replaced(segments=_all_one), "test_b12_packed_documents_do_not_see_each_other", ("llama",)),
    ("documents", _replaced(segments=_all_one), "test_long_calls_equal_the_methods_own_reference", ("packed",)),
    ("scaling", _replaced(scaling=lambda c: 1.0), "test_b14_a_family_equals_stock_or_is_refused", ("llama",)),
    ("causality", _replaced(causal=lambda c: False), "test_nothing_flows_back_from_later_tokens", ()),
    ("dropout", _replaced(dropout=lambda c: 0.0), "test_dropout_is_applied_or_refused", ()),
    ("dropout", _replaced(dropout=lambda c: 0.3), "test_dropout_is_applied_or_refused", ()),
    ("heads", _Tiled, "test_grouped_queries_are_repeated_keys", ()),
    ("noise", _Noisy, "test_the_same_twice", ()),
    ("state", _Absorbing, "test_b56_checkpointing_changes_no_gradient", (False,)),
    ("state", _Absorbing, "test_b18_copies_are_independent", ()),
    ("gradient", _Detached, "test_gradients_equal_the_reference", ("plain",)),
    ("weights", _Lazy, "test_b13_attention_weights_are_real_or_refused", ("gpt2",)),
]


@pytest.mark.parametrize(
    ("fault", "mutant", "test", "arguments"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fault_turns_its_test_red(fault: str, mutant: Any, test: str, arguments: tuple[Any, ...]) -> None:
    contract = TestExact()
    with installed(contract.method, mutant), pytest.raises(AssertionError):
        getattr(contract, test)(*arguments)


def test_an_approximation_that_does_nothing_is_seen() -> None:
    contract = TestLocal()
    contract.reference = lambda call: None  # type: ignore[method-assign, assignment]
    with installed(contract.method, Exact), pytest.raises(AssertionError, match="does nothing"):
        contract.test_long_calls_equal_the_methods_own_reference("plain")
