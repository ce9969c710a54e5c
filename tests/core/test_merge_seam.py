"""Merging adapters: what comes out against the exact sum, both routes, reload without hfplug, the report and the card."""

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
from hfplug.errors import ConfigError
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


Q = "layers.0.self_attn.q_proj"


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
    model = peft.PeftModel.from_pretrained(models.tiny_llama(), mixed[0], "a")
    before = torch.get_rng_state()
    hfplug.tuners.merge(mixed, rule="dare_linear")
    hfplug.tuners.merge(model, rule="dare_linear")
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
    # what a user froze or trains beside PEFT's habit stays so
    model.get_base_model().get_submodule(f"model.{Q}").lora_A["a0"].weight.requires_grad_(False)
    model.get_base_model().model.norm.weight.requires_grad_(True)
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


def test_adapters_on_a_4_bit_base_are_merged_without_touching_it(mixed, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    models.tiny_llama().save_pretrained(tmp_path / "base")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantised)
    model = peft.PeftModel.from_pretrained(base, mixed[0], "a0")
    model.load_adapter(mixed[1], "a1")
    weight = model.get_base_model().get_submodule(f"model.{Q}").base_layer.weight
    bits = weight.data.clone()
    report = hfplug.tuners.merge(model, [1, -0.5], method="svd_merge")
    assert report.error == pytest.approx(hfplug.tuners.merge(mixed[:2], [1, -0.5], method="svd_merge").error)
    assert torch.equal(weight.data, bits)
    layer = model.get_base_model().get_submodule(f"model.{Q}")
    added = {n: (layer.lora_B[n].weight @ layer.lora_A[n].weight * layer.scaling[n]).double() for n in ("a0", "a1", "merged")}
    assert off(added["merged"], added["a0"] - 0.5 * added["a1"]) < 1e-6


def test_an_adapter_of_the_hub_keeps_its_name(tmp_path, monkeypatch):
    a = folder(tmp_path / "a", 1)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, name: str(a / name))
    report = hfplug.tuners.merge(["org/adapter", a], output=tmp_path / "out")
    assert report.adapters[0] == "org/adapter"
    assert report.adapters[1].startswith("local adapter 2: r=4, sha256=")
    assert "org/adapter, weight 1" in (tmp_path / "out" / "README.md").read_text()


def test_layers_chosen_by_number_stay_chosen(tmp_path):
    """Configurations that say the same are kept; where they differ, every module is named."""
    one = [folder(tmp_path / f"one{i}", i, layers_to_transform=[1]) for i in range(2)]
    other = folder(tmp_path / "other", 3, layers_to_transform=[0])
    for name, chosen in (("same", one), ("both", [one[0], other])):
        hfplug.tuners.merge(chosen, method="svd_merge", output=tmp_path / name)
        found, expected = peft_deltas(tmp_path / name), exact_sum(chosen, [1, 1])
        assert set(found) == set(expected)
        assert all(off(found[n], expected[n]) < 1e-6 for n in expected)
    options = [json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("same", "both")]
    assert options[0]["target_modules"] == ["q_proj", "v_proj"]
    assert options[0]["layers_to_transform"] == [1]
    assert options[1]["layers_to_transform"] is None
    assert len(options[1]["target_modules"]) == 4


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
    stored = [load_file(path / "adapter_model.safetensors") for path in (folders[0], tmp_path / "out")]
    assert set(stored[0]) == set(stored[1])
    copy = "base_model.model.lm_head.base_layer.weight"  # PEFT's own habit, for heads that were resized
    assert torch.equal(stored[0][copy], stored[1][copy])
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


# -- report, card, command ---------------------------------------------------------------------------------------------


def test_an_adapter_that_is_mostly_lost_is_warned_of(tmp_path):
    folders = [folder(tmp_path / f"{i}", i) for i in range(8)]
    with pytest.warns(UserWarning, match=r"modules keep less than 50% of local adapter \d.*a larger rank keeps more"):
        report = hfplug.tuners.merge(folders, rank=1)
    assert "warning:" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hfplug.tuners.merge(folders, rank=32)
        hfplug.tuners.merge([folders[0]] * 2, [1, -1], method="svd_merge")  # nothing is left of either, as it should be


def test_b53_the_card_holds_no_local_path(tmp_path):
    folders = [folder(tmp_path / "secret_place" / f"{i}", i) for i in range(2)]
    for path in folders:
        config = path / "adapter_config.json"
        named = {**json.loads(config.read_text()), "base_model_name_or_path": str(tmp_path / "secret_base")}
        config.write_text(json.dumps(named))
    hfplug.tuners.merge(folders, [1, 0.5], output=tmp_path / "out", rule="ties")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "secret" not in card
    assert str(tmp_path) not in card
    for said in ("Compress then Merge", "arxiv.org/abs/2606.03723", "authors' code", hfplug.__version__, "local adapter 2: r=4",
                 "sha256=", "weight 0.5", "| rule | `ties` |", "relative error", "PEFT alone loads it"):  # fmt: skip
        assert said in card, said


def test_the_command_merges_and_prints_the_report(tmp_path):
    folders = [folder(tmp_path / f"{i}", i) for i in range(2)]
    words = ["--rank", 3, "--weights", "1,-0.5", "--set", "rule=ties", "--set", "density=0.5", "--seed", 4, "--json"]
    command = [sys.executable, "-m", "hfplug", "merge", *folders, "--output", tmp_path / "out", *words]
    done = subprocess.run([str(w) for w in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    here = hfplug.tuners.merge(folders, [1, -0.5], 3, output=tmp_path / "here", rule="ties", density=0.5, seed=4)
    assert shown["error"] == here.error
    assert shown["options"]["density"] == 0.5
    same = [(p / "adapter_model.safetensors").read_bytes() for p in (tmp_path / "out", tmp_path / "here")]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "rule"], "must be key=value"),
        (["--set", "rank=3"], "no option of a merge method"),
        (["--set", "rule=[ties"], "no YAML"),
        (["--weights", "1,x"], "must be numbers"),
        (["--weights", "-1,2"], "2 values for 1 adapters"),
        (["--method", "cmt"], "did you mean 'ctm'"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(tmp_path, monkeypatch, capsys, words, message):
    from hfplug.cli import main

    monkeypatch.setattr(sys, "argv", ["hfplug", "merge", str(folder(tmp_path / "a", 1)), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("hfplug: ")
    assert message in said[-1]
