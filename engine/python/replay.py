"""`srm replay`: makes the tokens of receipts again, and says where bits differ and why.

What the same weights made is replayed together, in batches that have nothing to do with those of
the server. Where weights changed, a completion goes on from the state of its tokens by then: as the
weights before left it or, since a change may refeed, as the new ones make it.
"""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from srm.engine.config import BUNDLED_NAMES, EngineConfig, find_model
from srm.engine.messages import PROMPT, Output, Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.receipt import Receipt, ReceiptSpan, params_that_decide
from srm.engine.state.parked import Parked
from srm.engine.steps.batch import Runner, SlotStates
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.weights import Weights
from srm.errors import UNDECODABLE, ConfigError, Overloaded, RequestError, SRMError, in_words
from srm.files import open_file
from srm.progress import Tell, count_seconds, show_progress
from srm.settings import CommandParser, build_struct

_TOGETHER = 1_024
"""Most samples of a prompt that are one request."""


@dataclass(slots=True, eq=False)
class Replay:
    """A receipt, as far as it is replayed."""

    place: str
    """Where it stands in its file."""
    receipt: Receipt
    fault: str = ""
    """Where it differs, or why it cannot be replayed."""
    reached: int = 0
    """Token at which it differs."""
    stage: int = 0
    """Number of its spans that were replayed."""
    states: list[bytes] = field(default_factory=list)
    """What weights before may have left as the state, float32[state_width], before the next span's
    first token; empty after no tokens."""

    @property
    def span(self) -> ReceiptSpan:
        """The span to be replayed next."""
        return self.receipt.spans[self.stage]

    def num_before(self, token: int) -> int:
        """Return how many tokens its state has before this one of its own is sampled."""
        return len(self.receipt.prompt_token_ids) // 4 - 1 + token

    def compare(self, made: Output) -> None:
        """Compare what was made with the tokens of its span."""
        begin, end = self.span.start, self.span.end
        asked = _bits(self.receipt.token_ids, self.receipt.logprobs)[begin:end]
        got = _bits(made.token_ids, made.logprobs)[begin:end]
        differ = np.flatnonzero((asked[: len(got)] != got).any(1))
        at = int(differ[0]) if len(differ) else len(got)
        if at == len(asked):
            self.fault = ""
        elif not self.fault or begin + at > self.reached:  # the try that came further counts
            self.reached = begin + at
            shown = _show(got[at]) if at < len(got) else made.error or "none: it ends"
            self.fault = f"token {begin + at} is {_show(asked[at])} and now {shown}"


def _bits(token_ids: bytes, logprobs: bytes) -> npt.NDArray[np.int32]:
    """Return i32[tokens, 2]: tokens, and the bits of their log-probabilities."""
    return np.stack([np.frombuffer(data, "<i4") for data in (token_ids, logprobs)], 1)


def _show(bits: npt.NDArray[np.int32]) -> str:
    return f"{bits[0]} ({bits[1:].view(np.float32)[0]})"


class Replayer:
    """Replays receipts of several weights, with one engine at a time."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raises CheckpointError."""
        self._weights: dict[str, tuple[Path, Weights]] = {}
        for folder in folders:
            with count_seconds(f"loading {folder}"):
                weights = load_checkpoint(folder)
            self._weights[weights.fingerprint] = folder, weights
        self._engine: Engine | None = None
        self._num_asked = self._num_compared = 0
        self._tell: Tell = lambda *_: None

    def close(self) -> None:
        """Free the engine's memory."""
        if self._engine is not None:
            self._engine.runner.close()
            self._engine = None

    def replay(self, replays: list[Replay], tell: Tell) -> None:
        """Replay receipts, and note in each where it differs. `tell` counts what was compared."""
        self._tell, left = tell, list(replays)
        while left := [own for own in left if own.stage < len(own.receipt.spans) and not own.fault]:
            groups: defaultdict[tuple[str, str], list[Replay]] = defaultdict(list)
            for own in left:
                groups[own.receipt.arithmetic, own.span.fingerprint].append(own)
            for (arithmetic, fingerprint), some in groups.items():
                try:
                    engine = self._engine_of(arithmetic, fingerprint)
                except SRMError as error:
                    for own in some:
                        if own.span.start < own.span.end:  # else it may do without these weights
                            what = f"token {own.span.start} cannot be made in {arithmetic!r}"
                            own.fault = f"{what}: {error.message}"
                else:
                    for own in some:
                        own.fault = _misfit(own.receipt, engine)
                    self._replay_spans(engine, [own for own in some if not own.fault])
                for own in some:
                    own.stage += 1

    def _engine_of(self, arithmetic: str, fingerprint: str) -> Engine:
        """Return an engine with these weights in this arithmetic. Raises SRMError, which says why
        there is none."""
        if fingerprint not in self._weights:
            name = fingerprint or "that nobody knows any more"
            given = ", ".join(self._weights)
            raise ConfigError(f"it is of weights {name}, and those given are {given}")
        (folder, weights), engine = self._weights[fingerprint], self._engine
        if engine and engine.status().arithmetic == arithmetic and engine.model == weights.config:
            if engine.status().fingerprint != fingerprint:
                engine.load_weights(weights)
            return engine
        how = zip(("device", "dtype", "product"), arithmetic.split(), strict=False)
        asked = {"model": folder, **dict(how)}
        config = build_struct(EngineConfig, asked, f"arithmetic {arithmetic!r}", strict=True)
        self.close()  # its memory is needed
        device = import_module("srm.engine.device.runner")  # which --help does without
        runner: Runner = device.make_runner(weights, config)
        if runner.arithmetic != arithmetic:
            raise ConfigError(f"it is {runner.arithmetic!r} here")
        self._engine = engine = Engine(weights.config, runner, config, fingerprint)
        return engine

    def _replay_spans(self, engine: Engine, replays: list[Replay]) -> None:
        """Replay the spans that are next, which the engine's weights made."""
        idle = [(own, own.span.end, 0, b"") for own in replays if own.span.start == own.span.end]
        anew = self._states(engine, idle)
        for own, state in anew.items():
            own.states.append(state)
        begun: dict[Replay, bytes] = {}
        turn, left = 0, [own for own in replays if own not in anew]
        while left:
            tries = {own: own.states[turn] for own in left if turn < len(own.states)}
            last = [own for own in left if turn == len(own.states)]
            tries |= dict.fromkeys(last, b"")
            fed = [(own, own.span.start, 0, b"") for own in last if own.span.start]
            tries |= self._states(engine, fed)
            self._sample(engine, tries)
            begun |= tries
            left = [own for own in left if own.fault and own not in last]
            turn += 1
        ended = [
            (own, own.span.end, own.span.start, state)
            for own, state in begun.items()
            if not own.fault and own.stage + 1 < len(own.receipt.spans)
        ]
        for own, state in self._states(engine, ended).items():
            own.states = [state]
        for own in begun:
            if own.fault:
                why = "no state that weights before left fits, nor one that these make: "
                own.fault += f", by weights {own.span.fingerprint}: " + (
                    f"{why if own.states else ''}the receipt was changed, the processor is another "
                    "one, or weights changed while a prompt was being read"
                )

    def _sample(self, engine: Engine, begun: dict[Replay, bytes]) -> None:
        """Make the tokens of the spans that are next, from these states, and compare them."""
        together: defaultdict[tuple[Any, ...], defaultdict[int, list[Replay]]]
        together = defaultdict(lambda: defaultdict(list))
        for own, state in begun.items():
            receipt = own.receipt
            alone = own.place if state else receipt.sample // _TOGETHER
            key = receipt.prompt_token_ids, msgspec.json.encode(receipt.params), alone, state
            together[key][receipt.sample].append(own)
        asked, by_id = [], {}
        for (*_, state), samples in together.items():
            of_each = [samples[number] for number in sorted(samples)]
            request, parked = self._request(engine, of_each, state)
            try:
                engine.scheduler.check(request)
            except RequestError as error:
                for own in [own for same in of_each for own in same]:
                    own.fault = f"it cannot be asked for: {error.message}"
            else:
                asked.append((request, parked))
                by_id[request.id] = of_each
        for output in _run(engine, asked):
            for own in by_id[output.id][output.index]:
                own.compare(output)
                self._num_compared += 1
                self._tell(self._num_compared, "")

    def _request(
        self, engine: Engine, of_each: list[list[Replay]], state: bytes
    ) -> tuple[Request, Parked | None]:
        """Return the request of these samples, each with its receipts, and what it goes on from.
        Receipts differ in the sample alone, and where there is a state, there is one."""
        own, numbers = of_each[0][0], [same[0].receipt.sample for same in of_each]
        receipt, start = own.receipt, own.span.start
        params = params_that_decide(receipt.params)
        if not params.constraint:  # which leads to an end before the last token that is allowed
            most = max(own.span.end for same in of_each for own in same)
            params = msgspec.structs.replace(params, max_tokens=max(most, params.min_tokens))
        parked = None
        if start:
            tokens, logprobs = receipt.token_ids[: 4 * start], receipt.logprobs[: 4 * start]
            states = np.frombuffer(state, "<f4")[None], np.frombuffer(tokens[-4:], "<i4")
            positions = np.array([own.num_before(start)], np.int32)
            parked = Parked(
                np.zeros(1, np.int64), positions, SlotStates(*states), (tokens,), (logprobs,)
            )
        request = self._new_request(
            *(engine, receipt.prompt_token_ids, b"" if start else state, own.num_before(0)),
            params=msgspec.structs.replace(params, n=len(numbers), logprobs=0),
            samples=np.array(numbers, "<i4").tobytes(),
            durable=start > 0,  # others do not go on
        )
        return request, parked

    def _states(
        self, engine: Engine, wanted: Iterable[tuple[Replay, int, int, bytes]]
    ) -> dict[Replay, bytes]:
        """Return the state, by the engine's weights, before each receipt's token `end`, from the
        one before token `start`; empty: from the beginning."""
        by_id, asked = {}, []
        for own, end, start, state in wanted:
            tokens = own.receipt.prompt_token_ids + own.receipt.token_ids[: 4 * end]
            begun = state, own.num_before(start)
            params = SamplingParams(max_tokens=0)
            request = self._new_request(engine, tokens, *begun, params=params, returns_state=True)
            by_id[request.id] = own
            asked.append((request, None))
        outputs = _run(engine, asked)
        return {by_id[made.id]: made.state for made in outputs if made.index == PROMPT}

    def _new_request(
        self, engine: Engine, token_ids: bytes, state: bytes, length: int, **fields: Any
    ) -> Request:
        """Return a request that begins from this state of its first tokens, if there is one."""
        self._num_asked += 1
        if state:
            fields |= {"state": state, "state_length": length}
            fields["state_of"] = engine.status().fingerprint  # or it would not be used
            fields["salt"] = blake2b(state).hexdigest()  # others do not begin from it
        return Request(str(self._num_asked), token_ids, **fields)


def _misfit(receipt: Receipt, engine: Engine) -> str:
    """Return why a receipt cannot be of the engine's model; empty: it can."""
    model, tokens = engine.model, np.frombuffer(receipt.prompt_token_ids + receipt.token_ids, "<i4")
    outside = tokens[(tokens < 0) | (tokens >= model.vocab_size)]
    count, room = receipt.num_tokens, model.n_ctx - len(tokens) + receipt.num_tokens + 1
    most = min(receipt.params.max_tokens, room)
    if len(outside):
        return f"it has token {outside[0]}; ids go from 0 to {model.vocab_size - 1}"
    if room < 1 or count > most or (receipt.finish_reason == "length" and count < most):
        return f"it has {count} tokens, and max_tokens and n_ctx = {model.n_ctx} allow {most}"
    return ""


def _run(engine: Engine, asked: Iterable[tuple[Request, Parked | None]]) -> Iterator[Output]:
    """Yield what comes of requests, in any order."""
    waiting = deque(asked)
    while waiting or engine.has_work:
        with suppress(Overloaded):
            while waiting:
                engine.add(*waiting[0])
                waiting.popleft()
        yield from engine.step_overlapped()


def read_receipts(lines: Iterable[bytes]) -> Iterator[Replay | str]:
    """Yield the receipts in lines of JSON, each one, or a reply that has some, or a batch's line
    with such a reply; and what is wrong with others, with their place."""
    for number, data in enumerate(lines, 1):
        line, place = data.removeprefix(BOM_UTF8), f"line {number}"
        if not line.strip():
            continue
        places: dict[str, Any] = {}
        try:
            value = msgspec.json.decode(line, type=dict[str, Any])
            if "format" in value:
                places[place] = value
            else:
                reply = (value.get("response") or {}).get("body") or value
                receipts = [choice.get("receipt") for choice in reply["choices"]]
                places = {f"{place}, choice {at}": own for at, own in enumerate(receipts)}
                places = places or {place: None}
        except (LookupError, TypeError, AttributeError):
            yield f"{place}: it has no receipt"
            continue
        except UNDECODABLE as error:
            yield f"{place}: {in_words(error)}"
            continue
        for where, each in places.items():
            try:
                if each is None:
                    raise ValueError("it has no receipt")
                receipt = msgspec.convert(each, Receipt, str_keys=True)
                receipt.check()
            except (*UNDECODABLE, ValueError) as error:
                yield f"{where}: {in_words(error)}"
            else:
                yield Replay(where, receipt)


def replay_parser() -> CommandParser:
    parser = CommandParser(
        prog="srm replay",
        description="Make the tokens of receipts again, and say where they differ.",
        epilog="example: srm replay receipts.jsonl --weights demo",
        allow_abbrev=False,
    )
    about = "file of receipts, replies or a batch's results, one a line"
    parser.add_argument("receipts", type=Path, metavar="RECEIPTS", help=about)
    about = f"folders of all weights that made them, or names of {BUNDLED_NAMES}"
    parser.add_argument(
        "--weights",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FOLDER",
        required=True,
        help=about,
    )
    return parser


def main(argv: list[str]) -> int:
    """Replay a file of receipts, and print which differ. Returns 1 if any does; raises SRMError."""
    given = replay_parser().parse_args(argv)
    try:
        with open_file(given.receipts) as file:
            read = list(read_receipts(file))
    except OSError as error:
        raise ConfigError(f"cannot read {given.receipts}: {error.strerror}") from None
    if not read:
        raise ConfigError(f"{given.receipts} has no receipts")
    replays = [own for own in read if isinstance(own, Replay)]
    total = sum(len(own.receipt.spans) for own in replays)
    own = Replayer(map(find_model, given.weights))
    with closing(own) as replayer, show_progress("replaying", total) as tell:
        replayer.replay(replays, tell)
    lines = [own if isinstance(own, str) else f"{own.place}: {own.fault}" for own in read]
    faults = [line for line in lines if not line.endswith(": ")]
    good, total = len(read) - len(faults), len(read)
    sys.stdout.write("".join(f"{line}\n" for line in faults))
    sys.stdout.write(f"{good:,} of {total:,} receipts replay bit for bit\n")
    return 1 if faults else 0
