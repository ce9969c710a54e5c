"""Distances of responses, where they come from, and the frozen copy of a trained adapter that TRL measures against."""

from __future__ import annotations

import datasets
import peft
import pytest
import torch
from sadpo_kit import batch, dpo

import hfplug
from hfplug.errors import ConfigError
from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.trainers import HiddenStateEncoder, add_semantic_distance
from hfplug.trainers.sa_dpo.distance import distances

ROWS = {
    "prompt": ["w5 w6 ", "w7 ", "w8 w9 w10 "],
    "chosen": ["w11 w12", "w13", "w14 w15 w16"],
    "rejected": ["w11 w12", "w20 w21 w22", "w17"],
}


def table(**columns):
    return datasets.Dataset.from_dict({**ROWS, **columns})


def letters(prompts, responses):
    """An encoder by hand: how often each of four words stands in a response."""
    return [[text.split().count(word) for word in ("a", "b", "c", "d")] for text in responses]


# -- the encoder -------------------------------------------------------------------------------------------------------------


def test_an_encoding_is_the_mean_over_the_response_read_after_its_prompt() -> None:
    model, tokenizer = tiny_llama(0), tiny_tokenizer()
    found = HiddenStateEncoder(model, tokenizer)(ROWS["prompt"], ROWS["rejected"])
    for prompt, response, vector in zip(ROWS["prompt"], ROWS["rejected"], found, strict=True):
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
        with torch.no_grad():
            states = model(input_ids=torch.tensor([before + after]), output_hidden_states=True).hidden_states[-1][0]
        assert torch.allclose(vector.float(), states[len(before) :].mean(0), atol=1e-6)
        assert not torch.allclose(vector.float(), states.mean(0), atol=1e-3)  # the prompt is not among them
    assert torch.equal(
        HiddenStateEncoder(model, tokenizer, layer=0)([""], ["w5"])[0], model.get_input_embeddings().weight[5].double()
    )


def test_the_prompt_matters_and_neighbours_in_the_batch_do_not() -> None:
    encoder = HiddenStateEncoder(tiny_llama(0), tiny_tokenizer())
    alone = encoder(["w5 w6 "], ["w11"])
    assert torch.allclose(encoder(["w5 w6 ", "w7 "], ["w11", "w8 w9 w10 w11 w12"])[0], alone[0], atol=1e-6)
    assert not torch.allclose(encoder(["w9 w7 "], ["w11"]), alone, atol=1e-3)


def test_a_long_pair_loses_the_left_of_the_prompt_then_the_right_of_the_response() -> None:
    model = tiny_llama(0)
    short = HiddenStateEncoder(model, tiny_tokenizer(), max_length=4)
    whole = HiddenStateEncoder(model, tiny_tokenizer())
    assert torch.allclose(short(["w3 w4 w5 w6"], ["w7 w8"]), whole(["w5 w6"], ["w7 w8"]), atol=1e-6)
    assert torch.allclose(short(["w3 w6"], ["w7 w8 w9 w10"]), whole(["w6"], ["w7 w8 w9"]), atol=1e-6)
    with pytest.raises(ConfigError, match="max_length=1 must be at least 2"):
        HiddenStateEncoder(model, tiny_tokenizer(), max_length=1)


def test_the_model_is_read_in_evaluation_and_left_as_it_was() -> None:
    model = tiny_llama(0, attention_dropout=0.5)
    encoder = HiddenStateEncoder(model, tiny_tokenizer())
    still = encoder(["w5 w6 "], ["w11 w12"])
    model.train()
    assert torch.equal(encoder(["w5 w6 "], ["w11 w12"]), still)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# -- the column ---------------------------------------------------------------------------------------------------------------


def test_distances_are_half_of_one_minus_the_cosine() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, mean = (torch.randn(n, 5, generator=draw, dtype=torch.float64) for n in (6, 6, 1))
    cosine = torch.nn.functional.cosine_similarity(a - mean, b - mean, dim=-1)
    assert torch.allclose(distances(a, b, mean), (1 - cosine) / 2, atol=1e-12)
    assert torch.equal(distances(a, b, mean), distances(b, a, mean))
    assert torch.equal(distances(a, a), torch.zeros(6, dtype=torch.float64))
    assert torch.allclose(distances(a, -a), torch.ones(6, dtype=torch.float64))


def test_the_column_holds_the_distances_of_the_responses() -> None:
    data = datasets.Dataset.from_dict({"prompt": ["p"] * 3, "chosen": ["a", "a b", "a"], "rejected": ["a", "a", "b"]})
    plain = add_semantic_distance(data, letters, center=False, batch_size=2)
    assert plain["semantic_distance"][:] == pytest.approx([0, (1 - 0.5**0.5) / 2, 0.5])
    encoded = torch.tensor(letters([], [*data["chosen"], *data["rejected"]]), dtype=torch.float64)
    centred = distances(encoded[:3], encoded[3:], encoded.mean(0))
    assert add_semantic_distance(data, letters)["semantic_distance"][:] == pytest.approx(centred.tolist())
    stretched = add_semantic_distance(data, letters, center=False, quantile=0.5, column="d")
    assert stretched["d"][:] == pytest.approx([0, 1, 1])


def test_the_first_split_gives_mean_and_quantile_for_all() -> None:
    first = datasets.Dataset.from_dict({"prompt": ["p", "p"], "chosen": ["a", "a"], "rejected": ["b", "a b"]})
    other = datasets.Dataset.from_dict({"prompt": ["p"], "chosen": ["c"], "rejected": ["d"]})
    both = add_semantic_distance(datasets.DatasetDict(train=first, test=other), letters, quantile=1.0)
    assert isinstance(both, datasets.DatasetDict)
    mean = torch.tensor(letters([], [*first["chosen"], *first["rejected"]]), dtype=torch.float64).mean(0)
    scale = float(distances(torch.eye(4)[[0]], torch.eye(4)[[1]], mean))
    c, d = torch.eye(4)[[2]], torch.eye(4)[[3]]
    assert both["test"]["semantic_distance"][0] == pytest.approx(min(float(distances(c, d, mean)) / scale, 1))
    assert max(both["train"]["semantic_distance"]) == pytest.approx(1)


def test_conversations_and_pairs_without_a_prompt_column() -> None:
    said = {
        "chosen": [[{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]],
        "rejected": [[{"role": "user", "content": "x"}, {"role": "assistant", "content": "b"}]],
    }
    seen = []

    def encoder(prompts, responses):
        seen.append((list(prompts), list(responses)))
        return letters(prompts, responses)

    made = add_semantic_distance(datasets.Dataset.from_dict(said), encoder, center=False)
    assert seen == [(["x"], ["a"]), (["x"], ["b"])]  # no template, no prompt in the response
    assert made["semantic_distance"][:] == pytest.approx([0.5])


def test_the_chat_template_renders_the_prompt_and_nothing_of_the_response() -> None:
    said = {
        "prompt": [[{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]],
        "chosen": [[{"role": "assistant", "content": "a"}]],
        "rejected": [[{"role": "assistant", "content": "b"}]],
    }
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    seen = []

    def encoder(prompts, responses):
        seen.append((list(prompts), list(responses)))
        return letters(prompts, responses)

    data = datasets.Dataset.from_dict(said)
    add_semantic_distance(data, encoder, tokenizer=tokenizer)
    add_semantic_distance(data, encoder)
    rendered = "<s><system>s<user>x<assistant>"
    assert seen == [([rendered], ["a"]), ([rendered], ["b"]), (["s\nx"], ["a"]), (["s\nx"], ["b"])]


def test_special_tokens_begin_a_pair_once_and_never_a_response() -> None:
    from tokenizers.processors import TemplateProcessing

    model, plain, tokenizer = tiny_llama(0), tiny_tokenizer(), tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert tokenizer("w5")["input_ids"] == [1, 5]
    expected = HiddenStateEncoder(model, plain)(["<s> w5 w6 "], ["w11 w12"])
    for prompt in ("w5 w6 ", "<s> w5 w6 "):  # as a template renders it
        assert torch.equal(HiddenStateEncoder(model, tokenizer)([prompt], ["w11 w12"]), expected)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (torch.ones, r"shape \(3,\) for 3 responses"),
        (lambda n: torch.ones(1, 4), r"shape \(1, 4\) for 3 responses"),
        (lambda n: torch.full((n, 4), float("nan")), r"shape \(3, 4\) for 3 responses.* finite"),
    ],
)
def test_an_encoder_that_gives_no_vector_per_response_is_refused(made, text) -> None:
    with pytest.raises(ConfigError, match=text):
        add_semantic_distance(table(), lambda prompts, responses: made(len(responses)))


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (lambda: table(semantic_distance=[0.0] * 3), {}, "column='semantic_distance' is in the dataset already"),
        (lambda: table().select([]), {}, "no rows"),
        (lambda: table().rename_column("rejected", "rejecte"), {}, "no column 'rejected'.*did you mean 'rejecte'"),
        (table, {"quantile": 0.0}, r"quantile=0.0 must be in \(0, 1\]"),
        (table, {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (lambda: table().to_iterable_dataset(), {}, "dataset is a IterableDataset: .* give a datasets.Dataset"),
        (
            lambda: table().remove_columns("rejected").add_column("rejected", ROWS["chosen"]),
            {"quantile": 0.5},
            "is 0: most pairs",
        ),
    ],
)
def test_refusals(data, options, text) -> None:
    with pytest.raises(ConfigError, match=text):
        add_semantic_distance(data(), HiddenStateEncoder(tiny_llama(0), tiny_tokenizer()), **options)


# -- a trained adapter against its own frozen copy ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "ulora", "bayes_lora"])
def test_b39_a_trained_adapter_starts_at_no_distance_from_its_frozen_copy(kind: str) -> None:
    targets = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    plain = kind == "lora"
    config = peft.LoraConfig(**targets, task_type="CAUSAL_LM") if plain else hfplug.tuners.config(type=kind, **targets)
    model = peft.get_peft_model(tiny_llama(0), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if ".default" in name and buffer.is_floating_point():
                buffer.mul_(1.5)  # as training may have moved what an adapter keeps besides its parameters
    trainer = dpo(model=model, margin="constant", gamma_max=0.0, surrogate="logistic")
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch(trainer))
    assert float(loss) == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)
