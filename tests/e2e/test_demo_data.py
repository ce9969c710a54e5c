"""The demo: its data (bounded, deterministic, nothing held out is trained on), its run file, and the whole of it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(f"hfplug_example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


demo_data = load_example("demo_data")


def count_words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def rows():
    return demo_data.build_rows()


def question(row) -> str:
    return row["prompt"][0]["content"]


def runs_of(rows, length: int) -> set[str]:
    """Every run of `length` words of the answers; written apart from the code it checks."""
    found = set()
    for row in rows:
        words = row["completion"][0]["content"].split()
        found |= {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}
    return found


def test_enough_rows_of_the_form_trl_takes(rows):
    assert len(rows["train"]) > 300
    assert len(rows["test"]) == demo_data.MAX_EVAL_ROWS
    for row in rows["train"] + rows["test"]:
        assert row.keys() == {"prompt", "completion", "topic"}
        (prompt,), (completion,) = row["prompt"], row["completion"]
        assert prompt["role"] == "user"
        assert completion["role"] == "assistant"
        assert prompt["content"].startswith("What ")
        assert "does the Python language reference say about" in prompt["content"]
        assert completion["content"].strip() == completion["content"] != ""


def test_no_topic_and_no_run_of_eight_words_is_in_both_splits(rows):
    assert {row["topic"] for row in rows["train"]}.isdisjoint(row["topic"] for row in rows["test"])
    assert runs_of(rows["train"], 8).isdisjoint(runs_of(rows["test"], 8))


def test_a_text_that_two_topics_share_is_held_out_whole():
    """The umbrella topic holds the held-out topic's text: it must not be trained on under the umbrella's name."""
    names = [f"topic{i}" for i in range(50)]
    held = next(name for name in names if demo_data.is_held_out(name))
    open_ = next(name for name in names if not demo_data.is_held_out(name))
    shared = "The statement under test is evaluated once, before any other part of the program is looked at.\n"
    own = "Something quite different stands here, so that this topic has a text of its own to be trained on.\n"
    near = "The statement under test is evaluated once, before any other thing happens in this other text here.\n"
    documents = {
        held: f"Held\n****\n\n{shared}",
        open_: f"Umbrella\n********\n\n{shared}\n{own}\nOther part\n**********\n\n{near}",
    }
    built = demo_data.build_rows(documents=documents)
    assert [demo_data.answer_of(row) for row in built["test"]] == [shared.strip()]
    assert [demo_data.answer_of(row) for row in built["train"]] == [own.strip()]


def test_the_split_of_a_topic_depends_on_its_name_alone(rows):
    some = {"a": "A\n***\n\nThis is one sentence with quite enough words in it to be kept as an answer.\n"}
    more = some | {"b": "B\n***\n\nThis is another sentence with more than enough words in it to be kept, too.\n"}
    where = [
        {row["topic"]: split for split, items in demo_data.build_rows(documents=d).items() for row in items} for d in (some, more)
    ]
    assert where[0]["a"] == where[1]["a"] == ("test" if demo_data.is_held_out("a") else "train")


@pytest.mark.parametrize("limit", [20, 45, 80])
def test_no_answer_is_longer_than_the_limit_and_sentences_stay_whole(limit):
    built = demo_data.build_rows(count_words, limit)
    answers = [demo_data.answer_of(row) for split in built.values() for row in split]
    assert max(map(count_words, answers)) <= limit
    assert max(map(count_words, answers)) > 0.9 * limit  # passages are filled up, not single sentences
    assert all(answer.rstrip("\"”')").endswith((".", "!", "?")) for answer in answers)


def test_a_limit_that_no_sentence_meets_is_refused():
    with pytest.raises(ValueError, match="max_answer_tokens=3"):
        demo_data.build_rows(count_words, 3)


def test_the_noise_of_the_plain_text_is_gone(rows):
    for row in rows["train"] + rows["test"]:
        answer = demo_data.answer_of(row)
        for noise in ("::=", ">>>", "\n", "  ", "****", "====", "Changed in version", "New in version"):
            assert noise not in answer, answer
        assert not answer.endswith(":")


def test_questions_name_the_nearest_heading_and_follow_up_once_asked():
    document = (
        'The "spam" statement\n********************\n\n'
        "The first passage of this topic, which is long enough to stand as an answer of its own.\n\n"
        "eggs(x, y)\n\n"
        "   This text is about the signature above it, and long enough to be kept as an answer as well.\n\n"
        "Second Section\n==============\n\n"
        "The text below a heading is about that heading, as long as no other heading comes in between.\n"
    )
    found = [(paragraph.subject, paragraph.text[:10]) for paragraph in demo_data.paragraphs(document)]
    assert found == [('the "spam" statement', "The first "), ('"eggs(x, y)"', "This text "), ("Second Section", "The text b")]
    built = demo_data.build_rows(
        count_words, 20, {"x": document.replace("as an answer of its own.", "as one. " + "More words stand here. " * 8)}
    )
    asked = [question(row) for split in built.values() for row in split]
    assert asked[0] == 'What does the Python language reference say about the "spam" statement?'
    assert asked[1] == 'What else does the Python language reference say about the "spam" statement?'


def test_words_wrapped_at_a_hyphen_are_joined():
    (found,) = demo_data.paragraphs(
        "Title\n*****\n\nThis is a comma-\nseparated list and a dash -\nwith *some emphasis* [1] in it.\n"
    )
    assert found.text == "This is a comma-separated list and a dash - with some emphasis in it."


def test_the_same_rows_in_another_process(rows, tmp_path):
    """Sets are ordered by a hash that changes from process to process; the rows must not be."""
    command = [sys.executable, str(EXAMPLES / "demo_data.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True)
    for split, items in rows.items():
        lines = (tmp_path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == items


def test_the_data_needs_no_hfplug():
    code = "import sys, demo_data; demo_data.build_rows(); print('hfplug' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_stock_load_dataset_reads_the_folder_as_train_and_test(rows, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    demo_data.write_jsonl(rows, tmp_path / "data")
    loaded = datasets.load_dataset(str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(loaded[split]) for split in loaded} == {split: len(rows[split]) for split in rows}
    assert loaded["test"][0] == rows["test"][0]
    assert demo_data.build()["test"][0] == rows["test"][0]


def test_the_run_file_is_valid_and_names_the_data_the_demo_makes():
    from hfplug.training import parse_sft, read_run

    content = read_run(EXAMPLES / "demo.yaml")
    run = parse_sft(content)
    assert {section: [choice.name for choice in choices] for section, choices in run.plugins.items()} == {
        "tuner": ["ulora"],
        "loss": ["nitp"],
        "callbacks": ["sink_monitor"],
    }
    assert f'DEMO_DATA = "{content["dataset_name"]}"' in (EXAMPLES / "demo.py").read_text(encoding="utf-8")
    training = run.arguments["training"]
    assert training.max_steps % training.eval_steps == 0  # the last evaluation is of the finished model
    assert training.max_length > demo_data.MAX_ANSWER_TOKENS + 80  # question and template: nothing is cut off


def tiny_model(folder: Path) -> None:
    """A Llama of two layers with a word tokenizer made from the demo's own answers, saved as a model folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", "<pad>"])
    words.train_from_iterator([demo_data.answer_of(row) for row in demo_data.build_rows()["train"]], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
        "{% if add_generation_prompt %}<s> assistant {% endif %}"
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_the_whole_demo_on_a_tiny_model(tmp_path):
    import yaml

    tiny_model(tmp_path / "tiny")
    run = yaml.safe_load((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"))
    run |= {"max_steps": 4, "eval_steps": 2, "logging_steps": 1, "warmup_steps": 0, "learning_rate": 0.02}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--run", "run.yaml", "--model", str(tmp_path / "tiny")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    output = tmp_path / "runs" / "demo"
    facts = json.loads((output / "hfplug_run.json").read_text(encoding="utf-8"))
    losses = {when: figures["loss"] for when, figures in facts["evaluation"].items()}
    assert losses["after"] < losses["before"] - 0.005
    assert losses["reloaded"] == pytest.approx(losses["after"], abs=1e-5)
    assert facts["evaluation"]["after"]["perplexity"] == pytest.approx(math.exp(losses["after"]))
    assert facts["model"] == "tiny"
    assert str(tmp_path) not in json.dumps(facts)
    assert [entry["name"] for entry in facts["plugins"]] == ["ulora", "nitp", "sink_monitor"]
    assert 0 < facts["parameters"]["trainable"] < facts["parameters"]["total"]
    (sample,) = facts["samples"]
    assert sample["question"].endswith('about the "for" statement?')
    assert sample["after"] == sample["reloaded"]
    adapter = json.loads((output / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["hfplug"]["plugin"] == "ulora"

    page = (output / "report" / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == 3  # loss, utilisation, sink: nothing is absent
    assert 'class="absent"' not in page
    assert "before training" in done.stdout
    assert "report.html" in done.stdout
    assert "4/4" in done.stderr  # the progress bar
