"""MuSe's options, layer by layer, and calibrate(): what it measures, chooses, keeps to and leaves alone."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from hfplug import ConfigError
from hfplug.attention import AttentionCall
from hfplug.kernels.muse import MuSeConfig, calibrate, calibration, configure
from hfplug.kernels.muse.calibration import LayerPlan, Plan, _choose, _relative
from hfplug.seams.attention import options_of
from hfplug.testing.models import tiny_llama

SMALL = {"clusters": 4, "query_clusters": 3, "block": 16, "min_length": 0}
SETTINGS = {"coarse": {"clusters": 2}, "fine": {"clusters": 16}}


@pytest.fixture
def model():
    made = tiny_llama(max_position_embeddings=512).eval()
    for layer in made.model.layers:  # sharp attention: otherwise any approximation is good
        layer.self_attn.q_proj.weight.data *= 8
    made.set_attn_implementation("muse")
    made.kept = configure(made, **SMALL)
    return made


def ids(n=120, seed=0):
    return torch.randint(3, 60, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def outputs(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


def stock(model):
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    return plain


# -- options of a layer ------------------------------------------------------------------------------------------------


def test_an_exact_layer_is_exact(model):
    tokens, layers = ids(), range(model.config.num_hidden_layers)
    exact = outputs(stock(model), tokens)
    assert (outputs(model, tokens) - exact).abs().max() > 1e-4
    with configure(model, **SMALL, layers={str(i): {"exact": True} for i in layers}):
        assert torch.equal(outputs(model, tokens), exact)
    with configure(model, **SMALL, layers={"0": {"exact": True}}):
        assert (outputs(model, tokens) - exact).abs().max() > 1e-4


def test_exact_heads_are_exact_and_the_others_are_not(model):
    tokens, layers, heads = ids(), range(model.config.num_hidden_layers), range(model.config.num_key_value_heads)
    exact = outputs(stock(model), tokens)
    assert len(heads) > 1
    with configure(model, **SMALL, layers={str(i): {"exact_heads": list(heads)} for i in layers}):
        assert (outputs(model, tokens) - exact).abs().max() <= 1e-5
    with configure(model, **SMALL, layers={str(i): {"exact_heads": [1]} for i in layers}):
        some = outputs(model, tokens)
    assert (some - exact).abs().max() > 1e-4
    assert (some - outputs(model, tokens)).abs().max() > 1e-4


def test_a_layers_own_numbers_count(model):
    with configure(model, **SMALL, layers={"1": {"clusters": 1000}, "0": {"clusters": 1000}}):
        assert (outputs(model, ids()) - outputs(stock(model), ids())).abs().max() <= 1e-4  # one key per cluster


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clusters": 0}, "clusters=0 must be 1 or more"),
        ({"retrieve": -1}, "retrieve=-1 must be 0 or more"),
        ({"query_codebook": "block"}, "query_codebook='block'"),
        ({"layers": {"one": {"exact": True}}}, "'one' must be the index of a layer"),
        ({"layers": {"1": True}}, "must be a mapping"),
        ({"layers": [1]}, r"layers=\[1\]"),
        ({"layers": {"²": {"exact": True}}}, "must be the index of a layer"),
        ({"layers": {True: {"exact": True}}}, "must be the index of a layer"),
        ({"layers": {"1": {"exact": True}, "01": {}}}, "layers has layer 1 twice"),
        ({"layers": {"2": {"exact": True}}}, "no layer 2; this model has 0 to 1"),
        ({"layers": {"1": {"exact_heads": [7]}}}, r"exact_heads=\[7\]: the layer has 2 key heads"),
        ({"layers": {"1": {"exat": True}}}, "did you mean 'exact'"),
        ({"layers": {"1": {"clusters": 0}}}, r"layers\['1'\].clusters=0 must be 1 or more"),
        ({"layers": {"1": {"clusters": "many"}}}, "is not int"),
        ({"layers": {"1": {"exact_heads": [0, 0]}}}, "each once"),
        ({"cluster": 3}, "did you mean 'clusters'"),
    ],
)
def test_a_wrong_option_is_named(model, options, told):
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(ConfigError, match=told):
        configure(model, **options)
    assert model.config.to_dict() == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"clusters": "64"}, "clusters='64'"),
        ({"block": True}, "block=True"),
        ({"min_length": 1.5}, "min_length=1.5"),
        ({"query_codebook": None}, "query_codebook=None"),
        ({"layers": None}, "layers=None must be a mapping"),
    ],
)
def test_a_wrong_type_is_named_without_the_seam_too(options, told):
    with pytest.raises(ConfigError, match=told):
        MuSeConfig(**options)


def test_a_layer_is_known_by_its_number(model):
    with configure(model, **SMALL, layers={"01": {"exact": True}, 0: {"clusters": 7}}):
        assert options_of(model.config, "muse").layers == {"1": {"exact": True}, "0": {"clusters": 7}}


def test_heads_a_damaged_config_names_are_refused(model):
    model.config.hfplug["attention"]["muse"]["options"]["layers"] = {"1": {"exact_heads": [7]}}
    with pytest.raises(ConfigError, match=r"exact_heads=\[7\]: the layer has 2 key heads"):
        outputs(model, ids())


# -- calibrate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Times as of long texts: here everything is too short for an approximation to be quicker than exact attention."""
    seconds = {"exact": 4.0, "coarse": 1.0, "fine": 2.0}
    took = calibration._Measured._took
    monkeypatch.setattr(calibration._Measured, "_took", lambda self, layer, name, _: took(self, layer, name, seconds[name]))


def test_a_larger_budget_approximates_more(model, quick):
    tokens, found = ids(200), []
    for budget in (1e-7, 1e-3, 10.0):
        plan = calibrate(model, [tokens], budget=budget, settings=SETTINGS, verbose=False)
        assert plan.loss <= plan.exact_loss + budget
        found.append(sum(len(next(iter(x.error.values()))) - len(x.exact_heads) for x in plan.layers if x.setting != "exact"))
    assert found[0] < found[1] <= found[2]
    assert found[2] == model.config.num_key_value_heads * model.config.num_hidden_layers
    assert plan.ratio == pytest.approx(4.0)


def test_the_plan_keeps_to_the_loss_and_the_model_is_left_alone(model, quick, capsys, tmp_path):
    tokens, before = ids(200), copy.deepcopy(model.config.to_dict())
    values, weights = outputs(model, tokens), {n: p.clone() for n, p in model.named_parameters()}
    model.train()
    plan = calibrate(model, [tokens], budget=1e-3, settings=SETTINGS)
    assert model.training
    model.eval()
    assert model.config.to_dict() == before
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert torch.equal(outputs(model, tokens), values)
    assert "layers on MuSe" in capsys.readouterr().out

    exact = float(stock(model)(input_ids=tokens, labels=tokens).loss)
    assert plan.exact_loss == pytest.approx(exact, abs=1e-6)
    assert plan.loss <= plan.exact_loss + 1e-3
    assert plan.on_muse > 0
    with plan.apply(model):
        assert float(model(input_ids=tokens, labels=tokens, use_cache=False).loss) == pytest.approx(plan.loss, abs=1e-6)
        model.save_pretrained(tmp_path / "model")
    assert model.config.hfplug == before["hfplug"]
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="muse")
    assert options_of(loaded.config, "muse") == MuSeConfig(**plan.options)


def test_the_error_of_each_head_is_measured_on_exact_inputs(model, quick):
    tokens = ids(150)
    plan = calibrate(model, [tokens], budget=0.05, measure="error", settings=SETTINGS, verbose=False)
    kept = {}
    stocks = stock(model)
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a, i=i: kept.setdefault(i, a[0].detach()))
        for i, layer in enumerate(stocks.model.layers)
    ]
    outputs(stocks, tokens)
    exact, kept = kept, {}
    for handle in handles:
        handle.remove()
    # the first layer of the model on MuSe sees exact inputs too
    configure(model, **SMALL | SETTINGS["fine"])
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: kept.setdefault(0, a[0].detach()))
    outputs(model, tokens)
    heads = model.config.num_key_value_heads
    parts = [x.double().unflatten(-1, (heads, -1)).square().sum((0, 1, 3)) for x in (kept[0] - exact[0], exact[0])]
    assert plan.layers[0].error["fine"] == pytest.approx((parts[0] / parts[1]).tolist(), rel=1e-5)
    assert plan.on_muse > 0
    for layer in plan.layers:
        on = [e for head, e in enumerate(layer.error.get(layer.setting, [])) if head not in layer.exact_heads]
        assert all(e <= 0.05 for e in on)


def test_the_cheapest_setting_within_the_threshold_is_chosen():
    layer = LayerPlan(3, "exact", [], {"coarse": [0.5, 0.001], "fine": [0.02, 0.001]}, {"coarse": 4.0, "fine": 2.0})
    assert (_choose(layer, 1.0).setting, _choose(layer, 1.0).exact_heads) == ("coarse", [])
    assert (_choose(layer, 0.1).setting, _choose(layer, 0.1).exact_heads) == ("fine", [])
    assert (_choose(layer, 0.01).setting, _choose(layer, 0.01).exact_heads) == ("coarse", [0])
    assert _choose(layer, 1e-4).setting == "exact"
    slow = LayerPlan(3, "exact", [], {"fine": [0.0, 0.0]}, {"fine": 0.9})
    assert _choose(slow, 1.0).setting == "exact"  # no error, but no gain either


def test_what_the_user_left_to_exact_attention_stays_there(model, quick):
    given = {"0": {"exact": True}, "1": {"exact_heads": [1], "retrieve": 1}}
    with configure(model, **SMALL, layers=given):
        plan = calibrate(model, [ids(200)], budget=10.0, settings=SETTINGS, verbose=False)
    assert plan.options["layers"] == {"0": {"exact": True}, "1": {"retrieve": 1, "clusters": 2, "exact_heads": [1]}}
    assert [layer.layer for layer in plan.layers] == [1]
    configure(model, **SMALL, layers={"1": {"retrieve": 50}})
    found = calibrate(model, [ids(200)], budget=10.0, settings=SETTINGS, verbose=False)
    assert max(found.layers[1].error["coarse"]) <= 1e-8  # a layer's own options count where it is measured


def test_a_head_without_a_number_or_without_output_stays_exact_or_goes(model, quick):
    assert _relative(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 4.0])) == [0.0, math.inf, 0.25]
    layer = LayerPlan(3, "exact", [], {"fine": [math.nan, 0.1, math.inf]}, {"fine": 4.0})
    assert _choose(layer, 1.0).exact_heads == [0, 2]
    tried = []

    def plan(threshold):
        tried.append(threshold)
        return Plan([_choose(layer, threshold)], 1.0, "loss", 2.0, math.nan, [9])

    assert calibration._boldest(plan, [layer], 3.0, lambda p: 2.5).layers[0].exact_heads == [0, 2]
    assert tried == [0.0, 0.1]


def test_times_are_taken_after_the_first_run_of_a_kind():
    measured, runs = calibration._Measured(SETTINGS), []
    calls = [AttentionCall(query=x, key=x, value=x, scaling=1.0) for x in (torch.zeros(1, 1, 5, 4), torch.zeros(1, 1, 6, 4))]
    for _ in range(2):
        found, took = measured._timed("fine", calls[0], lambda: runs.append(len(runs)) or len(runs))
        assert took >= 0
    assert (found, len(runs)) == (3, 3)  # twice for the first call, once for the second
    measured._timed("fine", calls[1], lambda: runs.append(0))
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"texts": "a text"}, "texts must be a list of strings or tensors, not str"),
        ({"texts": None}, "not NoneType"),
        ({"texts": [ids().expand(2, -1)]}, r"texts\[0\] of shape \(2, 120\)"),
        ({"texts": [ids().float()]}, r"texts\[0\] must be .* not torch.float32"),
        ({"texts": [[1, 2, 3]]}, r"texts\[0\] must be .* not list"),
        ({"texts": [ids()], "budget": True}, "budget=True"),
        ({"texts": [ids()], "budget": "1 %"}, "budget='1 %'"),
        ({"texts": [ids()], "budget": float("inf")}, "budget=inf"),
        ({"texts": [ids()], "budget": float("nan")}, "budget=nan"),
        ({"texts": [ids()], "settings": {}}, "settings={}"),
        ({"texts": [ids()], "settings": None}, "settings=None"),
        ({"texts": [ids()], "settings": {"odd": 3}}, r"settings\['odd'\]=3 must be a mapping"),
        ({"texts": [ids()], "settings": {"odd": {"min_length": 3}}}, "'min_length' is not an option of layers"),
        ({"texts": [ids()], "settings": {"odd": {"clusters": 0}}}, "clusters=0 must be 1 or more"),
        ({"texts": []}, "texts is empty"),
        ({"texts": [ids(30)]}, r"texts\[0\] has 30 tokens; MuSe is used from 33 on"),
        ({"texts": ["a text"]}, "tokenizer= is needed"),
        ({"texts": [ids()], "budget": 0.0}, "budget=0.0 must be a number > 0"),
        ({"texts": [ids()], "measure": "perplexity"}, "measure='perplexity'"),
        ({"texts": [ids()], "settings": {"exact": {}}}, "'exact' is taken"),
        ({"texts": [ids()], "settings": {"odd": {"cluster": 3}}}, "did you mean 'clusters'"),
    ],
)
def test_a_wrong_argument_is_named(model, arguments, told):
    with pytest.raises(ConfigError, match=told):
        calibrate(model, **arguments)


def test_a_model_that_is_not_on_muse_is_refused(model):
    with pytest.raises(ConfigError, match="not on MuSe"):
        calibrate(stock(model), [ids()])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": 3}, "not a plan of MuSe"),
        ({"layers": [{"layer": 0}]}, "needs a value for 'setting'"),
        ({"budget": "much"}, "budget='much'"),
        ({"options": {}}, "layers=None"),
        ({"options": {"layers": {}, "cluster": 3}}, "did you mean 'clusters'"),
        ({"setting": "tiny"}, "setting 'tiny' of layer 0 is not one of"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path, change, told):
    made = Plan([LayerPlan(0, "fine", [], {"fine": [0.1]}, {"fine": 2.0})], 0.1, "loss", 2.0, 2.1, [90], {"layers": {}})
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    stored = json.loads((tmp_path / "plan.json").read_text())
    if "setting" in change:
        stored["layers"][0] |= change
    else:
        stored |= change
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="is not a plan of MuSe") as raised:
        Plan.load(tmp_path / "plan.json")
    assert told in str(raised.value)
