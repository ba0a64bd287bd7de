"""Selects which finished samples become the choices of a reply: `until`, `return` and `best_of`.

index = prompt x n + sample. Knows no engine: it only tells which samples may start, and which are
not needed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

from msgspec import UNSET

from srm.engine.early_stop import EarlyStops
from srm.errors import InvalidRequest
from srm.server.generation.dedup_counts import Budget, DedupCounts
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.matching import Pattern
from srm.server.generation.verification import Verifier
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.completion_response import Counted, Samples


class Ranking:
    """`best_of`: collects the samples of each prompt until all are there.

    Ranks them by the mean log-probability of their tokens, the token that ended one included; of
    equal ones the earlier sample goes first.
    """

    def __init__(self, n: int, best_of: int) -> None:
        """Choose the best `n` of `best_of` samples."""
        self._n = n
        self._best_of = best_of
        self._by_prompt: defaultdict[int, list[ChoicePart]] = defaultdict(list)

    def choices(self, sample: ChoicePart) -> list[ChoicePart]:
        """Add a finished sample; return its prompt's choices, best first, once all have finished.

        A sample's index is prompt x best_of + sample; a choice's is prompt x n + place.
        """
        prompt = sample.index // self._best_of
        rivals = self._by_prompt[prompt]
        rivals.append(sample)
        if len(rivals) < self._best_of:
            return []
        del self._by_prompt[prompt]
        rivals.sort(key=lambda rival: (-mean_logprob(rival), rival.index))
        return [
            replace(rival, index=prompt * self._n + place)
            for place, rival in enumerate(rivals[: self._n])
        ]


def mean_logprob(sample: ChoicePart) -> float:
    """Return the mean log-probability of a sample's tokens; 0 where there are none."""
    logprobs = memoryview(sample.tokens.logprobs).cast("f")
    return math.fsum(logprobs) / len(logprobs) if len(logprobs) else 0.0


class SampleSelection:
    """Selects and counts the finished samples of a request."""

    def __init__(self, request: CompletionRequest, num_prompts: int) -> None:
        """Raises InvalidRequest for an invalid pattern or rule."""
        prompts, until = range(num_prompts), request.until
        self.num_tokens = 0
        """Tokens of the samples that are known to be in the reply so far."""
        self._request = request
        self._pattern: Pattern | None = None
        if until is not None and until.match is not None:
            by_group = request.count_by == "group"
            self._pattern = Pattern(until.match, by_group)
            if by_group and not self._pattern.has_group:
                raise InvalidRequest(
                    f'count_by = "group" needs a group in until.match = {until.match!r}, which has '
                    "none",
                    "count_by",
                )
        self._verifier = Verifier(request.verify) if request.verify else None
        self.early_stops: EarlyStops[ChoicePart] | None = None
        """Which samples are needed, where that depends on samples."""
        if until is not None and until.count is not None:
            self.early_stops = EarlyStops([request.n] * num_prompts, until.count, until.budget)
        self._dedup_counts: list[DedupCounts] = []
        if request.returns != "choices":
            keeps_first, budget = request.returns == "unique", Budget()
            by = request.count_by
            self._dedup_counts = [DedupCounts(by, keeps_first, budget) for _ in prompts]
        self._drawn = [0] * num_prompts
        self._matched = [0] * num_prompts
        self._scores: list[Counter[float]] = [Counter() for _ in prompts if self._verifier]
        self._finished_by: list[Counter[str]] = [Counter() for _ in prompts]

    async def add_finished(self, finished: list[ChoicePart]) -> list[ChoicePart]:
        """Add finished samples, each once; return the choices now known to be in the reply.

        Raises InvalidRequest when there are too many distinct ones to count.
        """
        if self._verifier is not None:
            await self._add_scores(self._verifier, finished)
        if self._pattern is not None:
            marks = await self._pattern.find_all([sample.text for sample in finished])
            for sample, mark in zip(finished, marks, strict=True):
                sample.matched = mark.matched and sample.matched is not False
                sample.group = mark.group
        certain = self._certain(finished)
        for sample in certain:
            self._count(sample)
        if not self._dedup_counts:
            return certain
        for sample in certain:
            self._dedup_counts[sample.index // self._request.n].add(sample)
        return []

    def rest(self) -> list[ChoicePart]:
        """Return the choices that are known only when all samples have finished."""
        return [choice for counts in self._dedup_counts for choice in counts.firsts()]

    def samples(self) -> list[Samples]:
        """Return the counts of each prompt's samples, so far."""
        return [self._of_prompt(prompt) for prompt in range(len(self._drawn))]

    async def _add_scores(self, verifier: Verifier, finished: list[ChoicePart]) -> None:
        n, until = self._request.n, self._request.until
        scores = await verifier.scores([(sample.index // n, sample.text) for sample in finished])
        for sample, score in zip(finished, scores, strict=True):
            sample.score = score
            if until is not None and until.score is not None:
                sample.matched = score >= until.score

    def _certain(self, finished: list[ChoicePart]) -> list[ChoicePart]:
        if self.early_stops is None:
            return finished
        certain: list[ChoicePart] = []
        for sample in finished:
            prompt, index = divmod(sample.index, self._request.n)
            certain += self.early_stops.add_sample(prompt, index, bool(sample.matched), sample)
        return certain

    def _count(self, sample: ChoicePart) -> None:
        prompt = sample.index // self._request.n
        self.num_tokens += sample.num_tokens
        self._drawn[prompt] += 1
        self._matched[prompt] += bool(sample.matched)
        if sample.score is not None:
            self._scores[prompt][sample.score] += 1
        self._finished_by[prompt][str(sample.finish_reason)] += 1

    def _of_prompt(self, prompt: int) -> Samples:
        until, matched = self._request.until, self._matched[prompt]
        samples = Samples(
            requested=self._request.n,
            drawn=self._drawn[prompt],
            finished_by=dict(sorted(self._finished_by[prompt].items())),
        )
        if until is not None:
            samples.matched = matched
            if until.count is not None:
                samples.reached = matched >= until.count
        if self._scores and samples.drawn:
            scores = self._scores[prompt].items()  # exact, in whatever order samples have ended
            total = math.fsum(score * count for score, count in scores)
            samples.mean_score = total / samples.drawn
        if self._dedup_counts:
            counts = self._dedup_counts[prompt].by_count()
            samples.distinct = len(counts)
            if self._request.returns == "counts":
                samples.counts = [
                    Counted(
                        text=count.text,
                        count=count.count,
                        matched=UNSET if until is None else count.matched,
                        score=UNSET if count.score is None else count.score,
                    )
                    for count in counts
                ]
        return samples
