"""Requests of a run: the body of each is a pure function of the scenario and its index.

So any process can make any request, in any order, and two runs send the same bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from srm.errors import ConfigError
from srm.loadtest import lengths, trace
from srm.loadtest.counter_rng import BLOCK, PREFIX, REQUEST, Draws, shares
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.prompts import Prompts
from srm.loadtest.workload.words import Words

_SEED = 5
_NUM_OWN = 6
"""Random numbers of each request before those of its prompt: prompt length, output length, samples,
whether it has a shared prefix, which, and its seed. Always drawn, used or not, so that changing one
distribution changes nothing else."""
_KEPT_BLOCKS = 1024


class RequestPlan(msgspec.Struct, frozen=True):
    """One request, and the parameters in its body."""

    body: bytes
    """JSON."""
    n: int
    """Samples asked for."""
    prompt_tokens: int
    """Prompt tokens as the server should count them, special tokens included; in a chat, of the
    messages' content without the template; -1: unknown."""
    max_tokens: int
    """Tokens asked for in each sample."""


class Workload:
    """All requests of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        """Read the files that the scenario names. Raises ConfigError."""
        self._generator = Draws(scenario.seed or 0)
        self._words = Words(scenario.tokenizer) if scenario.tokenizer else None
        self._chat = scenario.api == "chat"
        self._prompt_tokens = lengths.parse(scenario.prompt_tokens, "prompt_tokens")
        self._output_tokens = lengths.parse(scenario.output_tokens, "output_tokens")
        self._n = lengths.parse(scenario.n, "n")
        self._trace = trace.read(scenario.trace) if scenario.trace else []
        file = scenario.prompts
        self._prompts = Prompts(file, scenario.api, self._words, self._generator) if file else None
        self._num_symbols = len(self._words.words) if self._words else scenario.vocab_size
        self._num_special = self._words.num_special if self._words and not self._chat else 0
        self._share = scenario.prefix_share
        self._prefixes = [
            self._symbols(PREFIX, number, scenario.prefix_tokens)
            for number in range(scenario.prefixes)
        ]
        self._block = lru_cache(_KEPT_BLOCKS)(
            lambda number: self._symbols(BLOCK, number, trace.BLOCK_TOKENS)
        )
        self._fields = _fields(scenario)
        self._extra = msgspec.json.decode(scenario.extra_body, type=dict[str, Any])
        self._encoder = msgspec.json.Encoder()
        self._check(scenario)

    def request(self, index: int) -> RequestPlan:
        """Return the request of one index in the plan, ≥ 0; with a trace, of that line by time."""
        own = self._generator.raw(REQUEST, index, _NUM_OWN)
        share = shares(own).tolist()
        line = self._trace[index] if self._trace else None
        prompt = self._prompts.make_prompt(index) if self._prompts else None
        max_tokens = (
            (line and line.output_tokens)
            or (prompt and prompt.max_tokens)
            or self._output_tokens.at(share[1])
        )
        n = (line and line.n) or (prompt and prompt.n) or self._n.at(share[2])
        if prompt:
            fields, num_tokens = prompt.fields, prompt.num_tokens
        else:
            num_tokens = (line and line.prompt_tokens) or self._prompt_tokens.at(share[0])
            num_tokens = max(num_tokens, self._num_special + 1)
            fields = self._random(index, num_tokens - self._num_special, share, line)
        drawn = {"max_tokens": max_tokens, "n": n, "seed": int(own[_SEED] >> np.uint64(33))}
        made = {**self._fields, **fields, **drawn, **self._extra}
        return RequestPlan(self._encoder.encode(made), n, num_tokens, max_tokens)

    def count_tokens(self, text: str) -> int | None:
        """Count the tokens of received text by the tokenizer; None without one.

        The server may have sampled other tokens of the same text.
        """
        return self._words.count(text) if self._words else None

    def _random(
        self, index: int, length: int, share: list[float], line: trace.Arrival | None
    ) -> dict[str, Any]:
        """Return the body's members for a random prompt, or message, of so many tokens."""
        if line and line.blocks:
            first = np.concatenate([self._block(number) for number in line.blocks])[:length]
        elif self._prefixes and share[3] < self._share:
            first = self._prefixes[int(share[4] * len(self._prefixes))]
        else:
            first = None
        rest = length if first is None else length - len(first)
        symbols = self._symbols(REQUEST, index, rest, skip=_NUM_OWN)
        if first is not None:
            symbols = np.concatenate([first, symbols])
        if self._words is None:
            return {"prompt": symbols.tolist()}
        words = self._words.words
        text = self._words.text([words[number] for number in symbols.tolist()])
        return {"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}

    def _symbols(self, purpose: int, index: int, count: int, skip: int = 0) -> NDArray[np.uint64]:
        """Return random token ids, or indices into the list of words [count]."""
        raw = self._generator.raw(purpose, index, skip + count)[skip:]
        return raw % np.uint64(self._num_symbols)

    def _check(self, scenario: Scenario) -> None:
        """Check the settings that depend on the content of files. Raises ConfigError."""
        has_blocks = any(line.blocks for line in self._trace)
        if has_blocks and scenario.prefixes:
            raise ConfigError("prefixes must be 0 where the trace has hash_ids of its own")
        if self._prompts:
            if any(line.prompt_tokens for line in self._trace):
                raise ConfigError("prompts must not be set where the trace has prompt lengths")
        elif scenario.prefixes:
            reported = [line.prompt_tokens for line in self._trace]
            drawn = self._prompt_tokens.smallest
            shortest = min([prompt_tokens or drawn for prompt_tokens in reported] or [drawn])
            longest = shortest - self._num_special - 1
            if scenario.prefix_tokens > longest:
                raise ConfigError(
                    f"prefix_tokens must be at most {longest}, less than the shortest prompt has "
                    f"of its own, got {scenario.prefix_tokens}; a distribution may have "
                    "a shortest: lognormal:128,0.5,min=65"
                )


def _fields(scenario: Scenario) -> dict[str, Any]:
    """Return the members that are the same in all bodies."""
    settings = {
        "model": scenario.served_model_name or None,
        "temperature": scenario.temperature,
        "top_p": scenario.top_p,
        "top_k": scenario.top_k,
        "ignore_eos": scenario.ignore_eos or None,
    }
    fields: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if scenario.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields
