"""Rollouts are rewarded and learned from, by the weights that made them or by the next ones."""

from __future__ import annotations

import json
import math
import signal
import string
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from srm.engine.config import DEMO_MODEL, ModelConfig
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import ConfigError
from srm.settings import build, flatten, load
from srm.tokenizer_file import read_tokenizer
from srm.training.checkpoint import load_model, save_model
from srm.training.grpo.asked import ProblemQuestions, Questions, questions
from srm.training.grpo.asking import Asking, rows_of, updates_of
from srm.training.grpo.command import grpo
from srm.training.grpo.config import GRPOConfig, ScheduleSettings
from srm.training.grpo.engine_sampler import EngineSampler, folded
from srm.training.grpo.record import JsonLinesFile, StepEvaluation, Update, evaluated
from srm.training.grpo.rollouts import RolloutSampling, Sampler
from srm.training.grpo.torch_sampler import TorchSampler
from srm.training.instruments.log import LOG, PAGE, read_log
from srm.training.model import SRM
from srm.training.problems.drawn import problems
from srm.training.questions.questions import PROMPT
from srm.training.questions.reward_process import RewardProcess
from srm.training.text.tokenizer import BEGIN, BEGIN_ID, END
from tests.kit.engines.making import engine_of
from tests.kit.engines.numpy_runner import SMALL
from tests.kit.engines.numpy_runner import TINY as TINY_MODEL
from tests.unit.training.conftest import StopAt

REWARD = """
def wanted(completion, question):
    return float(any(one in "01234" for one in completion))
"""
TINY: dict[str, Any] = {
    "questions": 2, "rollouts": 16, "group_size": 8, "max_tokens": 6, "top_p": 1.0,
    "temperature": 1.0, "learning_rate": 3e-3, "clip_norm": 1.0, "evaluate_every": 0,
    "precision": "float32", "threads": 1, "save_every": 2,
}  # fmt: skip


def by_characters() -> Tokenizer:
    """A tokenizer of 97 entries, for the model shape that other tests have compiled. `Ċ` and `Ġ`
    are a line's end and a blank, as byte-level BPE spells them."""
    characters = [BEGIN, END, "Ċ", *string.printable[:93], "Ġ"]
    vocab = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.post_processor = TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)])
    return tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that knows nothing, questions and a reward."""
    folder = tmp_path_factory.mktemp("base")
    asked = [{"question": f"{a}?", "answer": str(a)} for a in range(5)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(reply)}\n" for reply in asked))
    (folder / "reward.py").write_text(REWARD)
    tokenizer = by_characters()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    torch.manual_seed(0)
    model = SRM(SMALL)
    with torch.no_grad():
        model.output_layer.weight.mul_(0.1)  # so that anything may be sampled
    save_model(model.config, model.state_dict(), folder)
    return folder


def settings(base: Path, output: Path, **changes: Any) -> GRPOConfig:
    files = {"model": base, "output": output, "train": (base / "train.jsonl",)}
    reward = {"reward": f"{base}/reward.py:wanted"}
    return build(GRPOConfig, {**files, **reward, **TINY, **changes})


def asked_of(config: GRPOConfig, model: ModelConfig, tokenizer: Tokenizer) -> Questions:
    groups, most = (config.data, config.evaluations), config.sampling.max_tokens
    return questions(*groups, config.seed, tokenizer, model.n_ctx, most)


def updates(folder: Path) -> list[Update]:
    return JsonLinesFile(folder / "updates.jsonl", Update, 10_000)


def gaps(made: list[Update]) -> list[float]:
    """Those of updates of which none was skipped."""
    finite = [update.gap for update in made if update.gap is not None]
    assert len(finite) == len(made)
    return finite


def test_what_is_rewarded_is_sampled_more_often(base: Path, tmp_path: Path) -> None:
    evaluation = {"evaluation": (base / "train.jsonl",), "evaluation_questions": 5}
    config = settings(base, tmp_path, steps=24, evaluate_every=12, **evaluation)
    trained = grpo(config)
    made = updates(tmp_path)
    assert [update.weights_version for update in made] == list(range(1, 25))
    assert made[0].kl == 0.0
    assert made[-1].kl is not None and made[-1].kl > 0.0
    assert np.mean([update.reward for update in made[-4:]]) > made[0].reward + 0.3
    assert all(gap < 1e-4 for gap in gaps(made)), "the trainer's log-probabilities are the engine's"
    logged = {line.step for line in read_log(tmp_path / LOG) if "pass@1" in line.values}
    assert logged == {0, 12, 24} and "pass@1" in (tmp_path / PAGE).read_text()
    first, _, last = trained.evaluations
    assert [evaluation.step for evaluation in trained.evaluations] == [0, 12, 24]
    assert last.weights_version == 25
    assert last.gain > 3 * last.gain_error > 0
    assert last.gain == pytest.approx(last.pass_at["1"] - first.pass_at["1"])
    assert trained.summary.updates == 24
    assert trained.summary.overlap_share == 0.0
    assert load_checkpoint(tmp_path).config == load_model(base).config
    for name in ("tokenizer.json", "summary.json", "grpo.svg"):
        assert (tmp_path / name).stat().st_size
    # A run that has ended is not run again.
    before = (tmp_path / "model.safetensors").read_bytes()
    assert grpo(config).evaluations == trained.evaluations
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_an_evaluation_that_no_run_vouches_for_is_made_again(base: Path, tmp_path: Path) -> None:
    evaluation = {"evaluation": (base / "train.jsonl",), "evaluation_questions": 5}
    config = settings(base, tmp_path, steps=1, evaluate_every=1, **evaluation)
    grpo(config)
    (tmp_path / "run.pt").unlink()
    (tmp_path / "updates.jsonl").unlink()
    evaluation["evaluation_questions"] = 3
    other = settings(base, tmp_path, steps=1, evaluate_every=1, **evaluation)
    first, last = grpo(other).evaluations
    assert len(first.right) == len(last.right) == 3
    logged = [line.step for line in read_log(tmp_path / LOG) if "pass@1" in line.values]
    assert logged == [0, 1]


def test_prompts_of_another_form_are_asked(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path, prompt="{question} =")
    tokenizer = read_tokenizer(base / "tokenizer.json")
    asked = asked_of(config, SMALL, tokenizer)
    texts = {tokenizer.decode(question.token_ids) for question in asked.train[0]}
    assert texts < {f"{number}? =" for number in range(5)}
    generated = asked_of(
        build(GRPOConfig, {"model": DEMO_MODEL, "prompt": "{question} =", "max_tokens": 6}),
        load_checkpoint(DEMO_MODEL).config,
        tokenizer := read_tokenizer(DEMO_MODEL / "tokenizer.json"),
    )
    for question in (*generated.train[0], *generated.evaluation):
        assert tokenizer.decode(question.token_ids) == f"{question.question.question} ="
    with pytest.raises(ConfigError, match=r"prompt must have \{question\} in it, got 'none'"):
        settings(base, tmp_path, prompt="none")


def test_no_update_has_the_problems_of_pretraining() -> None:
    tokenizer = read_tokenizer(DEMO_MODEL / "tokenizer.json")
    batches = ProblemQuestions(tokenizer, PROMPT, 64, 0)
    pretrained = {problem.question for problem in islice(problems("train", 7), 64)}
    again = ProblemQuestions(tokenizer, PROMPT, 64, 0)
    asked, same, other = (
        [prompt.question.question for prompt in batch]
        for batch in (batches[7], again[7], batches[8])
    )
    assert len(pretrained.intersection(asked)) < 8, "short ones are alike by chance"
    assert asked == same != other


@pytest.mark.parametrize(
    ("changes", "stop", "saved"),
    [
        ({}, (3, KeyboardInterrupt), 2),
        ({"kl_weight": 0.0, "save_every": 100}, (1, signal.SIGTERM), 2),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_run(
    base: Path, tmp_path: Path, stop_at: StopAt, changes: dict[str, Any], stop: Any, saved: int
) -> None:
    """Without a reference too: what was learned from then are rows that teach something."""
    grpo(settings(base, tmp_path / "whole", steps=5, **changes))
    halves = settings(base, tmp_path / "halves", steps=5, **changes)
    with stop_at(*stop), pytest.raises(KeyboardInterrupt):
        grpo(halves)
    assert len(updates(tmp_path / "halves")) == stop[0] + (stop[1] == signal.SIGTERM)
    assert len(torch.load(tmp_path / "halves" / "run.pt")["losses"]["steps"]) == saved
    grpo(halves)
    both = [tmp_path / name for name in ("whole", "halves")]
    assert len({(folder / "model.safetensors").read_bytes() for folder in both}) == 1
    result, other = (
        [(update.step, update.reward, update.loss, update.kl) for update in updates(folder)]
        for folder in both
    )
    assert result == other
    assert {kl is None for *_, kl in result} == {"kl_weight" in changes}
    with pytest.raises(ConfigError, match="a run of another rollouts, 16 and not 17"):
        grpo(settings(base, tmp_path / "halves", **changes | {"steps": 6, "rollouts": 17}))
    (tmp_path / "halves" / "updates.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"must have the 5 updates of run.pt, got 0"):
        grpo(settings(base, tmp_path / "halves", steps=6, **changes))


FAR = 1e6
"""A weight that no token reaches, however the policy moves."""


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "torch"},
        {"ahead": True, "correction": "auto", "most_weight": FAR},
        {"ahead": True, "correction": "clip", "most_weight": FAR},
        {"passes": 2, "loss_mean": "max_tokens"},
    ],
)
def test_other_ways_to_learn_learn_too(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Rollouts ahead are of the weights before."""
    grpo(settings(base, tmp_path, steps=24, **changes))
    made = updates(tmp_path)
    assert np.mean([update.reward for update in made[-3:]]) > made[0].reward + 0.3
    versions = [update.weights_version for update in made]
    if "passes" in changes:
        assert versions == list(range(1, 13))
    elif "ahead" in changes:
        assert versions == [1, 1, *range(2, 24)]
        first, second, *_ = gaps(made)
        assert first < 1e-4 < second
        assert any(update.limited for update in made) == (changes["correction"] == "clip")
    else:
        assert versions == list(range(1, 25)) and all(gap < 1e-4 for gap in gaps(made))


SEVERAL: dict[str, Any] = {
    "passes": 2, "mini_batches": 2, "redraws": 1, "loss_mean": "batch", "scale_advantages": False,
    "save_every": 4, "keep_every": 6,
}  # fmt: skip


def test_several_updates_a_batch_go_on_to_the_same_bits(
    base: Path, tmp_path: Path, stop_at: StopAt
) -> None:
    """Where the third batch was cut off in its second update, it is drawn and learned again."""
    grpo(settings(base, tmp_path / "whole", steps=16, **SEVERAL))
    made = updates(tmp_path / "whole")
    steps = [(update.step, update.weights_version) for update in made]
    assert steps == [(4, 1), (8, 2), (12, 3), (16, 4)]
    names = {path.name for path in (tmp_path / "whole").glob("step-*")}
    assert names == {"step-8", "step-12"}
    lines = [*read_log(tmp_path / "whole" / LOG)]
    logged = {line.step: line.values for line in lines if "entropy" in line.values}
    for update in made:
        assert logged[update.step]["entropy"] == update.entropy
        assert logged[update.step].keys() >= {"mixed", "length", "share of peak", "gradient norm"}
    samples = [line.sample for line in lines if line.sample]
    assert len(samples) == 8 and samples[0].reward is not None
    assert samples[0].reward >= (samples[1].reward or 0.0) and samples[0].prompt.endswith("Answer:")
    assert any(update.limited for update in made)
    assert all(gap > 1e-4 for gap in gaps(made)), "weights moved away from those that sampled"
    with stop_at(9), pytest.raises(KeyboardInterrupt):
        grpo(settings(base, tmp_path / "halves", steps=16, **SEVERAL))
    assert len(torch.load(tmp_path / "halves" / "run.pt")["losses"]["steps"]) == 8
    grpo(settings(base, tmp_path / "halves", steps=16, **SEVERAL))
    whole, halves = (tmp_path / name / "model.safetensors" for name in ("whole", "halves"))
    assert whole.read_bytes() == halves.read_bytes()
    with pytest.raises(ConfigError, match=r"exceed the 16 updates made by a multiple of the 4"):
        grpo(settings(base, tmp_path / "halves", steps=18, **SEVERAL))


def test_an_update_sees_each_row_once_a_pass() -> None:
    rows: Any = list(range(7))
    one, two = (updates_of(rows, ScheduleSettings(passes=2, mini_batches=n), 3, 8) for n in (1, 3))
    assert list(one) == [rows, rows]
    parts = [list(part) for part in two]
    assert [len(part) for part in parts] == [3, 2, 2] * 2
    assert set(chain(*parts[:3])) == set(chain(*parts[3:])) == set(rows)
    assert parts[:3] != parts[3:]
    again = updates_of(rows, ScheduleSettings(passes=2, mini_batches=3), 3, 8)
    assert [list(part) for part in again] == parts


def asking_of(config: GRPOConfig, reward: RewardProcess) -> Asking:
    model, tokenizer = load_model(config.model), read_tokenizer(config.model / "tokenizer.json")
    asked = asked_of(config, model.config, tokenizer)
    sampler = TorchSampler(model, torch.device("cpu"), "float32", 1)
    return Asking(config.sampling, config.seed, asked, tokenizer, reward, sampler)


def test_questions_whose_rollouts_are_all_alike_are_replaced_while_tries_last(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(
        "def wanted(completion, question):\n"
        "    digits = set('01234') & set(completion)\n"
        "    return float(question.question in ('0?', '1?') and bool(digits))\n"
    )
    config = settings(base, tmp_path, reward=f"{tmp_path}/reward.py:wanted", redraws=3)
    with closing(RewardProcess(*config.data.rewards)) as reward:
        asking = asking_of(config, reward)
        batch = asking.batch(0)  # an epoch has five questions, so three draws have all
        retained = [batch.asked[place].question.question for place in batch.learnable]
        assert sorted(retained) == ["0?", "1?"] and 1 <= batch.draws <= 3
        assert batch.rewards.shape == (2 * batch.draws, 16)
        able = [asked.question.question in ("0?", "1?") for asked in batch.asked]
        assert batch.mixed == pytest.approx(np.mean(able))
        rows = rows_of(batch, config.resampling, True, 0, 0)
        assert len(rows) == config.rows == 16 and all(row.advantage for row in rows)
        lengths = [len(rollout.token_ids) for own in batch.rollouts for rollout in own]
        logprobs = [float(x) for own in batch.rollouts for item in own for x in item.logprobs]
        assert batch.length == pytest.approx(np.mean(lengths))
        assert batch.entropy == pytest.approx(-np.mean(logprobs), rel=1e-5)
        later = asking.batch(batch.draws)
        assert later.asked[:2] != batch.asked[:2]
        # without redraws what comes is learned from, alike or not
        plain = asking_of(settings(base, tmp_path, reward=config.data.reward), reward).batch(0)
        assert (plain.draws, plain.learnable.tolist()) == (1, [0, 1])
        assert plain.rewards.tolist() == batch.rewards[:2].tolist()


def test_after_the_last_draw_questions_that_teach_nothing_fill_the_batch(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def wanted(completion, question):\n    return 0.0\n")
    changes = {"reward": f"{tmp_path}/reward.py:wanted", "redraws": 2, "steps": 2}
    changes |= {"rollouts": 2, "group_size": 2}
    grpo(settings(base, tmp_path / "run", sampler="torch", **changes))
    assert [update.draws for update in updates(tmp_path / "run")] == [3, 3]
    assert [update.rollout_tokens > 0 for update in updates(tmp_path / "run")] == [True, True]


def test_rewards_are_added_by_weight_and_told_apart(base: Path, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "def right(completion, question):\n    return 1\n"
        "def short(completion, question):\n    return 3.0\n"
    )
    names = f"{tmp_path}/two.py:right,{tmp_path}/two.py:short"
    changes = {"reward": names, "reward_weights": (0.5, 0.25), "steps": 1, "sampler": "torch"}
    grpo(settings(base, tmp_path / "run", **changes))
    (update,) = updates(tmp_path / "run")
    assert (update.each_reward, update.reward) == ([1.0, 3.0], 1.25)
    with pytest.raises(ConfigError, match=r"reward_weights must be as many as .*, 2, got 1"):
        settings(base, tmp_path, **{**changes, "reward_weights": (1.0,)})
    with pytest.raises(ConfigError, match=r"reward_weights must be numbers of at most 1e\+18"):
        settings(base, tmp_path, **{**changes, "reward_weights": (1.0, math.nan)})


def test_what_was_learned_is_saved_where_a_reward_fails_later(base: Path, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "calls = 0\n"
        "def reward(completion, question):\n"
        "    global calls\n    calls += 1\n"
        "    return 1.0 if calls <= 64 and '0' in completion else 0.0 if calls <= 64 else 1 / 0\n"
    )
    changes = {"reward": f"{tmp_path}/fails.py:reward", "save_every": 100, "sampler": "torch"}
    with pytest.raises(ConfigError, match=r"reward failed for .*ZeroDivisionError"):
        grpo(settings(base, tmp_path / "run", steps=4, **changes))
    assert len(torch.load(tmp_path / "run" / "run.pt")["losses"]["steps"]) == 2


def torch_model(seed: int) -> SRM:
    torch.manual_seed(seed)
    return SRM(TINY_MODEL)


def samplers() -> list[Sampler]:
    """Both, with the same weights."""
    model = torch_model(0)
    engine = engine_of(folded(TINY_MODEL, model.state_dict(), 1), num_slots=8)
    own = TorchSampler(model, torch.device("cpu"), "float32", 1)
    return [EngineSampler(engine, lambda: None), own]


@pytest.mark.parametrize("sampler", samplers(), ids=["engine", "torch"])
def test_weights_change_hands_in_memory_and_are_counted(sampler: Sampler) -> None:
    """And rollouts are a function of weights and seed."""
    asked = RolloutSampling(n=3, max_tokens=4, temperature=1.0, top_p=1.0, seed=5)
    first = sampler.sample([[1, 2], [3]], asked)
    assert [len(item) for item in first] == [3, 3]
    assert {solution.weights_version for own in first for solution in own} == {1}
    model = torch_model(1)
    sampler.load(model.state_dict())
    with torch.no_grad():  # the sampler has copies
        model.input_layer.weight.zero_()
    second = sampler.sample([[1, 2], [3]], asked)
    assert {solution.weights_version for own in second for solution in own} == {2}
    again = sampler.sample([[1, 2], [3]], asked)
    for own, others, before in zip(second, again, first, strict=True):
        for solution, other, old in zip(own, others, before, strict=True):
            assert solution.token_ids.tolist() == other.token_ids.tolist()
            assert solution.logprobs.tolist() == other.logprobs.tolist() != old.logprobs.tolist()
            assert len(solution.logprobs) == len(solution.token_ids)


@pytest.mark.parametrize("sampler", samplers(), ids=["engine", "torch"])
def test_samplers_say_the_models_own_log_probabilities_and_keep_to_top_p(sampler: Sampler) -> None:
    prompt, model = [1, 2, 3], torch_model(0)
    asked = RolloutSampling(n=40, max_tokens=70, temperature=5.0, top_p=0.9, seed=5)
    (result,) = sampler.sample([prompt], asked)
    most = TINY_MODEL.n_ctx - len(prompt) + 1
    assert {prompt.is_ended for prompt in result} == {True, False}
    for item in result:
        tokens = item.token_ids.tolist()
        assert item.is_ended == (tokens[-1] == TINY_MODEL.eos_token_id)
        assert item.is_ended or len(tokens) == most
        assert TINY_MODEL.eos_token_id not in tokens[:-1]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
        logp = torch.log_softmax(logits / 5.0, -1)
        own = logp.gather(1, torch.tensor(tokens)[:, None])
        assert item.logprobs.tolist() == pytest.approx(own[:, 0].tolist(), abs=1e-4)
        likelier = (logp.exp() * (logp > own)).sum(1)
        assert (likelier < 0.9 + 1e-4).all()


def test_questions_come_once_an_epoch_and_long_ones_never(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    lines = [{"question": f"{a}?", "answer": "1"} for a in range(4)]
    lines.append({"question": "so long " * 5, "answer": "1"})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = settings(base, tmp_path, train=(file,))
    model, tokenizer = load_model(base).config, read_tokenizer(base / "tokenizer.json")
    asked = asked_of(config, model, tokenizer)
    for first in (0, 2):
        drawn = [*asked.train[first], *asked.train[first + 1]]
        assert sorted(each.question.question for each in drawn) == ["0?", "1?", "2?", "3?"]
    assert asked.evaluation == []
    with pytest.raises(ConfigError, match=r"evaluation_questions must be at most 4, .* got 100"):
        changed = settings(base, tmp_path, train=(file,), evaluation=(file,), evaluate_every=1)
        asked_of(changed, model, tokenizer)
    with pytest.raises(ConfigError, match=r"max_tokens must be below .* 64 tokens, got 64"):
        asked_of(settings(base, tmp_path, train=(file,), max_tokens=64), model, tokenizer)
    with pytest.raises(ConfigError, match="train: all prompts have more than 1 tokens"):
        asked_of(settings(base, tmp_path, train=(file,), max_tokens=63), model, tokenizer)


def test_generated_problems_are_new_or_held_out(base: Path) -> None:
    wide = ModelConfig(d_model=16, num_layers=2, num_heads=2, n_ctx=512, vocab_size=270)
    config = settings(base, base, train=(), evaluate_every=1, evaluation_questions=3)
    tokenizer = read_tokenizer(base / "tokenizer.json")
    result, again = (asked_of(config, wide, tokenizer) for _ in range(2))
    drawn = [[path.question.question for path in result.train[index]] for index in range(3)]
    assert len({solution for own in drawn for solution in own}) == 6
    assert [path.question.question for path in again.train[2]] == drawn[2]
    held, same = ([each.question for each in own.evaluation] for own in (result, again))
    assert held == same and len(held) == 3
    assert result.evaluation[0].question.answer.rpartition("####")[2].strip().isdigit()


def test_an_evaluation_is_compared_with_the_first_one_question_by_question() -> None:
    first = evaluated(0, 1, 4, [0, 2, 4], None)
    assert first.pass_at == pytest.approx({"1": 0.5, "2": (0 + 5 / 6 + 1) / 3, "4": 2 / 3})
    assert (first.gain, first.gain_error) == (0.0, 0.0)
    assert first.pass_at_1_error == pytest.approx(math.sqrt(0.25) / math.sqrt(3))
    later = evaluated(9, 10, 4, [1, 3, 4], first)
    assert later.gain == pytest.approx((0.25 + 0.25) / 3)
    assert later.gain_error == pytest.approx(np.std([0.25, 0.25, 0], ddof=1) / math.sqrt(3))


def test_lines_of_a_run_that_was_cut_off_are_dropped(tmp_path: Path) -> None:
    lines = JsonLinesFile(tmp_path / "lines.jsonl", StepEvaluation, 0)
    for step in (0, 5, 10):
        lines.add(evaluated(step, step + 1, 2, [1], None))
    retained = JsonLinesFile(tmp_path / "lines.jsonl", StepEvaluation, 5)
    assert retained == lines[:2]
    retained.add(lines[2])
    assert JsonLinesFile(tmp_path / "lines.jsonl", StepEvaluation, 10) == lines
    (tmp_path / "lines.jsonl").write_text('{"step":')
    with pytest.raises(ConfigError, match=r"lines.jsonl is damaged"):
        JsonLinesFile(tmp_path / "lines.jsonl", StepEvaluation, 5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temperature=0", "temperature must be 0.001 … 100, got 0.0"),
        ("--top-p=0", r"top_p must lie in \(0, 1\], got 0.0"),
        ("--rollouts=1", "rollouts must be at least 2, got 1"),
        ("--group-size=51", "group_size must be 0 or 2 … 50, .* got 51"),
        ("--group-size=1", "group_size must be 0 or 2 … 50, .* got 1"),
        ("--pool --group-size=401", "group_size must be 0 or 2 … 400, .* got 401"),
        ("--micro-batch-tokens=0", "micro_batch_tokens must be at least 1, got 0"),
        ("--most-weight=0.5", "most_weight must be at least 1, got 0.5"),
        ("--clip-norm=0", "clip_norm must be above 0, got 0.0"),
        ("--kl-weight=inf", "kl_weight must be a finite number, got inf"),
        ("--kl-weight=nan", "kl_weight must be a finite number, got nan"),
        ("--kl-weight=-1", "kl_weight must be at least 0, got -1.0"),
        ("--warmup-share=2", r"warmup_share must lie in \[0, 1\], got 2.0"),
        ("--evaluation-questions=0", "evaluation_questions must be at least 1 of generated"),
        ("--clip-low=0", r"clip_low must lie in \(0, 1\], got 0.0"),
        ("--clip-high=-1", "clip_high must be at least 0, got -1.0"),
        ("--passes=0", "passes must be at least 1, got 0"),
        ("--mini-batches=129", "mini_batches must be at most the 128 rollouts of a batch, got 129"),
        ("--pool --redraws=1", "redraws must be 0 with pool, whose group is all questions, got 1"),
        ("--reward-limit-s=0", "reward_limit_s must be at least 1, got 0.0"),
        ("--loss-mean=some", "'some': allowed are completion, batch, max_tokens"),
        ("--correction=some", "correction = 'some': allowed are auto, none, truncate, clip"),
    ],
)
def test_settings_out_of_range_are_named(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(GRPOConfig, flags.split(), {})


def test_settings_outside_their_table_are_named(tmp_path: Path) -> None:
    file = tmp_path / "grpo.toml"
    argv = [f"--config={file}", "--clip-high=0.5"]
    objective = "[objective]\nkl_weight = 0\nclip_high = 0.4\n"
    file.write_text(f"seed = 3\n[schedule]\nsteps = 7\n{objective}")
    config = load(GRPOConfig, argv, {})
    assert (config.seed, config.schedule.steps) == (3, 7)
    assert (config.objective.kl_weight, config.objective.clip_high) == (0, 0.5)
    assert build(GRPOConfig, flatten(config)) == config
    for text, message in (
        (
            'steps = 7\nevaluation = ["a"]\nlearning_rate = 1.0\nseed = 3\n',
            r"steps, learning_rate in the table \[schedule\]; evaluation in the table \[data\]$",
        ),
        ("[data]\nseed = 3\n", "settings belong elsewhere: seed above all tables$"),
        ("[objective]\nsteps = 7\n", r"elsewhere: steps in the table \[schedule\]$"),
        ("[objective]\nkl_wait = 7\n", "unknown setting 'kl_wait'"),
        ("[objectives]\nkl_weight = 7\n", "unknown setting 'objectives'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(GRPOConfig, argv, {})


def test_a_run_in_the_folder_of_its_model_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="output must be another folder than model"):
        grpo(settings(base, base))
