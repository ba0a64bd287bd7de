"""The completions of one HTTP request: prompts to engine requests, outputs back to text.

Yields what is new as fast as it is asked for, so a slow reader gets fewer, larger deltas and no
queue of events grows. Closing the iterator cancels everything that still runs. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TypeVar

from msgspec import UNSET, UnsetType

from engine.client.client import EngineClient
from engine.client.streams import Delivery, Stream
from engine.errors import NotFinite
from engine.messages import PROMPT, REASONS, Output
from engine.steps.token_deltas import TokenDeltas, slices
from server.generation.detokenize import Detokenizer
from server.generation.engine_request import EngineRequests, wants_whole
from server.generation.prompts import Prompt
from server.generation.request_owner import RequestOwner
from server.generation.sample_selection import Ranking, SampleSelection
from server.generation.sampling import sampling_params
from server.generation.stop_strings import StopStringStream, StopStringWatch, taken
from server.http.request_log import note_stream
from server.schema.completion_request import CompletionRequest
from server.schema.completion_response import PromptTokensDetails, Samples, Usage
from server.text.sample import Delta, StopStrings, join
from server.text.text import Text

_BROKEN = "the model produced no finite probabilities"
_AT_ONCE = 512
"""Most completions that are detokenized before other tasks get their turn."""


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
        sender: RequestOwner,
    ) -> None:
        """`id` is unique; `prompts` are token ids, int32 little-endian, from
        `encode_prompts`."""
        self.id = request.request_id or id
        """Id of the reply. The engine gets the unique `id`: a request_id that is used again must
        not meet outputs of the earlier request that are still on their way."""
        self.request = request
        self.prompts = [Prompt(prompt, request, text) for prompt in prompts]
        self.created_unix = int(time.time()) if sender.created_unix is None else sender.created_unix
        self.started = time.monotonic()
        self.first_output: float | None = None
        self.weights_version: int | None = None
        """Version of the weights that made the latest output; None before there is any."""
        self.first_version: int | None = None
        """Version of the weights that made the first output."""
        self._text = text
        self._sender = sender
        self._table = text.table(with_special=not request.skip_special_tokens)
        self._stops = StopStrings(request.stops) if request.stops else None
        self._params = sampling_params(request, text)
        self._feeding = Detokenizer(request, prompts, text, self._params, self._stops)
        self._asking = EngineRequests(id, request, self._params, sender)
        self._ranking = (
            Ranking(request.n, request.num_samples) if request.num_samples > request.n else None
        )
        self._wholes = SampleSelection(request, len(prompts))
        self._stream: Stream | None = None
        self._cached_tokens = [0] * len(prompts)
        self._cached_in_columns: list[int] = []
        is_scored = self._params.prompt_logprobs is not None
        self._asked = [  # prompts that need the engine
            i
            for i, prompt in enumerate(self.prompts)
            if self._params.max_tokens or (is_scored and prompt.num_tokens > 1)
        ]

    @property
    def completion_tokens(self) -> int:
        """Tokens so far; with `until.count`, only those of samples in the reply."""
        return self._wholes.num_tokens if self.request.ends_early else self._feeding.num_tokens

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def is_durable(self) -> bool:
        """Whether its sender sends it again until it is answered."""
        return self._sender.durable

    @property
    def usage(self) -> Usage:
        """Usage so far."""
        return self.usage_of(self.completion_tokens)

    def usage_of(self, completion_tokens: int) -> Usage:
        """Return the usage at so many completion tokens."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=UNSET
            if self._sender.durable
            else PromptTokensDetails(sum(self._cached_tokens) + sum(self._cached_in_columns)),
            # A durable request must give the same reply each time, and this depends on timing.
            discarded_tokens=(
                self.discarded_tokens
                if self.request.ends_early and not self._sender.durable
                else UNSET
            ),
        )

    @property
    def discarded_tokens(self) -> int:
        """Tokens so far of samples that are not, or not yet known to be, in the reply."""
        return self._feeding.num_tokens - self.completion_tokens

    @property
    def samples(self) -> list[Samples] | UnsetType:
        """Counts of the samples drawn, if the reply has them."""
        return self._wholes.samples() if self.request.says_samples else UNSET

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.request.n]

    def choices(self, finished: Delta) -> list[Delta]:
        """Return the choices that a finished sample decides: itself, or with `best_of` all those of
        its prompt once the prompt's last sample has finished."""
        return [finished] if self._ranking is None else self._ranking.choices(finished)

    @property
    def is_plain(self) -> bool:
        """Whether it is a stream of nothing but text, sent as it arrives."""
        request = self.request
        asks_for_scores = request.logprobs is not None or request.prompt_logprobs is not None
        says_more = asks_for_scores or request.echo or request.return_token_ids
        is_text = not request.return_packed and request.skip_special_tokens
        is_at_once = (request.stream_interval or 1) == 1
        is_cut = self._stops is not None or request.include_stop_str_in_output
        is_plain = is_text and is_at_once and not (says_more or is_cut)
        return request.stream and is_plain and not request.stream_whole

    async def news(self, client: EngineClient) -> AsyncGenerator[TokenDeltas, None]:
        """Yield what a plain request has new since the last time; to be iterated once.

        Raises what the engine refuses the request with. A refusal of any prompt ends them all.
        """
        with client.open(self._asking.requests(self.prompts, self._asked)) as stream:
            note_stream(stream)
            while stream.unfinished:
                await stream.wait()
                delivery = stream.take()
                self._note(stream, delivery)
                self._feeding.num_tokens += len(delivery.news.token_ids)
                yield delivery.news

    async def deltas(self, client: EngineClient) -> AsyncGenerator[list[Delta], None]:
        """Yield what is new, one delta per choice with news; to be iterated once.

        Without `stream` a choice with stop strings comes whole. Raises as `news` does.
        """
        if idle := self._without_engine():
            yield idle
        requests = self._asking.requests(self.prompts, self._asked)
        if not requests:
            return
        with client.open(requests) as stream:
            note_stream(stream)
            self._stream = stream
            source = taken(stream, only_ended=wants_whole(self.request))
            if self._stops is not None:
                watch = StopStringWatch(self._table, self._stops, len(requests) * stream.n)
                source = StopStringStream(stream, watch).taken(only_whole=self._can_wait)
            async with aclosing(source) as deliveries:
                async for delivery in deliveries:
                    self._note(stream, delivery)
                    for outputs in self._in_parts(delivery):
                        if deltas := self._feeding.feed(outputs):
                            yield deltas
                        await asyncio.sleep(0)  # other requests get their turn

    async def wholes(self, client: EngineClient) -> AsyncGenerator[list[Delta], None]:
        """Yield the choices of the reply, whole, as soon as each is certain; to be iterated once.

        Raises as `news` does, and InvalidRequest when there are too many distinct ones to count.
        """
        parts: dict[int, list[Delta]] = {}
        async with aclosing(self.deltas(client)) as batches:
            async for deltas in batches:
                finished: list[Delta] = []
                for delta in deltas:
                    parts.setdefault(delta.index, []).append(delta)
                    if delta.finish_reason is not None:
                        finished += self.choices(join(parts.pop(delta.index)))
                if finished:
                    certain = await self._wholes.take(finished)
                    self._stop_others()
                    for part in _parts(certain):
                        yield part
        for part in _parts(self._wholes.rest()):
            yield part

    def _stop_others(self) -> None:
        """End the samples that are known not to be in the reply."""
        n = self.request.num_samples
        for prompt, begin, end in self._wholes.unneeded():
            assert self._stream is not None, "samples without tokens do not match"
            unread = self._stream.cut(self._asked.index(prompt), begin)
            self._feeding.cut(prompt * n + begin, prompt * n + end, unread)

    @property
    def _can_wait(self) -> bool:
        """Whether nothing is needed before all samples have ended."""
        return not (self.request.stream or self.request.ends_early)

    def _without_engine(self) -> list[Delta]:
        """Return the deltas of prompts that need no engine: finished, without new tokens."""
        asked, samples = set(self._asked), range(self.request.num_samples)
        idle = (prompt for prompt in range(len(self.prompts)) if prompt not in asked)
        indices = [prompt * len(samples) + sample for prompt in idle for sample in samples]
        return self._feeding.feed([(i, Output("", i, finish_reason="length")) for i in indices])

    def _note(self, stream: Stream, delivery: Delivery) -> None:
        """Record versions, prompt scores and times. Raises NotFinite if the model broke."""
        self.weights_version, self.first_version = delivery.weights_version, stream.first_version
        reasons = delivery.news.reasons
        if reasons.any() and (reasons == REASONS.index("error")).any():
            raise NotFinite(_BROKEN)
        self._cached_in_columns = stream.cached_tokens
        for place, output in delivery.outputs:
            if output.finish_reason == "error":
                raise NotFinite(output.error or _BROKEN)
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
        """Yield outputs with their choice's index, at most _AT_ONCE in a list."""
        n = self.request.num_samples
        outputs = [
            (self._asked[place] * n + output.index, output)
            for place, output in delivery.outputs
            if output.index != PROMPT
        ]
        yield from _parts(outputs)
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


_Part = TypeVar("_Part")


def _parts(items: list[_Part]) -> Iterator[list[_Part]]:
    """Split into lists of at most _AT_ONCE."""
    for begin in range(0, len(items), _AT_ONCE):
        yield items[begin : begin + _AT_ONCE]
