"""Settings of `srm evaluate passk`."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from srm.training.questions.questions import check_prompt

MOST = 1_000_000
"""Most samples of a problem, and most choices of a request."""
ON_SRM, ELSEWHERE = 10_000, 100
"""Choices of a request where `n` is 0: of an SRM server that draws all samples, and otherwise."""


class PassKConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm evaluate passk`."""

    url: str = "http://127.0.0.1:8000"
    """Server's address, with or without /v1 at its end."""
    served_model_name: str = ""
    """Name sent as `model` in every request; empty: the first model of /v1/models."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key to send; no key is sent where it is not set."""
    output: Path = Path("runs/passk")
    """Folder of the journal and of the results; an existing run is resumed."""
    input: Path | None = None
    """File .jsonl or .parquet with `question` and `answer`; None: held-out word problems."""
    problems: int = 50
    """Number of problems, the first ones; 0: all of the file."""
    examples: Path | None = None
    """File like `input` whose first `shots` rows are put before every question; None: word problems
    of the training split, only where `input` is None too."""
    shots: int = 0
    """Number of solved examples before every question."""
    prompt: str = ""
    """Text to complete, in which `{question}` stands for the question; empty: that of GSM8K."""
    reward: str = "srm.training.questions.rewards:gsm8k_strict"
    """Reward function of completion and question, as `module:function` or `file.py:function`; a
    reward of 1 or more is right."""
    samples: int = 1_000
    """Completions of each problem; the largest k."""
    until: int = 0
    """Number of right completions of a problem after which no more are drawn; 0: all are drawn."""
    match: str = ""
    """Regular expression of right completions, by which an SRM server itself stops drawing;
    `{answer}` stands for the number after ####. Only with `until`."""
    n: int = 0
    """Choices of one request; 0: 10,000 of an SRM server where `until` is 0, else 100."""
    concurrency: int = 4
    """Requests under way at any time."""
    max_tokens: int = 256
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature sent with every request."""
    top_p: float = 1.0
    """Top-p sent with every request."""
    regex: str = ""
    """Regular expression that the server keeps every completion to, as `structured_outputs` of the
    request; empty: completions are free."""
    stop: tuple[str, ...] = ("Question:",)
    """Texts that end a completion."""
    seed: int = 0
    """Seed of the word problems, of every request's own seed and of resampling."""
    timeout_s: float = 3_600.0
    """Seconds within which a request must be answered, retries included."""
    keep_texts: bool = False
    """Whether the journal keeps each reply's distinct texts, with counts and rewards."""

    def __post_init__(self) -> None:
        most: dict[str, tuple[float, float]] = {
            "samples": (1, MOST),
            "n": (0, MOST),
            "until": (0, self.samples),
            "problems": (0 if self.input else 1, MOST),
            "shots": (0, 1_000),
            "concurrency": (1, 1_000),
            "max_tokens": (1, math.inf),
            "seed": (0, 2**63 - 1),
            "temperature": (0, 100),
            "top_p": (1e-9, 1),
            "timeout_s": (1e-3, 1e9),
        }
        for name, (low, high) in most.items():
            value = getattr(self, name)
            if not low <= value <= high:
                ends = f"{low} … {high}" if high < math.inf else f"at least {low}"
                raise ValueError(f"{name} must be {ends}, got {value}")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        check_prompt(self.prompt)
        if self.match and not self.until:
            raise ValueError(f"match = {self.match!r} ends nothing where until is 0")
        if self.shots and self.input is not None and self.examples is None:
            raise ValueError(f"shots = {self.shots} of questions from a file need examples")
        if self.examples is not None and not self.shots:
            raise ValueError(f"examples = {self.examples} are not used where shots is 0")
