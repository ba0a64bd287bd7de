"""Makes text of the new tokens of a request's samples.

A sample is kept from its first tokens to its last ones. Knows no engine.
"""

from __future__ import annotations

from engine.messages import SamplingParams
from engine.steps.token_deltas import CompletionTokens, TokenDeltas
from server.schema.completion_request import CompletionRequest
from server.text.packed import PackedSample
from server.text.sample import Delta, Sample, StopStrings
from server.text.text import Text

_ENDED, _CUT = 1, 2


class Detokenizer:
    """All samples of one request; index = prompt x num_samples + sample."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: list[bytes],
        text: Text,
        params: SamplingParams,
        stops: StopStrings | None,
    ) -> None:
        """`prompts` are token ids, int32 little-endian."""
        self.num_tokens = 0
        """Tokens that have come, including those of samples that were cut."""
        self._request = request
        self._prompts = prompts
        self._text = text
        self._params = params
        self._stops = stops
        self._samples: dict[int, Sample | PackedSample] = {}
        self._is_over = bytearray(len(prompts) * request.num_samples)  # by sample; 0: it is not

    def feed(self, news: TokenDeltas) -> list[Delta]:
        """Return what new tokens add to each sample; samples that are over are skipped."""
        deltas = []
        for index, new in news.entries():
            deltas += self.feed_one(index, new)
        return deltas

    def feed_one(self, index: int, new: CompletionTokens) -> list[Delta]:
        """Feed one sample's tokens, as `feed` does for several."""
        if self._is_over[index]:  # ended at a stop string before this came, or not needed
            if self._is_over[index] == _CUT:
                self.num_tokens += len(new.token_ids) // 4
            return []
        sample = self._sample(index)
        delta = sample.feed(new)
        self.num_tokens += delta.num_tokens
        if sample.finished:
            self._is_over[index] = _ENDED
            del self._samples[index]
        return [delta]

    def free_sample(self, index: int) -> Sample | None:
        """Return a sample of text that runs, has begun, and holds back no beginning of a stop
        string; else None."""
        sample = self._samples.get(index)
        return sample if isinstance(sample, Sample) and sample.is_free else None

    def cut(self, begin: int, end: int, unread: int) -> None:
        """Drop samples begin … end - 1; `unread` of their tokens had come and were not fed."""
        self.num_tokens += unread
        self._is_over[begin:end] = bytes([_CUT]) * (end - begin)
        for index in range(begin, end):
            self._samples.pop(index, None)

    def _sample(self, index: int) -> Sample | PackedSample:
        sample = self._samples.get(index)
        if sample is None:
            prompt = index // self._request.num_samples
            sample = self._samples[index] = self._new_sample(prompt, index)
        return sample

    def _new_sample(self, prompt: int, index: int) -> Sample | PackedSample:
        request = self._request
        if request.return_packed:
            return PackedSample(index, self._params.stop_token_ids)
        return Sample(
            index,
            self._text,
            self._stops,
            self._params.stop_token_ids,
            has_offsets=request.logprobs is not None,
            echo=self._prompts[prompt] if request.echo else b"",
            with_special=not request.skip_special_tokens,
            keeps_stop=request.include_stop_str_in_output,
        )
