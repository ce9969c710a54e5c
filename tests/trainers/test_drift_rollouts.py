"""DRIFT's first half: returns and weights, rollouts as JSONL, the collector, ``hfplug drift collect``."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hfplug.cli import app
from hfplug.errors import ConfigError, UnsupportedError
from hfplug.testing.models import tiny_llama, tiny_tokenizer
from hfplug.trainers.drift.collect import DriftRolloutCollector, Verdict
from hfplug.trainers.drift.data import read_rollouts, to_drift_dataset, write_rollouts
from hfplug.trainers.drift.generators import ModelGenerator, VLLMGenerator
from hfplug.trainers.drift.verify import answer_match, normal_form
from hfplug.trainers.drift.weights import discounted_return, drift_weights, effective_sample_size, repeat_penalty

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] + ' ' }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


# -- weights ------------------------------------------------------------------------------------------------------------


def test_returns_by_hand() -> None:
    assert discounted_return([0.0, 0.0, 1.0], 0.9) == pytest.approx(0.81)
    assert discounted_return([1.0, 2.0, 3.0], 0.5) == 1 + 1 + 0.75
    assert discounted_return([3.0, 1.0, 2.0], 1.0) == discounted_return([1.0, 2.0, 3.0], 1.0) == 6.0
    assert discounted_return([5.0, 7.0], 0.0) == 5.0
    assert repeat_penalty(["a", "a", "b", ""], 0.5) == -0.25
    assert repeat_penalty(["a", "b"], 0.5) == 0.0
    assert repeat_penalty(["", ""], 0.5) == -0.5
    assert repeat_penalty([], 0.5) == 0.0
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "prompt_id": 0,
        "turn_rewards": [0, 0, 1], "answer_norms": ["3", "3", "4"], "format_penalty": -0.1,
    }  # fmt: skip
    other = {**row, "turn_rewards": {"t1": 1.0}, "answer_norms": ["4"], "format_penalty": 0}
    found = [r["weight"] for r in to_drift_dataset([row, other], beta=0.5, gamma=0.9)]
    returns = [0.81 - 0.1 - 0.5 * (1 - 2 / 3), 1.0]
    assert found == pytest.approx(drift_weights(returns, [0, 0], 0.5), rel=1e-12)


def test_weights_have_mean_1_per_prompt_and_no_zero_point() -> None:
    draw = torch.Generator().manual_seed(0)
    returns = torch.randn(60, generator=draw, dtype=torch.float64).tolist()
    groups = torch.randint(0, 7, (60,), generator=draw).tolist()
    found = drift_weights(returns, groups, 0.3)
    for group in set(groups):
        mine = [w for w, g in zip(found, groups, strict=True) if g == group]
        assert math.fsum(mine) / len(mine) == pytest.approx(1.0, rel=1e-12)
    shifted = drift_weights([r + 5.0 * g for r, g in zip(returns, groups, strict=True)], groups, 0.3)
    assert shifted == pytest.approx(found, rel=1e-9)
    plain = [math.exp(r / 0.3) for r in returns]
    sums = {g: [p for p, h in zip(plain, groups, strict=True) if h == g] for g in set(groups)}
    direct = [p * len(sums[g]) / sum(sums[g]) for p, g in zip(plain, groups, strict=True)]
    assert found == pytest.approx(direct, rel=1e-12)
    assert drift_weights(returns, groups, 0.3) != pytest.approx(drift_weights(returns, [0] * 60, 0.3))


def test_weights_at_the_limits() -> None:
    assert drift_weights([3.0, 3.0, 3.0], ["a", "a", "b"], 0.1) == [1.0, 1.0, 1.0]
    assert drift_weights([0.0, 1.0], [0, 0], math.inf) == [1.0, 1.0]
    assert drift_weights([0.0, 1.0, 1.0, -2.0], [0] * 4, 1e-300) == [0.0, 2.0, 2.0, 0.0]
    assert drift_weights([1e308, -1e308], [0, 0], 1e-3) == [2.0, 0.0]
    assert drift_weights([0.0, 1.0], [0, 0], 0.1, max_weight=1.5)[1] == 1.5
    assert drift_weights([], [], 0.1) == []
    assert effective_sample_size([1.0] * 5) == 5
    assert effective_sample_size([2.0, 0.0]) == 1
    assert effective_sample_size([0.0]) == 0.0


def test_weighted_likelihood_is_the_optimum_of_kl_regularised_rl() -> None:
    """A bandit with three arms, expectations exact: the fit is softmax(log pi_ref + R / beta)."""
    reference, rewards, beta = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), [0.0, 0.2, 0.5], 0.25
    arms = [0] * 6 + [1] * 3 + [2]  # pi_ref, as samples
    weights = torch.tensor(drift_weights([rewards[a] for a in arms], [0] * 10, beta), dtype=torch.float64)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = -(weights * torch.log_softmax(logits, 0)[arms]).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimum = torch.softmax(reference.log() + torch.tensor(rewards, dtype=torch.float64) / beta, 0)
    assert float((torch.softmax(logits.detach(), 0) - optimum).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: drift_weights([0.0], [0, 1]), "1 returns for 2 groups"),
        (lambda: drift_weights([0.0], [0], 0.0), "beta=0.0"),
        (lambda: drift_weights([0.0], [0], math.nan), "beta=nan"),
        (lambda: drift_weights([math.nan], [0]), r"returns\[0\]=nan"),
        (lambda: drift_weights([0.0], [0], max_weight=0.0), "max_weight=0.0"),
        (lambda: discounted_return([0.0], 1.5), "gamma=1.5"),
        (lambda: discounted_return(["1"]), r"rewards\[0\]='1'"),
        (lambda: repeat_penalty(["a"], -1.0), "coefficient=-1.0"),
    ],
)
def test_numbers_that_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


# -- rows ---------------------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ä"}],
    "turn_rewards": [1.0], "answer_norms": ["ä"], "prompt_id": "p", "format_penalty": -0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn_rewards": None}, "needs 'turn_rewards'"),
        ({"messages": ROW["messages"][:1]}, "messages="),
        ({"messages": [*ROW["messages"], {"role": "user", "content": "?"}]}, "the last message is 'user'"),
        ({"messages": [{"role": "user"}, ROW["messages"][1]]}, r"messages\[0\]"),
        ({"turn_rewards": {"t1": 0.0, "t3": 1.0}}, "without a gap"),
        ({"turn_rewards": []}, "a reward for each turn"),
        ({"turn_rewards": ["1"]}, r"turn_rewards\[0\]='1'"),
        ({"answer_norms": ["a", "b"]}, "2 answer_norms for 1 turns"),
        ({"answer_norms": [3]}, "answer_norms="),
        ({"format_penalty": 0.1}, "format_penalty=0.1"),
        ({"prompt_id": [1]}, "prompt_id="),
    ],
)
def test_rows_that_are_no_rollouts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"row 1.*{message}"):
        to_drift_dataset([ROW, {**ROW, **change}])


def test_prompts_never_solved_can_be_left_out() -> None:
    failed = {**ROW, "turn_rewards": [0.5], "prompt_id": "q"}
    assert len(to_drift_dataset([ROW, failed])) == 2
    assert len(to_drift_dataset([ROW, failed], drop_zero_success=True)) == 1
    with pytest.raises(ConfigError, match="none of 1 prompts was solved"):
        to_drift_dataset([failed], drop_zero_success=True)
    with pytest.raises(ConfigError, match="no rollouts"):
        to_drift_dataset([])


def test_jsonl_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "made" / "rollouts.jsonl"
    write_rollouts(file, iter([ROW, ROW]))
    assert "ä" in file.read_text(encoding="utf-8")
    assert read_rollouts(file) == [ROW, ROW]
    with pytest.raises(ConfigError, match="exists already"):
        write_rollouts(file, [ROW])
    file.write_text(json.dumps(ROW) + "\n\nnonsense\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rollouts.jsonl:3: not JSON"):
        read_rollouts(file)
    file.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r":1: expected an object"):
        read_rollouts(file)
    file.write_text(json.dumps({**ROW, "prompt_id": None}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r":1: a rollout needs 'prompt_id'"):
        read_rollouts(file)
    with pytest.raises(ConfigError, match="does not exist"):
        read_rollouts(tmp_path / "none.jsonl")


# -- the collector ------------------------------------------------------------------------------------------------------


class Script:
    """Answers by turn, and remembers what it was asked."""

    def __init__(self, *turns: str) -> None:
        self.turns, self.asked, self.seeds = turns, [], []

    def __call__(self, conversations: Any, *, seed: int) -> list[str]:
        self.asked.append([list(c) for c in conversations])
        self.seeds.append(seed)
        return [self.turns[sum(m["role"] == "assistant" for m in c)] for c in conversations]


def matches(answer: str, row: Any) -> Verdict:
    return Verdict(float(answer == row["answer"]), "" if answer == "?" else answer)


def test_stops_at_success_or_at_the_last_turn() -> None:
    script = Script("1", "?", "2", "9")
    collector = DriftRolloutCollector(script, matches, n=2, max_turns=3, feedback="no", prompts_per_call=2)
    prompts = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": "5", "prompt_id": "x"}]
    rows = list(collector.collect(prompts))
    assert [r["prompt_id"] for r in rows] == [0, 0, 1, 1, "x", "x"]
    assert rows[0]["messages"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}]
    assert rows[0]["turn_rewards"] == [1.0]
    assert [m["content"] for m in rows[2]["messages"]] == ["b", "1", "no", "?", "no", "2"]
    assert [m["role"] for m in rows[2]["messages"]] == ["user", "assistant"] * 3
    assert rows[2]["turn_rewards"] == [0.0, 0.0, 1.0]
    assert rows[2]["answer_norms"] == ["1", "", "2"]
    assert rows[2]["format_penalty"] == -0.1
    assert rows[4]["turn_rewards"] == [0.0, 0.0, 0.0]
    assert rows[4]["messages"][-1] == {"role": "assistant", "content": "2"}
    assert [len(a) for a in script.asked] == [4, 2, 2, 2, 2, 2]  # who is done is asked no more
    assert len(set(script.seeds)) == 6
    weights = [r["weight"] for r in to_drift_dataset(rows)]
    assert weights == pytest.approx([1.0] * 6)


def test_a_verifier_that_gives_a_reward_alone() -> None:
    rows = list(DriftRolloutCollector(Script("a", "b"), lambda answer, row: answer == "b", n=1).collect([{"prompt": "q"}]))
    assert rows[0]["turn_rewards"] == [0.0, 1.0]
    assert rows[0]["answer_norms"] == []
    assert rows[0]["format_penalty"] == 0.0


@pytest.mark.parametrize(
    ("options", "prompts", "message"),
    [
        ({"n": 0}, [], "n=0"),
        ({"max_turns": 1.5}, [], "max_turns=1.5"),
        ({"format_penalty": 0.1}, [], "format_penalty=0.1"),
        ({"verifier": "x"}, [], "verifier='x'"),
        ({}, [{"question": "a"}], "prompt 0: prompt=None"),
        ({}, [{"prompt": [{"role": "assistant", "content": "a"}]}], "prompt 0: its last message"),
        ({}, [{"prompt": "a"}, {"prompt": "b", "prompt_id": 0}], "prompts 0 and 1 both have prompt_id=0"),
        ({"generate": lambda c, seed: []}, [{"prompt": "a"}], "0 answers for 16 conversations"),
        ({"generate": lambda c, seed: [None] * 16}, [{"prompt": "a"}], "must be a string"),
        ({"verifier": lambda a, r: math.nan}, [{"prompt": "a"}], "reward=nan"),
    ],
)
def test_collectors_that_are_refused(options: dict[str, Any], prompts: list[Any], message: str) -> None:
    chosen = {"generate": Script("a", "b", "c", "d", "e"), "verifier": lambda a, r: 0.0, **options}
    with pytest.raises(ConfigError, match=message):
        list(DriftRolloutCollector(**chosen).collect(prompts))


def test_answers_are_found_and_compared() -> None:
    row = {"answer": "1,234"}
    assert answer_match(r"so \boxed{12}, no: \boxed{1234}.", row) == Verdict(1.0, "1234")
    assert answer_match("The answer is $1,234.\nGood", row) == Verdict(1.0, "1234")
    assert answer_match("#### 1235", row) == Verdict(0.0, "1235")
    assert answer_match("I do not know", row) == Verdict(0.0, "")
    assert answer_match(r"\boxed{\frac{1}{2}}", {"answer": r"\frac{1}{2}"}).reward == 1.0
    assert answer_match(r"\boxed{\frac{1}{2", row) == Verdict(0.0, "")
    assert normal_form("(1, 2)") == "(1,2)"
    with pytest.raises(ConfigError, match="needs 'answer'"):
        answer_match("x", {"prompt": "q"})


# -- models -------------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


TALKS = [
    [{"role": "user", "content": "w5"}],
    [{"role": "user", "content": "w5 w6 w7 w8"}],
    [{"role": "user", "content": "w9 w3"}],
]


def test_a_model_answers_the_same_for_the_same_seed() -> None:
    model = tiny_llama().train()
    model.lm_head.eval()
    generate = ModelGenerator(model, tokenizer(), max_new_tokens=6, batch_size=2)
    before = torch.random.get_rng_state()
    first = generate(TALKS, seed=3)
    assert bool((torch.random.get_rng_state() == before).all())
    assert model.training
    assert not model.lm_head.training
    assert generate(TALKS, seed=3) == first
    assert generate(TALKS, seed=4) != first
    assert all(isinstance(text, str) and "w" in text for text in first)


def test_padding_changes_no_answer() -> None:
    """At a temperature where the likeliest token is drawn, alone and beside longer conversations; and top_k does not cut."""
    options = {"max_new_tokens": 5, "temperature": 1e-4}
    together = ModelGenerator(tiny_llama(), tokenizer(), batch_size=3, **options)(TALKS, seed=0)
    alone = ModelGenerator(tiny_llama(), tokenizer(), batch_size=1, **options)(TALKS, seed=0)
    assert together == alone
    assert len(set(together)) > 1
    many = ModelGenerator(tiny_llama(), tokenizer(), max_new_tokens=1, batch_size=400)(TALKS[:1] * 400, seed=0)
    assert len(set(many)) > 50  # transformers' own default draws from 50


def test_generators_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        ModelGenerator(tiny_llama(), tiny_tokenizer())
    for name, value in (("max_new_tokens", 0), ("temperature", 0.0), ("top_p", 1.1), ("batch_size", 0)):
        with pytest.raises(ConfigError, match=name):
            ModelGenerator(tiny_llama(), tokenizer(), **{name: value})


def test_vllm_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnsupportedError, match=r"needs the package vllm.*pip install vllm"):
        VLLMGenerator("m")
    seen: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            seen["engine"] = options

        def chat(self, messages: Any, sampling_params: Any, use_tqdm: bool) -> Any:
            seen["chat"] = messages, sampling_params
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(text=m[-1]["content"])]) for m in messages]

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options))
    generate = VLLMGenerator("m", max_new_tokens=7, gpu_memory_utilization=0.5)
    assert generate(TALKS, seed=1) == [t[-1]["content"] for t in TALKS]
    assert seen["engine"] == {"model": "m", "gpu_memory_utilization": 0.5}
    options = seen["chat"][1]
    assert len({o["seed"] for o in options}) == 3
    assert options[0] == {"n": 1, "seed": options[0]["seed"], "max_tokens": 7, "temperature": 1.0, "top_p": 1.0}


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and prompts."""
    made = tmp_path_factory.mktemp("drift")
    tiny_llama().save_pretrained(made / "model")
    tokenizer().save_pretrained(made / "model")
    lines = [{"prompt": f"w{i} w{i + 1}", "answer": "w7"} for i in range(3, 6)]
    (made / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (made / "judge_of_words.py").write_text("def judge(text, row):\n    return float('w5' in text)\n", encoding="utf-8")
    return made


def collect(folder: Path, output: Path, *words: str) -> Any:
    command = ["drift", "collect", str(folder / "prompts.jsonl"), "-o", str(output), "--model", str(folder / "model")]
    return CliRunner().invoke(app, [*command, "--max-new-tokens", "3", *words])


def test_collecting_by_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ("--samples", "4", "--max-turns", "2", "--limit", "2", "--verifier", "judge_of_words:judge", "--json")
    done = collect(folder, tmp_path / "a.jsonl", *words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = read_rollouts(tmp_path / "a.jsonl")
    assert told["rollouts"] == len(rows) == 8
    assert told["prompts"] == 2
    assert 0 < told["solved"] < 1
    assert told["solved"] == sum(max(r["turn_rewards"]) == 1 for r in rows) / 8
    assert 0 < told["effective_sample_size"] <= 8
    assert {len(r["turn_rewards"]) for r in rows} <= {1, 2}
    assert collect(folder, tmp_path / "b.jsonl", *words).exit_code == 0
    assert read_rollouts(tmp_path / "b.jsonl") == rows
    assert collect(folder, tmp_path / "c.jsonl", *words, "--seed", "1").exit_code == 0
    assert read_rollouts(tmp_path / "c.jsonl") != rows
    said = collect(folder, tmp_path / "d.jsonl", "--samples", "1", "--max-turns", "1")
    assert "3 rollouts of 3 prompts" in said.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "vlm"), "did you mean 'vllm'"),
        (("--verifier", "answer_mach"), "did you mean 'answer_match'"),
        (("--verifier", "judge_of_words:juge"), "did you mean 'judge'"),
        (("--verifier", "no_such_module:judge"), "no_such_module"),
        (("--samples", "0"), "n=0"),
        (("--temperature", "0"), "temperature=0.0"),
        (("--limit", "0"), "--limit 0"),
    ],
)
def test_commands_that_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    done = collect(folder, tmp_path / "out.jsonl", *words)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert not (tmp_path / "out.jsonl").exists()


def test_no_output_is_written_over(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("mine", encoding="utf-8")
    assert "exists already" in str(collect(folder, tmp_path / "out.jsonl").exception)
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == "mine"
