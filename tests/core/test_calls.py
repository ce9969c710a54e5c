"""The call scope: code deep in a model knows its call, in the forward and in the recomputation of checkpointing."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from hfplug.calls import call_scope, token_stack
from hfplug.testing import models
from hfplug.testing.callback import structure

IDS = torch.tensor([[1, 9, 23, 5, 40], [1, 30, 11, 52, 7]])
CHECKPOINTING = [None, False, True]  # off, non-reentrant, reentrant


def checkpointed(use_reentrant, model=None):
    model = (model or models.tiny_llama()).train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    return model


@pytest.fixture
def joined():
    model = models.tiny_llama()
    scope = call_scope(model)
    scope.join("test")
    return model, scope


@pytest.mark.parametrize("name", list(models.TINY_MODELS))
def test_token_stack_takes_the_tokens(name):
    model, seen = models.TINY_MODELS[name](), []
    handle = token_stack(model).register_forward_pre_hook(
        lambda _m, args, kwargs: seen.extend([*args, *kwargs.values()]), with_kwargs=True
    )
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    handle.remove()
    assert sum(value is IDS for value in seen) == 1


def test_token_stack_through_wrappers():
    from peft import LoraConfig, get_peft_model

    model = models.tiny_llama()
    stack = model.model
    assert token_stack(stack) is stack
    assert token_stack(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))) is stack
    assert token_stack(torch.nn.Linear(2, 2)).weight.shape == (2, 2)


def test_a_call_knows_its_ids_but_not_of_embeddings(joined):
    model, scope = joined
    seen = []
    scope.join("test", lambda call: seen.append((call.input_ids, call.length)))
    model(input_ids=IDS)
    model(inputs_embeds=model.get_input_embeddings()(IDS))
    assert torch.equal(seen[0][0], IDS)
    assert seen[1] == (None, 5)


def test_one_scope_per_model_whoever_asks():
    from peft import LoraConfig, get_peft_model

    model = models.tiny_llama()
    scope = call_scope(model)
    assert call_scope(model.model) is scope
    assert call_scope(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))) is scope
    assert call_scope(models.tiny_llama()) is not scope


def test_arguments_by_name_and_by_position(joined):
    model, scope = joined
    calls = []
    scope.join("ends", calls.append)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = torch.arange(5)[None]
    model(input_ids=IDS, attention_mask=mask, position_ids=positions)
    model.model(IDS, mask, positions)
    model(inputs_embeds=model.get_input_embeddings()(IDS))
    for call in calls[:2]:
        assert call.attention_mask.equal(mask.bool())
        assert call.position_ids is positions
    assert all((call.batch, call.length, call.training) == (2, 5, True) for call in calls)
    assert calls[2].attention_mask is None


def test_a_mask_without_padding_is_none(joined):
    model, scope = joined
    calls = []
    scope.join("ends", calls.append)
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert calls[0].attention_mask is None


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_padding_is_read_off_a_prepared_mask(attn):
    from transformers.masking_utils import create_causal_mask

    model, calls = models.tiny_llama(attn=attn), []
    call_scope(model).join("ends", calls.append)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    prepared = create_causal_mask(
        config=model.config, inputs_embeds=torch.zeros(2, 5, 32), attention_mask=mask, cache=None,
        position_ids=None,
    )  # fmt: skip
    model(input_ids=IDS, attention_mask=prepared)
    assert calls[0].attention_mask.equal(mask.bool())


def test_chunks_of_a_cached_generation(joined):
    model, scope = joined
    calls = []
    scope.join("ends", lambda call: calls.append((call.length, call.past, call.attention_mask, call.cache)))
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    model.generate(IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert [(length, past) for length, past, _, _ in calls] == [(5, 0), (1, 5), (1, 6)]
    assert calls[0][2].equal(mask.bool())
    assert calls[1][2] is None  # the new token is real
    assert calls[0][3] is calls[1][3] is not None


def test_packed_documents(joined):
    model, scope = joined
    calls = []
    scope.join("ends", calls.append)
    model(input_ids=IDS[:1], position_ids=torch.tensor([[0, 1, 0, 1, 2]]))
    model(input_ids=IDS[:1], position_ids=torch.tensor([[3, 4, 5, 6, 7]]))
    # Left padding: positions of padding tokens restart nothing.
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1]]), "position_ids": torch.tensor([[1, 1, 0, 1, 2]])}
    model(input_ids=IDS[:1], **padded)
    assert calls[0].restarts.tolist() == [[False, False, True, False, False]]
    assert calls[1].restarts is None
    assert calls[2].restarts is None


@pytest.mark.parametrize("use_reentrant", CHECKPOINTING)
def test_recomputation_is_told_apart_and_sees_its_own_call(use_reentrant):
    model = checkpointed(use_reentrant)
    scope = call_scope(model)
    scope.join("test")
    seen = []
    # Not at the end of the layer: non-reentrant recomputation stops as soon as it has every tensor it needs.
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append((scope.current, scope.recompute)))
    # Two forwards before one backward, as in DPO: each layer's recomputation belongs to its own forward.
    losses = [model(input_ids=IDS, labels=IDS).loss, model(input_ids=IDS.flip(0), labels=IDS).loss]
    forwards = [call for call, recompute in seen if not recompute]
    assert len(forwards) == len(seen) == 2
    assert forwards[0] is not forwards[1]
    sum(losses).backward()
    recomputed = [call for call, recompute in seen if recompute]
    expected = [] if use_reentrant is None else [forwards[1], forwards[0]]
    assert len(recomputed) == len(expected)
    assert all(a is b for a, b in zip(recomputed, expected, strict=True))
    assert scope.recompute  # outside of any forward nothing may be counted


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b56_following_a_checkpointed_model_changes_no_gradient(use_reentrant):
    gradients = []
    for follow in (False, True):
        model = checkpointed(use_reentrant, models.tiny_llama(attention_dropout=0.3))
        if follow:
            call_scope(model).join("test")
        torch.manual_seed(5)
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(gradients[1][n].equal(g) for n, g in gradients[0].items())


def test_the_memo_outlives_the_forward_under_checkpointing():
    model = checkpointed(True)
    scope = call_scope(model)
    scope.join("test")
    seen = []

    def hook(*_):
        if not scope.recompute:
            scope.current.memo["drawn"] = len(seen)
        seen.append(scope.current.memo["drawn"])

    model.model.layers[0].mlp.register_forward_hook(hook)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen == [0, 0]


def test_an_error_in_the_forward_leaves_no_call(joined):
    model, scope = joined
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 3), models.VOCAB))
    assert scope.current is None
    assert scope.recompute
    calls = []
    scope.join("ends", calls.append)
    model(input_ids=IDS)
    assert len(calls) == 1


def test_an_evaluation_keeps_no_call_alive(joined):
    model, scope = joined
    model.eval()(input_ids=IDS)
    assert scope.current is None
    model.train()(input_ids=IDS)
    assert scope.current is not None


def test_threads_do_not_see_each_others_calls(joined):
    model, scope = joined
    inside, seen = threading.Barrier(2), {}

    def hook(*_):
        inside.wait(timeout=20)
        seen[threading.current_thread().name] = scope.current.length

    model.model.layers[0].register_forward_hook(hook)
    threads = [threading.Thread(target=lambda n=n: model(input_ids=IDS[:, :n]), name=str(n)) for n in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"3": 3, "5": 5}


def test_the_last_to_leave_removes_every_trace():
    model = checkpointed(True)
    before = structure(model)
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    scope = call_scope(model)
    scope.join("a")
    scope.join("b")
    model(input_ids=IDS)
    assert structure(model) != before
    scope.leave("a")
    assert structure(model) != before
    scope.leave("b")
    assert structure(model) == before
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    scope.leave("b")  # once more does no harm
    assert call_scope(model) is not scope


def test_a_copy_of_a_followed_model_follows_itself(joined):
    model, scope = joined
    model(input_ids=IDS)
    twin = copy.deepcopy(model)
    own = call_scope(twin)
    assert own is not scope
    assert own.stack is twin.model
    twin.train()(input_ids=IDS[:, :2])
    assert own.current.length == 2
    assert scope.current is None or scope.current.length == 5
    own.leave("test")
    assert structure(twin) == structure(models.tiny_llama().train())


def test_a_call_inside_a_call_gives_the_outer_one_back(joined):
    model, scope = joined
    seen = []

    def once(*_):
        if not seen:
            seen.append(None)
            model(input_ids=IDS[:, :2])

    model.model.layers[0].register_forward_pre_hook(once)
    model.model.layers[1].register_forward_pre_hook(lambda *_: seen.append(scope.current and scope.current.length))
    for training in (False, True):
        seen.clear()
        model.train(training)(input_ids=IDS)
        assert seen == [None, 2, 5]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_inside_a_forward_is_still_a_recomputation(use_reentrant):
    model = checkpointed(use_reentrant)
    scope = call_scope(model)
    scope.join("test")
    seen, losses = [], []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append((scope.current.length, scope.recompute)))
    losses.append(model(input_ids=IDS[:, :3], labels=IDS[:, :3]).loss)
    model.model.embed_tokens.register_forward_hook(lambda *_: losses and losses.pop().backward())
    model(input_ids=IDS)
    assert seen == [(3, False), (3, True), (5, False)]
