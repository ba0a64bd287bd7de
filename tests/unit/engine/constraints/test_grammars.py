"""Grammars as sequences follow them: what is kept, what is refused, and when a row has its turn."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from srm.engine.constraints import grammars as matching
from srm.engine.constraints.constraint import json_constraint, regex_constraint
from srm.engine.constraints.grammars import I32, Grammar, Grammars, MakeTable, Matchers, make_masks
from srm.engine.messages import Request, StartSamples, StopSamples
from srm.engine.process import compiling as compiling_threads
from srm.engine.process.compiling import Compiling
from srm.engine.process.table_process import CPU_S, OutOfTime, TableProcess
from srm.engine.scheduler.round_robin import MASKED, MASKED_PART
from srm.engine.steps.batch import Span
from srm.errors import InvalidRequest, Overloaded, RequestError
from srm.limited_process import FIRST_CPU_S
from tests.kit.engines.making import complete, engine_of, ints, request_of, scheduled
from tests.kit.engines.numpy_runner import TINY
from tests.kit.engines.tables import of_demo
from tests.kit.models.tiny_tokenizer import CHARACTERS, tiny_folder
from tests.kit.processes.run_engine import run
from tests.kit.processes.run_engine import tokens as tokens_of

FEW = LLMatcher.grammar_from_lark("start: /[a-c]{3}/")


def ids_of(text: str) -> list[int]:
    return [2 + CHARACTERS.index(character) for character in text]


def text_of(token_ids: list[int]) -> str:
    return "".join(CHARACTERS[token - 2] for token in token_ids if token > 1)


def grammars() -> Grammars:
    return Grammars(TINY, tiny_folder() / "tokenizer.json")


def constrained(name: str = "a", **settings: object) -> Request:
    return request_of(name, [5, 6], constraint=FEW, ignore_eos=False, max_tokens=9, **settings)


def sized(constraint: str, nbytes: int) -> Grammar:
    made = grammars().build(constraint)
    made.learnt += nbytes - made.nbytes
    return made


def test_grammars_make_room_by_all_that_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MAX_BYTES", 3_000)
    monkeypatch.setattr(matching, "resident_bytes", lambda: 0)
    own, words = grammars(), [regex_constraint(word) for word in "abc"]
    for word in words:
        own.keep(word, sized(word, 1_000))
    own.compile(words[0])
    own.compile(words[1]).learnt += 1
    assert own.make_room() is None and own.nbytes == 2_001 == own.shown_bytes
    assert [own.has(word) for word in words] == [True, True, False]


def test_constraints_in_use_leave_room_or_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching, "MAX_BYTES", 3_000)
    monkeypatch.setattr(matching, "resident_bytes", lambda: 0)
    own, words = grammars(), [regex_constraint(word) for word in "abcd"]
    used = [sized(word, 1_400) for word in words[:2]]
    for word, grammar in zip(words, used, strict=False):
        own.keep(word, grammar)
    with pytest.raises(Overloaded, match="take 2800 of 3000 bytes, and this one takes 500"):
        own.keep(words[2], sized(words[2], 500))
    used[0].learnt += 500
    assert own.make_room() is used[0], "it is to forget"
    del used[:], grammar
    own.keep(words[3], sized(words[3], 2_000))
    assert own.nbytes == 2_000 and own.has(words[3])


def test_counts_what_a_grammar_learns_and_renews_it_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, works = [0], list[Callable[[], object]]()

    def grow() -> int:
        sizes[0] += 10
        return sizes[0]

    own = grammars()
    own.beside = works.append
    grammar = own.compile(json_constraint({"type": "string"}))
    monkeypatch.setattr(matching, "resident_bytes", grow)
    monkeypatch.setattr(matching, "MAX_LEARNT", 25)
    matchers, text = Matchers(), np.array(ids_of('"ab'), np.int32)

    def mask() -> I32:
        return matchers.next_masks([0], [int(text[-1])], lambda _: (grammar, text.tobytes()))

    first = mask()
    matchers.forget([0])
    for learnt in (20, 30):
        assert np.array_equal(mask(), first) and grammar.learnt == learnt
        matchers.forget([0])
    assert len(works) == 1, "it is asked for once"
    assert np.array_equal(mask(), first) and len(works) == 1, "steps go on meanwhile"
    matchers.forget([0])
    works.pop()()
    assert np.array_equal(mask(), first) and grammar.learnt == 10
    works.pop()()
    assert not works, "what there was is freed"


def test_a_table_that_takes_long_is_made_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own, begun, goes_on = grammars(), list[tuple[str, float]](), threading.Event()

    def make_table(_: TableProcess, constraint: str, *__: object, cpu_s: float) -> None:
        begun.append((constraint, cpu_s))
        if constraint == words[0] and cpu_s < CPU_S:
            goes_on.wait()
            raise OutOfTime

    monkeypatch.setattr(TableProcess, "make_table", make_table)
    compiling, words = Compiling(own, 100), [regex_constraint(word) for word in "abc"]
    for word in words[:2]:
        compiling.start(b"x", request_of(word, constraint=word, share="many"))
    compiling.start(b"x", request_of("few", constraint=words[2], share="few"))
    while len(begun) < 2:
        pass
    assert {*begun} == {(words[0], FIRST_CPU_S), (words[2], FIRST_CPU_S)}
    goes_on.set()
    assert len(compiled(compiling)) == 3
    assert begun[2:] == [(words[1], FIRST_CPU_S), (words[0], CPU_S)]
    compiling.close()


@pytest.mark.parametrize("constraint", ["{", '{"grammars":[]}', LLMatcher.grammar_from_lark("x")])
def test_what_is_no_constraint_is_refused(constraint: str) -> None:
    with pytest.raises(InvalidRequest, match="constraint is not taken") as refused:
        grammars().compile(constraint)
    assert refused.value.param == "constraint"


@pytest.mark.parametrize("content", [None, "{}", '{"model": {}}'])
def test_a_model_without_a_tokenizer_takes_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidRequest, match="constraint"):
        Grammars(TINY, tmp_path / "tokenizer.json").compile(FEW)


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_tokenizer_is_that_of_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copy(tiny_folder() / "tokenizer.json", path)
    own = Grammars(TINY, path)
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert (own.compile(FEW).first_mask == grammars().compile(FEW).first_mask).all()


@pytest.mark.parametrize("name", ["ignore_eos", "allowed_token_ids", "bad_words"])
def test_what_contradicts_a_constraint_is_refused_by_name(name: str) -> None:
    value = {"ignore_eos": True, "allowed_token_ids": (1, 2), "bad_words": ((3, 4),)}[name]
    engine = engine_of()
    settings = {"ignore_eos": False, name: value}
    with pytest.raises(InvalidRequest) as refused:
        engine.add(request_of("a", [5], constraint=FEW, **settings))
    assert refused.value.param == name


def test_a_row_waits_for_its_last_token_and_others_do_not() -> None:
    scheduler = engine_of().scheduler
    scheduler.add(constrained("a"))
    scheduler.add(request_of("b", [7], max_tokens=20))
    scheduler.add(request_of("c", [8], max_tokens=20))
    scheduler.schedule()  # feeds the first token of "a"
    first = scheduled(scheduler)
    second = scheduled(scheduler)  # while the first is under way
    assert first.num_decode == second.num_decode + 1 == 3
    complete(scheduler, first, ids_of("b")[0])
    third = scheduled(scheduler)
    assert third.num_decode == 3
    row = int(third.edits.rows[0])
    start, stop = third.edits.spans[0].reshape(-1, 2)[Span.MASK].tolist()
    bits = np.unpackbits(third.edits.masks[start:stop].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == ids_of("abc")
    assert third.sequence_ids[row] == first.sequence_ids[first.edits.rows[0]]


def test_masked_rows_take_turns_where_others_run() -> None:
    engine = engine_of(num_slots=400, max_step_rows=400, max_step_tokens=900, max_waiting=400)
    scheduler = engine.scheduler
    scheduler.add(request_of("free", [7], n=240, max_tokens=30))
    scheduler.add(request_of("masked", [5], n=100, max_tokens=30, ignore_eos=False, constraint=FEW))
    seen: list[int] = []
    most = max(MASKED, 240 // MASKED_PART)
    for _ in range(4):
        batch = scheduled(scheduler)
        slots = batch.slots[batch.edits.rows].tolist()
        assert batch.num_decode == 240 + len(slots) and len(slots) <= most
        complete(scheduler, batch, ids_of("a")[0])
        seen += slots
    assert len(seen) == 4 * most > 100 and set(seen) == set(range(240, 340))


def test_where_several_grammars_go_on_in_one_way_all_tokens_that_fit_are_allowed() -> None:
    demo = of_demo()
    inner = json.loads(json_constraint({"const": "name"}))["grammars"][0] | {"name": "inner"}
    outer = {"lark_grammar": 'start: "name" @inner'}
    matcher = demo.matcher(json.dumps({"grammars": [outer, inner]}))
    text, most = b'name"name"', 0
    for place, byte in enumerate(text):
        fitting = [i for i, own in enumerate(demo.tokens) if own and text.startswith(own, place)]
        assert np.flatnonzero(demo.mask(matcher)).tolist() == fitting
        assert matcher.consume_token(demo.tokens.index(bytes([byte])))
        most = max(most, len(fitting))
    assert matcher.is_accepting() and most > 1


@pytest.mark.parametrize("is_added", [True, False])
def test_an_end_of_text_that_has_a_text_ends_none_within_a_string(
    tmp_path: Path, is_added: bool
) -> None:
    written = (tiny_folder() / "tokenizer.json").read_text()
    spec = json.loads(written.replace("</s>", "end"))
    spec["added_tokens"][1]["special"] = False
    if not is_added:
        del spec["added_tokens"][1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    own = Grammars(TINY, tmp_path / "tokenizer.json")
    grammar = own.compile(json_constraint({"type": "string"}))
    assert own.tokens[1] == b"end" and grammar.automaton is not None
    for text in ("", '"', '"a', '"a"'):
        token_ids = np.array(ids_of(text), np.int32)
        mask = make_masks([grammar.start(token_ids.tobytes())], grammar.num_words)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        assert allowed[1] == (text == '"a"')
        tabled = grammar.automaton.allowed(grammar.automaton.walk(token_ids), 99)
        assert np.array_equal(allowed, tabled)


def test_where_nothing_may_follow_the_sample_ends_with_an_error() -> None:
    engine = engine_of()
    nothing = LLMatcher.grammar_from_lark("start: /ab[xyz]/")
    engine.add(request_of("a", [5], constraint=nothing, ignore_eos=False, max_tokens=9))
    (last,) = run(engine)
    assert last.finish_reason == "error" and "constraint" in (last.error or "")
    assert text_of(ints(last.token_ids)) == "ab"


def test_a_matcher_that_made_room_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    request = constrained(n=5, seed=1, temperature=2.0)
    engine = engine_of()
    engine.add(request)
    expected = tokens_of(run(engine))
    monkeypatch.setattr(matching, "MAX_MATCHERS", 2)
    engine = engine_of(max_step_rows=3)
    engine.add(request)
    assert tokens_of(run(engine)) == expected


def compiled(compiling: Compiling) -> list[tuple[str, RequestError | None]]:
    """Ids and errors of all that wait, once they need not."""
    answers: list[tuple[str, RequestError | None]] = []
    while len(compiling):
        answers += [(own.request.id, error) for own, error in compiling.take_compiled()]
    return answers


class Held:
    """Compiles that wait until `goes_on`, and the constraints that were begun."""

    def __init__(self, most: int = 100) -> None:
        self.grammars, self.goes_on, self.begun = grammars(), threading.Event(), list[str]()
        self.compiling = Compiling(self.grammars, most)
        self._build = self.grammars.build
        self.grammars.build = self._hang  # type: ignore[method-assign,assignment]

    def _hang(self, constraint: str, make_table: MakeTable) -> Grammar:
        self.begun.append(constraint)
        self.goes_on.wait()
        return self._build(constraint, make_table)

    def start(self, name: str, client: bytes = b"x", **settings: Any) -> bool:
        return self.compiling.start(client, request_of(name, **settings))

    def wait_until_begun(self) -> None:
        while not self.begun:
            pass

    def compiled(self) -> list[tuple[str, RequestError | None]]:
        """Ids and errors of all that wait, once they need not."""
        self.goes_on.set()
        return compiled(self.compiling)


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    """hold(5): compiles of at most so many waiting sequences of a share; closed at the end."""
    made: list[Held] = []

    def begin(most: int = 100) -> Held:
        made.append(Held(most))
        return made[-1]

    yield begin
    for item in made:
        item.goes_on.set()
        item.compiling.close()


Hold = Callable[..., Held]


def test_requests_wait_for_constraints_and_go_with_their_client(
    hold: Hold,
) -> None:
    held = hold()
    compiling = held.compiling
    assert not held.start("free")
    sources = [LLMatcher.grammar_from_lark(f"start: /{name}{name}/") for name in "ab"]
    for name, client, source in (
        ("a", b"x", sources[0]),
        ("b", b"y", sources[1]),
        ("c", b"x", "{"),
    ):
        assert held.start(name, client, constraint=source)
    assert len(compiling) == 3
    assert not compiling.drop(b"x", "b"), "not its own"
    assert len(compiling) == 3
    compiling.drop_client(b"y")
    (first, error), (last, fault) = held.compiled()
    assert (first, error, last) == ("a", None, "c") and fault is not None
    assert held.grammars.has(sources[0]) and not held.grammars.has(sources[1])
    assert not held.start("d", constraint=sources[0])


def test_equal_constraints_are_compiled_once_for_those_who_stay(hold: Hold) -> None:
    held = hold()
    for number in range(20):
        assert held.start(str(number), constraint=FEW)
    held.start("other", constraint=LLMatcher.grammar_from_lark("start: /b/"))
    held.start("mine", b"y", constraint="".join(FEW))
    held.compiling.drop_client(b"x")
    (waiting,) = held.compiling.drop_all()
    assert waiting.request.params.constraint is FEW, "the text is held once too"
    held.start("mine", b"y", constraint=FEW)
    assert held.compiled() == [("mine", None)] and held.begun == [FEW]


def test_waits_for_constraints_are_limited_by_share(hold: Hold) -> None:
    held = hold(5)
    held.start("a", constraint=FEW, n=3)
    with pytest.raises(Overloaded, match="3 of at most 5 sequences wait"):
        held.start("b", constraint=FEW, n=3)
    held.start("c", constraint=FEW, n=2)
    held.start("other", constraint=FEW, n=4, share="other")
    with pytest.raises(Overloaded):
        held.start("d", constraint=FEW)
    held.compiling.drop(b"x", "a")
    held.start("d", constraint=FEW, n=3)
    assert held.compiled() == [("c", None), ("other", None), ("d", None)]
    held.start("e", constraint=LLMatcher.grammar_from_lark("start: /b/"), n=5)


def test_shares_compile_in_turn_and_high_priorities_first(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling_threads, "NUM_THREADS", 1)
    held = hold()
    words = {name: LLMatcher.grammar_from_lark(f"start: /{name}/") for name in "abcdefgh"}

    def start(name: str, share: str, word: str, priority: int = 0) -> None:
        assert held.start(name, constraint=words[word], share=share, priority=priority)

    start("first", "many", "a")
    held.wait_until_begun()
    for word in "bcd":
        start(f"many {word}", "many", word)
    start("batch", "batch", "e", -1)
    start("few d", "few", "d")
    start("few f", "few", "f")
    start("chat", "few", "g", 1)
    start("left", "left", "h")
    held.compiling.drop(b"x", "left")
    names = [name for name, _ in held.compiled()]
    begun = [word for own in held.begun for word in "abcdefgh" if words[word] == own]
    assert begun == list("agbdcfe")
    assert names[3:5] == ["many d", "few d"]


def test_an_id_that_waits_is_in_use_unless_it_is_durable(hold: Hold) -> None:
    held = hold()
    for name, durable in (("a", False), ("b", True)):
        assert held.start(name, constraint=FEW, durable=durable)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        held.start("a", constraint=FEW)
    assert held.start("b", constraint=FEW, durable=True, weight=2.0)
    assert held.start("a", b"y", constraint=FEW), "another client's"
    assert [name for name, _ in held.compiled()] == ["a", "b", "a"]


def test_all_that_wait_are_dropped_and_a_begun_compile_is_kept(
    hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling_threads, "NUM_THREADS", 1)
    held = hold(1)
    held.start("a", constraint=FEW)
    held.wait_until_begun()
    held.start("b", constraint="{", share="b")
    assert [waiting.request.id for waiting in held.compiling.drop_all()] == ["a", "b"]
    assert held.compiling.drop_all() == [] and len(held.compiling) == 1
    held.start("c", constraint=FEW)
    assert held.compiled() == [("c", None)] and held.begun == [FEW]


def test_what_is_said_before_the_constraint_is_there_is_kept(hold: Hold) -> None:
    held = hold()
    held.start("a", constraint=FEW)
    stop = StopSamples("a", b"", cut=1)
    start = StartSamples("a", 9)
    of_another = StopSamples("b", b"")
    for client, message in ((b"y", stop), (b"x", of_another), (b"x", stop), (b"x", start)):
        held.compiling.note(client, message)
    held.goes_on.set()
    while not (answers := list(held.compiling.take_compiled())):
        pass
    assert answers[0][0].choices == [stop, start]


def test_a_bug_in_a_compile_refuses_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = grammars()
    compiling = Compiling(own, 100)

    def fail(_: str, make_table: MakeTable) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(own, "build", fail)
        compiling.start(b"x", request_of("a", constraint=FEW))
        ((_, error),) = compiled(compiling)
    assert error is not None and "a bug" in error.message and error.param == "constraint"
    compiling.start(b"x", request_of("b", constraint=FEW))
    assert compiled(compiling) == [("b", None)]
    compiling.close()


def test_masked_rows_of_a_higher_priority_come_first_and_prompts_count_as_others() -> None:
    settings: dict[str, Any] = {"num_slots": 400, "max_step_rows": 400, "max_step_tokens": 900}
    engine = engine_of(**settings, max_waiting=400)
    scheduler = engine.scheduler
    fields = {"max_tokens": 30, "ignore_eos": False, "constraint": FEW}
    scheduler.add(request_of("free", [7], n=8, max_tokens=30))
    scheduler.add(request_of("batch", [5], n=100, priority=-1, **fields))
    first = scheduled(scheduler)
    assert len(first.edits.rows) == MASKED
    scheduler.add(request_of("chat", [6], n=2, **fields))
    for _ in range(2):
        batch = scheduled(scheduler)
        complete(scheduler, batch, ids_of("a")[0])
        chat = scheduler.registry.by_id["chat"]
        own = batch.sequence_ids[batch.edits.rows] - chat.first_id
        assert {0, 1} <= set(own.tolist()) and len(own) == MASKED
    alone = engine_of(**settings, max_waiting=400).scheduler
    alone.add(request_of("batch", [5], n=100, **fields))
    alone.add(request_of("long", [7] * 60, max_tokens=2))
    assert len(scheduled(alone).edits.rows) == MASKED, "and the prompt is fed"


def test_a_grammar_that_has_learnt_too_much_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All texts of a grammar share its states, of which there may be only so many."""
    hard = LLMatcher.grammar_from_lark("start: /(.*a.{20}|.*b.{19})c/")
    monkeypatch.setattr(matching, "LIMITS", LLParserLimits(max_lexer_states=300))
    request = request_of(
        "a", [5], constraint=hard, ignore_eos=False, max_tokens=30, n=40, temperature=50.0
    )
    reasons = []
    for after in (10**9, 1):
        monkeypatch.setattr(matching, "RENEWED_AFTER", after)
        engine = engine_of(num_slots=40, max_step_rows=40, max_step_tokens=99)
        engine.add(request)
        reasons.append([output.finish_reason for output in run(engine)])
    assert reasons[0].count("error") > 30 and reasons[1].count("error") < 5
