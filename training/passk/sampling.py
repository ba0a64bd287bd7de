"""Draws the samples of every problem and scores them, a journal line for each reply.

The requests of a problem are its parts: each asks for `n` samples with a seed of its own. Where
drawing may end early they are sent one after the other, so that "the first samples until m are
right" means the same whatever the server; else all of them are independent.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Iterator
from typing import Any

from srm.errors import ConfigError
from srm.progress import Tell, show_progress
from srm.training.passk.config import ELSEWHERE, ON_SRM, PassKConfig
from srm.training.passk.journal import Journal, JournalEntry
from srm.training.passk.problems import PromptProblem
from srm.training.passk.server import CompletionsServer, CountedReply
from srm.training.questions.questions import Question
from srm.training.questions.rewards import Reward, rewarded

Texts = list[tuple[str, int]]
"""Texts with their counts; if the server does not count, each has count 1, in the order of the
samples."""


def choices_of(config: PassKConfig, is_srm: bool) -> int:
    """Return the number of choices to ask for in a request."""
    return min(config.samples, config.n or (ON_SRM if is_srm and not config.until else ELSEWHERE))


class SamplingSession:
    """One session of sampling: draws all samples that the journal does not have yet."""

    def __init__(
        self,
        config: PassKConfig,
        problems: list[PromptProblem],
        reward: Reward,
        server: CompletionsServer,
        journal: Journal,
    ) -> None:
        self._config = config
        self._problems = problems
        self._reward = reward
        self._server = server
        self._journal = journal
        self._n = choices_of(config, server.is_srm)
        self._parts = -(-config.samples // self._n)
        self._session = journal.next_session
        self._started = time.monotonic()
        self._scoring = asyncio.Lock()
        self._right = [0] * len(problems)
        self._left = [self._parts] * len(problems)
        """Number of requests of each problem still to be answered."""
        self._fingerprints: set[str | None] = set()
        self._tokens = 0
        self._tell: Tell = lambda _done, _note: None
        self._is_over = False
        """Whether the session has ended, and what is still being scored is not wanted."""
        for answer in journal.answers.values():
            self._count(answer)

    async def run(self) -> None:
        """Draw the missing samples. Raises SRMError; replies received before are in the journal."""
        chains = list(self._chains())
        coming = iter(chains)

        async def work() -> None:
            for chain in coming:  # shared by all workers
                for problem, part in chain:
                    if self._left[problem]:
                        await self._draw(problem, part)

        requests = self._parts * len(self._left)
        shown = show_progress("drawing", requests, requests - sum(self._left))
        try:
            with shown as self._tell:
                async with asyncio.TaskGroup() as request:
                    for _ in range(min(self._config.concurrency, len(chains))):
                        request.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._is_over = True

    def _chains(self) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of requests that are sent one after the other, as problem and part."""
        for problem, left in enumerate(self._left):
            parts = range(self._parts if left else 0)
            missing = [
                (problem, part) for part in parts if (problem, part) not in self._journal.answers
            ]
            if self._config.until:
                yield missing
            else:
                yield from ([request] for request in missing)

    def _count(self, answer: JournalEntry) -> None:
        left = self._left[answer.problem] - 1
        self._left[answer.problem] = 0 if answer.is_enough else left
        self._right[answer.problem] += answer.right
        self._fingerprints.add(answer.fingerprint)

    async def _draw(self, problem: int, part: int) -> None:
        config, asked = self._config, self._problems[problem]
        count = min(self._n, config.samples - part * self._n)
        wanted = max(0, config.until - self._right[problem])
        body = {
            "prompt": asked.prompt,
            "n": count,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": _seed(config.seed, problem, part * self._n),
        }
        if config.regex:
            body["structured_outputs"] = {"regex": config.regex}
        if config.stop:
            body["stop"] = list(config.stop)
        if self._server.is_srm:
            body |= self._counting(asked.question, min(wanted, count))
        reply = await self._server.complete(body)
        self._check(reply, count, is_counted="return" in body)
        async with self._scoring:  # a slow reward keeps neither replies nor time-outs waiting
            answer = await asyncio.to_thread(self._scored, problem, part, reply, wanted)
        self._journal.add(answer)
        self._count(answer)
        self._show(answer)

    def _counting(self, question: Question, wanted: int) -> dict[str, Any]:
        """Return the fields by which an SRM server counts equal texts, and ends the drawing."""
        if not self._config.until:
            return {"return": "counts"}
        if not self._config.match:  # the order of samples matters
            return {}
        answer = re.escape(question.answer.rpartition("####")[2].strip())
        pattern = self._config.match.replace("{answer}", answer)
        return {"return": "counts", "until": {"match": pattern, "count": wanted}}

    def _check(self, reply: CountedReply, count: int, is_counted: bool) -> None:
        """Raise ConfigError for a reply that does not fit the request."""
        if is_counted:
            got = [sample.drawn for sample in reply.samples]
            if len(got) != 1 or sum(count.count for count in reply.samples[0].counts) != got[0]:
                raise ConfigError("the server did not count the samples of one prompt")
            if not (got[0] == count or (self._config.until and reply.samples[0].reached)):
                raise ConfigError(f"{count} samples were asked for, and {got[0]} came")
        elif len(reply.choices) != count:
            raise ConfigError(
                f"n = {count} choices were asked for, and {len(reply.choices)} came: give an n "
                "that the server honours"
            )
        others = self._fingerprints - {reply.system_fingerprint}
        if self._server.is_srm and (others or reply.first_weights_version is not None):
            raise ConfigError(
                "the server's weights were changed during the run, and samples of two models are "
                "not added up: choose another output"
            )

    def _scored(self, problem: int, part: int, reply: CountedReply, wanted: int) -> JournalEntry:
        """Score each distinct text once. With `wanted`, samples after that many right ones are left
        out."""
        counted = reply.samples[0] if reply.samples else None
        texts: Texts
        if counted is not None:
            texts = [(sampled.text, sampled.count) for sampled in counted.counts]
        else:
            choices = sorted(reply.choices, key=lambda choice: choice.index)
            texts = [(choice.text, 1) for choice in choices]
        question = self._problems[problem].question
        rewards: dict[str, float] = {}
        for text, _ in texts:
            if self._is_over:  # the process waits for this thread
                raise asyncio.CancelledError
            if text not in rewards:
                rewards[text] = rewarded(self._reward, text, question)
        drawn = right = 0
        for text, count in texts:
            drawn += count
            right += count if rewards[text] >= 1 else 0
            if wanted and counted is None and right == wanted:
                break
        if wanted and counted is not None:
            for sampled in counted.counts:
                if (sampled.matched > 0) != (rewards[sampled.text] >= 1):
                    raise ConfigError(
                        f"match = {self._config.match!r} and reward disagree "
                        f"on {sampled.text!r:.300}"
                    )
        numbers = dict.fromkeys(rewards, 0)
        for text, count in texts if self._config.keep_texts else []:
            numbers[text] += count
        return JournalEntry(
            problem=problem,
            part=part,
            drawn=drawn,
            right=right,
            sampled=sum(count for _, count in texts),
            completion_tokens=reply.usage.completion_tokens,
            prompt_tokens=reply.usage.prompt_tokens,
            texts_scored=len(rewards),
            session=self._session,
            session_s=time.monotonic() - self._started,
            is_enough=bool(wanted) and right == wanted,
            fingerprint=reply.system_fingerprint,
            texts=[(text, count, rewards[text]) for text, count in numbers.items() if count],
        )

    def _show(self, answer: JournalEntry) -> None:
        self._tokens += answer.completion_tokens
        self._tell(
            self._parts * len(self._left) - sum(self._left),
            f"{self._left.count(0)} of {len(self._left)} problems, {self._tokens:,} tokens, "
            f"{self._tokens / answer.session_s:,.0f} a second",
        )


def _seed(seed: int, problem: int, first: int) -> int:
    """Return the seed, of 31 bits, of a request whose first sample has index `first` in its
    problem.

    Seeds of a problem are as far apart as samples, since some servers, vLLM among them, give choice
    i of a request the seed + i, and would draw the same samples again for neighbouring seeds.
    """
    drawn = hashlib.sha256(f"{seed} {problem}".encode()).digest()
    return (int.from_bytes(drawn[:4], "big") + first) % 2**31
