"""`python -m srm.server.text.constraint_process PARENT`: makes and tries constraints in a process
that may be killed.

A schema or regex may be written to take all time and memory. The first message is the vocabulary,
the others are what requests say, each read by a process of its own; each answer is the constraint,
or what is wrong with it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

import msgspec
from llguidance import LLTokenizer

from srm.engine.constraints.constraint import (
    can_be_followed,
    choice_constraint,
    json_constraint,
    lark_constraint,
    lenient_json_constraint,
    read_json,
    regex_constraint,
)
from srm.engine.constraints.trial import NOTHING, tokenizer_of, why_not
from srm.errors import UNDECODABLE, InvalidRequest, cut
from srm.limited_process import (
    Answer,
    answer_each,
    limit_this_process,
    receive,
    send,
    yield_processors,
)
from srm.server.schema.structured_outputs import ConstraintSource, Vocabulary
from srm.server.text.tool_calls import call_constraint

_STACK = 2 * 1024 * 1024
"""Bytes of the thread that compiles: what would overflow the engine's overflows this one first."""


MAX_PLACES = 100
"""Most places that are named of what is not enforced."""


def constraint_of(
    source: ConstraintSource, not_enforced: list[str], why_not: Callable[[str], str]
) -> str:
    """Return the constraint. What a lenient source asks for and cannot be held is left out, and its
    place added to the list; `why_not` says of a constraint why it cannot be followed. Raises
    InvalidRequest, and UNDECODABLE for what is no JSON."""
    if source.kind == "json":
        schema = read_json(bytes(source.value))
        if isinstance(schema, str):
            schema = read_json(schema)
        if source.is_lenient:
            return lenient_json_constraint(schema, source.space, not_enforced, why_not)
        return json_constraint(schema, source.strict, source.space)
    if source.kind == "calls":
        return call_constraint(read_json(bytes(source.value)), not_enforced, why_not)
    if source.kind == "choice":
        return choice_constraint(msgspec.json.decode(source.value, type=list[str]))
    text = msgspec.json.decode(source.value, type=str)
    return (regex_constraint if source.kind == "regex" else lark_constraint)(text)


def answer(message: bytes, tokenizer: LLTokenizer) -> Answer:
    """Make the constraint and try it."""
    try:
        source = msgspec.json.decode(message, type=ConstraintSource)
        for why in (can_be_followed, partial(why_not, tokenizer=tokenizer)):  # all together first
            not_enforced: list[str] = []
            constraint = constraint_of(source, not_enforced, why)
            if not (fault := why_not(constraint, tokenizer)):
                places = [cut(place, 300) for place in not_enforced[:MAX_PLACES]]
                return Answer(text=constraint, data=msgspec.json.encode(places))
        if source.strict and fault.startswith(NOTHING):
            fault = f"with strict, objects have only the properties that they name: {fault}"
    except InvalidRequest as error:
        fault = error.message
    except RecursionError:
        fault = "it nests too deep"
    except MemoryError:
        fault = "it takes too much memory"
    except UNDECODABLE as error:
        fault = f"it is not JSON: {error}"
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is not even an Exception
        fault = f"it cannot be compiled: {type(error).__name__}: {error!s:.200}"
    # It may quote half of a surrogate pair.
    return Answer(error=fault.encode(errors="backslashreplace").decode())


def _serve(control: int) -> None:
    first = receive(sys.stdin.buffer)
    if first is None:
        return
    vocabulary = msgspec.json.decode(first, type=Vocabulary)
    tokenizer = tokenizer_of(vocabulary.tokens, vocabulary.end_ids)
    yield_processors()
    send(sys.stdout.buffer, Answer())
    answer_each(control, lambda message: answer(message, tokenizer))


def main(argv: list[str]) -> int:
    if not limit_this_process(int(argv[0])):
        return 1
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=[int(argv[1])])
    thread.start()
    thread.join()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
