"""The completions of one HTTP request: prompts to engine requests, outputs back to text.

Yields what is new as fast as it is asked for, so a slow reader gets fewer, larger deltas and no
queue of events grows. Closing the iterator cancels everything that still runs. Knows no HTTP.

Randomness: sample k of a prompt draws from the stream (seed, k). A given seed is every prompt's, so
a completion does not depend on which other prompts are in the list; without one, each prompt gets a
seed of its own, so equal prompts give different completions.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from engine.client import EngineClient
from engine.errors import StepFailed
from engine.messages import PROMPT, REASONS, Output, Request
from engine.news import News, slices
from engine.streams import Delivery, Stream
from server.backlog import Backlog, taken
from server.packed import PackedSample
from server.prompts import Prompt
from server.protocol import CompletionRequest
from server.ranking import Ranking
from server.replies import PromptTokensDetails, Usage
from server.sample import Delta, Sample, StopStrings, join
from server.sampling import sampling_params
from server.sender import Sender
from server.text import Text
from server.watch import Watch

_BROKEN = "the model produced no finite probabilities"
_AT_ONCE = 512
"""Completions whose text is made before others get their turn."""


class Generation:
    """Runs one checked request; choice index = prompt index x n + sample.

    With `best_of` the deltas are of candidates, of index prompt index x best_of + sample.
    """

    def __init__(
        self,
        id: str,
        request: CompletionRequest,
        prompts: list[bytes],
        text: Text,
        sender: Sender,
    ) -> None:
        """`id` is like no other; `prompts` are token ids, int32 little-endian, from
        `encode_prompts`."""
        self.id = request.request_id or id
        """What the reply is called. The engine is not told: an id that is used again must not meet
        what is still on its way from the engine for the one before."""
        self._engine_id = id
        self.request = request
        self.prompts = [Prompt(prompt, request, text) for prompt in prompts]
        self.created_unix = int(time.time()) if sender.created_unix is None else sender.created_unix
        self.started = time.monotonic()
        self.first_output: float | None = None
        self.completion_tokens = 0
        self._text = text
        self._sender = sender
        self._table = text.table(with_special=not request.skip_special_tokens)
        self._stops = StopStrings(request.stops) if request.stops else None
        self._params = sampling_params(request, text)
        self._ranking = (
            Ranking(request.n, request.num_samples) if request.num_samples > request.n else None
        )
        self._samples: dict[int, Sample | PackedSample] = {}  # from their first output on
        self._cached_tokens = [0] * len(prompts)
        self._cached_in_columns: list[int] = []
        is_scored = self._params.prompt_logprobs is not None
        self._asked = [  # prompts that take an engine
            i
            for i, prompt in enumerate(self.prompts)
            if self._params.max_tokens or (is_scored and prompt.num_tokens > 1)
        ]

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def is_durable(self) -> bool:
        """Whether its sender sends it again until it is answered."""
        return self._sender.durable

    @property
    def usage(self) -> Usage:
        """So far."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=UNSET
            if self._sender.durable
            else PromptTokensDetails(sum(self._cached_tokens) + sum(self._cached_in_columns)),
        )

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.request.n]

    def choices(self, finished: Delta) -> list[Delta]:
        """What the whole of a sample gives: itself, or, of ranked ones, the last of its prompt all
        that are chosen."""
        return [finished] if self._ranking is None else self._ranking.choices(finished)

    @property
    def is_plain(self) -> bool:
        """Whether it is a stream whose events say nothing but text, as soon as it is there."""
        request = self.request
        asks_for_scores = request.logprobs is not None or request.prompt_logprobs is not None
        says_more = asks_for_scores or request.echo or request.return_token_ids
        is_text = not request.return_packed and request.skip_special_tokens
        is_at_once = (request.stream_interval or 1) == 1
        is_cut = self._stops is not None or request.include_stop_str_in_output
        return request.stream and is_text and is_at_once and not (says_more or is_cut)

    async def news(self, client: EngineClient) -> AsyncGenerator[News, None]:
        """What a plain request has new since the last time; to be iterated once.

        Raises what the engine refuses the request with. A refusal of any prompt ends them all.
        """
        with client.open(self._requests()) as stream:
            while stream.unfinished:
                await stream.wait()
                delivery = stream.take()
                self._note(stream, delivery)
                self.completion_tokens += len(delivery.news.token_ids)
                yield delivery.news

    async def deltas(self, client: EngineClient) -> AsyncGenerator[list[Delta], None]:
        """What is new since the last time, one delta per choice with news; to be iterated once.

        Without `stream` a choice with stop strings comes whole. Raises as `news` does.
        """
        if idle := self._without_engine():
            yield idle
        requests = self._requests()
        if not requests:
            return
        with client.open(requests) as stream:
            source = taken(stream)
            if self._stops is not None:
                watch = Watch(self._table, self._stops, len(requests) * stream.n)
                source = Backlog(stream, watch).taken(only_whole=not self.request.stream)
            async with aclosing(source) as deliveries:
                async for delivery in deliveries:
                    self._note(stream, delivery)
                    for outputs in self._in_parts(delivery):
                        if deltas := self._feed(outputs):
                            yield deltas
                        await asyncio.sleep(0)  # a request of many completions is not alone here

    def _requests(self) -> list[Request]:
        """To the engine; those of `_asked` prompts."""
        request, found = self.request, []
        sender, has_alternatives = self._sender, bool(self._params.logprobs)
        is_stream = request.stream or self._stops or has_alternatives
        in_outputs = has_alternatives or sender.durable  # of which columns know nothing
        for prompt in self._asked:
            params = msgspec.structs.replace(self._params, seed=self._seed(prompt))
            found.append(
                Request(
                    id=f"{self._engine_id}-{prompt}",
                    prompt_token_ids=self.prompts[prompt].token_ids,
                    params=params,
                    priority=self._priority(),
                    emit="final" if not is_stream else "delta" if in_outputs else "columns",
                    share=sender.share,
                    weight=sender.weight,
                    durable=sender.durable,
                )
            )
        return found

    def _priority(self) -> int:
        priority = self._sender.priority - self.request.priority  # the client's is reversed
        # What lasts never goes ahead of what people wait for, whatever its body says.
        return min(priority, -1) if self._sender.durable else priority

    def _seed(self, prompt: int) -> int:
        given = self.request.seed
        if given is None:
            drawn = self._sender.seed(self._engine_id, prompt)
            return secrets.randbits(64) if drawn is None else drawn
        return given % 2**64

    def _without_engine(self) -> list[Delta]:
        """Of prompts of which nothing is wanted that takes an engine."""
        asked, samples = set(self._asked), range(self.request.num_samples)
        idle = (prompt for prompt in range(len(self.prompts)) if prompt not in asked)
        indices = [prompt * len(samples) + sample for prompt in idle for sample in samples]
        return [self._sample(i).feed(Output("", i, finish_reason="length")) for i in indices]

    def _note(self, stream: Stream, delivery: Delivery) -> None:
        """Raises StepFailed if the model broke."""
        reasons = delivery.news.reasons
        if reasons.any() and (reasons == REASONS.index("error")).any():
            raise StepFailed(_BROKEN)
        self._cached_in_columns = stream.cached_tokens
        for place, output in delivery.outputs:
            if output.finish_reason == "error":
                raise StepFailed(output.error or _BROKEN)
            prompt = self._asked[place]
            if output.index == PROMPT:
                self.prompts[prompt].scores.append(output)
            else:
                self._cached_tokens[prompt] = output.cached_tokens
        if self.first_output is None and (len(reasons) or self._has_sample(delivery)):
            self.first_output = time.monotonic()

    @staticmethod
    def _has_sample(delivery: Delivery) -> bool:
        return any(output.index != PROMPT for _, output in delivery.outputs)

    def _in_parts(self, delivery: Delivery) -> Iterator[list[tuple[int, Output]]]:
        """All that completions have new, by choice."""
        n = self.request.num_samples
        outputs = [
            (self._asked[place] * n + output.index, output)
            for place, output in delivery.outputs
            if output.index != PROMPT
        ]
        for begin in range(0, len(outputs), _AT_ONCE):
            yield outputs[begin : begin + _AT_ONCE]
        for news in slices(delivery.news, _AT_ONCE):
            yield [
                (
                    self._asked[index // n] * n + index % n,
                    Output(
                        id="",
                        index=index % n,
                        token_ids=news.tokens_of(entry),
                        logprobs=news.logprobs_of(entry),
                        finish_reason=REASONS[reason],
                    ),
                )
                for entry, (index, reason) in enumerate(
                    zip(news.indices.tolist(), news.reasons.tolist(), strict=True)
                )
            ]

    def _feed(self, outputs: list[tuple[int, Output]]) -> list[Delta]:
        fresh: dict[int, list[Delta]] = {}
        for index, output in outputs:
            sample = self._sample(index)
            if sample.finished:  # by a stop string, before this came
                continue
            delta = sample.feed(output)
            self.completion_tokens += delta.num_tokens
            fresh.setdefault(index, []).append(delta)
        return [join(deltas) for deltas in fresh.values()]

    def _sample(self, index: int) -> Sample | PackedSample:
        sample = self._samples.get(index)
        if sample is None:
            prompt = index // self.request.num_samples
            sample = self._samples[index] = self._new_sample(prompt, index)
        return sample

    def _new_sample(self, prompt: int, index: int) -> Sample | PackedSample:
        request = self.request
        if request.return_packed:
            return PackedSample(index, self._params.stop_token_ids)
        return Sample(
            index,
            self._text,
            self._stops,
            self._params.stop_token_ids,
            has_offsets=request.logprobs is not None,
            echo=self.prompts[prompt].token_ids if request.echo else b"",
            with_special=not request.skip_special_tokens,
            keeps_stop=request.include_stop_str_in_output,
        )
