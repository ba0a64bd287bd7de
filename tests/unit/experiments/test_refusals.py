"""Settings with which no experiment can be run are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.experiments.__main__ import main
from research.experiments.harness import runner
from srm.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "experiments are mixers"),
        ("mixer", "experiments are mixers"),
        ("mixers --seeds=0", "seeds must be two or more different numbers"),
        ("mixers --seeds=1,1", "seeds must be two or more different numbers"),
        (f"mixers --seeds=0,{2**64}", "numbers of 0 … 2..64 - 1, got"),
        ("mixers --learning-rate=0", "learning_rate must be above 0"),
        ("mixers --learning-rate=inf", "learning_rate must be above 0 and finite, got inf"),
        ("mixers --learning-rate=1e19", "learning_rate must be at most 1e.18, got 1e.19"),
        ("mixers --threads=5000", "threads must be at most 4096, got 5000"),
        (f"mixers --max-vocab-size={10**12}", "max_vocab_size must be at most 1000000, got"),
        ("mixers --steps=0", "steps must be at least 1, got 0"),
        ("mixers --num-heads=3", "num_heads = 3 must divide d_model = 128"),
        ("mixers --num-heads=1", "num_heads must be even where mixer is mixed, got 1"),
        ("baselines --d-model=20", "d_model must be a multiple of 8, got 20"),
        ("baselines --learning-rates=1e-3,0", "learning_rates must be above 0"),
        ("capacity --copied=4,2", "copied must be one or more numbers ≥ 1 that rise"),
        ("capacity --widths=", "widths must be one or more numbers ≥ 8 that rise"),
        ("capacity --widths=12", "widths must be multiples of 8, got"),
        ("capacity --ids=1", "ids must be at least 2, got 1"),
        ("copying --n-ctx=9", "n_ctx must be even, got 9"),
        ("copying --widths=64,32", "widths must be one or more numbers ≥ 1 that rise"),
        ("copying --copied=0,4", "copied must be one or more numbers ≥ 1 that rise"),
        ("copying --ids=1", "ids must be at least 2, got 1"),
        ("copying --widths=24", "widths and d_model must be multiples of 16, got 24"),
        ("copying --d-model=8", "widths and d_model must be multiples of 16, got 8"),
        ("coverage --minutes=0", "minutes must be above 0, got 0"),
        ("coverage --search-minutes=nan", "search_minutes must be a finite number, got nan"),
        ("coverage --d-model=12", "d_model must be a multiple of 8, got 12"),
        ("coverage --transformer-width=9", "transformer_width must be a multiple of 8, got 9"),
        ("coverage --form=pool", "form = 'pool': allowed are direct, steps, chain"),
        ("coverage --rollouts=2", "rollouts must be at least 3, got 2"),
        ("coverage --transformer-rollouts=2", "transformer_rollouts must be at least 3, got 2"),
        ("coverage --grpo-puzzles=0", "grpo_puzzles must be at least 1, got 0"),
        ("coverage --grpo-minutes=-1", "grpo_minutes must be at least 0.0, got -1"),
        ("coverage --grpo-minutes=inf", "grpo_minutes must be a finite number, got inf"),
        ("coverage --grpo-learning-rate=0", "grpo_learning_rate must be above 0, got 0"),
        ("finetuning --train=a.jsonl", "train and evaluation must both have files"),
        ("finetuning --clip-norm=0", "clip_norm must be above 0"),
        ("finetuning --temperature=0", "temperature must be 0.001"),
        ("finetuning --train=/ --evaluation=/", "/ cannot be read: Is a directory"),
        ("finetuning --rows=200000", "at most 200000 together where train has no files"),
        ("forms --forms=chunked,parallel", r"forms must be some of .*, got \['parallel'\]"),
        ("forms --most-seconds=0", "most_seconds must be above 0, got 0"),
        ("forms --most-gib=-1", "most_gib must be above 0, got -1"),
        ("forms --shortest=64 --n-ctx=32", "shortest must be at most n_ctx = 32, got 64"),
        ("forms --d-model=12", "d_model must be a multiple of 2 . num_heads = 8, got 12"),
        ("grpo --evaluation=a.jsonl", "train and evaluation must both have files"),
        ("grpo --rollouts=7", "rollouts must each be at least 3 and divide sampled = 400"),
        ("grpo --rollouts=50,5", "rollouts must be one or more that rise"),
        ("grpo --rollouts=", "rollouts must be one or more that rise"),
        ("grpo --train=/no.jsonl --evaluation=/no.jsonl", "/no.jsonl: No such file"),
        ("grpo --group-size=1", "group_size must be 0 or 2 … 5"),
        ("information --n-ctx=1", "n_ctx must be at least 2, got 1"),
        ("information --d-model=12", "d_model must be a multiple of 8, got 12"),
        ("information --max-vocab-size=257", "max_vocab_size must be at least 258, got 257"),
        ("matrices --d-model=12", "d_model must be a multiple of 8, got 12"),
        ("matrices --n-ctx=1", "n_ctx must be at least 2, got 1"),
        ("memory --copied=4,2", "copied must be one or more numbers ≥ 1 that rise"),
        ("memory --copied=", "copied must be one or more numbers ≥ 1 that rise"),
        ("memory --ids=1", "ids must be at least 2, got 1"),
        ("memory --d-model=6", "must divide d_model = 6"),
        ("rollouts --group-size=51", "group_size must be 0 or 2 … 50"),
        ("scaling --widths=32", "widths must be two or more numbers ≥ 8 that rise, got"),
        ("scaling --widths=32,20", "widths must be two or more numbers ≥ 8 that rise, got"),
        ("scaling --widths=20,32", "widths must be multiples of 8, got"),
        ("scaling --durations=0,1", "durations must be two or more numbers ≥ 1 that rise"),
        ("throughput --kinds=SRM,LSTM", r"kinds must be some of SRM, .*, got \['LSTM'\]"),
        ("throughput --modes=fast", r"modes must be some of eager, compiled, got \['fast'\]"),
        ("throughput --widths=12", r"widths must be multiples of 8 above 0, got \(12,\)"),
        ("throughput --seconds=0", "seconds must be above 0, got 0"),
        ("throughput --seeds=0,0", "seeds must be one or more different numbers"),
        ("trainers --environment=/none", "environment: /none/bin/python is missing"),
        ("trainers --rollouts=1", "rollouts must be at least 2"),
    ],
)
def test_impossible_settings_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    places = [f"--output={tmp_path}", f"--results={tmp_path}"] if " " in flags else []
    with pytest.raises(ConfigError, match=message):
        main([*flags.split(), *places])


@pytest.mark.parametrize("setting", ["results", "output"])
@pytest.mark.parametrize("name", ["mixers", "finetuning"])
def test_a_folder_that_cannot_be_written_is_refused_first(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(runner, "cached", None)  # no case is run
    places = {"results": tmp_path / "results", "output": tmp_path / "out"}
    places[setting] = tmp_path / "file" / "folder"
    with pytest.raises(ConfigError, match=f"{setting}: .*: Not a directory"):
        main([name, *(f"--{key}={folder}" for key, folder in places.items())])
