"""A run that goes on keeps the settings it began with, or is refused; the others are honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from srm.errors import ConfigError
from srm.settings import build
from srm.training.finetuning.config import SFTConfig
from srm.training.finetuning.sft import sft
from srm.training.grpo.command import grpo
from srm.training.grpo.config import GRPOConfig
from srm.training.passk.journal import Journal
from srm.training.pretrain import pretrain
from srm.training.settings import MAY_CHANGE, PretrainConfig
from srm.training.text.tokenizer import train_tokenizer
from srm.training.text.whole_files import seal
from tests.kit.fake_wandb import Wandb
from tests.unit.training.conftest import tiny_run, write_numbers

ADDED = {"weight_decay", "clip_norm", "max_vocab_size", "evaluation_share"}
"""Runs that earlier versions saved lack these settings."""


@pytest.fixture
def config(tmp_path: Path) -> PretrainConfig:
    """Settings of a run of two steps on texts, which is there."""
    evaluated = {"evaluate_every": 2, "evaluation_share": 0.1}
    made = tiny_run(write_numbers(tmp_path), tmp_path / "run", steps=2, **evaluated)
    pretrain(made)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_decay": 0.5}, "weight_decay, 0.01 and not 0.5"),
        ({"clip_norm": 0.5}, "clip_norm, 1.0 and not 0.5"),
        ({"evaluation_share": 0.2}, "evaluation_share, 0.1 and not 0.2"),
        ({"evaluate_every": 0}, "evaluation_share, 0.1 and not 0.0"),
        ({"max_vocab_size": 300}, "max_vocab_size, 280 and not 300"),
        ({"seed": 1}, "seed, 0 and not 1"),
        ({"d_model": 32}, "d_model, 16 and not 32"),
    ],
)
def test_a_run_keeps_the_settings_it_began_with(
    config: PretrainConfig, changes: dict[str, Any], message: str
) -> None:
    before = (config.output / "run.pt").read_bytes()
    with pytest.raises(ConfigError, match=f"run.pt is a run of another {message}: .*{MAY_CHANGE}"):
        pretrain(structs.replace(config, steps=3, **changes))
    assert (config.output / "run.pt").read_bytes() == before


def test_what_may_change_is_honoured(config: PretrainConfig) -> None:
    """Also float16, whose scale a run of another precision has not saved."""
    changes = {"learning_rate": 1e-3, "decline": "cosine", "warmup_steps": 2, "micro_batches": 2}
    changes["checkpoint_activations"] = True
    changed = structs.replace(config, steps=4, evaluate_every=3, **changes)
    losses = pretrain(structs.replace(changed, precision="float16", save_every=1))
    assert len(losses.steps) == 4
    assert [step for step, _ in losses.evaluations] == [2, 3, 4]
    assert len(pretrain(structs.replace(changed, steps=5)).steps) == 5


def test_fewer_steps_than_were_made_are_refused(config: PretrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"has 2 updates: steps, .* must be at least .* got 1"):
        pretrain(structs.replace(config, steps=1))
    assert len(pretrain(config).steps) == 2


def test_a_run_saved_before_settings_were_kept_takes_them_as_given(
    config: PretrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    saved = config.output / "run.pt"
    run = torch.load(saved, weights_only=True)
    retained = run.pop("kept")
    run["settings"] |= {name: retained[name] for name in retained.keys() - ADDED}
    torch.save(run, saved)
    seal(saved)
    pretrain(structs.replace(config, steps=3, weight_decay=0.5))
    assert caplog.messages == [
        f"{saved} does not say its clip_norm, evaluation_share, max_vocab_size, weight_decay: now "
        "as given"
    ]
    run = torch.load(saved, weights_only=True)
    assert [group["weight_decay"] for group in run["optimizer"]["param_groups"]] == [0.5, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"another weight_decay, 0.5 and not 0.01"):
        pretrain(config)


def test_a_run_saved_with_one_group_of_parameters_goes_on_with_its_moments(
    config: PretrainConfig,
) -> None:
    saved = config.output / "run.pt"
    run = torch.load(saved, weights_only=True)
    pretrain(structs.replace(config, steps=3))
    whole = torch.load(saved, weights_only=True)
    first, *others = run["optimizer"]["param_groups"]
    first["params"] += [name for group in others for name in group["params"]]
    run["optimizer"]["param_groups"] = [first]
    torch.save(run, saved)
    seal(saved)
    pretrain(structs.replace(config, steps=3))
    again = torch.load(saved, weights_only=True)
    assert all(torch.equal(again["model"][name], value) for name, value in whole["model"].items())


def test_another_tokenizer_is_refused_and_the_runs_own_stays(config: PretrainConfig) -> None:
    own = (config.output / "tokenizer.json").read_bytes()
    other = config.output.parent / "other.json"
    other.write_text(train_tokenizer(["other words, other words"], 280).to_str())
    with pytest.raises(ConfigError, match=r"tokenizer: .* has a run of another one than .*other"):
        pretrain(structs.replace(config, tokenizer=str(other)))
    assert (config.output / "tokenizer.json").read_bytes() == own
    pretrain(structs.replace(config, tokenizer=str(config.output / "tokenizer.json")))


def test_fine_tuning_and_rewards_keep_their_settings(
    config: PretrainConfig, tmp_path: Path, wandb: Wandb
) -> None:
    """And the run of another command is never taken for theirs. Both send theirs to W&B."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(6 * '{"question": "1?", "answer": "1"}\n')
    tuned = SFTConfig(model=config.output, output=tmp_path / "sft", train=(rows,), epochs=1,
                      batch_rows=5, threads=1)  # fmt: skip
    changes: dict[str, Any] = {"checkpoint_activations": True, "wandb": True}
    sft(structs.replace(tuned, **changes))
    with pytest.raises(ConfigError, match=r"another weight_decay, 0.1 and not 0.0: remove"):
        sft(structs.replace(tuned, epochs=2, weight_decay=0.0))
    rewarded = {
        "model": config.output, "output": tmp_path / "grpo", "train": (rows,), "steps": 1,
        "questions": 1, "rollouts": 2, "group_size": 2, "max_tokens": 2, "sampler": "torch",
        "threads": 1,
    }  # fmt: skip
    grpo(build(GRPOConfig, rewarded | changes))
    configs = [run.given["config"] for run in wandb.runs]
    assert all(made["checkpoint_activations"] for made in configs) and len(configs) == 2
    with pytest.raises(ConfigError, match=r"another weight_decay, 0.1 and not 0.0: remove"):
        grpo(build(GRPOConfig, rewarded | {"steps": 2, "weight_decay": 0.0}))
    with pytest.raises(ConfigError, match="another questions, 1 and not 2: remove"):
        grpo(build(GRPOConfig, rewarded | {"steps": 2, "questions": 2}))
    with pytest.raises(ConfigError, match="is a run of another rows, None and not "):
        sft(structs.replace(tuned, output=rewarded["output"]))
    with pytest.raises(ConfigError, match="is a run of another questions, None and not "):
        grpo(build(GRPOConfig, rewarded | {"output": tuned.output}))


def test_a_batch_without_anything_to_learn_is_said(config: PretrainConfig) -> None:
    changes: dict[str, Any] = {"texts": (), "n_ctx": 1, "output": config.output.parent / "one"}
    changes["tokenizer"] = str(config.output / "tokenizer.json")
    with pytest.raises(ConfigError, match="a batch has no token to learn: raise its size or n_ctx"):
        pretrain(structs.replace(config, **changes))


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output: .*file/journal.jsonl: File exists"):
        Journal(tmp_path / "file" / "journal.jsonl", {})
