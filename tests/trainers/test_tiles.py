"""The tiles that every distillation loss stands on, against full logits in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from hfplug.testing.models import TINY_MODELS, tiny_gpt2, tiny_llama
from hfplug.trainers import distill_base
from hfplug.trainers.tiles import Head, Tiles, Wanted, tiles

N, H, HT, V = 23, 6, 9, 53
WITH_GRADIENT = 4


def full(hidden, student, target, teacher, wanted, labels):
    """The same from all logits at once, by autograd."""
    z, zt, cold = student.logits(hidden) / wanted.temperature, teacher.logits(target) / wanted.temperature, teacher.logits(target)
    log_q, log_p, log_cold = z.log_softmax(-1), zt.log_softmax(-1), cold.log_softmax(-1)
    pair = (log_p, log_q) if wanted.divergence == "reverse" else (log_q, log_p)
    divergence = kl_div(*pair, reduction="none", log_target=True).sum(-1)
    top, ids = log_p.topk(min(wanted.top, z.shape[-1]), -1)
    pick = labels[:, None]
    power = (wanted.power * log_p).logsumexp(-1)
    return Tiles(
        divergence, z.logsumexp(-1), z.gather(1, pick)[:, 0], z.gather(1, ids), -(log_q.exp() * log_q).sum(-1), z.amax(-1),
        -(log_cold.exp() * log_cold).sum(-1), top, log_p.gather(1, pick)[:, 0], power,
    )  # fmt: skip


def problem(dtype=torch.float64, cap=None, scale=1.0, seed=0, sharp=1.0):
    draw = torch.Generator().manual_seed(seed)

    def make(*shape):
        return (sharp * torch.randn(*shape, generator=draw, dtype=torch.float64)).to(dtype)

    hidden, weight, bias = (make(*s).requires_grad_() for s in ((N, H), (V, H), (V,)))
    target, teacher_weight = make(N, HT), make(V, HT).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=draw)
    return hidden, Head(weight, bias, scale, cap), target, Head(teacher_weight, None, 1 / scale, cap), labels


def gradients(found, leaves, seed=1):
    """Of a random combination of everything that has one."""
    draw = torch.Generator().manual_seed(seed)
    parts = found[:WITH_GRADIENT]
    total = sum((x * torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype)).sum() for x in parts)
    return torch.autograd.grad(total, leaves)


def rms(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize(("temperature", "cap", "scale"), [(1.0, None, 1.0), (1.7, None, 0.6), (1.0, 2.5, 1.3), (0.8, 2.5, 0.6)])
def test_against_full_logits(divergence, temperature, cap, scale):
    hidden, student, target, teacher, labels = problem(cap=cap, scale=scale)
    leaves = (hidden, student.weight, student.bias)
    expected = full(hidden, student, target, teacher, Wanted(divergence, temperature, 5, 0.3), labels)
    wanted_gradients = gradients(expected, leaves)
    for rows, columns in ((1, 7), (7, 20), (100, 100)):
        found = tiles(hidden, student, target, teacher, Wanted(divergence, temperature, 5, 0.3, rows, columns), labels)
        for name, a, b in zip(Tiles._fields, found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
        for a, b in zip(gradients(found, leaves), wanted_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert student.weight.grad is None
    assert teacher.weight.grad is None


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_fp32_against_fp64(divergence):
    exact, rounded = problem(), problem(torch.float32)
    wanted = Wanted(divergence, top=5, rows=7, columns=20)
    # Of the same rounded inputs: what is measured is the arithmetic.
    for a, b in zip((exact[0], exact[1].weight, exact[1].bias, exact[2], exact[3].weight),
                    (rounded[0], rounded[1].weight, rounded[1].bias, rounded[2], rounded[3].weight), strict=True):  # fmt: skip
        a.data.copy_(b.detach())
    found = tiles(*rounded[:4], wanted, rounded[4])
    expected = full(*exact[:4], Wanted(divergence, 1.0, 5, 1.0), exact[4])
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert rms(a, b) <= 1e-6
    leaves = [(h, s.weight, s.bias) for h, s, *_ in (rounded, exact)]
    for a, b in zip(gradients(found, leaves[0]), gradients(expected, leaves[1]), strict=True):
        assert rms(a, b) <= 1e-5


def test_bf16_inputs_lose_nothing_but_their_own_rounding():
    rounded = problem(torch.bfloat16)
    found = tiles(*rounded[:4], Wanted("reverse", top=5, rows=7, columns=20), rounded[4])
    hidden, student, target, teacher = rounded[:4]
    wide = [x.detach().float().requires_grad_() for x in (hidden, student.weight, student.bias)]
    expected = full(
        wide[0], Head(wide[1], wide[2]), target.float(), Head(teacher.weight.float()), Wanted("reverse", 1.0, 5, 1.0), rounded[4]
    )
    assert found.divergence.dtype == torch.float32
    for a, b in zip(found[:-1], expected[:-1], strict=True):
        assert rms(a, b) <= 5e-3
    for a, b in zip(gradients(found, (hidden, student.weight, student.bias)), gradients(expected, wide), strict=True):
        assert a.dtype == torch.bfloat16
        assert rms(a, b) <= 5e-3


def test_under_autocast_the_products_are_narrow_and_the_sums_wide():
    hidden, student, target, teacher, labels = problem(torch.float32)
    exact = tiles(hidden, student, target, teacher, Wanted("reverse"), labels)
    with torch.autocast("cpu", torch.bfloat16):
        found = tiles(hidden, student, target, teacher, Wanted("reverse"), labels)
    assert found.divergence.dtype == torch.float32
    assert 1e-6 < rms(found.log_z, exact.log_z) <= 5e-3  # narrow, or it would be exact
    assert all(g.dtype == torch.float32 for g in gradients(found, (hidden, student.weight, student.bias)))


def test_large_logits_overflow_nothing():
    hidden, student, target, teacher, labels = problem(sharp=30.0)
    for divergence in ("reverse", "forward"):
        wanted = Wanted(divergence, top=5, power=0.3, rows=7, columns=20)
        found = tiles(hidden, student, target, teacher, wanted, labels)
        assert all(bool(torch.isfinite(x).all()) for x in found)
        assert all(bool(torch.isfinite(g).all()) for g in gradients(found, (hidden, student.weight, student.bias)))


def test_no_token_is_a_differentiable_zero():
    hidden, student, target, teacher, labels = problem()
    none = torch.zeros(N, dtype=torch.bool)
    found = tiles(hidden[none], student, target[none], teacher, Wanted("reverse", top=5), labels[none])
    assert found.top_logits.shape == (0, 5)
    found.divergence.sum().backward()
    assert float(hidden.grad.abs().sum()) == 0.0
    assert float(student.weight.grad.abs().sum()) == 0.0


def test_more_than_the_vocabulary_means_all():
    hidden, student, target, teacher, labels = problem()
    found = tiles(hidden, student, target, teacher, Wanted("reverse", top=10 * V, columns=20), labels)
    assert found.top_logits.shape == (N, V)
    torch.testing.assert_close(found.teacher_top.exp().sum(-1), torch.ones(N, dtype=torch.float64))


def test_no_tensor_of_all_tokens_by_all_words_is_made():
    """Torch reports every allocation: none is larger than a tile or a weight."""
    tokens, words, rows, columns = 200, 400, 10, 50
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(words, 8, requires_grad=True)
    target, teacher = torch.randn(tokens, 8), torch.randn(words, 8)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    with Sizes():
        found = tiles(hidden, Head(weight), target, Head(teacher), Wanted("reverse", top=4, rows=rows, columns=columns))
        (found.divergence.sum() + found.top_logits.sum()).backward()
    assert weight.grad is not None
    assert largest <= words * 8


@pytest.mark.parametrize("family", TINY_MODELS)
def test_head_of_every_family(family):
    model = TINY_MODELS[family](1)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(Head.of(model).logits(hidden), model(ids).logits)


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.25}),
        ("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 3.0}),
        ("Gemma2ForCausalLM", "Gemma2Config", {"final_logit_softcapping": 2.0, "head_dim": 8}),
        ("PhiForCausalLM", "PhiConfig", {}),  # a bias on the head
    ],
)
def test_heads_with_a_scale_a_softcap_or_a_bias(model_class, config_class, options):
    import transformers

    shared = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, config_class)(**shared, num_key_value_heads=4, pad_token_id=0, **options)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).float().eval()
    if model_class == "PhiForCausalLM":
        torch.nn.init.normal_(model.lm_head.bias)
        assert Head.of(model).bias is not None
    ids = torch.arange(6)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(Head.of(model).logits(hidden), model(ids).logits)
    distill_base._check_head(model, Head.of(model), "the student")
    # What the check is for: a factor that the table of names does not know.
    with pytest.raises(distill_base.UnsupportedError, match=r"the student .* does more between"):
        distill_base._check_head(model, Head(model.lm_head.weight, None, 1.7), "the student")


def test_the_check_of_heads_leaves_the_model_as_it_was():
    model = tiny_gpt2(resid_pdrop=0.3).train()
    distill_base._check_head(model, Head.of(model), "the student")
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path):
    from hfplug.testing.models import tiny_tokenizer

    own, other = tiny_tokenizer(), tiny_tokenizer()
    distill_base._check_tokenizers(own, tiny_llama(), "")  # nothing known of the teacher's: nothing said
    other.save_pretrained(tmp_path / "same")
    distill_base._check_tokenizers(own, tiny_llama(), str(tmp_path / "same"))
    text = (tmp_path / "same" / "tokenizer.json").read_text()
    other.save_pretrained(tmp_path / "other")
    swapped = text.replace('"w7"', '"w?"').replace('"w9"', '"w7"').replace('"w?"', '"w9"')
    (tmp_path / "other" / "tokenizer.json").write_text(swapped)
    with pytest.raises(distill_base.ConfigError, match=r"other' has another vocabulary of the same size: 2 ids .* 7: 'w7'"):
        distill_base._check_tokenizers(own, tiny_llama(), str(tmp_path / "other"))
