"""Which completions a watch says have stopped: once each, and not those that the engine ended."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.messages import REASONS, FinishReason, Output
from srm.engine.steps.tokens import Tokens, from_outputs
from srm.server.generation.detokenize import ChoicePart, Detokenizer, join
from srm.server.generation.stop_strings import StopStringWatch
from srm.server.text.stream import StopStrings
from srm.server.text.text import Text
from tests.kit.bodies.refusals import completion

STOPS = ["ab", "bca", "é", "cc"]
N = 6
reasons = st.lists(st.sampled_from(["stop", "length"]), min_size=N, max_size=N)


def deliveries(
    completions: list[bytes],
    reasons: list[FinishReason],
    rng: random.Random,
    stopped: Collection[int] = (),
) -> Iterator[Tokens]:
    """All tokens, some of some completions at a time; none of those that were `stopped`."""
    left = dict(enumerate(completions))
    while left:
        outputs = []
        for index in rng.sample([*left], rng.randint(1, len(left))):
            size = 4 * rng.randint(1, 9)
            ids, left[index] = left[index][:size], left[index][size:]
            reason = None if left[index] else reasons[index]
            outputs.append((index, Output("", index, ids, finish_reason=reason)))
        yield from_outputs(outputs)
        left = {i: ids for i, ids in left.items() if ids and i not in stopped}


@settings(max_examples=60)
@given(st.data(), reasons, st.randoms(use_true_random=False))
def test_stop_strings_are_found_as_if_the_text_were_whole(
    text: Text, data: st.DataObject, reasons: list[FinishReason], rng: random.Random
) -> None:
    pieces = text.pieces(array("i", range(300)).tobytes())
    letters = [pieces.index(bytes([byte])) for byte in "abcé".encode()] + [pieces.index(b"the")]
    tokens = st.lists(st.sampled_from(letters), min_size=1, max_size=20)
    drawn = data.draw(st.lists(tokens, min_size=N, max_size=N))
    completions = [array("i", ids).tobytes() for ids in drawn]
    stops = StopStrings(STOPS, text.table())
    watch, stopped = StopStringWatch(text.table(), stops, N), set[int]()
    each, whole = (Detokenizer(completion(n=N), [b""], text, (), stops) for _ in range(2))
    entries: defaultdict[int, list[ChoicePart]] = defaultdict(list)
    for new in deliveries(completions, reasons, rng, stopped):
        result = watch.find_stopped(new)
        stopped |= set(result)
        for part, (index, *_, reason) in zip(each.decode(new), new.rows(), strict=True):
            entries[index].append(part)
            ends_here = part.finish_reason is not None and REASONS[reason] is None
            assert (part.index, index in result) == (index, ends_here)
    outputs = [Output("", i, completions[i], finish_reason=reasons[i]) for i in range(N)]
    assert [join(entries[i]) for i in range(N)] == whole.decode(from_outputs([*enumerate(outputs)]))
