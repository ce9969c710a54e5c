"""MuSe as an attention implementation: the contract, and what its card and options promise."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hfplug.attention import AttentionCall
from hfplug.kernels.muse import MuSeConfig, backend, configure
from hfplug.kernels.muse.backend import approximate, left_to_exact
from hfplug.kernels.muse.reference import clusters_of, reference
from hfplug.kernels.muse.scheme import Setting
from hfplug.seams.attention import options_of
from hfplug.testing.attention import AttentionContract
from hfplug.testing.models import tiny_llama, tiny_trainer

SMALL = {"clusters": 4, "query_clusters": 3, "block": 16, "min_length": 0}


def own_reference(call):
    """MuSe of a call in fp64, document by document, the slow way; exact where MuSe leaves it."""
    config = options_of(call.config, "muse")
    if left_to_exact(call, config) is not None:
        return None
    batch, heads, tokens, _ = call.query.shape
    groups = call.key.shape[1]
    out = torch.zeros(batch, tokens, heads, call.value.shape[3], dtype=torch.float64)
    numbers = (config.clusters, config.query_clusters, config.block, config.retrieve, config.iterations)
    setting = Setting(*numbers, False, call.scaling)
    for row, start, stop in call.rows():
        for group in range(groups):
            mine = slice(group * heads // groups, (group + 1) * heads // groups)
            q, k, v = call.query[row, mine, start:stop], call.key[row, group, start:stop], call.value[row, group, start:stop]
            with torch.no_grad():  # the clusters of fp32, as the method makes them: a tie may fall otherwise in fp64
                made = clusters_of(q, k, v, setting)
            made = [m.double() if m.is_floating_point() else m for m in made]
            found = reference(q.double(), k.double(), v.double(), setting, made)
            out[row, start:stop, mine] = found.transpose(0, 1)
    return out


class TestMuSeContract(AttentionContract):
    method, options, exact_when_short = "muse", SMALL, 32

    def reference(self, call):
        return own_reference(call)


@pytest.mark.slow
class TestMuSeRetrievingContract(TestMuSeContract):
    options = SMALL | {"retrieve": 2}


# -- dtypes ------------------------------------------------------------------------------------------------------------


def _call(dtypes, **more):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 90, 16, generator=generator) for heads in (4, 2, 2))
    q, k, v = (x.to(dtype).requires_grad_() for x, dtype in zip((q, k, v), dtypes, strict=True))
    return AttentionCall(query=q, key=k, value=v, scaling=0.4, **more)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F32, F32, BF16), (BF16, BF16, BF16)], ids=["fp32", "mixed", "bf16"])
def test_under_autocast_it_is_muse_in_autocasts_dtype(dtypes):
    """Rotary embeddings leave fp32 queries and keys beside bf16 values; the sums inside stay as they are written."""
    config = MuSeConfig(**SMALL)
    call = _call(dtypes)
    with torch.autocast("cpu", dtype=BF16):
        out = approximate(call, config)
        exact, _ = call.exact()
        (out.float() * torch.arange(16)).sum().backward()  # inside, as gradient checkpointing may
    assert out.dtype == exact.dtype == BF16
    lower = _call((BF16, BF16, BF16))
    expected = approximate(lower, config)
    (expected.float() * torch.arange(16)).sum().backward()
    assert torch.equal(out, expected)
    for found, own in zip((call.query, call.key, call.value), (lower.query, lower.key, lower.value), strict=True):
        assert found.grad.dtype == found.dtype
        assert torch.equal(found.grad.to(BF16), own.grad)


@pytest.mark.parametrize("heads", [(), (1,)], ids=["all on MuSe", "one head exact"])
@pytest.mark.parametrize("segments", [None, [1] * 70 + [2] * 20], ids=["whole", "packed with a short one"])
def test_mixed_dtypes_are_worked_in_the_wider(heads, segments):
    config = MuSeConfig(**SMALL)
    more = {} if segments is None else {"segments": torch.tensor([segments], dtype=torch.int32)}
    call = _call((F32, F32, BF16), **more)
    wide = dataclasses.replace(call, value=call.value.float())
    found, expected = (approximate(c, config, heads) for c in (call, wide))
    assert torch.equal(found, expected)


def test_a_model_trains_under_autocast():
    model = tiny_llama(max_position_embeddings=256, attn="muse")
    configure(model, **SMALL)
    ids = torch.randint(3, 60, (2, 100), generator=torch.Generator().manual_seed(0))
    grads = []
    for on in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=BF16, enabled=on):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.995


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_trl_packs_documents_for_it(monkeypatch, strategy):
    """TRL's packing trains as under sdpa (here a key is a cluster), and MuSe is told where a document ends."""
    from datasets import Dataset

    seen, losses = [], []
    monkeypatch.setattr(backend, "approximate", lambda call, *given: seen.append(call.rows()) or approximate(call, *given))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in (70, 50, 90, 40, 100, 30, 64, 80)]
    for attention in ("sdpa", "muse"):
        model = tiny_llama(max_position_embeddings=512, attn=attention)
        if attention == "muse":
            configure(model, **SMALL | {"clusters": 1000})
        trainer = tiny_trainer(
            model, sft=True, train_dataset=Dataset.from_dict({"input_ids": rows}), packing=True, packing_strategy=strategy,
            max_length=128, max_steps=2, logging_steps=1, per_device_train_batch_size=2,
        )  # fmt: skip
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    lengths = {stop - start for rows_ in seen for _, start, stop in rows_}
    if strategy == "bfd":
        assert lengths <= {len(row) for row in rows}
    else:  # cut without regard to documents, as TRL says
        assert max(lengths) == 128
