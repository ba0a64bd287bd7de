"""Scenarios: all settings that decide which requests a run sends, where, and when.

A scenario is flat data; together with the files that it names it fixes every byte and every planned
time of a run.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec

from srm.errors import UNDECODABLE
from srm.loadtest import lengths
from srm.settings import Command, build, read_settings

SCENARIOS = Path(__file__).parent / "scenarios"
"""The folder of ready-made scenarios."""
VARIABLES = frozenset({"url", "api_key_env", "output"})
"""Settings that variables set too: those that tell a container where it is."""
MEASURED = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream")
"""Members of a body that measures depend on, so `extra_body` may not set them."""

Arrivals = Literal["synchronous", "concurrent", "constant", "poisson", "ramp", "trace"]
CLOSED_LOOPS = ("synchronous", "concurrent")


def must(settings: msgspec.Struct, holds: bool, name: str, allowed: str) -> None:
    """Raise ValueError unless it holds, naming the setting, what is allowed, and its value."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {getattr(settings, name)!r}")


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest`. Times are seconds, rates per second.

    Lengths are distributions: `128`, `uniform:16,256`, `normal:128,32`, `lognormal:128,0.5`
    (median, sigma), `choice:1=0.9,64=0.1`, or `file:lengths.jsonl`. Files are opened when a run
    needs them, so that a scenario can be read where they are not.
    """

    url: str = "http://127.0.0.1:8000"
    """Address of the server, to which paths such as /v1/completions are appended."""
    api: Literal["completions", "chat"] = "completions"
    """Route of the server that requests are sent to."""
    served_model_name: str = ""
    """Name sent as `model` in every request; empty: the first model of /v1/models."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key to send; no key is sent where it is not set."""
    stream: bool = True
    """Whether tokens are streamed. Whole replies have no TTFT and no ITL."""

    arrivals: Arrivals = "concurrent"
    """Closed loops: synchronous (one request at a time), concurrent. Open loops, whose times are
    fixed before the run: constant, poisson, ramp (from `rate` to `rate_end`), trace."""
    concurrency: int = 16
    """Requests in flight at any time; for concurrent arrivals."""
    rate: float = 10.0
    """Requests a second; for constant, poisson and ramp arrivals."""
    rate_end: float = 0.0
    """Requests a second at the end of a ramp."""
    trace: Path | None = None
    """File of times and, optionally, lengths, for trace arrivals: JSONL of our own or Mooncake's,
    or Azure's CSV."""
    trace_scale: float = 1.0
    """Factor that times of the trace are multiplied by: 0.5 replays it twice as fast."""
    duration_s: float = 30.0
    """Time after the start from which no request begins; 0: no limit, allowed where there is
    another limit."""
    requests: int = 0
    """Most requests to send; 0: no limit but `duration_s` or the end of the trace."""
    warmup_s: float = 0.0
    """Requests planned, and tokens received, in the first seconds are not measured."""
    cooldown_s: float = 0.0
    """Requests planned, and tokens received, in the last seconds before the last request may begin
    are not measured."""
    grace_s: float = 30.0
    """Time that requests in flight may take after the last request may begin; then they are cut,
    and counted as cut."""
    timeout_s: float = 600.0
    """Most time that a request may take, from the time it was planned for."""
    retries: int = 0
    """Times that a request refused with 429 or 503 is sent again, after Retry-After."""
    seed: int | None = None
    """Seed of all that is random; two runs of one seed send the same bytes, which a server may know
    from the first. None: another one for each run, which its report has. Each step of a sweep has a
    seed of its own, made of this one."""

    prompt_tokens: str = "32"
    """Distribution of prompt lengths, shared prefix included."""
    output_tokens: str = "128"
    """The distribution of `max_tokens`."""
    n: str = "1"
    """The distribution of samples asked for by one request."""
    prompts: Path | None = None
    """A JSONL file with `prompt` (text or token ids) or `messages`, and perhaps `max_tokens` and
    `n`, in each line, instead of random prompts; used in an order that the seed fixes."""
    tokenizer: Path | None = None
    """A tokenizer.json, or a folder with one: prompts are then random text of exactly so many
    tokens, and received text is counted with it. Without, prompts are token ids."""
    vocab_size: int = 256
    """Token ids of prompts are below this, where there is no tokenizer."""
    prefixes: int = 0
    """Number of different prefixes that requests share; 0: none."""
    prefix_tokens: int = 0
    """Length of each shared prefix, in tokens."""
    prefix_share: float = 1.0
    """Fraction of the requests that begin with a shared prefix."""
    temperature: float = 1.0
    """Temperature sent with every request."""
    top_p: float | None = None
    """Top-p sent with every request; None: not sent."""
    top_k: int | None = None
    """Top-k sent with every request; None: not sent."""
    ignore_eos: bool = True
    """Whether `ignore_eos` is sent with every request, so that outputs have the length asked
    for."""
    extra_body: str = "{}"
    """JSON object whose members are put into every request, replacing others of the same name."""

    workers: int = 1
    """Client processes; they share one clock and deal out requests in turn."""
    objectives: tuple[str, ...] = ()
    """Objectives of a good request, such as `ttft<0.5,tpot<0.05,e2e<10`; goodput counts the
    requests that meet all."""
    fail_if: tuple[str, ...] = ()
    """Conditions on the summary, such as `ttft_p99>0.5`: the exit code is 1 if one holds."""
    metrics_url: str = ""
    """URL whose /metrics are sampled during the run; empty: the server's; `none`: no sampling."""
    output: Path = Path("runs/loadtest")
    """Folder that reports are written to."""

    @property
    def open_loop(self) -> bool:
        """Whether requests begin at times fixed before the run."""
        return self.arrivals not in CLOSED_LOOPS

    def __post_init__(self) -> None:
        for name in ("concurrency", "vocab_size", "workers"):
            must(self, getattr(self, name) >= 1, name, "at least 1")
        for name in ("rate", "trace_scale", "timeout_s"):
            must(self, 0 < getattr(self, name) < math.inf, name, "above 0, and finite")
        for name in ("rate_end", "duration_s", "warmup_s", "cooldown_s", "grace_s", "temperature"):
            must(self, 0 <= getattr(self, name) < math.inf, name, "at least 0, and finite")
        for name in ("requests", "retries", "prefixes", "prefix_tokens"):
            must(self, getattr(self, name) >= 0, name, "at least 0")
        must(self, 0 <= (self.seed or 0) < 2**64, "seed", "0 … 2**64 - 1")
        must(self, 0 <= self.prefix_share <= 1, "prefix_share", "0 … 1")
        is_address = self.url.startswith(("http://", "https://"))
        must(self, is_address, "url", "an address that begins with http:// or https://")
        is_metrics = self.metrics_url in {"", "none"} or "://" in self.metrics_url
        must(self, is_metrics, "metrics_url", "an address, none, or empty")
        for name in ("prompt_tokens", "output_tokens", "n"):
            lengths.check(getattr(self, name), name)
        self._check_end()
        self._check_prompts()
        self._check_extra_body()

    def _check_end(self) -> None:
        is_trace, is_ramp = self.arrivals == "trace", self.arrivals == "ramp"
        kind = f"where arrivals is {self.arrivals}"
        must(self, (self.trace is not None) == is_trace, "trace",
                   f"{'a file' if is_trace else 'left out'} {kind}")  # fmt: skip
        must(self, (self.rate_end > 0) == is_ramp, "rate_end",
                   f"{'above 0' if is_ramp else 'left out'} {kind}")  # fmt: skip
        ends = self.duration_s > 0 or is_trace or (self.requests > 0 and not is_ramp)
        needs = "" if is_ramp else " and requests is 0"
        must(self, ends, "duration_s", f"above 0 {kind}{needs}")
        trimmed, whole = self.warmup_s + self.cooldown_s, self.duration_s
        if whole and trimmed >= whole:
            message = f"must be less than duration_s = {whole}, got {trimmed}"
            raise ValueError(f"warmup_s + cooldown_s {message}")

    def _check_prompts(self) -> None:
        if self.api == "chat" and self.tokenizer is None and self.prompts is None:
            raise ValueError(
                "tokenizer or prompts must be given where api is chat: messages are no token ids"
            )
        if (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise ValueError(
                "prefixes and prefix_tokens must both be 0 or neither, got "
                f"{self.prefixes} and {self.prefix_tokens}"
            )
        must(self, not (self.prefixes and self.prompts), "prefixes", "0 where prompts is a file")

    def _check_extra_body(self) -> None:
        try:
            members = msgspec.json.decode(self.extra_body, type=dict[str, Any])
        except UNDECODABLE as error:
            raise ValueError(
                f"extra_body must be a JSON object, got {self.extra_body!r}: {error}"
            ) from None
        own = sorted(set(MEASURED) & set(members))
        if own:
            raise ValueError(
                f"extra_body must not have {', '.join(own)}: measures rest on what their "
                f"settings say; got {self.extra_body!r}"
            )


def read(argv: list[str], command: Command) -> Scenario:
    """Build the scenario of a command line. Raises ConfigError."""
    return build(Scenario, read_settings((Scenario,), argv, command))


def command_of(name: str, about: str, example: str) -> Command:
    """Return how a command of `srm loadtest` is given its scenario: its first argument without a
    flag is a TOML file, or the name of a ready-made one."""
    return Command(
        f"srm loadtest {name}",
        about,
        f"srm loadtest {name} {example}",
        "url served_model_name arrivals concurrency rate duration_s prompt_tokens output_tokens n "
        "output",
        presets=SCENARIOS,
        variables=VARIABLES,
    )


def as_path(kind: type, value: object) -> object:
    """Decode a Path; a hook for decoders of scenarios, since msgspec does not support paths."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(kind)
