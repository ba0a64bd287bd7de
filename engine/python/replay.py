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
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from srm.engine.config import BUNDLED_NAMES, EngineConfig, find_model
from srm.engine.messages import PROMPT, Output, Request, SamplingParams, begin_from
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


@dataclass(slots=True, eq=False)
class Replay:
    """A receipt, as far as it is replayed."""

    place: str
    """Where it stands in its file."""
    receipt: Receipt
    fault: str = ""
    """Where it differs, or why it cannot be replayed."""
    stage: int = 0
    """Number of its spans that were replayed."""
    states: list[bytes] = field(default_factory=list)
    """The states, float32[state_width], from which the next span may begin; an empty one stands
    after no token."""

    @property
    def span(self) -> ReceiptSpan:
        """The span to be replayed next."""
        return self.receipt.spans[self.stage]

    def num_before(self, token: int) -> int:
        """Return how many tokens its state has before this one of its own is sampled."""
        return len(self.receipt.prompt_token_ids) // 4 - 1 + token

    def compare(self, made: Output) -> tuple[int, str]:
        """Return up to which token what was made is that of its span, and what differs there."""
        begin, end = self.span.start, self.span.end
        asked = _bits(self.receipt.token_ids, self.receipt.logprobs)[begin:end]
        got = _bits(made.token_ids, made.logprobs)[begin:end]
        differ = np.flatnonzero((asked[: len(got)] != got).any(1))
        at = int(differ[0]) if len(differ) else len(got)
        if at == len(asked):
            return end, ""
        shown = _show(got[at]) if at < len(got) else made.error or "none: it ends"
        return begin + at, f"token {begin + at} is {_show(asked[at])}; the replay has {shown}"


def _bits(token_ids: bytes, logprobs: bytes) -> npt.NDArray[np.int32]:
    """Return i32[tokens, 2]: tokens, and the bits of their log-probabilities."""
    return np.stack([np.frombuffer(data, "<i4") for data in (token_ids, logprobs)], 1)


def _show(bits: npt.NDArray[np.int32]) -> str:
    return f"{bits[0]}, of log-probability {bits[1:].view(np.float32)[0]}"


_Asked = tuple[Replay, bytes, bytes, int, dict[str, Any], Parked | None]
"""A receipt, the state that a request begins from, its prompt, how many tokens of that the state
has, further fields, and the sequence that goes on, if one does."""


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
        self._num_asked = self._num_replayed = 0
        self._tell: Tell = lambda *_: None

    def close(self) -> None:
        """Free the engine's memory."""
        if self._engine is not None:
            self._engine.runner.close()
            self._engine = None

    def replay(self, replays: list[Replay], tell: Tell) -> None:
        """Replay receipts, and note in each where it differs. `tell` counts their spans."""
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
                    self._replay_spans(engine, some)
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
        """Replay the spans that are next, which the engine's weights made: from each state that the
        weights before may have left, and from that which these make of the tokens before."""
        for own in replays:
            own.fault = _misfit(own.receipt, engine)
        good = [own for own in replays if not own.fault]
        before = [own for own in good if own.span.start or not own.span.end]
        self._read(engine, [(own, own.span.start, 0, b"") for own in before])
        asked = []
        for own in good:
            if own.span.start < own.span.end and not own.fault:
                states = own.states if own.span.start else [*own.states, b""]
                asked += [(own, state, *_sampling(own, state)) for state in states]
                own.states = []
        tries: defaultdict[Replay, list[tuple[int, str, bytes]]] = defaultdict(list)
        for own, state, made in self._run(engine, asked):
            tries[own].append((*own.compare(made), state))
            self._tell(self._num_replayed + len(tries), "")
        for own, results in tries.items():
            _, own.fault, _ = max(results)  # the one that came furthest
            if own.fault:
                why = "no state that weights before left fits, nor one that these make: "
                own.fault += f", by weights {own.span.fingerprint}: " + (
                    f"{why if len(results) > 1 else ''}the receipt was changed, the processor is "
                    "another one, or weights changed while a prompt was being read"
                )
        ended = [
            (own, own.span.end, own.span.start, state)
            for own, results in tries.items()
            for _, fault, state in results
            if not fault and own.stage + 1 < len(own.receipt.spans)
        ]
        self._read(engine, ended)
        self._num_replayed += len(replays)

    def _read(self, engine: Engine, wanted: Iterable[tuple[Replay, int, int, bytes]]) -> None:
        """Add to each receipt's states the one before its token `end`, by the engine's weights from
        the one before its token `start`; empty: from the beginning."""
        asked = []
        for own, end, start, state in wanted:
            token_ids = own.receipt.prompt_token_ids + own.receipt.token_ids[: 4 * end]
            fields = {"params": SamplingParams(max_tokens=0), "returns_state": True}
            asked.append((own, state, token_ids, own.num_before(start), fields, None))
        for own, _, made in self._run(engine, asked):
            if made.index == PROMPT:
                own.states.append(made.state)

    def _run(
        self, engine: Engine, asked: Iterable[_Asked]
    ) -> Iterator[tuple[Replay, bytes, Output]]:
        """Yield what comes of requests, with receipt and state, in any order; note in receipts what
        is refused."""
        waiting, by_id = deque(asked), {}
        while waiting or engine.has_work:
            while waiting:
                own, state, token_ids, length, fields, parked = waiting[0]
                if state and not parked:
                    fields |= begin_from(state, length, engine.status().fingerprint)
                self._num_asked += 1
                try:
                    engine.add(Request(str(self._num_asked), token_ids, **fields), parked)
                except Overloaded:
                    break
                except RequestError as error:
                    own.fault = f"it cannot be asked for: {error.message}"
                else:
                    by_id[str(self._num_asked)] = own, state
                waiting.popleft()
            for made in engine.step_overlapped():
                yield (*by_id[made.id], made)


def _sampling(own: Replay, state: bytes) -> tuple[bytes, int, dict[str, Any], Parked | None]:
    """Return what is asked for so that the tokens of the next span come, from this state."""
    receipt, start = own.receipt, own.span.start
    params = msgspec.structs.replace(params_that_decide(receipt.params), logprobs=0)
    if not params.constraint:  # which leads to an end before the last token that is allowed
        most = max(own.span.end, params.min_tokens)
        params = msgspec.structs.replace(params, max_tokens=most)
    parked = None
    if start:
        tokens, logprobs = receipt.token_ids[: 4 * start], receipt.logprobs[: 4 * start]
        states = np.frombuffer(state, "<f4")[None], np.frombuffer(tokens[-4:], "<i4")
        positions = np.array([own.num_before(start)], np.int32)
        parked = Parked(
            np.zeros(1, np.int64), positions, SlotStates(*states), (tokens,), (logprobs,)
        )
    samples = np.array([receipt.sample], "<i4").tobytes()
    fields = {"params": params, "samples": samples, "durable": start > 0}  # others do not go on
    return receipt.prompt_token_ids, own.num_before(0), fields, parked


def _misfit(receipt: Receipt, engine: Engine) -> str:
    """Return why a receipt's length cannot be that of its model and parameters; empty: it can."""
    count, n_ctx = receipt.num_tokens, engine.model.n_ctx
    most = min(receipt.params.max_tokens, n_ctx - len(receipt.prompt_token_ids) // 4 + 1)
    if count > most or (receipt.finish_reason == "length" and count < most):
        return f"it has {count} tokens, and max_tokens and n_ctx = {n_ctx} allow {most}"
    return ""


def read_receipts(lines: Iterable[bytes]) -> Iterator[Replay | str]:
    """Yield the receipts in lines of JSON, each one, or a reply that has some, or a batch's line
    with one; and faults of others by place. Raises ConfigError for JSON over several lines."""
    for number, data in enumerate(lines, 1):
        line, place = data.removeprefix(BOM_UTF8), f"line {number}"
        if not line.strip():
            continue
        if number == 1 and line.strip() in {b"{", b"["}:
            raise ConfigError("each receipt or reply must be one line of JSON, as of `jq -c .`")
        try:
            value = msgspec.json.decode(line, type=dict[str, Any])
            places: dict[str, Any] = {place: value}
            if "format" not in value:
                reply = (value.get("response") or {}).get("body") or value
                receipts = [choice.get("receipt") for choice in reply["choices"]]
                places = {f"{place}, choice {at}": own for at, own in enumerate(receipts)}
                places = places or {place: None}
        except (LookupError, TypeError, AttributeError):
            places = {place: None}
        except UNDECODABLE as error:
            yield f"{place}: {in_words(error)}"
            continue
        for where, each in places.items():
            try:
                if each is None:
                    raise ValueError("it has no receipt")
                receipt = msgspec.convert(each, Receipt, str_keys=True)
                receipt.check()
            except UNDECODABLE as error:
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
