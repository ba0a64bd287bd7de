"""A scenario: all that decides which requests a run sends, where, and when.

It is data, flat, and together with the files that it names it fixes every byte and every planned
time of a run. Knows neither clients nor measures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Arrivals = Literal["synchronous", "concurrent", "constant", "poisson", "ramp", "trace"]
CLOSED_LOOPS = ("synchronous", "concurrent")


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest`. Times are seconds, rates per second.

    Lengths are distributions: `128`, `uniform:16,256`, `normal:128,32`, `lognormal:128,0.5`
    (median, sigma), `choice:1=0.9,64=0.1`, or `file:lengths.jsonl`.
    """

    url: str = "http://127.0.0.1:8000"
    """Where the server is; paths such as /v1/completions are put behind it."""
    api: Literal["completions", "chat"] = "completions"
    """Which of the server's routes is asked."""
    served_model_name: str = ""
    """The `model` of every request. Empty: the first that /v1/models names."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key to send, if it is set."""
    stream: bool = True
    """Whether tokens are streamed. Whole replies have no TTFT and no ITL."""

    arrivals: Arrivals = "concurrent"
    """Closed loops: synchronous (one request at a time), concurrent. Open loops, whose times are
    fixed before the run: constant, poisson, ramp (from `rate` to `rate_end`), trace."""
    concurrency: int = 16
    """Of a concurrent run: requests under way at any time."""
    rate: float = 10.0
    """Of constant, poisson and ramp: requests a second."""
    rate_end: float = 0.0
    """Of a ramp: the rate that it ends with."""
    trace: Path | None = None
    """Of a trace: a JSONL file with `timestamp` (seconds) and, if it likes, `prompt_tokens`,
    `output_tokens` and `n` in each line."""
    trace_scale: float = 1.0
    """What times of the trace are multiplied by: 0.5 replays it twice as fast."""
    duration_s: float = 30.0
    """No request begins later than this after the start. 0: no limit, where `requests` is one."""
    requests: int = 0
    """At most so many requests. 0: no limit but `duration_s` or the end of the trace."""
    warmup_s: float = 0.0
    """Requests planned, and tokens received, in the first seconds are not measured."""
    cooldown_s: float = 0.0
    """Nor are those in the last seconds before the last request may begin."""
    grace_s: float = 30.0
    """How long requests under way may go on after that; the rest are cut, and counted as such."""
    timeout_s: float = 600.0
    """How long a request may take, from the time it was planned for."""
    retries: int = 0
    """How often a request that was refused with 429 or 503 is sent again, after Retry-After."""
    seed: int = 0
    """Of all that is random. Two runs with one scenario send the same bytes."""

    prompt_tokens: str = "32"
    """The distribution of prompt lengths, shared prefix included."""
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
    """How many different prefixes requests share. 0: none."""
    prefix_tokens: int = 0
    """The length of each of them."""
    prefix_share: float = 1.0
    """The share of requests that begin with one of them."""
    temperature: float = 1.0
    """Sent with every request, as are the following where they are given."""
    top_p: float | None = None
    """Sent as it is."""
    top_k: int | None = None
    """Sent as it is."""
    ignore_eos: bool = True
    """Sent as it is, so that outputs have the length asked for. Not sent if false."""
    extra_body: str = "{}"
    """A JSON object whose members are put into every request."""

    workers: int = 1
    """Client processes; they share one clock and deal out requests in turn."""
    objectives: tuple[str, ...] = ()
    """What a good request meets, such as `ttft<0.5,tpot<0.05,e2e<10`: goodput counts them."""
    fail_if: tuple[str, ...] = ()
    """Conditions on the summary, such as `ttft_p99>0.5`: the exit code is 1 if one holds."""
    metrics_url: str = ""
    """Whose /metrics are sampled meanwhile. Empty: the server's; `none`: no sampling."""
    output: Path = Path("runs/loadtest")
    """The folder that reports are written to."""

    @property
    def open_loop(self) -> bool:
        """Whether requests begin at times fixed before the run."""
        return self.arrivals not in CLOSED_LOOPS
