"""The completions of one HTTP request: prompts to engine requests, new tokens back to text.

Tokens are yielded as fast as they are asked for, so a slow reader gets fewer, larger parts and no
queue of events grows. Closing the iterator cancels everything that still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import numpy as np
from msgspec import UNSET, UnsetType

from srm.engine.client.client import EngineClient
from srm.engine.client.streams import Delivery, Stream
from srm.engine.messages import REASONS, Request
from srm.engine.receipt import Receipt, cover_versions, params_that_decide, sha256
from srm.engine.steps.tokens import NO_TOKENS, Tokens
from srm.server.errors import NotFinite
from srm.server.generation.detokenize import ChoicePart, Detokenizer, join
from srm.server.generation.engine_request import (
    RequestOwner,
    engine_requests,
    sampling_params,
    wants_whole,
)
from srm.server.generation.prompts import GivenState, Prompt
from srm.server.generation.sample_selection import Ranking, SampleSelection
from srm.server.generation.trees import BeamSearch
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.completion_response import PromptTokensDetails, Samples, Usage
from srm.server.text.text import Text

_ERROR, _LENGTH = REASONS.index("error"), REASONS.index("length")
Save = Callable[[list[bytes]], Awaitable[list[str]]]
"""Makes states of tokens, all or none; returns their ids."""
AT_ONCE = 512
"""Most completions that are detokenized before other tasks get their turn."""


class Generation:
    """Runs one checked request; choice index = prompt index x n + sample.

    With `best_of` the tokens are of candidates, of index prompt index x best_of + sample.
    """

    def __init__(
        self,
        id: str,
        request: CompletionRequest,
        prompts: list[bytes],
        text: Text,
        owner: RequestOwner,
        constraint: str = "",
        model_name: str = "",
        begun: GivenState | None = None,
        save: Save | None = None,
    ) -> None:
        """`id` is unique; `prompts` are token ids, int32 little-endian, of `encode_prompts`;
        `constraint` is what `Constraints` makes of the request; `begun` is the state that prompts
        go on from. `save` makes states of choices' tokens, where the request asks for them."""
        self.id = request.request_id or id
        """Id of the reply. The engine gets the unique `id`: a request_id that is used again must
        not meet outputs of the earlier request that are still on their way."""
        self.request = request
        self.text = text
        self.model_name = model_name
        self.prompts = [Prompt(prompt, request.prompt_logprobs_start) for prompt in prompts]
        self.num_prompt_tokens = sum(map(len, prompts)) // 4
        self.num_choices = len(prompts) * request.n
        self.owner = owner
        self.begun, self._save = begun, save
        """`begun`: the state of the first tokens of its prompts."""
        self._unsaved: list[ChoicePart] = []
        self.created_unix = int(time.time()) if owner.created_unix is None else owner.created_unix
        self.started = time.monotonic()
        self.first_output: float | None = None
        self.weights_version: int | None = None
        """Version of the weights that made the latest output; None before there is any."""
        self._params = sampling_params(request, text, constraint)
        self._beams = None
        if request.use_beam_search:
            longest = self._params.max_tokens, request.length_penalty
            self._beams = BeamSearch(request.n, *longest, text.model)
        self._requests: list[Request] = []  # of the engine
        self._fingerprints: dict[int, str] = {}
        self._arithmetic = ""
        stop_ids = self._params.stop_token_ids
        self.detokenizer = Detokenizer(request, prompts, text, stop_ids)
        self.stream: Stream | None = None
        """The engine's output, once it is asked."""
        self._id = id
        self.num_ahead = 0
        """Tokens that were read of the stream and are still to be decoded."""
        self._ends_early, self._says_samples = request.ends_early, request.says_samples
        self._ranking = (
            Ranking(request.n, request.num_samples) if request.num_samples > request.n else None
        )
        self._selection = SampleSelection(request, len(prompts))
        self._parts: dict[int, list[ChoicePart]] = {}  # of samples that run, by index
        is_scored = self._params.prompt_logprobs is not None
        self._asked = [  # prompts that need the engine
            i
            for i, prompt in enumerate(self.prompts)
            if self._params.max_tokens or (is_scored and prompt.num_tokens > 1)
        ]
        self._places = {prompt: place for place, prompt in enumerate(self._asked)}
        self.asks_for_all = len(self._asked) == len(prompts)
        """Whether every prompt needs the engine."""

    @property
    def forked_at(self) -> int | UnsetType:
        """Tokens that the sample had that this is a fork of, if it is one."""
        begun = self.begun
        return UNSET if begun is None or begun.salt is None else len(begun.token_ids) // 4

    @property
    def first_version(self) -> int:
        """Version of the weights that made the first output; 0 before there is any."""
        if self._beams is not None:
            return min((search.first_version for search in self._beams.searches), default=0)
        return 0 if self.stream is None else self.stream.first_version

    @property
    def completion_tokens(self) -> int:
        """Tokens so far; with `until.count`, only those of samples in the reply."""
        if self._ends_early:
            return self._selection.num_tokens
        return self.detokenizer.num_tokens

    @property
    def discarded_tokens(self) -> int:
        """Tokens so far of samples that are not, or not yet known to be, in the reply."""
        computed = self.detokenizer.num_tokens if self._beams is None else self._beams.num_tokens
        return max(computed - self.completion_tokens, 0)

    def when_counted(self, call: Callable[[int, int], None]) -> None:
        """Have `call` called with the request's completion tokens and all not charged yet, once it
        is over. If it ended early, that is later, with all that were sampled."""
        decoded = self.detokenizer.num_tokens + self.num_ahead
        if self.stream is None or not self.stream.unfinished:
            call(self.completion_tokens, 0 if self._beams else decoded)
            return
        self.stream.when_counted(lambda left: call(decoded + left, decoded + left))

    @property
    def is_awaited(self) -> bool:
        """Whether the engine was asked, and more comes of it."""
        return self.stream is not None and self.stream.unfinished > 0

    def usage_of(self, completion_tokens: int) -> Usage:
        """Return the usage at so many completion tokens.

        A durable request gives the same reply each time, so its usage lacks what depends on timing.
        """
        total_tokens = self.num_prompt_tokens + completion_tokens
        usage = Usage(self.num_prompt_tokens, completion_tokens, total_tokens)
        if not self.owner.durable:
            cached = sum(self.stream.cached_tokens) if self.stream else 0
            usage.prompt_tokens_details = PromptTokensDetails(cached)
            if self._ends_early:
                usage.discarded_tokens = self.discarded_tokens
        return usage

    @property
    def samples(self) -> list[Samples] | UnsetType:
        """Counts of the samples drawn, if the reply has them."""
        return self._selection.samples() if self._says_samples else UNSET

    def receipt(self, part: ChoicePart) -> Receipt:
        """Return the receipt of a whole choice, whose versions are known."""
        asked = self._requests[self._places[part.index // self.request.n]]
        made = [(span.version, span.start, span.end) for span in part.versions or ()]
        return Receipt(
            arithmetic=self._arithmetic,
            spans=cover_versions(made, self.first_version, self._fingerprints),
            prompt_token_ids=asked.prompt_token_ids,
            prompt_sha256=sha256(asked.prompt_token_ids),
            params=params_that_decide(asked.params),
            sample=part.tokens.index % self.request.num_samples,  # with `best_of` no choice's
            token_ids=part.token_ids,
            logprobs=part.tokens.logprobs,
            finish_reason=part.finish_reason,
        )

    async def run(
        self, client: EngineClient, at_once: int = AT_ONCE
    ) -> AsyncGenerator[Tokens, None]:
        """Yield the new tokens of samples, of `at_once` at most, but for those that its stream
        hands out meanwhile; to be iterated once.

        Without `stream`, samples come when they have ended. Raises what the engine refuses the
        request with; a refusal of any prompt ends them all.
        """
        if not self.asks_for_all:
            yield self._without_engine()
        early_stops = self._selection.early_stops
        requests = engine_requests(
            *(self._id, self.request, self._params, self.owner, self.prompts, self._asked),
            [None] * len(self.prompts) if early_stops is None else early_stops.below,
            self.begun,
        )
        if not requests:
            return
        if self._beams is not None:
            tokens = await self._beams.run(client, requests, self.owner.charge)
            self.first_output = time.monotonic()
            self.weights_version = max(search.version for search in self._beams.searches)
            yield tokens
            return
        finder = self.detokenizer.finder
        only_ended = wants_whole(self.request) and not (self.request.stream and finder)
        self._requests, self._fingerprints = requests, client.fingerprints
        self._arithmetic = client.require_status().arithmetic
        opened = client.open(requests, self.request.needs_versions, finder)
        with opened as stream:
            self.stream = stream
            while stream.unfinished:
                await stream.wait()
                delivery = stream.read_new(only_ended)
                self._note(delivery)
                tokens = delivery.tokens
                self.num_ahead = len(tokens.token_ids)
                if not self.asks_for_all:
                    tokens = self._by_sample(tokens)
                for part in tokens.slices(at_once):
                    self.num_ahead -= len(part.token_ids)
                    yield part
                    await asyncio.sleep(0)  # other requests get their turn

    async def certain(self, tokens: Tokens) -> list[ChoicePart]:
        """Return the choices, whole, that these tokens make certain to be in the reply.

        Raises InvalidRequest when there are too many distinct ones to count.
        """
        finished: list[ChoicePart] = []
        for part in self.detokenizer.decode(tokens):
            self._parts.setdefault(part.index, []).append(part)
            if part.finish_reason is not None:
                whole = join(self._parts.pop(part.index))
                # With `best_of` the last sample of a prompt decides its choices.
                finished += [whole] if self._ranking is None else self._ranking.choices(whole)
        if not finished:
            return []
        certain = await self._selection.add_finished(finished)
        self._choose_samples()
        if self._save is not None:  # all at the end, so that all are there or none
            self._unsaved += certain
            return []
        return certain

    async def rest(self) -> list[ChoicePart]:
        """Return the choices that are certain only when all samples have finished. Raises what
        making their states does."""
        if self._save is None:
            return self._selection.rest()
        request, limit, asked = self.request, self.text.model.n_ctx, list[tuple[str, bytes]]()
        for part in self._unsaved:
            token_ids = self.prompts[part.index // request.n].token_ids + part.token_ids
            length = len(token_ids) // 4
            # In order, so that each is read on from the one before.
            lengths = {f"{part.index} {at}": at for at in sorted(request.save_at)}
            if request.save_state:
                lengths[str(part.index)] = length
            last = min(length, limit)
            asked += [(key, token_ids[: 4 * at]) for key, at in lengths.items() if at <= last]
        ids = await self._save([token_ids for _, token_ids in asked])
        made = {key: id for (key, _), id in zip(asked, ids, strict=True)}
        for part in self._unsaved:
            part.state = made.get(str(part.index))
            if request.save_at:
                part.states = {str(at): made.get(f"{part.index} {at}") for at in request.save_at}
        return self._unsaved

    def _choose_samples(self) -> None:
        """End the samples that are known not to be in the reply, and let others start."""
        n, early_stops = self.request.num_samples, self._selection.early_stops
        if early_stops is None:
            return
        for prompt, begin, end in early_stops.unneeded():
            assert self.stream is not None, "samples without tokens do not match"
            unread = self.stream.cut(self._places[prompt], begin)
            self.detokenizer.cut(prompt * n + begin, prompt * n + end, unread)
        for prompt, below in early_stops.start_more().items():
            if self.stream is not None and prompt in self._places:
                self.stream.start_below(self._places[prompt], below)

    def _without_engine(self) -> Tokens:
        """Return the samples of prompts that need no engine: finished, without new tokens."""
        n = self.request.num_samples
        idle = np.setdiff1d(np.arange(len(self.prompts)), self._asked)
        owners = (idle[:, None] * n + np.arange(n)).ravel()
        offsets = np.zeros(len(owners) + 1, np.int64)
        reasons = np.full(len(owners), _LENGTH, np.uint8)
        return replace(NO_TOKENS, owners=owners, offsets=offsets, reasons=reasons)

    def _note(self, delivery: Delivery) -> None:
        """Record versions, prompt scores and times. Raises NotFinite if the model broke."""
        self.weights_version = delivery.weights_version or None
        reasons = delivery.tokens.reasons
        if _ERROR in reasons.tobytes():
            is_constrained = bool(self._params.constraint)
            beside = ", or its constraint became too complex" if is_constrained else ""
            raise NotFinite(f"the model produced no finite probabilities{beside}")
        for place, output in delivery.scores:
            self.prompts[self._asked[place]].scores.append(output)
        if self.first_output is None and len(reasons):
            self.first_output = time.monotonic()

    def _by_sample(self, tokens: Tokens) -> Tokens:
        """Give tokens of the prompts that the engine was asked for the index of their sample."""
        n = self.request.num_samples
        asked = np.array(self._asked)
        return tokens.with_owners(asked[tokens.owners // n] * n + tokens.owners % n)
