"""Merging adapters: what comes out against the exact sum, both routes, reload without hfplug, and all that is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import hfplug
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.loras import FolderLora
from hfplug.testing import models

IDS = torch.arange(3, 19)[None]
DEFAULT = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
# Ranks, scalings and targets that differ in every way PEFT has.
MIXED = (
    {},
    {"r": 3, "use_rslora": True, "lora_alpha": 2},
    {"target_modules": ["v_proj", "up_proj"], "rank_pattern": {"up_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 9}},
)
pytestmark = pytest.mark.filterwarnings("ignore:.*keep less than")


def wrapped(seed: int, base=models.tiny_llama, **options):
    """A new model with one LoRA whose factors are both random."""
    torch.manual_seed(seed)
    return peft.get_peft_model(base(), peft.LoraConfig(**{**DEFAULT, **options}))


def folder(path: Path, seed: int, base=models.tiny_llama, **options) -> Path:
    wrapped(seed, base, **options).save_pretrained(path)
    return path


@pytest.fixture
def mixed(tmp_path):
    return [folder(tmp_path / f"a{i}", i, **options) for i, options in enumerate(MIXED)]


def peft_deltas(path, base=models.tiny_llama) -> dict[str, torch.Tensor]:
    """What PEFT itself says an adapter adds, module by module; a new model for each."""
    model = peft.PeftModel.from_pretrained(base(), path)
    layers = {n: m for n, m in model.get_base_model().named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    return {n: m.get_delta_weight("default").double() for n, m in layers.items()}


def exact_sum(folders, weights, base=models.tiny_llama) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for path, weight in zip(folders, weights, strict=True):
        for name, delta in peft_deltas(path, base).items():
            total[name] = total.get(name, 0) + weight * delta
    return total


def off(found, expected) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# -- what comes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.7, -1.3, 0.2]])
def test_b47_without_a_rank_the_result_is_peft_s_own_weighted_sum(mixed, tmp_path, weights):
    """Against get_delta_weight of a new model per adapter: a scaling applied twice, or not at all, would be seen."""
    report = hfplug.tuners.merge(mixed, weights, method="svd_merge", output=tmp_path / "out")
    found, expected = peft_deltas(tmp_path / "out"), exact_sum(mixed, weights)
    assert set(found) == set(expected)
    for name, delta in expected.items():
        assert off(found[name], delta) < 1e-6, name
    assert report.error < 1e-6


@pytest.mark.parametrize("method", ["ctm", "svd_merge"])
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_b46_the_error_reported_is_the_one_measured(mixed, tmp_path, method, rank):
    weights = [1, -0.5, 2]
    report = hfplug.tuners.merge(mixed, weights, rank, method, tmp_path / "out")
    found, expected = peft_deltas(tmp_path / "out"), exact_sum(mixed, weights)
    for module in report.modules:
        measured = off(found[module.module], expected[module.module])
        # both sums above are of float32 deltas, which are off by 1e-7 themselves
        assert module.error == pytest.approx(measured, rel=1e-5, abs=3e-7)
        assert module.error >= module.least_error * (1 - 1e-9)
    total = sum((found[n] - expected[n]).square().sum() for n in expected) / sum(d.square().sum() for d in expected.values())
    assert report.error == pytest.approx(total.sqrt().item(), rel=1e-5, abs=3e-7)
    assert report.error < 1e-6 if rank == 20 else report.error > 0.1  # exact where the rank allows it


def test_b46_a_negative_weight_takes_the_adapter_away(tmp_path):
    a = folder(tmp_path / "a", 1)
    for method in ("ctm", "svd_merge"):
        hfplug.tuners.merge([a], [-1], method=method, output=tmp_path / method)
        for name, delta in peft_deltas(a).items():
            assert off(peft_deltas(tmp_path / method)[name], -delta) < 1e-6
        gone = hfplug.tuners.merge([a, a], [1, -1], method=method, output=tmp_path / f"{method}_none")
        assert gone.worst.error < 1e-6  # relative to the parts: the sum itself is zero
        for name, delta in peft_deltas(tmp_path / f"{method}_none").items():
            assert delta.norm() < 1e-6 * peft_deltas(a)[name].norm()


def test_the_output_is_a_plain_lora_of_scaling_one(mixed, tmp_path):
    hfplug.tuners.merge(mixed, rank=16, output=tmp_path / "out")
    options = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (options["r"], options["lora_alpha"], options["use_rslora"]) == (16, 16, False)
    assert not options["rank_pattern"]
    assert not options["alpha_pattern"]
    assert "hfplug" not in options
    assert options["task_type"] == "CAUSAL_LM"
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {t.shape[0] for n, t in tensors.items() if "lora_A" in n} == {16}  # also where the modules allow less
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}


def test_the_same_merge_gives_the_same_files_whatever_the_rule_draws(mixed, tmp_path):
    options = {"method": "ctm", "rank": 6, "rule": "dare_ties", "drop": 0.5}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        hfplug.tuners.merge(mixed, output=tmp_path / name, seed=seed, **options)
    files = ("adapter_config.json", "adapter_model.safetensors", "README.md")
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert (tmp_path / "a" / files[1]).read_bytes() != (tmp_path / "c" / files[1]).read_bytes()


def test_the_global_generator_is_left_alone(mixed):
    before = torch.get_rng_state()
    hfplug.tuners.merge(mixed, rule="dare_linear")
    assert torch.equal(before, torch.get_rng_state())


RELOAD = """
import sys, torch, peft
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
base, merged, out = sys.argv[1:]
model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), merged).eval()
with torch.no_grad():
    save_file({"logits": model(torch.arange(3, 19)[None]).logits}, out)
assert "hfplug" not in sys.modules
"""


@pytest.mark.parametrize("base", [models.tiny_llama, models.tiny_gpt2], ids=["llama", "gpt2"])
def test_the_output_loads_without_hfplug_and_gives_the_logits_of_the_exact_sum(tmp_path, base):
    targets = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True} if base is models.tiny_gpt2 else {}
    base().save_pretrained(tmp_path / "base")
    folders = [folder(tmp_path / f"{i}", i, base, use_rslora=bool(i), **targets) for i in range(2)]
    weights = [0.8, -0.4]
    hfplug.tuners.merge(folders, weights, method="svd_merge", output=tmp_path / "out")
    words = [sys.executable, "-c", RELOAD, tmp_path / "base", tmp_path / "out", tmp_path / "logits"]
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, env={**os.environ, "HFPLUG_PLUGINS": ""}, check=False
    )
    assert done.returncode == 0, done.stderr
    plain = base().eval()
    with torch.no_grad():
        for name, delta in exact_sum(folders, weights, base).items():
            plain.get_submodule(name).weight += delta.float()
        expected = plain(IDS).logits
    assert (load_file(tmp_path / "logits")["logits"] - expected).abs().max() < 1e-5
    assert (base().eval()(IDS).logits - expected).abs().max() > 1e-2


def test_b47_both_routes_give_the_same_and_the_model_is_left_as_it_was(mixed):
    from_folders = hfplug.tuners.merge(mixed, [1, -0.5, 2], rank=5, rule="ties")
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), mixed[0], "a0", is_trainable=True)
    for i in (1, 2):
        model.load_adapter(mixed[i], f"a{i}")
    with torch.no_grad():
        before = model.eval()(IDS).logits
    state = {n: (p.clone(), p.requires_grad) for n, p in model.named_parameters()}
    report = hfplug.tuners.merge(["a0", "a1", "a2"], [1, -0.5, 2], rank=5, rule="ties", model=model, name="all")
    assert [m.error for m in report.modules] == [m.error for m in from_folders.modules]
    assert report.name == "all"
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    for name, parameter in model.named_parameters():
        if ".all." in name:
            assert not parameter.requires_grad, name
        else:
            assert torch.equal(parameter, state[name][0]), name
            assert parameter.requires_grad == state[name][1], name


def test_the_adapter_added_to_a_model_equals_the_folder_written(mixed, tmp_path):
    hfplug.tuners.merge(mixed, [1, -0.5, 2], rank=5, output=tmp_path / "out")
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), mixed[0], "a0")
    for i in (1, 2):
        model.load_adapter(mixed[i], f"a{i}")
    hfplug.tuners.merge(model, [1, -0.5, 2], rank=5)
    model.save_pretrained(tmp_path / "saved", selected_adapters=["merged"])
    ours, theirs = (load_file(p / "adapter_model.safetensors") for p in (tmp_path / "out", tmp_path / "saved" / "merged"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    model.set_adapter("merged")
    expected = peft.PeftModel.from_pretrained(models.tiny_llama(), tmp_path / "out").eval()(IDS).logits
    assert torch.equal(model.eval()(IDS).logits, expected)


def test_adapters_in_half_precision_are_summed_in_double(tmp_path):
    folders = [folder(tmp_path / f"{i}", i) for i in range(2)]
    for path in folders:
        tensors = load_file(path / "adapter_model.safetensors")
        save_file({k: t.bfloat16() for k, t in tensors.items()}, path / "adapter_model.safetensors")
    hfplug.tuners.merge(folders, method="svd_merge", output=tmp_path / "out")
    for name, delta in exact_sum(folders, [1, 1]).items():  # PEFT loads them in float32: the same values
        assert off(peft_deltas(tmp_path / "out")[name], delta) < 1e-6


def test_memory_is_that_of_one_module(tmp_path, monkeypatch):
    """No module's tensors are read before the one before it is merged."""
    order = []
    read = FolderLora.factors

    def watched(self, module):
        order.append(module)
        return read(self, module)

    monkeypatch.setattr(FolderLora, "factors", watched)
    hfplug.tuners.merge([folder(tmp_path / f"{i}", i) for i in range(2)])
    assert order == [module for module in sorted(set(order)) for _ in range(2)]


# -- tied heads --------------------------------------------------------------------------------------------------------


def tied(**options):
    return models.tiny_llama(tie_word_embeddings=True, **options)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning", "ignore:.*save_embedding_layers:UserWarning")
def test_b48_a_tied_head_is_merged_without_touching_the_embedding(tmp_path):
    targets = {"target_modules": ["q_proj", "lm_head"]}
    folders = [folder(tmp_path / f"{i}", i, tied, **targets) for i in range(2)]
    report = hfplug.tuners.merge(folders, method="svd_merge", output=tmp_path / "out")
    assert any("lm_head" in note and "tied" in note for note in report.notes)
    assert "note: lm_head" in str(report)
    base = tied()
    embedding = base.get_input_embeddings().weight.clone()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    plain, hidden = tied().eval(), {}
    plain.lm_head.register_forward_pre_hook(lambda _, args: hidden.update(x=args[0]))
    with torch.no_grad():
        total = exact_sum(folders, [1, 1], tied)
        head = total.pop("lm_head")
        for name, delta in total.items():
            plain.get_submodule(name).weight += delta.float()
        expected = plain(IDS).logits + hidden["x"] @ head.float().T
        assert (model(IDS).logits - expected).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning", "ignore:.*save_embedding_layers:UserWarning")
def test_b48_heads_saved_over_different_bases_are_refused(tmp_path):
    a = folder(tmp_path / "a", 1, target_modules=["lm_head"])
    b = folder(tmp_path / "b", 2, lambda: models.tiny_llama(seed=9), target_modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"a'.*b'.*different base weights.*lm_head"):
        hfplug.tuners.merge([a, b], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- what is refused ---------------------------------------------------------------------------------------------------


def edit(path: Path, tensors=None, **options) -> Path:
    """Change a saved adapter."""
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **options}))
    if tensors is not None:
        kept = load_file(path / "adapter_model.safetensors")
        save_file(tensors(kept), path / "adapter_model.safetensors")
    return path


def without(part):
    return lambda tensors: {k: t for k, t in tensors.items() if part not in k}


def changed(part, value):
    return lambda tensors: {k: value(t) if part in k else t for k, t in tensors.items()}


def grown(tensors):
    return {k: torch.cat([t, t]) if "q_proj.lora_B" in k else t for k, t in tensors.items()}


Q = "layers.0.self_attn.q_proj"
REFUSED = {
    "ia3": ({"peft_type": "IA3"}, None, ConfigError, r"b'.*'IA3'.*only adapters of type 'LORA'"),
    "ours": ({"peft_type": "ULORA"}, None, ConfigError, r"b'.*'ULORA'.*hfplug export"),
    "dora": ({"use_dora": True}, None, UnsupportedError, r"b'.*use_dora=True"),
    "bias": ({"bias": "all"}, None, UnsupportedError, r"bias='all'.*allowed: 'none'"),
    "lora_bias": ({"lora_bias": True}, None, UnsupportedError, "lora_bias=True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None, UnsupportedError, "modules_to_save"),
    "target_parameters": ({"target_parameters": ["w"]}, None, UnsupportedError, "target_parameters"),
    "tokens": ({"trainable_token_indices": [3]}, None, UnsupportedError, "trainable_token_indices"),
    "alora": ({"alora_invocation_tokens": [3]}, None, UnsupportedError, "alora_invocation_tokens"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, None, UnsupportedError, "pissa.*changed the weights of its base"),
    "unknown option": ({"lora_alfa": 3}, None, ConfigError, r"'lora_alfa'.*did you mean 'lora_alpha'"),
    "base": ({"base_model_name_or_path": "org/large"}, None, ConfigError, r"a'.*'org/small'.*b'.*'org/large'"),
    "task": ({"task_type": "SEQ_CLS"}, None, ConfigError, r"a'.*'CAUSAL_LM'.*b'.*'SEQ_CLS'"),
    "fan": ({"fan_in_fan_out": True}, None, ConfigError, r"a'.*fan_in_fan_out=False.*b'.*True"),
    "rank": ({"r": 5}, None, ConfigError, r"q_proj' the rank 5, but its factors have 4"),
    "shape": ({}, grown, ConfigError, r"q_proj' is \(32, 32\).*a'.*\(64, 32\).*b'"),
    "no A": ({}, without(f"{Q}.lora_A"), ConfigError, r"b'.*q_proj' lacks its lora_A"),
    "no B": ({}, without(f"{Q}.lora_B"), ConfigError, r"b'.*q_proj' lacks its lora_B"),
    "nothing": ({}, lambda t: {}, ConfigError, "holds no LoRA tensors"),
    "nan": ({}, changed(f"{Q}.lora_B", lambda t: t * float("nan")), ConfigError, r"b'.*lora_B of .*q_proj'.*not finite"),
    "infinite": ({}, changed(f"{Q}.lora_A", lambda t: t / 0), ConfigError, r"lora_A of .*not finite"),
    "conv": ({}, changed(f"{Q}.lora_A", lambda t: t[..., None, None].contiguous()), UnsupportedError, "only adapters of linear"),
    "embedding": ({}, lambda t: {**t, "base_model.model.e.lora_embedding_A": torch.ones(4, 8)}, UnsupportedError, "embedding"),
    "magnitude": ({}, lambda t: {**t, f"{Q}.lora_magnitude_vector.weight": torch.ones(4)}, UnsupportedError, "DoRA"),
    "whole weight": ({}, lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(4)}, UnsupportedError, "whole weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_before_anything_is_written(tmp_path, case):
    options, tensors, error, message = REFUSED[case]
    a = edit(folder(tmp_path / "a", 1), base_model_name_or_path="org/small")
    b = edit(folder(tmp_path / "b", 2), tensors, **options)
    with pytest.raises(error, match=message):
        hfplug.tuners.merge([a, b], output=tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}


def test_b57_sharded_tensors_are_refused(tmp_path):
    a = folder(tmp_path / "a", 1)
    b = edit(folder(tmp_path / "b", 2), changed(f"{Q}.lora_A", lambda t: t.new_empty(0)))
    with pytest.raises(ConfigError, match=r"b'.*lora_A of .*q_proj' is empty.*ZeRO-3.*gather"):
        hfplug.tuners.merge([a, b], output=tmp_path / "out")
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), a, "a")
    layer = model.get_base_model().get_submodule(f"model.{Q}")
    layer.lora_B["a"].weight.data = torch.empty(0)
    with pytest.raises(ConfigError, match=r"'a'.*lora_B of .*q_proj' is empty"):
        hfplug.tuners.merge(model)
    assert list(model.peft_config) == ["a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": []}, r"adapters=\[\] is empty"),
        ({"adapters": "one"}, "must be a list"),
        ({"weights": [1]}, "1 values for 2 adapters"),
        ({"weights": [1, float("nan")]}, "nan is not a finite number"),
        ({"weights": [1, "2"]}, "'2' is not a finite number"),
        ({"rank": 0}, "rank=0 must be an integer > 0"),
        ({"rank": 2.0}, r"rank=2\.0 must be an integer"),
        ({"seed": "x"}, "seed='x' must be an integer"),
        ({"method": "ctn"}, r"'ctn'.*did you mean 'ctm'"),
        ({"method": "ulora"}, r"'ulora' is a tuner, not a merge"),
        ({"rule": "tie"}, r"rule='tie'.*did you mean 'ties'"),
        ({"bta": 0.1}, r"no option 'bta'.*did you mean 'beta'"),
        ({"beta": 2.0}, r"beta=2\.0 must be in \[0, 1\]"),
        ({"density": 0.0}, "density"),
        ({"drop": 1.0}, "drop"),
        ({"name": "x", "model": object()}, "must be a PeftModel"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path, changes, message):
    arguments = {"adapters": [folder(tmp_path / "a", 1), tmp_path / "a"], **changes}
    with pytest.raises(ConfigError, match=message):
        hfplug.tuners.merge(**arguments)


def test_a_pickle_is_not_read(tmp_path):
    a = folder(tmp_path / "a", 1)
    (a / "adapter_model.safetensors").rename(a / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="pickle"):
        hfplug.tuners.merge([a])


def test_folders_that_are_none_are_named(tmp_path):
    for path, message in ((tmp_path / "no", "no such folder"), (tmp_path, r"lacks adapter_config\.json")):
        with pytest.raises(ConfigError, match=message):
            hfplug.tuners.merge([path])


def test_an_output_that_holds_something_is_left_alone(tmp_path):
    a, out = folder(tmp_path / "a", 1), tmp_path / "out"
    out.mkdir()
    hfplug.tuners.merge([a], output=out)  # an empty folder is as good as none
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ConfigError, match=r"output=.*exists and is not an empty folder"):
        hfplug.tuners.merge([a], output=out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_the_model_route_refuses_by_name(tmp_path):
    a = folder(tmp_path / "a", 1)
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), a, "a")
    for arguments, message in (
        ({"adapters": ["b"]}, r"no adapter 'b'.*\['a'\]"),
        ({"adapters": ["a"], "name": "a"}, "already has an adapter"),
        ({"adapters": ["a"], "output": tmp_path / "out"}, "save_pretrained"),
    ):
        with pytest.raises(ConfigError, match=message):
            hfplug.tuners.merge(model=model, **arguments)
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge_adapter"):
        hfplug.tuners.merge(model)
    assert list(model.peft_config) == ["a"]


def test_embeddings_of_a_live_model_are_refused():
    model = wrapped(1, target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(UnsupportedError, match=r"embed_tokens' is an embedding"):
        hfplug.tuners.merge(model)


# -- report, card, command ---------------------------------------------------------------------------------------------


def test_an_adapter_that_is_mostly_lost_is_warned_of(tmp_path):
    folders = [folder(tmp_path / f"{i}", i) for i in range(8)]
    with pytest.warns(UserWarning, match=r"modules keep less than 50% of local adapter \d.*a larger rank keeps more"):
        report = hfplug.tuners.merge(folders, rank=1)
    assert "warning:" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hfplug.tuners.merge(folders, rank=32)


def test_b53_the_card_holds_no_local_path(tmp_path):
    folders = [folder(tmp_path / "secret_place" / f"{i}", i) for i in range(2)]
    for path in folders:
        edit(path, base_model_name_or_path=str(tmp_path / "secret_base"))
    hfplug.tuners.merge(folders, [1, 0.5], output=tmp_path / "out", rule="ties")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "secret" not in card
    assert str(tmp_path) not in card
    for said in ("Compress then Merge", "arxiv.org/abs/2606.03723", "authors' code", hfplug.__version__, "local adapter 2: r=4",
                 "sha256=", "weight 0.5", "| rule | `ties` |", "relative error", "PEFT alone loads it"):  # fmt: skip
        assert said in card, said


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "hfplug", "merge", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_the_command_merges_and_prints_the_report(tmp_path):
    folders = [folder(tmp_path / f"{i}", i) for i in range(2)]
    words = ["--rank", 3, "--weights", "1,-0.5", "--set", "rule=ties", "--set", "density=0.5", "--seed", 4]
    done = command(*folders, "--output", tmp_path / "out", *words, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    here = hfplug.tuners.merge(folders, [1, -0.5], 3, output=tmp_path / "here", rule="ties", density=0.5, seed=4)
    assert shown["error"] == here.error
    assert shown["options"]["density"] == 0.5
    same = [(p / "adapter_model.safetensors").read_bytes() for p in (tmp_path / "out", tmp_path / "here")]
    assert same[0] == same[1]


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    a = folder(tmp_path / "a", 1)
    for words, message in (
        (["--set", "rule"], "must be key=value"),
        (["--set", "rank=3"], "no option of a merge method"),
        (["--weights", "1,x"], "must be numbers"),
        (["--method", "cmt"], "did you mean 'ctm'"),
    ):
        done = command(a, *words)
        assert done.returncode == 2
        assert done.stderr.strip().splitlines()[-1].startswith("hfplug: ")
        assert message in done.stderr
