"""U-LoRA: what holds over calls and over training steps (the card's exact properties)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from hfplug.errors import UnsupportedError
from hfplug.testing import models
from hfplug.testing.ranks import run_ranks

FAMILIES = sorted(models.TINY_MODELS)


@pytest.fixture(params=FAMILIES)
def model(request, kit):
    return kit.wrap(models.TINY_MODELS[request.param](), stir=0.3).eval()


# -- causality ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_later_tokens_do_not_reach_earlier_outputs(kit, bidirectional):
    """Bit for bit in float64 (eager); the leaking mode must fail the very same check."""
    options = {"context": "bidirectional", "force_bidirectional": True} if bidirectional else {}
    model = kit.wrap(models.tiny_llama(attn="eager"), stir=0.3, **options).double()
    ids = kit.ids(1, 10)
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 7) % (models.VOCAB - 3) + 3
    found, changed = (kit.logits(model, x, use_cache=False) for x in (ids, other))
    assert not torch.equal(found[:, 6:], changed[:, 6:])
    assert torch.equal(found[:, :6], changed[:, :6]) is not bidirectional


# -- the context beside the cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "static"])
def test_left_padded_generation_is_the_recomputed_one(kit, model, kind):
    ids = kit.ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    shared = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": models.PAD, "eos_token_id": None}
    shared |= {"return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **shared)
    cached = model.generate(input_ids=ids, attention_mask=mask, cache_implementation=kind, **shared)
    assert torch.equal(plain.sequences, cached.sequences)
    assert max(kit.off(a, b) for a, b in zip(plain.logits, cached.logits, strict=True)) <= 1e-5
    alone = model.generate(input_ids=ids[:1, 4:], use_cache=True, **shared)
    assert torch.equal(alone.sequences[0, 5:], cached.sequences[0, 9:])


def test_a_prefix_serves_two_questions_and_chunks_are_the_whole(kit, model):
    from transformers import DynamicCache

    prefix, questions = kit.ids(1, 7), [kit.ids(1, 4, seed=s) for s in (1, 2)]
    config = model.get_base_model().config
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(prefix[:, :3], cache=cache)
        model(prefix[:, 3:], cache=cache)  # chunked prefill
        for question in questions:
            answer = model(question, cache=copy.deepcopy(cache)).logits
            whole = kit.logits(model, torch.cat([prefix, question], 1))[:, 7:]
            assert kit.off(answer, whole) <= 1e-5
        assert cache.get_seq_length() == 7  # the copies left the prefix alone


def test_what_the_context_cannot_follow_is_refused(kit):
    from transformers import DynamicCache

    model = kit.wrap(models.tiny_llama(), stir=0.3).eval()
    config, ids = model.get_base_model().config, kit.ids(1, 6)
    with torch.no_grad():
        cache = DynamicCache(config=config)
        with model.disable_adapter():
            model(ids, cache=cache)
        with pytest.raises(UnsupportedError, match="covers 0"):
            model(ids, cache=cache)
        cache = DynamicCache(config=config)
        model(ids, cache=cache)
        assert not cache.is_croppable
        with pytest.raises(UnsupportedError, match="cropped"):
            cache.crop(-1)
        cache.reset()
        model(ids, cache=cache)  # an emptied cache starts anew
    with pytest.raises(Exception, match=r"(?i)crop|assist"):
        model.generate(ids, assistant_model=models.tiny_llama(), max_new_tokens=4, do_sample=False)


def test_packed_documents_are_separate_ones(kit, model):
    first, second = kit.ids(1, 5, seed=1), kit.ids(1, 8, seed=2)
    packed = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    found = kit.logits(model, packed, position_ids=positions, use_cache=False)
    assert kit.off(found[:, :5], kit.logits(model, first)) <= 1e-5
    assert kit.off(found[:, 5:], kit.logits(model, second)) <= 1e-5
    assert kit.off(found[:, 5:], kit.logits(model, packed, use_cache=False)[:, 5:]) > 1e-4


def test_an_encoder_reads_the_whole_sequence(kit):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    options = {"context": "bidirectional", "task_type": "SEQ_CLS", "target_modules": ["query", "value"]}
    model = kit.wrap(BertForSequenceClassification(config), stir=0.3, **options).eval()
    ids, mask = kit.ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
        alone = model(input_ids=ids[:1, :6]).logits
    assert kit.off(together[:1], alone) <= 1e-5


# -- the prior over steps -------------------------------------------------------------------------------------------------


def step(model, ids, lr=0.1, **kwargs):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr)
    model.train()(ids, labels=ids, **kwargs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_prior_is_bias_corrected_and_one_step_behind(kit, monkeypatch):
    """After step 1 it is that step's mean exactly; step s uses what was there after step s - 1."""
    from hfplug.tuners.ulora.layer import ULoraLinear

    model = kit.wrap(models.tiny_llama(), stir=0.3, ema_decay=0.9, target_modules=["v_proj"])
    layer = kit.layers(model)[0]
    layer.ulora_ema["default"].fill_(1)
    layer.ulora_steps["default"].zero_()
    means, used = [], []
    fold = ULoraLinear.fold_ema

    def watched(self, name, mean):
        if self is layer:
            means.append(mean.clone())
        fold(self, name, mean)

    monkeypatch.setattr(ULoraLinear, "fold_ema", watched)
    for seed in range(4):
        used.append(layer.ulora_ema["default"].clone())
        step(model, kit.ids(seed=seed))
        if seed == 0:
            assert torch.equal(layer.ulora_ema["default"], means[0])
    assert torch.equal(used[0], torch.ones(4))
    assert torch.equal(used[1], means[0])
    weights = [0.1 * 0.9 ** (3 - i) for i in range(4)]
    expected = sum(w * m.double() for w, m in zip(weights, means, strict=True)) / (1 - 0.9**4)
    assert kit.off(layer.ulora_ema["default"].double(), expected) <= 1e-6
    assert int(layer.ulora_steps["default"]) == 4


def test_only_training_steps_count(kit):
    model = kit.wrap(models.tiny_llama(), stir=0.3)
    layer, ids = kit.layers(model)[0], kit.ids()
    before = layer.ulora_ema["default"].clone()
    kit.logits(model, ids)
    with torch.no_grad():
        model.train()(ids)
    assert not layer.ulora_pending
    model(ids, labels=ids).loss.backward()
    assert layer.ulora_pending  # waits for its optimiser step
    kit.logits(model, ids)
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=1.0).step()  # somebody else's
    assert torch.equal(layer.ulora_ema["default"], before)
    model.zero_grad()
    step(model, ids)
    assert not torch.equal(layer.ulora_ema["default"], before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_one_backward_keep_their_own_masks(kit, reentrant):
    """As in DPO, under checkpointing: the recomputation of each forward sees its own padding."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)  # the initialisation of A
        model = kit.wrap(models.tiny_llama(), stir=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss = 0.0
        for seed, pad in ((1, 4), (2, 0), (3, 6)):
            ids = kit.ids(seed=seed)
            mask = torch.ones_like(ids)
            mask[0, :pad] = 0
            loss = loss + model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, expected in gradients[0].items():
        assert kit.off(gradients[1][name], expected) <= 1e-6, name


RANKS = """
import json, os, sys, torch, torch.distributed as dist
import hfplug
from hfplug.testing import models
from peft import get_peft_model
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = get_peft_model(models.tiny_llama(), hfplug.tuners.config(type="ulora", r=4, target_modules=["v_proj"]))
layers = [layer for _, layer in hfplug.tuners.tuner_layers(model, "ulora")]
for layer in layers:
    for p in layer.ulora_gate["default"].parameters():
        torch.nn.init.normal_(p, std=0.5)
net = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for step in range(3):
    ids = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(step))
    mine = ids[rank * 4 // world : (rank + 1) * 4 // world]
    net(input_ids=mine, labels=mine).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    json.dump([layer.ulora_ema["default"].tolist() for layer in layers], open(sys.argv[1], "w"))
"""


@pytest.mark.slow
def test_the_prior_of_two_ranks_is_that_of_one(tmp_path: Path):
    (tmp_path / "ranks.py").write_text(RANKS)
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        run_ranks(tmp_path / "ranks.py", str(out), ranks=ranks)
        found.append(torch.tensor(json.loads(out.read_text())))
    assert (found[0] - 1).abs().max() > 1e-3
    assert (found[0] - found[1]).abs().max() <= 1e-6
