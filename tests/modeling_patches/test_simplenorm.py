"""SimpleNorm keeps the contract of patches, and what its paper says of it."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import Split, decoder_of
from hfplug.modeling_patches import SimpleNorm, build_simplenorm, lr_scale, warm_start
from hfplug.modeling_patches.simplenorm.layer import NormedConv1D, NormedLinear, PartNorm
from hfplug.testing.kernels import assert_rms
from hfplug.testing.patch import PatchContract
from hfplug.testing.patch_models import FAMILIES

IDS = torch.arange(3, 27).reshape(2, 12)


class TestSimpleNorm(PatchContract):
    method = "simplenorm"


def patched(family: str = "Llama", build: Any = None, **options: Any) -> Any:
    model = (build or FAMILIES[family])().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hfplug.apply(model, "simplenorm", **options)
    return model


def projections(model: Any) -> list[tuple[str, Any, Split]]:
    decoder = decoder_of(model)
    return [p for i in range(len(decoder.layers)) for p in decoder.projections(i)]


def parts(out: Tensor, split: Split) -> list[Tensor]:
    """Each part of a projection's output on its own, ``(..., width)``; the slow way, index by index."""
    if not split.heads:
        return list(out.split(split.sizes, -1))
    size, n = split.sizes[0], len(split.sizes)
    index = [[h * n * size + p * size + i for h in range(split.heads) for i in range(size)] for p in range(n)]
    return [out[..., torch.tensor(i)] for i in index]


def reference(x: Tensor, norm: PartNorm) -> Tensor:
    """fp64, part by part, from the definition."""
    x = x.double()
    out = torch.empty_like(x)
    for part, place in zip(parts(x, norm.split), parts(torch.arange(x.shape[-1]), norm.split), strict=True):
        centred = part - part.mean(-1, keepdim=True) if norm.kind == "layer" else part
        out[..., place] = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return out if norm.weight is None else out * norm.weight.double()


# -- the norm ------------------------------------------------------------------------------------------------------------

SPLITS = [Split(("o",), (24,)), Split(("q", "k", "v"), (16, 8, 8)), Split(("q", "k", "v"), (4, 4, 4), heads=3)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("split", SPLITS, ids=["one", "concatenated", "interleaved"])
def test_the_norm_equals_its_reference(split: Split, kind: Any, affine: bool) -> None:
    torch.manual_seed(0)
    norm = PartNorm(split, kind, 1e-5, affine, torch.empty(0))
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
    x = (3 * torch.randn(5, 7, norm.width) + 1).requires_grad_()
    out, expected = norm(x), reference(x, norm)
    assert_rms(out, expected, 1e-6, "forward")
    leaves = [x] if norm.weight is None else [x, norm.weight]
    score = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    wanted = torch.autograd.grad((expected * score).sum(), leaves)
    found = torch.autograd.grad((out * score.float()).sum(), leaves)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_rms(ours, theirs, 1e-5, "gradient")
    low = norm.bfloat16()
    rounded = x.detach().bfloat16()
    assert low(rounded).dtype == torch.bfloat16
    assert_rms(low(rounded), reference(rounded, low), 5e-3, "bf16")


@pytest.mark.parametrize("scale", [1e-2, 1e3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_has_unit_rms_at_any_scale(family: str, scale: float) -> None:
    """The whole width of each part: q, k and v apart where one matrix holds them, all heads together."""
    model = patched(family, eps=1e-12)
    with torch.no_grad():
        for _, linear, _ in projections(model):
            linear.weight.mul_(scale)
    seen = []
    for path, linear, split in projections(model):

        def look(module: Any, args: Any, output: Tensor, path: str = path, split: Split = split) -> None:
            for role, part in zip(split.roles, parts(output, split), strict=True):
                seen.append(role)
                rms = part.double().square().mean(-1).sqrt()
                assert (rms - 1).abs().max() < 1e-4, f"{path} {role}"

        linear.register_forward_hook(look)
    with torch.no_grad():
        model(input_ids=IDS)
    assert {"q", "k", "v", "o", "up", "down"} <= set(seen)


def test_interleaved_parts_are_those_gpt_neox_reads() -> None:
    model = patched("GPT-NeoX")
    attention = model.gpt_neox.layers[0].attention
    heads, size = model.config.num_attention_heads, attention.head_size
    out = attention.query_key_value(torch.randn(1, 5, 32))
    for part in out.view(1, 5, heads, 3 * size).chunk(3, dim=-1):  # as GPTNeoXAttention.forward does
        assert (part.flatten(2).square().mean(-1).sqrt() - 1).abs().max() < 1e-3
    split = next(s for p, _, s in projections(model) if p.endswith("query_key_value"))
    assert split == Split(("q", "k", "v"), (size,) * 3, heads)


def test_concatenated_parts_are_those_phi_and_gpt2_read() -> None:
    found = {p.rpartition(".")[2]: s for p, _, s in projections(FAMILIES["Phi-3"]())}
    assert found["qkv_proj"] == Split(("q", "k", "v"), (32, 16, 16))  # four heads on two
    assert found["gate_up_proj"] == Split(("gate", "up"), (48, 48))
    assert next(s for p, _, s in projections(FAMILIES["GPT-2"]()) if p.endswith("c_attn")) == Split(("q", "k", "v"), (32,) * 3)


# -- the invariances of the paper ---------------------------------------------------------------------------------------------


def test_scaling_a_weight_changes_nothing_and_its_gradient_is_orthogonal() -> None:
    model = patched(eps=0.0).double()
    expected = model(IDS).logits
    model(IDS, labels=IDS).loss.backward()
    for path, linear, _ in projections(model):
        inner = (linear.weight * linear.weight.grad).sum().abs()
        assert inner <= 1e-12 * linear.weight.norm() * linear.weight.grad.norm(), path
    with torch.no_grad():
        for index, (_, linear, _) in enumerate(projections(model)):
            linear.weight.mul_(1.5 + index)
        assert (model(IDS).logits - expected).abs().max() <= 1e-6 * expected.abs().max()  # the final norm is fp32
        before = FAMILIES["Llama"]().double()
        stock = before(IDS).logits
        before.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        assert (before(IDS).logits - stock).abs().max() > 1e-3  # without the norms it does


def test_scaling_the_input_changes_nothing_and_its_gradient_is_orthogonal() -> None:
    module = next(m for _, m, _ in projections(patched(eps=0.0).double()))
    x = torch.randn(4, 6, 32, dtype=torch.float64, requires_grad=True)
    score = torch.randn(4, 6, 32, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((module(x) * score).sum(), x)
    assert (gradient * x).sum(-1).abs().max() < 1e-12
    assert (module(7 * x) - module(x)).abs().max() < 1e-12


def test_a_bias_is_inside_the_norm() -> None:
    """Qwen2: scaling weight and bias together changes nothing, the weight alone does."""
    model = patched("Qwen2", eps=0.0)
    module = next(m for _, m, _ in projections(model) if m.bias is not None).double()
    nn.init.normal_(module.bias)
    x = torch.randn(3, 32, dtype=torch.float64)
    with torch.no_grad():
        out = module(x)
        module.weight.mul_(3)
        assert (module(x) - out).abs().max() > 1e-2
        module.bias.mul_(3)
        assert (module(x) - out).abs().max() < 1e-12


def test_scores_are_bounded_by_the_whole_width() -> None:
    """|q . k| <= sqrt(heads * key heads) * d_h * max gains; reached where all of a token's weight is in one head."""
    model = patched(eps=0.0).double()
    layer = model.model.layers[0].self_attn
    heads, grouped, size = 4, 2, layer.head_dim
    bound = math.sqrt(heads * grouped) * size * 1.5 * 0.7
    with torch.no_grad():
        layer.q_proj.norm.weight.fill_(1.5)
        layer.k_proj.norm.weight.fill_(0.7)
        for module, count in ((layer.q_proj, heads), (layer.k_proj, grouped)):
            module.weight.view(count, size, 32)[1:] = 0
            module.weight.view(count, size, 32)[0] = module.weight[0].clone()
        x = torch.randn(64, 32, dtype=torch.float64)
        q, k = layer.q_proj(x).view(64, heads, size)[:, 0], layer.k_proj(x).view(64, grouped, size)[:, 0]
        scores = (q @ k.T).abs()
    assert scores.max() <= bound * (1 + 1e-9)
    assert scores.max() >= 0.999 * bound
    assert scores.max() > 1.1 * size * 1.5 * 0.7  # norms of single heads would keep it below this


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_grows_by_one_per_branch_at_most(family: str) -> None:
    model = patched(family)
    seen: list[Tensor] = []
    for layer in decoder_of(model).layers:
        layer.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append((args or tuple(kwargs.values()))[0]), with_kwargs=True
        )
        layer.register_forward_hook(lambda m, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(input_ids=IDS)
    sizes = [h.double().square().mean(-1).sqrt() for h in seen]
    assert len(sizes) == 2 * len(decoder_of(model).layers)
    for before, after in zip(sizes[::2], sizes[1::2], strict=True):
        assert (after <= before + 2 + 1e-5).all()


# -- structure -------------------------------------------------------------------------------------------------------------------


def test_parameters_are_counted_as_in_the_paper() -> None:
    model = FAMILIES["Llama"]()
    c = model.config
    plan = hfplug.plan(model, "simplenorm")
    d, size = c.hidden_size, c.hidden_size // c.num_attention_heads
    gains = c.num_attention_heads * size + 2 * c.num_key_value_heads * size + d + 2 * c.intermediate_size + d
    assert plan.parameters == c.num_hidden_layers * (gains - 2 * d)
    assert plan.bytes == 4 * plan.parameters
    assert hfplug.plan(model, "simplenorm", affine=False).parameters == -2 * d * c.num_hidden_layers
    assert hfplug.plan(model, "simplenorm", keep_prenorm=True).parameters == c.num_hidden_layers * gains


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_keep_their_names(family: str) -> None:
    """Only norms of the layers go, only gains come; the norm before the head stays."""
    stock, model = FAMILIES[family](), patched(family)
    before, after = set(stock.state_dict()), set(model.state_dict())
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in after - before} == {"norm"}
    assert all("norm" in n or ".ln_" in n for n in before - after)
    decoder, ours = decoder_of(model), (PartNorm, NormedLinear, NormedConv1D)
    assert type(decoder.stack.get_submodule(decoder.family.final_norm)) is not nn.Identity
    for index, layer in enumerate(decoder.layers):
        left = [n for n, m in layer.named_modules() if "Norm" in type(m).__name__ and not isinstance(m, ours)]
        assert left == [], f"layer {index}"
    assert {type(m) for _, m, _ in projections(model)} <= {NormedLinear, NormedConv1D}


def test_tied_embeddings_stay_tied() -> None:
    model = patched(build=lambda: FAMILIES["Llama"](tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is nn.Linear


def test_some_targets_beside_the_models_own_norms() -> None:
    model = patched("Qwen3", keep_prenorm=True, targets=("q", "k"))
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is NormedLinear
    assert type(layer.mlp.up_proj) is nn.Linear
    assert type(layer.input_layernorm).__name__ == type(layer.self_attn.q_norm).__name__ == "Qwen3RMSNorm"
    with pytest.raises(UnsupportedError, match="names only some"):
        patched("Phi-3", keep_prenorm=True, targets=("q",))


def test_trainer_decays_no_gain() -> None:
    from transformers import Trainer

    model = patched()
    names = Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model)
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [n for n in names if n.endswith(".norm.weight")]


# -- building, options, refusals ----------------------------------------------------------------------------------------------


def _config(**options: Any) -> Any:
    shared = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaConfig(**{**shared, "pad_token_id": 0, **options})


def test_a_model_from_scratch_is_initialised_as_by_the_authors() -> None:
    config = _config()
    before = copy.deepcopy(vars(config))
    torch.manual_seed(0)
    model = build_simplenorm(config)
    assert vars(config) == before
    assert not any(p.is_meta for p in model.parameters())
    assert hfplug.applied(model)[0].patch == SimpleNorm()
    stds = {"model.embed_tokens": 1.0, "lm_head": 128**-0.5}
    for index in range(2):
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
            stds[f"model.layers.{index}.{path}"] = 0.02
        for path in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            stds[f"model.layers.{index}.{path}"] = 0.02 / math.sqrt(2 * (index + 1))
    for path, std in stds.items():
        weight = model.get_parameter(f"{path}.weight")
        assert abs(float(weight.std()) / std - 1) < 0.03, path
    assert model.lm_head.weight.abs().max() <= 3 * 128**-0.5
    torch.manual_seed(0)
    again = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    stock = build_simplenorm(config, init="stock")
    assert abs(float(stock.model.embed_tokens.weight.std()) / 0.02 - 1) < 0.03


def test_every_family_is_initialised_part_by_part() -> None:
    """Parts of one matrix (gate and up) by themselves, ``Conv1D``, biases, and an MLP without a gate, whose first map is up."""
    wide: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    for family in ("Phi-3", "GPT-2", "GPT-NeoX", "Qwen2"):
        stock = FAMILIES[family](**({"n_embd": 128, "n_inner": 512} if family == "GPT-2" else wide))
        torch.manual_seed(0)
        model = build_simplenorm(stock.config)
        gated = "gate" in "".join(decoder_of(model).family.projections.values())
        for path, linear, split in projections(model):
            index = decoder_of(model).layer_of(path)
            assert index is not None
            small = 0.02 / math.sqrt(2 * (index + 1))
            weight = linear.weight.T if isinstance(linear, NormedConv1D) else linear.weight
            for role, part in zip(split.roles, parts(weight.T, split), strict=True):
                expected = small if role in ("o", "down") or (role == "up" and gated) else 0.02
                assert abs(float(part.std()) / expected - 1) < 0.06, f"{family} {path} {role}"
            assert linear.bias is None or not linear.bias.any(), path


def test_tied_embeddings_get_the_heads_initialisation() -> None:
    model = build_simplenorm(_config(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert abs(float(model.lm_head.weight.std()) / 128**-0.5 - 1) < 0.03


def test_a_live_model_keeps_its_weights_and_is_warned_about() -> None:
    model = FAMILIES["Llama"]()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.warns(UserWarning, match="retrain"):
        hfplug.apply(model, "simplenorm")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_a_warm_start_keeps_the_size_of_every_feature() -> None:
    from hfplug.modeling_patches.simplenorm.build import _sizes

    model = FAMILIES["Llama"]()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    batches = [{"input_ids": IDS, "attention_mask": mask}, {"input_ids": IDS.flip(1)}]
    before = _sizes(model, batches, {p: m for p, m, _ in projections(model)})
    with pytest.warns(UserWarning, match="retrain"):
        handle = warm_start(model, batches)
    after = _sizes(model, batches, {p: m for p, m, _ in projections(model)})
    for path, size in before.items():
        assert ((after[path] - size).abs() <= 1e-4 * size.max()).all(), path
    handle.remove()
    with pytest.raises(ConfigError, match="batches is empty"):
        warm_start(model, [])
    with pytest.raises(ConfigError, match="affine"):
        warm_start(model, batches, affine=False)
    assert hfplug.applied(model) == ()


def test_a_warm_start_that_fails_leaves_the_model_as_it_was() -> None:
    model = FAMILIES["Llama"]()
    before = model(IDS).logits
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # 1: the sizes before; 2: the probe of apply
            raise KeyboardInterrupt

    model.register_forward_pre_hook(stop)
    with pytest.warns(UserWarning, match="retrain"), pytest.raises(KeyboardInterrupt):
        warm_start(model, [{"input_ids": IDS}])
    assert hfplug.applied(model) == ()
    assert torch.equal(model(IDS).logits, before)


def test_learning_rates_are_advice_within_what_the_paper_says() -> None:
    assert lr_scale(3e-4) == pytest.approx(9e-4)
    with pytest.raises(ConfigError, match="factor=20"):
        lr_scale(3e-4, 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"norm": "rmsnorm"}, "did you mean 'rms'"),
        ({"targets": ["query"], "keep_prenorm": True}, "'query'"),
        ({"targets": ["q", "q"], "keep_prenorm": True}, "once"),
        ({"targets": [], "keep_prenorm": True}, "targets"),
        ({"targets": ["q"]}, "keep_prenorm=True"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hfplug.plan(FAMILIES["Llama"](), "simplenorm", **options)


def test_what_it_cannot_do_it_refuses() -> None:
    moe = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
        num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="'mixtral'"):
        hfplug.apply(transformers.MixtralForCausalLM(moe), "simplenorm")
    with pytest.raises(UnsupportedError, match="add_cross_attention"):
        hfplug.apply(FAMILIES["GPT-2"](add_cross_attention=True), "simplenorm")
    with pytest.raises(UnsupportedError, match="do_layer_norm_before"):
        hfplug.apply(FAMILIES["OPT"](do_layer_norm_before=False), "simplenorm")
    model = FAMILIES["Llama"]()
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: None)
    with pytest.raises(UnsupportedError, match=r"mlp\.up_proj has hooks"):
        hfplug.apply(model, "simplenorm")
    model = FAMILIES["Llama"]()
    model.model.layers[1].mlp.up_proj = type("Int8Linear", (nn.Linear,), {})(32, 48)
    with pytest.raises(UnsupportedError, match="Int8Linear"):
        hfplug.apply(model, "simplenorm")
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear  # nothing half done
