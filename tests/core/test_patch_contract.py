"""The contract of patches holds for a right one, and each fault turns the test that is named for it red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_toys import Gain, Right, fault, gain, installed
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import hfplug
from hfplug.errors import HfplugError
from hfplug.testing.patch import PatchContract
from hfplug.testing.patch_models import FAMILIES


class TestRight(PatchContract):
    method = "toy_gain"
    # The toy is installed in this process alone.
    test_b01_a_fresh_process_loads_the_model = None
    test_b58_two_ranks_train_as_one_process = None

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed(Right):
            yield


# -- faults: what it does, the test that must see it, the family ------------------------------------------------------------


def _leaves_an_attribute(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    layer.toy_was_here = True


def _unrecorded(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    layer.mlp.act_fn = nn.Tanh()


def _closure(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    own = Gain(decoder.config.hidden_size, next(layer.parameters()))
    ledger.add_module(layer, "toy_gain", own)

    def hook(module: Any, args: Any, output: Any) -> Any:
        return own.change(output)

    ledger.hook(layer, "forward", hook)


def _on_the_class(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    cls = type(layer.mlp)
    stock = cls.forward
    if index == 0:
        ledger.set_attr(cls, "forward", lambda module, x: 0.5 * stock(module, x))


def _a_plain_tensor(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    layer.toy_gain.shift = torch.randn(decoder.config.hidden_size)


def _only_live(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    if not layer.toy_gain.gain.is_meta:
        layer.toy_gain.register_parameter("more", nn.Parameter(torch.zeros(3)))


def _new_weights(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    weight = layer.self_attn.q_proj.weight
    ledger.set_item(layer.self_attn.q_proj._parameters, "weight", nn.Parameter(torch.empty_like(weight).copy_(weight.detach())))


class _Remembers:
    last: torch.Tensor | None = None

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, hidden.detach().mean()
        return Gain.change(self, hidden) + (0.0 if before is None else 1e-2 * before)  # type: ignore[arg-type]


def _over_tokens(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return Gain.change(self, hidden) + 0.1 * hidden.mean(1, keepdim=True)


def _over_rows(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return Gain.change(self, hidden) + 0.1 * hidden.mean((0, 1), keepdim=True)


def _no_gradient(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (1 + self.gain.detach())


def _noisy(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return Gain.change(self, hidden) + 1e-3 * torch.randn_like(hidden)


def _breaks(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return Gain.change(self, hidden)


def _shifted(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (1 + self.gain) + 1e-3


def _nothing(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 0 * self.gain


def _in_float64(self: Any, width: int, like: torch.Tensor) -> None:
    Gain.__init__(self, width, like)
    self.gain = nn.Parameter(torch.zeros(width, dtype=torch.float64))


def _by_length(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return Gain.change(self, hidden) * (1 if hidden.shape[1] > 1 else -1)


FAULTS: list[tuple[Any, str, tuple[Any, ...]]] = [
    (fault("Left", on_layer=_leaves_an_attribute), "test_b07_removing_restores_everything", ("Llama",)),
    (fault("Unrecorded", on_layer=_unrecorded), "test_b07_removing_restores_everything", ("Llama",)),
    (fault("Closure", on_layer=_closure), "test_b18_other_models_stay_stock", ()),
    (fault("OnTheClass", on_layer=_on_the_class), "test_b18_other_models_stay_stock", ()),
    (fault("Tensor", on_layer=_a_plain_tensor, module=type("T", (Gain,), {"change": lambda s, h: Gain.change(s, h) + s.shift})),
     "test_b50_a_reloaded_model_is_the_model", ("Llama", Path)),
    (fault("OnlyLive", on_layer=_only_live), "test_the_plan_is_what_apply_does", ("Llama",)),
    (fault("NewWeights", on_layer=_new_weights), "test_b19_weights_stay_the_models_own", ("Llama",)),
    (gain("Wide", __init__=_in_float64), "test_b19_weights_stay_the_models_own", ("Llama",)),
    (gain("Shifted", change=_shifted), "test_a_fresh_patch_is_the_identity_where_promised", ("Llama",)),
    (gain("Nothing", change=_nothing), "test_a_fresh_patch_is_the_identity_where_promised", ("Llama",)),
    (gain("Tokens", change=_over_tokens), "test_b10_decoding_is_recomputation", ("Llama",)),
    (gain("Tokens", change=_over_tokens), "test_a_prefill_in_chunks_is_one_prefill", ("Llama",)),
    (gain("Tokens", change=_over_tokens), "test_padding_and_batch_do_not_count", ("Llama", "left")),
    (gain("Tokens", change=_over_tokens), "test_b12_packed_documents_do_not_see_each_other", ("Llama",)),
    (gain("Tokens", change=_over_tokens), "test_nothing_flows_back_from_later_tokens", ("Llama",)),
    (gain("ByLength", change=_by_length), "test_assisted_decoding", ()),
    (gain("Rows", change=_over_rows), "test_padding_and_batch_do_not_count", ("Llama", "right")),
    (gain("Rows", change=_over_rows), "test_beams", ()),
    (gain("Gradient", change=_no_gradient), "test_b56_checkpointing_changes_no_gradient", ("Llama", False)),
    (gain("Noisy", change=_noisy), "test_b56_checkpointing_changes_no_gradient", ("Llama", True)),
    (gain("Noisy", change=_noisy), "test_the_same_twice", ()),
    (gain("Memory", change=_Remembers.change, last=None), "test_the_same_twice", ()),
    (gain("Breaks", change=_breaks), "test_compiled", ()),
    (gain("Uninitialised", reset_parameters=lambda self: nn.init.ones_(self.gain)),
     "test_a_stock_checkpoint_fills_a_recorded_configuration", (Path,)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "test", "arguments"), FAULTS, ids=lambda v: getattr(v, "__name__", None))
def test_a_fault_turns_its_test_red(cls: Any, test: str, arguments: tuple[Any, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", LlamaMLP.forward)  # taken back also where the fault leaves it changed
    contract = TestRight()
    arguments = tuple(tmp_path if a is Path else a for a in arguments)
    red: tuple[type[BaseException], ...] = (AssertionError, HfplugError)
    if test == "test_compiled":
        red = (*red, torch._dynamo.exc.Unsupported)
    if cls.__name__ in ("Wide", "Tensor"):
        red = (*red, RuntimeError)  # torch's own: two dtypes, no data
    with installed(cls), pytest.raises(red):
        getattr(contract, test)(*arguments)


# -- faults that apply itself sees ------------------------------------------------------------------------------------------


def _first_alone(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    if index == 0:
        Right.on_layer(self, decoder, index, layer, ledger)


def _never_called(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    ledger.add_module(layer, "spare", nn.ModuleList([nn.Identity()]))
    ledger.hook(layer.spare[0], "forward", Gain(1, next(layer.parameters())).after)


def _fails_late(self: Any, decoder: Any, index: int, layer: Any, ledger: Any) -> None:
    Right.on_layer(self, decoder, index, layer, ledger)
    if index == 1:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (_first_alone, r"patched 1 of 2 layers of LlamaForCausalLM: nothing was changed in layer 1"),
        (lambda *_: None, r"patched 0 of 2 layers"),
        (_never_called, r"patched 0 of 2 layers of LlamaForCausalLM: 'model\.layers\.0\.spare\.0' is not called"),
        (_fails_late, "no"),
    ],
)
def test_b17_a_patch_that_does_not_take_is_an_error_and_nothing_stays(how: Any, message: str) -> None:
    from hfplug.testing.patch_runs import portrait

    model = FAMILIES["Llama"]()
    before = portrait(model)
    with installed(fault("Dead", on_layer=how)), pytest.raises((HfplugError, RuntimeError), match=message):
        hfplug.apply(model, "toy_gain")
    assert portrait(model) == before


def test_layers_may_be_chosen() -> None:
    chosen = fault("Second", on_layer=_first_alone, layers=lambda self, decoder: [0])
    with installed(chosen):
        model = FAMILIES["Llama"]()
        assert hfplug.apply(model, "toy_gain").plan.layers == (0,)
        assert "1 of 2 layers" in repr(hfplug.applied(model)[0])
