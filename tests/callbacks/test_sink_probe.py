"""SinkProbe: features against their definitions, the probe on data with a planted answer, the callback in training."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch

from hfplug import ConfigError, HfplugError, UnsupportedError
from hfplug.callbacks import (
    FeatureTable,
    SinkProbe,
    SinkProbeCallback,
    SinkProbeConfig,
    auroc,
    baselines,
    cross_validate,
    extract,
    read_records,
)
from hfplug.callbacks.sink_probe.evaluate import grouped_folds
from hfplug.callbacks.sink_probe.features import FEATURES, Layout, top_k
from hfplug.callbacks.sink_probe.records import check_record, groups_of, is_wrong
from hfplug.testing import models
from hfplug.testing.callback import CallbackContract, hfplug_warnings

pytest.importorskip("sklearn")


def some_records(count=40, seed=0, longest=6):
    """Random token ids; two answers to each question, one of each label."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(3, models.VOCAB, (length,), generator=generator).tolist()

    return [
        {"prompt_ids": draw(5 + i % 3), "answer_ids": draw(1 + i % longest), "label": i % 2, "question_id": i // 2}
        for i in range(count)
    ]


def whole_map(model_name, record):
    """``(layers, heads, T, T)`` fp64 of one text alone, and the norms of its values ``(layers, kv heads, T)``."""
    model = models.TINY_MODELS[model_name](attn="eager").eval()
    norms, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith("v_proj"):
            hooks.append(module.register_forward_hook(lambda _m, _a, out: norms.append(out)))
    ids = torch.tensor([[*record["prompt_ids"], *record["answer_ids"]]])
    with torch.no_grad():
        out = model(ids, output_attentions=True, use_cache=False)
    size = model.config.hidden_size // model.config.num_attention_heads
    norms = [n[0].unflatten(-1, (-1, size)).norm(dim=-1).T.double() for n in norms]
    return torch.cat(out.attentions).double(), torch.stack(norms), out.logits[0].double()


def by_hand(name, record, options):
    """A feature of one text, in loops."""
    maps, norms, logits = whole_map("llama", record)
    length, start = maps.shape[-1], len(record["prompt_ids"])
    if name == "prompt_length":
        return [float(start)]
    if name == "answer_length":
        return [float(length - start)]
    if name in ("nll", "perplexity"):
        answer = record["answer_ids"]
        nll = -np.mean([float(logits[start - 1 + j].log_softmax(-1)[t]) for j, t in enumerate(answer)])
        return [float(np.exp(nll))] if name == "perplexity" else [nll]
    counted = range(start if options["span"] == "answer" else 0, length)
    found, single = [], []
    for layer in range(maps.shape[0]):
        for head in range(maps.shape[1]):
            map_, values = maps[layer, head], []
            for i in range(length):
                seeing = [u for u in counted if u > i or (u == i and (options["include_self"] or name == "lap_eig"))]
                score = float(sum(map_[u, i] for u in seeing)) / len(seeing) if seeing else 0.0
                own = i in counted
                if name == "attn_eig" and own:
                    values.append(float(map_[i, i]))
                elif name == "lap_eig" and len(seeing) >= options["min_queries"]:
                    values.append(score - (float(map_[i, i]) if own else 0.0))
                elif name == "sink" and len(seeing) >= max(1, options["min_queries"]):
                    values.append(score * (float(norms[layer, head // 2, i]) if options["value_norm"] == "mul" else 1.0))
            if name == "log_det":
                found.append(np.mean([float(map_[i, i].log()) for i in counted]))
            elif name == "bos_mass":
                single.append(float(sum(map_[u, 0] for u in counted)) / len(counted))
            else:
                kept = sorted(values, reverse=True)[: options["k"]]
                found += [*kept, *[0.0] * (options["k"] - len(kept))]
    return [float(np.mean(single))] if name == "bos_mass" else found


VARIANTS = [
    {}, {"k": 20}, {"include_self": False}, {"min_queries": 3}, {"span": "answer"}, {"value_norm": "mul"},
    {"span": "answer", "include_self": False, "value_norm": "mul", "min_queries": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_features_equal_their_definitions(name, options):
    probe = SinkProbe(**{"k": 3, "feature": name, **options})
    records = some_records(5)
    (table,) = extract(models.tiny_llama(), None, records, [probe], batch_size=3)
    expected = np.array([by_hand(name, r, probe.options) for r in records])
    assert table.values == pytest.approx(expected, abs=2e-6, rel=1e-6)


def test_padding_batches_and_the_order_of_records_change_nothing():
    model, probes = models.tiny_qwen3(), list(baselines(SinkProbe(k=4)).values())
    records = some_records(9)
    alone = extract(model, None, records, probes, batch_size=1)
    for batch_size in (2, 9):
        for one, other in zip(alone, extract(model, None, records[::-1], probes, batch_size=batch_size), strict=True):
            assert other.values[::-1] == pytest.approx(one.values, abs=2e-6, rel=1e-6)
            assert one.layout == other.layout


def test_the_order_of_tokens_does_not_matter_to_sorted_features():
    values = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(0))
    valid = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    turn = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    assert top_k(values, valid, 4).equal(top_k(values[..., turn], valid[..., turn], 4))
    assert top_k(values, valid, 12)[..., 9:].abs().sum() == 0
    assert top_k(-values, valid, 12)[0, 0, : int(valid[0].sum())].max() < 0  # the padding is not sorted among them


def test_b26_scores_that_are_not_finite_are_an_error():
    values = torch.rand(1, 1, 4)
    values[..., 2] = float("nan")
    with pytest.raises(HfplugError, match="NaN"):
        top_k(values, torch.ones(1, 1, 4, dtype=torch.bool), 2)
    values[..., 2] = 1e30
    assert top_k(values, torch.ones(1, 1, 4, dtype=torch.bool), 1).item() == pytest.approx(1e30)
    model = models.tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(HfplugError, match="NaN"):
        extract(model, None, some_records(2), [SinkProbe()])


def test_few_queries_put_the_last_tokens_on_top():
    # What min_queries is for: the last token's score is its attention to itself, from one query.
    model, records = models.tiny_llama(), some_records(12)
    (paper,) = extract(model, None, records, [SinkProbe(k=30)])
    (strict,) = extract(model, None, records, [SinkProbe(k=30, min_queries=3)])
    lengths = np.array([len(r["prompt_ids"]) + len(r["answer_ids"]) for r in records])
    assert ((paper.by_head()[:, 0, 0] > 0).sum(axis=1) == lengths).all()
    assert ((strict.by_head()[:, 0, 0] > 0).sum(axis=1) == lengths - 2).all()


def test_the_model_is_left_as_it_was_and_any_implementation_gives_the_same():
    records, probe, found = some_records(4), SinkProbe(k=4), []
    for attn in ("sdpa", "eager", "sink_scores"):
        model = models.tiny_llama(attn=attn).train()
        (table,) = extract(model, None, records, [probe])
        assert model.training
        assert model.config._attn_implementation == attn
        found.append(table.values)
    assert found[1] == pytest.approx(found[0], abs=2e-6)
    assert found[2] == pytest.approx(found[0], abs=2e-6)


def test_text_is_tokenised_with_an_exact_boundary():
    tokenizer = models.tiny_tokenizer()
    records = [{"prompt": "w5 w9 w7", "answer": "w8 w4"}]
    ids = [{"prompt_ids": [5, 9, 7], "answer_ids": [8, 4]}]
    model, probes = models.tiny_llama(), [SinkProbe(), SinkProbe(feature="nll")]
    for one, other in zip(extract(model, tokenizer, records, probes), extract(model, None, ids, probes), strict=True):
        assert (one.values == other.values).all()
    with pytest.raises(ConfigError, match="no tokenizer"):
        extract(model, None, records, probes)
    with pytest.raises(ConfigError, match="no chat template"):
        extract(model, tokenizer, records, probes, chat=True)
    tokenizer.chat_template = "{% for m in messages %}w3 {{ m.content }} w4 {% endfor %}"
    (chat,) = extract(model, tokenizer, records, probes[:1], chat=True)
    assert chat.layout.prompt.startswith("chat:")
    (same,) = extract(model, None, [{"prompt_ids": [3, 5, 9, 7, 4], "answer_ids": [8, 4]}], probes[:1])
    assert (chat.values == same.values).all()
    with pytest.raises(ConfigError, match="answer has no tokens"):
        extract(model, tokenizer, [{"prompt": "w5", "answer": ""}], probes)


# -- the probe -------------------------------------------------------------------------------------------------------


def planted(rows=300, seed=0, layers=4, heads=3, k=5):
    """Features where head 2 of layer 1 tells the labels, its second value above all."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    values = rng.random((rows, layers, heads, k)) * 0.1
    values[:, 1, 2, 1] += 0.15 * labels
    layout = Layout("sink", "toy", "toy 1", layers=tuple(range(layers)), heads=heads, k=k)
    return FeatureTable(values.reshape(rows, -1), layout), labels


@pytest.mark.parametrize("solver", ["liblinear", "saga"])
def test_a_planted_head_is_found(solver):
    (train, y), (test, other) = planted(), planted(seed=1)
    probe = SinkProbe(C=0.1, solver=solver).fit(train, y)
    assert probe.score(test, other) > 0.95
    assert (1, 2, 1) in probe.support
    assert len(probe.support) < train.values.shape[1] / 4  # L1 leaves most out
    assert len(SinkProbe(C=0.1, penalty="l2", solver=solver).fit(train, y).support) == train.values.shape[1]


def test_the_penalty_is_chosen_inside_the_training_data():
    train, y = planted()
    probe = SinkProbe(C=(1e-5, 0.1)).fit(train, y)
    assert probe.chosen == 0.1  # with 1e-5 all weights are 0


def test_shuffled_labels_give_one_half_and_right_ones_do_not():
    table, y = planted(rows=400)
    probe = SinkProbe(C=0.1)
    assert cross_validate(probe, table, y, seeds=(0,)).mean > 0.95
    control = cross_validate(probe, table, y, seeds=range(6), shuffle_labels=True)
    assert len(control.aurocs) == 30
    assert abs(control.mean - 0.5) <= 0.05


def test_folds_never_divide_a_question():
    rng = np.random.default_rng(0)
    questions = rng.integers(0, 30, 200)
    labels = rng.integers(0, 2, 200)
    for train, test in grouped_folds(labels, questions, 5, 0):
        assert not set(questions[train]) & set(questions[test])
        assert len(train) + len(test) == 200
    # And without it, a feature that knows the question would look like one that knows the answer.
    table = np.eye(30)[questions] + 0.01 * rng.random((200, 30))
    by_question = (np.arange(30) % 2)[questions]
    leaking = cross_validate(SinkProbe(C=1.0), table, by_question, None, seeds=(0,)).mean
    honest = cross_validate(SinkProbe(C=1.0), table, by_question, questions, seeds=(0,)).mean
    assert leaking > 0.95
    assert honest < 0.8


def test_folds_that_cannot_be_are_refused():
    labels = np.array([0, 1] * 10)
    with pytest.raises(ConfigError, match="5 folds need as many questions"):
        grouped_folds(labels, [0] * 10 + [1] * 10, 5, 0)
    assert len(grouped_folds(labels, np.arange(20) // 2 % 4, 5, 0, fewer=True)) == 4
    with pytest.raises(ConfigError, match="groups must be 20"):
        grouped_folds(labels, [0, 1], 5, 0)


def test_auroc_is_the_mann_whitney_u_value():
    from scipy.stats import mannwhitneyu
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    for _ in range(5):
        labels, scores = rng.integers(0, 2, 60), rng.integers(0, 9, 60) / 3.0  # with ties
        found = auroc(labels, scores)
        u = mannwhitneyu(scores[labels == 1], scores[labels == 0]).statistic
        assert found == pytest.approx(u / ((labels == 1).sum() * (labels == 0).sum()), abs=1e-12)
        assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert auroc([0, 1], [0.5, 0.5]) == 0.5
    with pytest.raises(ConfigError, match="both classes"):
        auroc([1, 1], [0.1, 0.2])
    with pytest.raises(ConfigError, match="equally many"):
        auroc([0, 1], [0.1, float("nan")])


def test_probabilities_are_those_of_scikit_learn():
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table, y = planted()
    probe = SinkProbe(C=0.1).fit(table, y)
    lr = LogisticRegression(C=0.1, l1_ratio=1.0, solver="liblinear", class_weight="balanced", max_iter=2000, random_state=0)
    oracle = make_pipeline(StandardScaler(), lr).fit(table.values, y)
    assert probe.predict_proba(table) == pytest.approx(oracle.predict_proba(table.values), abs=1e-9)


def test_components_are_an_option():
    (train, y), (test, other) = planted(), planted(seed=1)
    for table, labels in ((train, y), (test, other)):
        table.values[:, :30] += 0.1 * labels[:, None]  # a direction that varies most
    probe = SinkProbe(C=1.0, pca=3, penalty="l2").fit(train, y)
    assert probe.score(test, other) > 0.95
    few = SinkProbe(C=1.0, pca=2, penalty="l2").fit(train, y)
    assert np.linalg.matrix_rank(np.stack([few.coef, *np.linalg.svd((train.values - few.mean) / few.scale)[2][:2]])) == 2


def test_a_column_that_does_not_vary_has_no_say():
    table, y = planted()
    values = np.concatenate([table.values, np.full((300, 1), 0.1)], axis=1)
    probe = SinkProbe(C=0.1).fit(values, y)
    assert probe.coef[-1] == 0
    assert probe.scale[-1] == 1.0


def test_what_is_saved_is_plain_and_loads_bit_for_bit_without_scikit_learn(tmp_path):
    model, records = models.tiny_llama(), some_records()
    probe = SinkProbe(k=3).fit_records(model, None, records)
    folder = probe.save(tmp_path / "probe")
    assert sorted(p.name for p in folder.iterdir()) == ["probe.json", "probe.npz"]
    assert json.loads((folder / "probe.json").read_text())["layout"]["k"] == 3
    with np.load(folder / "probe.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["coef", "mean", "scale"]
    (table,) = extract(model, None, records, [probe])
    again = SinkProbe.load(folder)
    assert (again.predict_proba(table) == probe.predict_proba(table)).all()
    assert (again.support, again.layout, again.options) == (probe.support, probe.layout, probe.options)
    np.save(tmp_path / "x.npy", table.values)
    code = (
        "import sys; sys.modules['sklearn'] = None\nimport numpy as np\nfrom hfplug.callbacks import SinkProbe\n"
        f"p = SinkProbe.load({str(folder)!r}).predict_proba(np.load({str(tmp_path / 'x.npy')!r}))\n"
        f"np.save({str(tmp_path / 'p.npy')!r}, p); assert 'sklearn.linear_model' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (np.load(tmp_path / "p.npy") == probe.predict_proba(table)).all()


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_what_is_damaged_or_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no probe\.npz"):
        SinkProbe.load(tmp_path)
    table, y = planted()
    folder = SinkProbe(C=0.1).fit(table, y).save(tmp_path)
    about = json.loads((folder / "probe.json").read_text())
    for change, message in (
        ({"format": 99}, "format 99 is not known"), ({"layout": {"feature": "sink"}}, "damaged"),
        ({"options": {"k": 0}}, "k=0"), ({"options": {"new": 1}}, "damaged"),
    ):  # fmt: skip
        (folder / "probe.json").write_text(json.dumps({**about, **change}))
        with pytest.raises(HfplugError, match=message):
            SinkProbe.load(folder)
    (folder / "probe.json").write_text(json.dumps(about))
    np.savez(folder / "probe.npz", coef=np.array([Touches(tmp_path / "ran")]), mean=np.zeros(1), scale=np.ones(1))
    with pytest.raises(HfplugError, match="damaged"):
        SinkProbe.load(folder)
    assert not (tmp_path / "ran").exists()  # a pickle is not opened


def test_an_unfitted_probe_refuses():
    table, _ = planted(rows=4)
    with pytest.raises(HfplugError, match="not fitted"):
        SinkProbe().predict_proba(table)
    with pytest.raises(HfplugError, match="not fitted"):
        SinkProbe().save("nowhere")
    assert "not fitted" in repr(SinkProbe())


def test_another_model_other_layers_heads_or_k_are_refused():
    model, records = models.tiny_llama(), some_records()
    model.config._name_or_path = "one"
    probe = SinkProbe(k=3).fit_records(model, None, records)
    (own,) = extract(model, None, records, [probe])
    probe.predict_proba(own)

    def refused(words, other_model, asked, **how):
        (table,) = extract(other_model, None, records[:2], [asked], **how)
        with pytest.raises(UnsupportedError, match=words):
            probe.predict_proba(table)

    refused("k: fitted on 3, given 4", model, probe.unfitted(k=4))
    refused(r"layers: fitted on \(0, 1\), given \(0,\)", model, probe.unfitted(layers=[0]))
    refused("feature: fitted on 'sink'", model, probe.unfitted(feature="lap_eig"))
    refused("span: fitted on 'all'", model, probe.unfitted(span="answer"))
    refused("model: fitted on 'one', given 'two'", model, probe, name="two")
    refused("heads: fitted on 4, given 2", models.tiny_llama(num_attention_heads=2), probe, name="one")
    refused("shape: fitted on 'llama", models.tiny_qwen3(), probe, name="one")
    with pytest.raises(UnsupportedError, match="width 5"):
        probe.predict_proba(np.zeros((1, 5)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k=0"), ({"k": True}, "k=True"), ({"C": ()}, r"C=\(\)"), ({"C": -1.0}, "C=-1.0"), ({"C": (0.1, "a")}, "C="),
        ({"penalty": "l3"}, "penalty='l3'.*l1"), ({"solver": "lbfgs"}, "solver='lbfgs'"), ({"span": "answers"}, "span='answers'"),
        ({"feature": "sinks"}, "feature='sinks'.*sink"), ({"class_weight": "balance"}, "class_weight='balance'"),
        ({"layers": []}, r"layers=\[\]"), ({"layers": [0, 0]}, "each once"), ({"min_queries": 0}, "min_queries=0"),
        ({"value_norm": "max"}, "value_norm='max'"), ({"pca": 0}, "pca=0"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        SinkProbe(**options)


def test_wrong_data_is_named():
    table, y = planted(rows=20)
    with pytest.raises(ConfigError, match="labels must be 20"):
        SinkProbe().fit(table, y[:5])
    with pytest.raises(ConfigError, match="labels must be 20"):
        SinkProbe().fit(table, y + 1)
    with pytest.raises(ConfigError, match="labels are all 0"):
        SinkProbe().fit(table, y * 0)
    with pytest.raises(ConfigError, match="finite"):
        SinkProbe().fit(np.full((20, 2), np.nan), y)
    with pytest.raises(ConfigError, match=r"values \(2, 3\)"):
        FeatureTable(np.zeros((2, 3)), table.layout)
    with pytest.raises(ConfigError, match="batch_size=0"):
        extract(models.tiny_llama(), None, some_records(2), [SinkProbe()], batch_size=0)
    with pytest.raises(ConfigError, match=r"layers \[7\]"):
        extract(models.tiny_llama(), None, some_records(2), [SinkProbe(layers=[7])])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([], "list instead of an object"), ({"promt": "a", "answer": "b", "label": 1}, "no field 'prompt'.*promt"),
        ({"prompt": "a", "label": 1}, "no field 'answer'"), ({"prompt": 3, "answer": "b", "label": 1}, "prompt=3 must be text"),
        ({"prompt": "a", "answer_ids": ["x"], "label": 1}, "answer_ids="), ({"prompt": "a", "answer": "b"}, "no field 'label'"),
        ({"prompt": "a", "answer": "b", "label": 2}, "label=2"), ({"prompt": "a", "answer": "b", "label": "1"}, "label='1'"),
    ],
)  # fmt: skip
def test_wrong_records_are_named(record, words):
    with pytest.raises(ConfigError, match=f"here: {words}"):
        check_record(record, "here", label=True)


def test_records_from_a_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b", "label": true}\n\n{"prompt": "c", "answer": "d", "question_id": 7, "x": 1}\n')
    assert [r.get("label") for r in read_records(path)] == [1, None]
    assert groups_of(read_records(path)) == ["'a'", "7"]
    with pytest.raises(ConfigError, match=r"data\.jsonl:3: no field 'label'"):
        read_records(path, label=True)
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: not JSON"):
        read_records(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no record"):
        read_records(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
    assert not is_wrong("  Paris. ", "paris")
    assert is_wrong("Rome", "Paris")


# -- the callback ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    return SinkProbe(k=3, C=1.0).fit_records(models.tiny_llama(), None, some_records())


def write_records(path, records):
    path.write_text("\n".join(json.dumps(r) for r in records) + "\n")
    return str(path)


class Contract(CallbackContract):
    method, logged_with = "sink_probe", "eval_loss"
    train_args: ClassVar = {"eval_strategy": "steps", "eval_steps": 1}

    @pytest.fixture(autouse=True)
    def _probe(self, fitted, tmp_path_factory):
        self.probe, self.records = fitted, write_records(tmp_path_factory.mktemp("probe") / "r.jsonl", some_records(8, seed=3))


class TestEvaluationRowsContract(Contract):
    def make_callback(self):
        return SinkProbeCallback(self.probe)


class TestRecordsContract(Contract):
    """Held-out records; the same figures whatever the evaluation set looks like."""

    # Evaluation rows play no part; the rest is a matter of the base.
    test_b33_padding_does_not_count = None
    test_b33_cut_into_micro_batches_does_not_count = None
    test_b31_checkpointing_counts_once = None
    test_b32_memory_does_not_grow_with_the_window = None
    test_everything_is_removed_after_an_interrupt = None
    test_everything_is_removed_after_training = None
    test_b34_an_error_inside_the_model_turns_it_off = None

    def make_callback(self):
        return SinkProbeCallback(self.probe, records=self.records, heatmap=False)


def evaluation(callback, tmp_path, model=None, sft=False, **args):
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0, "output_dir": tmp_path} | args
    trainer = models.tiny_trainer(model or models.tiny_llama(), [callback], sft=sft, **settings)
    with hfplug_warnings() as warnings:
        trainer.train()
    assert not warnings, warnings
    return [e for e in trainer.state.log_history if "eval_loss" in e], trainer


def test_rows_of_the_evaluation_set_are_judged_in_its_own_forward(fitted, tmp_path):
    logs, trainer = evaluation(SinkProbeCallback(fitted), tmp_path)
    rows = trainer.eval_dataset["input_ids"]
    records = [{"prompt_ids": list(row[:1]), "answer_ids": list(row[1:])} for row in rows]
    (table,) = extract(models.tiny_llama(), None, records, [fitted])
    expected = fitted.predict_proba(table)[:, 1].mean()
    for entry in logs:
        assert entry["eval_sink_probe/probability"] == pytest.approx(expected, abs=1e-6)
        assert "eval_sink_probe/auroc" not in entry
    pictures = sorted(p.name for p in (tmp_path / "sink_probe").iterdir())
    assert pictures == ["step_000001.png", "step_000002.png"]
    from matplotlib.image import imread

    picture = imread(tmp_path / "sink_probe" / pictures[0])
    assert picture.std() > 0.05  # something is drawn


def test_records_are_judged_with_their_labels(fitted, tmp_path):
    held_out = some_records(12, seed=5)
    callback = SinkProbeCallback(fitted, records=write_records(tmp_path / "r.jsonl", held_out))
    logs, _ = evaluation(callback, tmp_path)
    (table,) = extract(models.tiny_llama(), None, held_out, [fitted])
    assert len(logs) == 2
    for entry in logs:
        assert entry["eval_sink_probe/auroc"] == pytest.approx(fitted.score(table, [r["label"] for r in held_out]))
        assert entry["eval_sink_probe/wrong"] == 0.5
        assert entry["eval_sink_probe/probability"] == pytest.approx(fitted.predict_proba(table)[:, 1].mean())


def test_questions_without_an_answer_are_answered(fitted, tmp_path):
    model, tokenizer = models.tiny_llama(), models.tiny_tokenizer()
    questions = [{"prompt": "w5 w9 w7 w20 w11"}, {"prompt": "w8 w33 w2 w12 w41"}]
    for question in questions:
        ids = torch.tensor([tokenizer(question["prompt"])["input_ids"]])
        text = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        question["reference"] = tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True)
    questions[1]["reference"] += " w3"  # which it will not say
    path = write_records(tmp_path / "r.jsonl", questions)
    logs, _ = evaluation(SinkProbeCallback(fitted, records=path, max_new_tokens=4), tmp_path, sft=True)
    assert [e["eval_sink_probe/wrong"] for e in logs] == [0.5, 0.5]
    assert all("eval_sink_probe/auroc" in e for e in logs)


def test_b32_evaluation_keeps_nothing_per_row(fitted, tmp_path):
    from hfplug.callbacks.sink_probe import callback as module

    kept, inner = [], module._Watcher._finish

    def finish(self, call):
        inner(self, call)
        if self._callback._rows:  # the training step's own forward is none
            kept.append((len(self), np.shape(self._callback._sum), self._callback._rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Watcher, "_finish", finish)
        evaluation(SinkProbeCallback(fitted), tmp_path, max_steps=1, eval_dataset=models.tiny_lm_dataset(40, seed=1))
    assert [rows for _, _, rows in kept] == list(range(4, 41, 4))
    assert {(held, shape) for held, shape, _ in kept} == {(0, (2, 4, 3))}


def test_b34_an_error_in_the_evaluations_forward_costs_the_callback_not_the_run(fitted, tmp_path):
    from hfplug.callbacks.sink_probe import callback as module

    def fail(*args, **kwargs):
        raise RuntimeError("broken")

    callback = SinkProbeCallback(fitted)
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "output_dir": tmp_path}
    with pytest.MonkeyPatch.context() as patch, hfplug_warnings() as warnings:
        patch.setattr(module, "_scorer", lambda: fail)
        trainer = models.tiny_trainer(models.tiny_llama(), [callback], **settings)
        trainer.train()
    assert [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e] != []
    assert trainer.state.global_step == 2
    assert "broken" in warnings[0]
    assert str(callback.disabled) == "broken"


def test_training_and_generation_are_not_judged(fitted, tmp_path):
    callback = SinkProbeCallback(fitted)
    model = models.tiny_llama()
    seen, inner = [], SinkProbeCallback._take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SinkProbeCallback, "_take", lambda self, table: (seen.append(len(table)), inner(self, table))[1])
        evaluation(callback, tmp_path, model, eval_steps=2)
    assert sum(seen) == 8  # one evaluation of 8 rows


def test_a_probe_from_a_folder_and_one_from_a_checkpoint(fitted, tmp_path):
    folder = fitted.save(tmp_path / "probe")
    by_path, _ = evaluation(SinkProbeCallback(folder), tmp_path / "a")
    handed, _ = evaluation(SinkProbeCallback(fitted), tmp_path / "b")
    assert by_path[0]["eval_sink_probe/probability"] == handed[0]["eval_sink_probe/probability"]
    again = SinkProbeCallback.from_state(json.loads(json.dumps(SinkProbeCallback(fitted).state())))
    restored, _ = evaluation(again, tmp_path / "c")
    assert restored[0]["eval_sink_probe/probability"] == handed[0]["eval_sink_probe/probability"]


def test_what_cannot_work_is_refused_when_the_trainer_is_built(fitted, tmp_path):
    def build(callback, model=None):
        models.tiny_trainer(model or models.tiny_llama(), [callback], output_dir=tmp_path)

    with pytest.raises(ConfigError, match="no probe"):
        build(SinkProbeCallback())
    with pytest.raises(ConfigError, match="not fitted"):
        SinkProbeCallback(SinkProbe())
    with pytest.raises(ConfigError, match="not both"):
        SinkProbeCallback(fitted, SinkProbeConfig(probe="x"))
    with pytest.raises(ConfigError, match=r"no probe\.npz"):
        build(SinkProbeCallback(tmp_path))
    with pytest.raises(ConfigError, match="shape: fitted on 'llama"):
        build(SinkProbeCallback(fitted), models.tiny_qwen3())
    with pytest.raises(ConfigError, match="cannot be read"):
        build(SinkProbeCallback(fitted, records=str(tmp_path / "none")))
    table, y = planted()
    with pytest.raises(ConfigError, match="bare array"):
        build(SinkProbeCallback(SinkProbe(C=0.1).fit(table.values, y)))
    for options in ({"feature": "nll"}, {"span": "answer"}):
        probe = SinkProbe(C=1.0, **options).fit_records(models.tiny_llama(), None, some_records())
        with pytest.raises(ConfigError, match="give records="):
            build(SinkProbeCallback(probe))
    with pytest.raises(ConfigError, match="batch_size=0"):
        SinkProbeCallback(fitted, batch_size=0)
    with pytest.MonkeyPatch.context() as patch:
        import importlib.util

        find = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
        with pytest.raises(ConfigError, match=r"hfplug\[plots\]"):
            build(SinkProbeCallback(fitted))


@pytest.mark.parametrize(
    "options", [{"feature": "nll"}, {"span": "answer"}, {"feature": "bos_mass"}, {"feature": "log_det"}], ids=str
)
def test_every_kind_of_probe_can_judge_records(options, tmp_path):
    probe = SinkProbe(C=1.0, **options).fit_records(models.tiny_llama(), None, some_records())
    held_out = some_records(6, seed=5)
    callback = SinkProbeCallback(probe, records=write_records(tmp_path / "r.jsonl", held_out))
    logs, _ = evaluation(callback, tmp_path, max_steps=1)
    (table,) = extract(models.tiny_llama(), None, held_out, [probe])
    assert logs[0]["eval_sink_probe/auroc"] == pytest.approx(probe.score(table, [r["label"] for r in held_out]))
    single = options.get("feature") in ("nll", "bos_mass")
    assert (tmp_path / "sink_probe").exists() is not single  # a single number has no map
