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
from collections.abc import AsyncGenerator

import msgspec

from engine.client import EngineClient
from engine.errors import StepFailed
from engine.messages import PROMPT, Output, Request
from server.packed import PackedSample
from server.prompts import Prompt
from server.protocol import CompletionRequest
from server.ranking import Ranking
from server.replies import PromptTokensDetails, Usage
from server.sample import Delta, Sample, StopStrings, join
from server.sampling import sampling_params
from server.text import Text


class Generation:
    """Runs one checked request; choice index = prompt index x n + sample.

    With `best_of` the deltas are of candidates, of index prompt index x best_of + sample.
    """

    def __init__(
        self, id: str, request: CompletionRequest, prompts: list[bytes], text: Text
    ) -> None:
        """`id` is like no other; `prompts` are token ids, int32 little-endian, from
        `encode_prompts`."""
        self.id = request.request_id or id
        """What the reply is called. The engine is not told: an id that is used again must not meet
        what is still on its way from the engine for the one before."""
        self._engine_id = id
        self.request = request
        self.prompts = [Prompt(prompt, request, text) for prompt in prompts]
        self.created_unix = int(time.time())
        self.started = time.monotonic()
        self.first_output: float | None = None
        self.completion_tokens = 0
        self._text = text
        self._stops = StopStrings(request.stops) if request.stops else None
        self._params = sampling_params(request, text)
        self._ranking = (
            Ranking(request.n, request.num_samples) if request.num_samples > request.n else None
        )
        self._samples: dict[int, Sample | PackedSample] = {}  # from their first output on
        self._unfinished = [request.num_samples] * len(prompts)
        self._cached_tokens = [0] * len(prompts)
        self._arrived: asyncio.Queue[tuple[int, Output] | asyncio.Task[None]] = asyncio.Queue()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def usage(self) -> Usage:
        """So far."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens)),
        )

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.request.n]

    def choices(self, finished: Delta) -> list[Delta]:
        """What the whole of a sample gives: itself, or, of ranked ones, the last of its prompt all
        that are chosen."""
        return [finished] if self._ranking is None else self._ranking.choices(finished)

    async def deltas(self, client: EngineClient) -> AsyncGenerator[list[Delta], None]:
        """What is new since the last time, one delta per choice with news; to be iterated once.

        Raises what the engine refuses the request with. A refusal of any prompt ends them all.
        """
        tasks = [
            asyncio.create_task(self._receive(client, prompt))
            for prompt in range(len(self.prompts))
        ]
        for task in tasks:
            task.add_done_callback(self._arrived.put_nowait)
        try:
            while any(self._unfinished):
                news = [await self._arrived.get()]
                while not self._arrived.empty():
                    news.append(self._arrived.get_nowait())
                if deltas := self._take(news, tasks):
                    yield deltas
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, client: EngineClient, prompt: int) -> None:
        params = msgspec.structs.replace(self._params, seed=self._seed())
        is_scored = params.prompt_logprobs is not None and self.prompts[prompt].num_tokens > 1
        if not (params.max_tokens or is_scored):  # nothing that takes an engine
            for index in range(params.n):
                self._arrived.put_nowait((prompt, Output("", index, finish_reason="length")))
            return
        is_stream = self.request.stream or self._stops or params.logprobs
        request = Request(
            id=f"{self._engine_id}-{prompt}",
            prompt_token_ids=self.prompts[prompt].token_ids,
            params=params,
            priority=-self.request.priority,  # ours is the other way round
            emit="delta" if is_stream else "final",
        )
        async for output in client.generate(request):
            self._arrived.put_nowait((prompt, output))

    def _seed(self) -> int:
        given = self.request.seed
        return secrets.randbits(64) if given is None else given % 2**64

    def _take(
        self,
        news: list[tuple[int, Output] | asyncio.Task[None]],
        tasks: list[asyncio.Task[None]],
    ) -> list[Delta]:
        fresh: dict[int, list[Delta]] = {}
        for item in news:
            if isinstance(item, asyncio.Task):
                if not item.cancelled():
                    item.result()
                continue
            prompt, output = item
            if output.index == PROMPT:
                self.prompts[prompt].scores.append(output)
                continue
            sample = self._sample(prompt, output.index)
            if sample.finished:  # by a stop string; the engine is not told of single samples
                continue
            if output.finish_reason == "error":
                raise StepFailed(output.error or "the model produced no finite probabilities")
            self._cached_tokens[prompt] = output.cached_tokens
            delta = sample.feed(output)
            self.completion_tokens += delta.num_tokens
            fresh.setdefault(delta.index, []).append(delta)
            if sample.finished:
                self._unfinished[prompt] -= 1
                if not self._unfinished[prompt]:
                    tasks[prompt].cancel()
        if fresh and self.first_output is None:
            self.first_output = time.monotonic()
        return [join(deltas) for deltas in fresh.values()]

    def _sample(self, prompt: int, number: int) -> Sample | PackedSample:
        index = prompt * self.request.num_samples + number
        sample = self._samples.get(index)
        if sample is None:
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
