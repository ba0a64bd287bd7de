"""The completions of one HTTP request: prompts to engine requests, new tokens back to text.

Tokens are yielded as fast as they are asked for, so a slow reader gets fewer, larger deltas and no
queue of events grows. Closing the iterator cancels everything that still runs. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace

import numpy as np
from msgspec import UNSET, UnsetType

from engine.client.client import EngineClient
from engine.client.streams import Delivery, Stream
from engine.messages import REASONS
from engine.steps.token_deltas import NO_NEWS, CompletionTokens, TokenDeltas, slices
from server.errors import NotFinite
from server.generation.detokenize import Detokenizer
from server.generation.engine_request import (
    RequestOwner,
    engine_requests,
    sampling_params,
    wants_whole,
)
from server.generation.event_writer import EventWriter, Outlet
from server.generation.prompts import Prompt
from server.generation.sample_selection import Ranking, SampleSelection
from server.generation.stop_strings import (
    StopStringStream,
    StopStringWatch,
    do_nothing,
    taken,
)
from server.http.request_log import note_stream
from server.schema.completion_request import CompletionRequest
from server.schema.completion_response import PromptTokensDetails, Samples, Usage
from server.text.sample import Delta, Sample, StopStrings, join
from server.text.text import Text

_ERROR = REASONS.index("error")
MOST_ALONE = 16
"""Most choices of a request for which each has events of its own, since many clients read only the
first choice of an event."""
AT_ONCE = 512
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
        """`id` is unique; `prompts` are token ids, int32 little-endian, of `encode_prompts`."""
        self.id = request.request_id or id
        """Id of the reply. The engine gets the unique `id`: a request_id that is used again must
        not meet outputs of the earlier request that are still on their way."""
        self.request = request
        self.prompts = [Prompt(prompt, request, text) for prompt in prompts]
        self.created_unix = int(time.time()) if sender.created_unix is None else sender.created_unix
        self.started = time.monotonic()
        self.outlet = Outlet(self.started)
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
        self._detokenizer = Detokenizer(request, prompts, text, self._params, self._stops)
        self._id = id
        self._ranking = (
            Ranking(request.n, request.num_samples) if request.num_samples > request.n else None
        )
        self._selection = SampleSelection(request, len(prompts))
        self._parts: dict[int, list[Delta]] = {}  # of samples that run, by index
        self._stream: Stream | None = None
        self._watch: StopStringWatch | None = None
        is_scored = self._params.prompt_logprobs is not None
        self._asked = [  # prompts that need the engine
            i
            for i, prompt in enumerate(self.prompts)
            if self._params.max_tokens or (is_scored and prompt.num_tokens > 1)
        ]

    @property
    def completion_tokens(self) -> int:
        """Tokens so far; with `until.count`, only those of samples in the reply."""
        selected = self.request.ends_early
        if selected:
            return self._selection.num_tokens
        return self._detokenizer.num_tokens + self.outlet.num_tokens

    @property
    def is_awaited(self) -> bool:
        """Whether the engine was asked, and more comes of it."""
        return self._stream is not None and self._stream.unfinished > 0

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
        """Return the usage at so many completion tokens.

        A durable request gives the same reply each time, so its usage lacks what depends on timing.
        """
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        usage = Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
        if not self._sender.durable:
            cached = sum(self._stream.cached_tokens) if self._stream else 0
            usage.prompt_tokens_details = PromptTokensDetails(cached)
            if self.request.ends_early:
                usage.discarded_tokens = self.discarded_tokens
        return usage

    @property
    def discarded_tokens(self) -> int:
        """Tokens so far of samples that are not, or not yet known to be, in the reply."""
        return self._detokenizer.num_tokens + self.outlet.num_tokens - self.completion_tokens

    @property
    def samples(self) -> list[Samples] | UnsetType:
        """Counts of the samples drawn, if the reply has them."""
        return self._selection.samples() if self.request.says_samples else UNSET

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[index // self.request.n]

    @property
    def is_plain(self) -> bool:
        """Whether it is a stream of nothing but text, sent as it arrives."""
        request = self.request
        asks_for_scores = request.logprobs is not None or request.prompt_logprobs is not None
        is_cut = self._stops is not None or request.include_stop_str_in_output
        is_plain = self._goes_on_as_text and not (asks_for_scores or request.echo or is_cut)
        return request.stream and is_plain and not request.stream_whole

    @property
    def _goes_on_as_text(self) -> bool:
        """Whether all between a choice's first tokens and its last is text, sent as it arrives, and
        scores."""
        request = self.request
        is_text = request.skip_special_tokens and not request.return_token_ids
        return is_text and not request.return_packed and (request.stream_interval or 1) == 1

    def free_sample(self, index: int) -> Sample | None:
        """Return a choice's sample if the text of its next token is sent as it is, should the token
        have nothing of a stop string."""
        return self._detokenizer.free_sample(index) if self._goes_on_as_text else None

    async def deltas(
        self, client: EngineClient, writer: EventWriter | None = None
    ) -> AsyncGenerator[TokenDeltas, None]:
        """Yield the new tokens of samples, of AT_ONCE at most unless the request is plain; to be
        iterated once. What `writer` writes meanwhile is not yielded.

        Without `stream` a sample with stop strings comes whole. Raises what the engine refuses the
        request with; a refusal of any prompt ends them all.
        """
        if len(self._asked) < len(self.prompts):
            yield self._without_engine()
        requests = engine_requests(
            self._id, self.request, self._params, self._sender, self.prompts, self._asked
        )
        if not requests:
            return
        with ExitStack() as opened:
            stream = self._stream = opened.enter_context(client.open(requests))
            note_stream(stream)
            if self._stops is not None:
                size = len(requests) * stream.n
                self._watch = StopStringWatch(self._table, self._stops, size)
                self.outlet.kinds = self._watch.kinds
            go_on = do_nothing
            if writer is not None and self._is_written_directly:
                go_on = opened.enter_context(writer.writing(stream, self.outlet))
            source = taken(stream, go_on, only_ended=wants_whole(self.request))
            if self._watch is not None:
                can_wait = not (self.request.stream or self.request.ends_early)
                source = StopStringStream(stream, self._watch).taken(go_on, only_whole=can_wait)
            async with aclosing(source) as deliveries:
                async for delivery in deliveries:
                    self._note(stream, delivery)
                    news = self._by_sample(delivery.news)
                    for part in [news] if self.is_plain else slices(news, AT_ONCE):
                        yield part
                        await asyncio.sleep(0)  # other requests get their turn

    @property
    def _is_written_directly(self) -> bool:
        is_stream = self.request.stream and not self.request.stream_whole
        are_all_asked = len(self._asked) == len(self.prompts)
        return is_stream and are_all_asked and self.num_choices <= MOST_ALONE

    def texts(self, news: TokenDeltas) -> list[Delta]:
        """Return the text and scores of new tokens, one delta per sample with news."""
        return self._detokenizer.feed(news)

    def text(self, index: int, new: CompletionTokens) -> list[Delta]:
        """Return the same of one token of a sample, which still runs, that `deltas` does not yield;
        ends the sample at a stop string."""
        token = int.from_bytes(new.token_ids, "little")
        if self._stream is not None and self._watch is not None and self._watch.stops(index, token):
            self._stream.stop(np.array([index]))
        return self._detokenizer.feed_one(index, new)

    def pass_on(self, news: TokenDeltas) -> TokenDeltas:
        """Count new tokens that need no text here."""
        self._detokenizer.num_tokens += len(news.token_ids)
        return news

    async def certain(self, news: TokenDeltas) -> list[Delta]:
        """Return the choices, whole, that these tokens make certain to be in the reply.

        Raises InvalidRequest when there are too many distinct ones to count.
        """
        finished: list[Delta] = []
        for delta in self.texts(news):
            self._parts.setdefault(delta.index, []).append(delta)
            if delta.finish_reason is not None:
                finished += self.choices(join(self._parts.pop(delta.index)))
        if not finished:
            return []
        certain = await self._selection.take(finished)
        self._stop_others()
        return certain

    def rest(self) -> list[Delta]:
        """Return the choices that are certain only when all samples have finished."""
        return self._selection.rest()

    def choices(self, finished: Delta) -> list[Delta]:
        """Return the choices that a finished sample decides: itself, or with `best_of` all those of
        its prompt once the prompt's last sample has finished."""
        return [finished] if self._ranking is None else self._ranking.choices(finished)

    def _stop_others(self) -> None:
        """End the samples that are known not to be in the reply."""
        n = self.request.num_samples
        for prompt, begin, end in self._selection.unneeded():
            assert self._stream is not None, "samples without tokens do not match"
            unread = self._stream.cut(self._asked.index(prompt), begin)
            self._detokenizer.cut(prompt * n + begin, prompt * n + end, unread)

    def _without_engine(self) -> TokenDeltas:
        """Return the samples of prompts that need no engine: finished, without new tokens."""
        n = self.request.num_samples
        idle = np.setdiff1d(np.arange(len(self.prompts)), self._asked)
        indices = (idle[:, None] * n + np.arange(n)).ravel()
        offsets = np.zeros(len(indices) + 1, np.int64)
        reasons = np.full(len(indices), REASONS.index("length"), np.uint8)
        return replace(NO_NEWS, indices=indices, offsets=offsets, reasons=reasons)

    def _note(self, stream: Stream, delivery: Delivery) -> None:
        """Record versions, prompt scores and times. Raises NotFinite if the model broke."""
        self.weights_version, self.first_version = delivery.weights_version, stream.first_version
        reasons = delivery.news.reasons
        if _ERROR in reasons.tobytes():
            raise NotFinite("the model produced no finite probabilities")
        for place, output in delivery.scores:
            self.prompts[self._asked[place]].scores.append(output)
        if self.first_output is None and len(reasons):
            self.first_output = time.monotonic()

    def _by_sample(self, news: TokenDeltas) -> TokenDeltas:
        """Give tokens of the prompts that the engine was asked for the index of their sample."""
        if len(self._asked) == len(self.prompts):
            return news
        n = self.request.num_samples
        return replace(
            news, indices=np.array(self._asked)[news.indices // n] * n + news.indices % n
        )
