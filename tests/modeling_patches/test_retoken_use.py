"""ReToken and MoRT in use: sparse and offloaded tables, the balance loss, options and cost, PEFT, quantised weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from retoken_kit import OPTIONS, SOME, gradients, holders, ids_of, logits, made, stack_of, stirred, tables
from torch import Tensor

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.families import decoder_of
from hfplug.modeling_patches import MoRT, ReToken, router_balance
from hfplug.modeling_patches.retoken.loss import RouterBalance, RouterBalanceConfig, balance
from hfplug.optimization import optimizer_groups
from hfplug.testing.patch_models import FAMILIES

# -- sparse gradients, host memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ids": SOME}, {"rank": 3, "ids": SOME}], ids=str)
@pytest.mark.parametrize("method", ["retoken", "mort"])
def test_sparse_gradients_are_the_dense_ones(method: str, options: dict[str, Any]) -> None:
    ids = ids_of(2, 40, low=4, high=50)  # not the first row of SOME, which stands in where a token has none
    expected = gradients(made(method, **options).train(), ids)
    model = made(method, sparse=True, **options).train()
    found = gradients(model, ids)
    for name, gradient in expected.items():
        assert found[name].is_sparse == (name.endswith(("table.weight", "codes.weight")))
        dense = found[name].to_dense()
        assert (dense - gradient).abs().max() <= 1e-6 * max(1.0, float(gradient.abs().max())), name
    wanted = {int(x) for x in ids.flatten().tolist() if not options or x in SOME}
    size = len(SOME) if options else 64
    before = [table.weight.detach().clone() for table in tables(model)]
    torch.optim.SparseAdam([table.weight for table in tables(model)], lr=0.1).step()
    for old, table in zip(before, tables(model), strict=True):
        rows = set(table.weight.grad.coalesce().indices()[0].tolist())
        assert rows
        assert {SOME[r % size] if options else r % size for r in rows} <= wanted
        moved = set((old != table.weight).any(1).nonzero()[:, 0].tolist())
        assert moved
        assert moved <= rows


def _to_cuda(tensor: Tensor) -> Any:
    """A move to an accelerator that is not there."""
    assert not tensor.numel(), "a table was moved"
    return SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, is_meta=False)


def test_offloaded_tables_stay_when_the_model_moves() -> None:
    """``meta`` plays the accelerator: what moves there loses its values."""
    for rank in (0, 3):
        model = made("mort", rank=rank, offload=True)
        kept = [table.weight.clone() for table in tables(model)]
        model.to(torch.bfloat16)
        for old, table in zip(kept, tables(model), strict=True):
            assert torch.equal(table.weight, old.bfloat16())

        for old, table in zip(kept, tables(model), strict=True):
            table._apply(_to_cuda)
            assert table.weight.dtype == torch.float32
            assert torch.equal(table.weight, old.bfloat16().float())
    empty = copy.deepcopy(model).to("meta")
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    assert not any(p.is_meta for p in empty.parameters())


@pytest.mark.parametrize("method", ["retoken", "mort"])
def test_weights_that_are_there_for_their_modules_forward_alone(method: str) -> None:
    """Accelerate's offloading leaves ``meta`` tensors, ZeRO-3 empty ones, but while the module that owns them runs."""
    import accelerate

    batches = ids_of(), ids_of(2, 60)  # fewer tokens than rows, and more
    expected = [logits(made(method), ids) for ids in batches]
    model = accelerate.cpu_offload(made(method), execution_device=torch.device("cpu"))
    for ids, wanted in zip(batches, expected, strict=True):
        assert torch.equal(logits(model, ids), wanted)

    model = made(method)
    for table in tables(model):
        kept = table.weight.data

        def fetch(module: Any, args: Any, kept: Tensor = kept) -> None:
            module.weight.data = kept

        def put_away(module: Any, args: Any, output: Any) -> None:
            module.weight.data = torch.empty(0)

        table.register_forward_pre_hook(fetch)
        table.register_forward_hook(put_away)
        table.weight.data = torch.empty(0)
    for ids, wanted in zip(batches, expected, strict=True):
        assert torch.equal(logits(model, ids), wanted)


def test_an_offloaded_table_is_made_in_host_memory() -> None:
    from hfplug.modeling_patches.retoken.tables import TokenTable

    like: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, is_meta=False)
    assert TokenTable(4, 3, 1.0, 0, like, sparse=False, offload=True).weight.device == torch.device("cpu")


def test_an_offloaded_table_that_was_loaded_elsewhere_is_refused() -> None:
    from hfplug.modeling_patches.retoken.tokens import check_place

    table = tables(made(offload=True))[0]
    check_place("retoken", table)

    class Moved:
        offload = True
        weight = type("W", (), {"device": torch.device("cuda")})

    with pytest.raises(UnsupportedError, match="device_map"):
        check_place("retoken", Moved())  # type: ignore[arg-type]


def test_no_weight_decay_on_tables_and_scales() -> None:
    for method, rank in (("retoken", 0), ("mort", 3)):
        model = made(method, rank=rank)
        groups = {id(p): g for g in optimizer_groups(model) for p in g.parameters}
        for name, parameter in model.named_parameters():
            wanted = name.endswith(("table.weight", "codes.weight", "modulation.scale"))
            assert (id(parameter) in groups) == wanted, name
        assert {g.weight_decay for g in groups.values()} == {0.0}


# -- balance -----------------------------------------------------------------------------------------------------------------


def test_the_balance_is_one_at_uniform_routing_and_grows_to_the_number_of_tables() -> None:
    real = torch.ones(1, 4, dtype=torch.bool)
    even = torch.full((1, 4, 4), -2.0)
    for t in range(4):
        even[0, t, t] += 1e-4  # one choice each
    assert abs(float(balance(even, 1, real)) - 1) < 1e-4
    one = torch.full((1, 4, 4), -30.0)
    one[..., 2] = 30
    assert abs(float(balance(one, 1, real)) - 4) < 1e-4
    half = torch.cat([even, one], 1)
    mask = torch.tensor([[True] * 4 + [False] * 4])
    assert torch.equal(balance(half, 1, mask), balance(even, 1, real))
    assert float(balance(half, 1, ~mask & False)) == 0


def by_hand(kept: list[Tensor], real: Tensor) -> float:
    """Of every router: counted one choice at a time."""
    values = []
    for g in kept:
        chosen, mean = torch.zeros(5), torch.zeros(5)
        for row in g[real]:
            chosen[row.topk(2).indices] += 0.5
            mean += row.sigmoid() / row.sigmoid().sum()
        values.append(5 * float((chosen * mean).sum()) / int(real.sum()) ** 2)
    return sum(values) / len(values)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_balance_of_a_forward(checkpointing: bool) -> None:
    model, ids, kept = made("mort").train(), ids_of(), []
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for holder in holders(model, "mort"):
        holder.router.register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    model(input_ids=ids, attention_mask=mask)
    found = router_balance(model)
    assert abs(float(found) - by_hand(kept[:2], mask.bool())) < 1e-5
    found.backward()
    gradient = holders(model, "mort")[0].router.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0


def test_a_balance_that_cannot_train_is_refused() -> None:
    model = made("mort")
    with pytest.raises(UnsupportedError, match="training mode"):
        router_balance(model)
    model.train()
    for holder in holders(model, "mort"):
        holder.router.weight.requires_grad_(False)
    stack_of(model).embed_tokens.weight.requires_grad_(False)
    decoder_of(model).layers[0].requires_grad_(False)
    model(input_ids=ids_of())
    with pytest.raises(UnsupportedError, match="frozen"):
        router_balance(model)
    model = made("mort").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model(input_ids=ids_of())
    with pytest.raises(UnsupportedError, match="use_reentrant"):
        router_balance(model)
    with pytest.raises(ConfigError, match="weight=-1"):
        RouterBalanceConfig(weight=-1.0)
    assert RouterBalanceConfig().weight == 1e-4


def trained(tmp_path: Any, rows: int, accumulate: int, weight: float) -> dict[str, Tensor]:
    from transformers import Trainer, TrainingArguments

    model = made("mort")
    ids = ids_of(4, 10)
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=rows, gradient_accumulation_steps=accumulate, max_steps=1,
        learning_rate=0.1, optim="sgd", max_grad_norm=0.0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        seed=0, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    if weight:
        hfplug.losses.add(trainer, RouterBalance(RouterBalanceConfig(weight=weight)))
    trainer.train()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_the_balance_joins_a_trainer(tmp_path: Any) -> None:
    plain, one = (trained(tmp_path, 4, 1, weight) for weight in (0.0, 1.0))
    name = "model.layers.1.mort.router.weight"
    model = made("mort").train()
    model(input_ids=ids_of(4, 10))
    router_balance(model).backward()
    step = 0.1 * model.get_parameter(name).grad
    assert step.abs().max() > 1e-6
    assert torch.allclose(plain[name] - one[name], step, atol=1e-6)


# -- options, cost, order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank=-1"), ({"eps": 0.0}, "eps=0.0"), ({"ids": ()}, "at least one id"), ({"ids": (3, -1)}, "from -1"),
        ({"ids": (4, 3, 4)}, "names 4 twice"), ({"norm": "l1"}, "did you mean 'l2'"), ({"ids": (64,)}, "ends at 63"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    for method in ("retoken", "mort"):
        model = FAMILIES["Llama"]()
        with pytest.raises(ConfigError, match=message):
            hfplug.apply(model, method, **options)
        assert hfplug.applied(model) == ()


def test_routing_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="top_k=3 must be from 1 to experts=2"):
        MoRT(experts=2, top_k=3)
    with pytest.raises(ConfigError, match="experts=0"):
        MoRT(experts=0)
    with pytest.raises(ConfigError, match="no option 'experts'"):
        hfplug.plan(FAMILIES["Llama"](), "retoken", experts=2)
    with pytest.raises(ConfigError, match="norm='l1'"):
        ReToken(norm="l1")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("method", "more"), [("retoken", {}), ("mort", {}), ("mort", {"experts": 1, "top_k": 1})])
def test_the_plan_says_what_it_costs(method: str, more: dict[str, Any], options: dict[str, Any]) -> None:
    plan = hfplug.plan(FAMILIES["Llama"](), method, offload=True, **more, **options)
    rows, k = len(options.get("ids") or range(64)), options.get("rank", 0)
    tables_, width, layers = more.get("experts", 5 if method == "mort" else 1), 32, 2
    router = width * tables_ if method == "mort" else 0
    count = layers * (tables_ * (k or rows) * width + width + router) + rows * k
    assert plan.parameters == count
    assert f" = {count:,}, with {rows} rows" in plan.notes[0]
    used = 1 if method == "retoken" else more.get("top_k", 2)
    assert f"{k or used * width} values of tables read" in plan.notes[1]
    assert f"accelerator: {4 * (k or used * width * layers)} bytes" in plan.notes[2]
    assert "floating point operations" in str(plan)


@pytest.mark.parametrize(
    ("family", "last", "first"),
    [("Llama", "mlp", "input_layernorm"), ("Gemma2", "post_feedforward_layernorm", "input_layernorm"), ("GPT-2", "mlp", "ln_1"),
     ("GPT-NeoX", "mlp", "input_layernorm"), ("OPT", "fc2", "self_attn_layer_norm"), ("LLaVA", "mlp", "input_layernorm")],
)  # fmt: skip
def test_where_it_is(family: str, last: str, first: str) -> None:
    """What is added to the residual is changed: the output of the MLP, or of the norm behind it."""
    decoder = decoder_of(FAMILIES[family]())
    for method, more in (("retoken", set()), ("mort", {(first, "forward_pre")})):
        hooked = set(hfplug.plan(decoder.model, method).hooked)
        for index in range(len(decoder.layers)):
            head = decoder.layer_path(index) + "."
            assert {(n.removeprefix(head), kind) for n, kind in hooked if n.startswith(head)} == {(last, "forward"), *more}


def test_the_operations_of_the_plan() -> None:
    """ReToken: norm 3, scale 1, one plus 1, product 1 for each value. MoRT: two norms, router, mixture, scale, factor, sum."""
    for method, options, count in (
        ("retoken", {}, 6 * 32), ("retoken", {"rank": 3}, 6 * 32 + 2 * 3 * 32), ("mort", {}, 3 * 32 + 10 * 32 + 4 * 32 + 6 * 32),
        ("mort", {"rank": 3}, 3 * 32 + 10 * 32 + 15 * 65 + 6 * 32),
    ):  # fmt: skip
        assert f"layer: {count:,} floating" in hfplug.plan(FAMILIES["Llama"](), method, **options).notes[1]


def test_the_formula_of_the_plan_is_the_count() -> None:
    """The words of the note, read as a product of numbers."""
    for method, options in (("retoken", {}), ("retoken", {"rank": 3}), ("mort", {}), ("mort", {"rank": 3, "experts": 4})):
        plan = hfplug.plan(FAMILIES["Llama"](), method, **options)
        formula = plan.notes[0].removeprefix("parameters: ").partition(" = ")[0]
        values = {"rows": 64, "layers": 2, "hidden": 32, "rank": 3, "experts": options.get("experts", 5)}
        inner = formula.partition("layers (")[2].removesuffix(")")

        def total(text: str, values: dict[str, int] = values) -> int:
            return sum(int(torch.tensor([values[w] for w in term.split()]).prod()) for term in text.split(" + "))

        outer = formula.partition("layers (")[0].removesuffix(" + ")
        assert 2 * total(inner) + (total(outer) if outer else 0) == plan.parameters


def test_first_values_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, other, third = made(stir=0), made(stir=0), made(stir=0, seed=1)
    assert torch.equal(torch.rand(1), expected)
    first, second, different = (tables(m)[0].weight for m in (one, other, third))
    assert torch.equal(first, second)
    assert not torch.equal(first, different)
    assert not torch.equal(tables(one)[0].weight, tables(one)[1].weight)
    assert 0.15 < float(first.std()) < 0.25  # the model's own initializer_range


def test_both_on_one_model(tmp_path: Any) -> None:
    model, ids = FAMILIES["Llama"]().eval(), ids_of()
    stock = logits(model, ids)
    with hfplug.applied(model, "retoken", ("mort", {"experts": 3})) as handles:
        for handle in handles:
            stirred(model, handle)
        expected = logits(model, ids)
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(type(model).from_pretrained(tmp_path), ids), expected)
        handles[1].remove()
        alone = logits(model, ids)
    assert torch.equal(logits(model, ids), stock)
    assert len({float(x.sum()) for x in (stock, expected, alone)}) == 3
    assert not [k for k in vars(stack_of(model)) if "hfplug" in k and "patches" not in k]


# -- PEFT, quantised weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "rank"), [("retoken", 0), ("mort", 3)])
def test_peft_trains_and_keeps_the_patch(method: str, rank: int, tmp_path: Any) -> None:
    """As modules_to_save: PEFT freezes the rest of the model, and its copies are what the hooks call."""
    from peft import LoraConfig, PeftModel, get_peft_model

    names = ["modulation", "codes", "router"] if method == "mort" else ["modulation"]
    model, ids = made(method, rank=rank, stir=0), ids_of()
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names, task_type="CAUSAL_LM")
    adapted, expected = get_peft_model(model, config), logits(FAMILIES["Llama"]().eval(), ids)
    assert torch.equal(logits(adapted.eval(), ids), expected)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = [n for n, p in adapted.named_parameters() if f".{method}." in n and p.grad is not None and p.grad.abs().max() > 0]
    assert len(moved) == len([n for n, p in adapted.named_parameters() if f".{method}." in n and p.requires_grad])
    assert not any(p.requires_grad for n, p in adapted.named_parameters() if "original_module" in n)
    trained_logits = logits(adapted.eval(), ids)
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(made(method, rank=rank, stir=0), tmp_path)
    assert torch.equal(logits(again.eval(), ids), trained_logits)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, ids), expected)


def test_what_opt_cannot_is_said() -> None:
    """Its MLP is no module: the last projection is hooked, and an adapter on that is not scaled with it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["fc2"], task_type="CAUSAL_LM", init_lora_weights=False)
    with pytest.raises(UnsupportedError, match="retoken scales"):
        get_peft_model(made(family="OPT"), config).merge_and_unload()
    adapted, ids = get_peft_model(made("mort", family="OPT"), config).eval(), ids_of()
    expected = logits(adapted, ids)
    assert (logits(adapted.merge_and_unload(), ids) - expected).abs().max() < 1e-4
    model = FAMILIES["OPT"]()
    model.config.quantization_config = {"quant_method": "none"}
    with pytest.raises(UnsupportedError, match="quantised"):
        hfplug.apply(model, "retoken")
    assert not any(hasattr(layer, "retoken") for layer in decoder_of(model).layers)


def test_quantised_weights_stay_as_they_are(tmp_path: Any) -> None:
    """4-bit weights of bitsandbytes: patched live, and patched first and quantised when loaded."""
    import transformers

    quantised = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)

    def build() -> Any:
        return FAMILIES["Llama"](hidden_size=64, intermediate_size=128).eval()

    stock, ids = build(), ids_of()
    stock.save_pretrained(tmp_path / "stock")
    small = type(stock).from_pretrained(tmp_path / "stock", quantization_config=quantised)
    expected = logits(small, ids)
    handle = hfplug.apply(small, "retoken")
    assert torch.equal(logits(small, ids), expected)
    stirred(small, handle)
    assert not torch.equal(logits(small, ids), expected)
    whole = made(build=build)
    whole.save_pretrained(tmp_path / "patched")
    again = type(whole).from_pretrained(tmp_path / "patched", quantization_config=quantised)
    assert type(again.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"
    assert torch.equal(logits(again, ids), logits(small, ids))
