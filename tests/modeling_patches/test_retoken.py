"""ReToken and MoRT compute what their formulas say, on the tokens they should, and learn only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from retoken_kit import OPTIONS, SOME, gradients, holders, ids_of, logits, made, stack_of, tables
from torch import Tensor, nn

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import decoder_of
from hfplug.modeling_patches import token_ids
from hfplug.modeling_patches.retoken import reference
from hfplug.modeling_patches.retoken.patch import _where
from hfplug.modeling_patches.retoken.tables import mixture
from hfplug.testing.kernels import assert_rms
from hfplug.testing.patch_models import FAMILIES

# -- the formulas ------------------------------------------------------------------------------------------------------------


def vector_of(model: Any, method: str, index: int, options: dict[str, Any]) -> Callable[..., Tensor | None]:
    part, codes = holders(model, method)[index].modulation, getattr(stack_of(model), method).codes
    ids, rank = options.get("ids"), options.get("rank", 0)

    def vector(table: int, token: int) -> Tensor | None:
        row = token if ids is None else ids.index(token) if token in ids else None
        if row is None:
            return None
        if rank:
            basis: Tensor = part.basis[table * rank : (table + 1) * rank]
            return codes.weight[row].double() @ basis.double()
        size = 64 if ids is None else len(ids)
        found: Tensor = part.table.weight[table * size + row]
        return found

    return vector


def seen(model: Any, index: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer was given, what its MLP computed before the patch, and after."""
    decoder, kept = decoder_of(model), {}
    layer = decoder.layers[index]
    path, _ = _where(decoder)
    target = layer.get_submodule(path)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept["input"] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        kept["stock"], kept["patched"] = type(module).forward(module, *args), output

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True), target.register_forward_hook(after)]
    logits(model, ids)
    for handle in handles:
        handle.remove()
    shape = (*ids.shape, -1)
    return kept["input"].view(shape), kept["stock"].view(shape), kept["patched"].view(shape)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT-NeoX", "OPT"])
def test_retoken_is_its_formula(family: str, options: dict[str, Any]) -> None:
    model = made("retoken", family, **options)
    for length in (12, 60):  # fewer and more tokens than rows
        ids = ids_of(2, length)
        for index in range(2):
            _, stock, patched = seen(model, index, ids)
            vector = vector_of(model, "retoken", index, options)
            scale = holders(model, "retoken")[index].modulation.scale
            p = reference.gate(lambda x, v=vector: v(0, x), ids, scale, options.get("norm", "l2"), options.get("eps", 1e-6))
            assert (p != 1).any()
            assert_rms(patched, stock.double() * p, 1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPT-NeoX", "OPT"])
def test_mort_is_its_formula(family: str, options: dict[str, Any]) -> None:
    model, ids = made("mort", family, experts=4, top_k=2, **options), ids_of()
    for index in range(2):
        given, stock, patched = seen(model, index, ids)
        holder = holders(model, "mort")[index]
        dr = reference.routed(
            vector_of(model, "mort", index, options), ids, given, holder.router.weight, holder.modulation.scale, 2, 2,
            options.get("norm", "l2"), options.get("eps", 1e-6),
        )  # fmt: skip
        assert dr.abs().max() > 1e-2
        assert_rms(patched, stock.double() + dr, 1e-6)


def test_an_opt_model_with_its_norms_behind_is_routed_by_what_the_layer_is_given() -> None:
    model, ids = made("mort", build=lambda: FAMILIES["OPT"](do_layer_norm_before=False), experts=3), ids_of()
    given, stock, patched = seen(model, 1, ids)
    holder = holders(model, "mort")[1]
    dr = reference.routed(
        vector_of(model, "mort", 1, {}), ids, given, holder.router.weight, holder.modulation.scale, 2, 2, "l2", 1e-6
    )
    assert_rms(patched, stock.double() + dr, 1e-6)


def test_the_first_gradients_reach_the_scales_alone() -> None:
    """s = 0 makes the model what it was, and dE = 0; after one step everything learns."""
    for method in ("retoken", "mort"):
        model = made(method, stir=0)
        scales = {n for n, _ in model.named_parameters() if n.endswith("modulation.scale")}
        for acting in (False, True):
            found = {n for n, g in gradients(model.train(), ids_of()).items() if f".{method}." in n and g.abs().max() > 0}
            own = {n for n, _ in model.named_parameters() if f".{method}." in n}
            assert found == (own if acting else scales)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[2:3], ids=str)
def test_the_gate_depends_on_the_id_alone(options: dict[str, Any]) -> None:
    model, kept = made(**options), []
    ids = torch.tensor([[5, 9, 5, 11, 9], [7, 5, 5, 8, 9]])
    handle = holders(model, "retoken")[1].modulation.register_forward_hook(lambda m, a, out: kept.append(out))
    logits(model, ids)
    handle.remove()
    for token in (5, 9):
        found = kept[0][ids == token]
        assert (found == found[0]).all()
    assert (kept[0][ids == 5][0] != kept[0][ids == 9][0]).any()


def test_the_length_of_a_row_means_nothing() -> None:
    model, ids = made(), ids_of()
    expected = logits(model, ids)
    with torch.no_grad():
        for table in tables(model):
            table.weight.mul_(torch.rand(64, 1, generator=torch.Generator().manual_seed(1)) + 0.5)
    assert (logits(model, ids) - expected).abs().max() < 1e-5
    with torch.no_grad():
        tables(model)[0].weight[:, 0].mul_(3)
    assert (logits(model, ids) - expected).abs().max() > 1e-3


def test_rms_is_l2_with_a_larger_scale() -> None:
    one, other, ids = made(eps=1e-12), made(norm="rms", eps=1e-12), ids_of()
    with torch.no_grad():
        for holder in holders(one, "retoken"):
            holder.modulation.scale.mul_(32**0.5)
    assert (logits(one, ids) - logits(other, ids)).abs().max() < 1e-5


def test_a_mixture_is_of_exactly_k_and_sums_to_one() -> None:
    g = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    weights, experts = mixture(g, 2)
    assert experts.shape == (50, 2)
    assert (experts[:, 0] != experts[:, 1]).all()
    assert (weights > 0).all()
    assert torch.allclose(weights.sum(-1), torch.ones(50))
    chosen = g.gather(1, experts).sigmoid()
    assert torch.allclose(weights, chosen / chosen.sum(-1, keepdim=True))
    assert mixture(g - 1e4, 2)[0].isfinite().all()  # where sigmoids are all 0


def test_one_table_needs_no_router_and_steps_are_bounded() -> None:
    model, ids = made("mort", experts=1, top_k=1), ids_of()
    expected = logits(model, ids)
    with torch.no_grad():
        for holder in holders(model, "mort"):
            holder.router.weight.normal_(generator=torch.Generator().manual_seed(1))
    assert torch.equal(logits(model, ids), expected)
    model = made("mort", stir=3.0)
    _, stock, patched = seen(model, 1, ids)
    bound = holders(model, "mort")[1].modulation.scale.abs().max() / (2 * 2) ** 0.5
    assert 0.2 * bound < (patched - stock).norm(dim=-1).max() <= bound


def test_a_gate_is_not_rounded_to_bf16() -> None:
    """1 + 3·2^-10 rounds to 1 in bf16: the product is taken in fp32."""
    model = made(stir=0).to(torch.bfloat16)
    with torch.no_grad():
        for holder in holders(model, "retoken"):
            holder.modulation.scale.fill_(3 * 2.0**-10 * 32**0.5)
            holder.modulation.table.weight.fill_(1.0)
    p = 1 + holders(model, "retoken")[0].modulation.scale.float()[0] / 32**0.5
    _, stock, patched = seen(model, 0, ids_of(8, 12))
    assert patched.dtype == torch.bfloat16
    assert torch.equal(patched, (stock.float() * p).bfloat16())
    assert p.bfloat16() == 1
    assert not torch.equal(patched, stock)


# -- which tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["retoken", "mort"])
@pytest.mark.parametrize("rank", [0, 3])
def test_tokens_without_rows_are_left_alone(method: str, rank: int) -> None:
    model = made(method, ids=SOME, rank=rank)
    stock = FAMILIES["Llama"]().eval()
    without = ids_of(low=40)
    assert torch.equal(logits(model, without), logits(stock, without))
    mixed = torch.where(torch.arange(12) % 2 == 0, without, torch.tensor(5))
    _, before, after = seen(model, 0, mixed)
    same = (before == after).all(-1)
    assert torch.equal(same, mixed >= 40)


@pytest.mark.parametrize("method", ["retoken", "mort"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("length", [12, 60])
def test_only_rows_of_the_batch_learn(method: str, rank: int, length: int) -> None:
    model, ids = made(method, rank=rank).train(), ids_of(2, length, high=20)
    present = torch.zeros(64, dtype=torch.bool)
    present[ids] = True
    gradients(model, ids)
    for table in tables(model):
        touched = table.weight.grad.view(-1, 64, table.weight.shape[1]).abs().amax((0, 2)) > 0
        assert torch.equal(touched, present)


def test_embeddings_without_ids_are_refused_and_named_ids_are_used() -> None:
    for method in ("retoken", "mort"):
        model, ids = made(method), ids_of()
        vectors, expected = model.get_input_embeddings()(ids), logits(model, ids)
        with torch.no_grad():
            with pytest.raises(UnsupportedError, match="token_ids"):
                model(inputs_embeds=vectors)
            with token_ids(model, ids):
                assert torch.equal(model(inputs_embeds=vectors).logits, expected)
                with token_ids(model, torch.full_like(ids, -1)):
                    bare = model(inputs_embeds=vectors).logits
            assert torch.equal(bare, logits(FAMILIES["Llama"]().eval(), ids))
            with pytest.raises(UnsupportedError, match="token_ids"):
                model(inputs_embeds=vectors)


@pytest.mark.parametrize("method", ["retoken", "mort"])
@pytest.mark.parametrize("length", [1, 9])
def test_generating_from_embeddings_goes_on_with_the_new_ids(method: str, length: int) -> None:
    """The ids that were named are the prompt's; with one token in it, a later step has as many."""
    model, ids = made(method), ids_of(2, length)
    vectors = model.get_input_embeddings()(ids).detach()

    def steps(**prompt: Tensor) -> Tensor:
        found = model.generate(
            **prompt, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return torch.stack(found.logits)

    expected = steps(input_ids=ids)
    with token_ids(model, ids):
        assert torch.equal(steps(inputs_embeds=vectors), expected)
    with token_ids(model, torch.full_like(ids, -1)):
        assert not torch.equal(steps(inputs_embeds=vectors)[0], expected[0])


def test_soft_prompts_have_no_rows() -> None:
    model, ids = made(), ids_of()
    vectors = model.get_input_embeddings()(ids)
    with torch.no_grad():
        with token_ids(model, ids[:, 4:]):
            found = model(inputs_embeds=vectors).logits
        with token_ids(model, torch.cat([torch.full((2, 4), -1), ids[:, 4:]], 1)):
            assert torch.equal(model(inputs_embeds=vectors).logits, found)
        with token_ids(model, ids[:1]), pytest.raises(UnsupportedError, match=r"\(1, 12\)"):
            model(inputs_embeds=vectors)
        with token_ids(model, torch.cat([ids, ids], 1)), pytest.raises(UnsupportedError, match=r"\(2, 24\)"):
            model(inputs_embeds=vectors)


def test_named_ids_are_checked() -> None:
    model = made()
    for wrong in (torch.tensor([[64]]), torch.tensor([[-2]]), torch.tensor([3]), torch.tensor([[0.5]]), "ids"):
        with pytest.raises(ConfigError, match="ids"), token_ids(model, wrong):
            pass
    with pytest.raises(ConfigError, match="neither"), token_ids(FAMILIES["Llama"](), ids_of()):
        pass


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    model, ids = made(family="LLaVA"), ids_of()
    with pytest.raises(IndexError):
        logits(model, torch.full((1, 3), 10_000))
    assert stack_of(model).retoken.outer == []
    with torch.no_grad(), pytest.raises(UnsupportedError, match="token_ids"):
        stack_of(model)(inputs_embeds=model.get_input_embeddings()(ids))


@pytest.mark.parametrize("family", ["LLaVA", "Qwen2.5-VL"])
def test_images_keep_the_ids_of_their_places(family: str) -> None:
    """The stack is given embeddings that hold image features; the ids are those the whole model was given."""
    model = made(family=family)
    marker = model.config.image_token_id
    if family == "LLaVA":
        size = model.config.vision_config.image_size
        pixels: dict[str, Any] = {"pixel_values": torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))}
        count = model.get_image_features(**pixels, return_dict=True).pooler_output[0].shape[0]
    else:
        grid = torch.tensor([[1, 4, 4]])
        width = model.config.vision_config.in_channels * model.config.vision_config.temporal_patch_size
        width *= model.config.vision_config.patch_size**2
        patches = torch.randn(16, width, generator=torch.Generator().manual_seed(0))
        pixels, count = {"pixel_values": patches, "image_grid_thw": grid}, 4
    ids = torch.cat([ids_of(1, 4, high=50), torch.full((1, count), marker), ids_of(1, 4, high=50)], 1)
    more = {**pixels, "mm_token_type_ids": (ids == marker).int()} if family != "LLaVA" else pixels
    found = logits(model, ids, **more)
    with token_ids(model, ids):
        assert torch.equal(logits(model, ids, **more), found)
    with token_ids(model, torch.where(ids == marker, -1, ids)):
        assert not torch.equal(logits(model, ids, **more), found)


def test_a_vocabulary_that_grew_is_refused() -> None:
    model = made()
    model.resize_token_embeddings(70)
    with pytest.raises(UnsupportedError, match=r"70 embeddings.*64"):
        logits(model, ids_of())
    model = FAMILIES["Llama"]()
    model.resize_token_embeddings(70)
    hfplug.apply(model, "retoken")
    assert logits(model, torch.tensor([[69, 3]])).isfinite().all()


# -- calls -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["retoken", "mort"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_one_backward_keep_their_tokens(method: str, reentrant: bool) -> None:
    model = made(method, rank=3).train()
    batches = ids_of(seed=1), ids_of(seed=2)
    expected = {n: g.clone() for n, g in gradients(model, *batches).items()}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, *batches)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("method", ["retoken", "mort"])
@pytest.mark.parametrize("rank", [0, 3])
def test_each_table_is_read_once_per_forward(method: str, rank: int) -> None:
    model, count = made(method, rank=rank, offload=True).train(), 0

    def read(*_: Any) -> None:
        nonlocal count
        count += 1

    for table in tables(model):
        table.register_forward_hook(read)
    logits(model, ids_of())
    assert count == len(tables(model)) == (1 if rank else 2)
    if rank:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        gradients(model, ids_of())
        assert count == 2  # not again when a layer is recomputed


def test_a_layer_on_its_own_knows_no_tokens() -> None:
    model = made()
    with pytest.raises(UnsupportedError, match="outside the model's forward"):
        decoder_of(model).layers[0].mlp(torch.zeros(1, 2, 32))
