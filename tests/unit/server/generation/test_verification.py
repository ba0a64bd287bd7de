"""`verify`: what each form of a rule gives a text, and how a rule that is none is refused."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.errors import InvalidRequest
from srm.regex_examples import MAX_LENGTH, reading_work
from srm.server.generation.matching import INLINE, MAX_PROGRAM
from srm.server.generation.verification import (
    MAX_CHECKED,
    MAX_DEPTH,
    MAX_NESTED,
    MAX_PATTERNS,
    Verifier,
    as_number,
    read_json,
)
from srm.server.schema.completion_request import CompletionRequest, parse_completion
from srm.server.schema.verify import MAX_RULES, MAX_STRING_LENGTH
from srm.training.problems.countdown import evaluate
from srm.training.questions.questions import Question
from srm.training.questions.rewards import gsm8k_strict

Json = dict[str, Any]
ANSWER = r"####\s*([-$0-9.,]*[0-9])"


def parsed(rule: Any, prompt: Any = "a", **fields: Any) -> CompletionRequest:
    body = json.dumps({"prompt": prompt, "verify": rule, **fields})
    return parse_completion(body.encode())


def verifier(rule: Any, prompt: Any = "a") -> Verifier:
    rules = parsed(rule, prompt).verify
    assert rules is not None
    return Verifier(rules)


def score(rule: Any, text: str) -> float:
    (only,) = asyncio.run(verifier(rule).scores([(0, text)]))
    return only


def nested(rule: Json, depth: int) -> Json:
    return rule if depth == 1 else {"not": nested(rule, depth - 1)}


A, B = {"match": "a"}, {"match": "b"}
BIG = 2**53
RIGHT: list[tuple[Json, str]] = [
    # Text: the group, what matches, or all of it.
    ({"match": "a"}, "cat"),
    ({"match": r"#### (.*)", "equals": "57"}, "so\n#### 57"),
    ({"match": r"\d+", "equals": "57"}, "is 57 is"),
    ({"match": r"(?s)^.*#### (\d+)", "equals": "2"}, "#### 1\n#### 2"),
    ({"equals": " 57"}, " 57"),
    ({"equals": ""}, ""),
    # Numbers.
    ({"match": ANSWER, "number": 1234}, "#### $1,234"),
    ({"match": ANSWER, "number": 1234}, "#### 1234.00"),
    ({"match": ANSWER, "number": "$1,234"}, "#### 1234"),
    ({"number": 0}, "-0"),
    ({"number": -0.0}, "0.00"),
    ({"number": 0.1}, " .1 "),
    ({"number": 5}, "5."),
    ({"number": 1000}, "+1e3"),
    ({"number": "1e400"}, "1" + "0" * 400),
    ({"number": BIG + 1}, str(BIG + 1)),
    ({"number": 0.3, "tolerance": 0.1}, "0.2"),
    ({"number": 0.3, "tolerance": 0.1}, "0.4"),
    ({"number": 200, "relative_tolerance": 0.01}, "198"),
    ({"number": -200, "relative_tolerance": 0.01, "tolerance": 3}, "-203"),
    ({"number": 1, "tolerance": 1e300}, "-1e299"),
    # Expressions.
    ({"number": 64, "using": [25, 3, 7, 4]}, " 25 * 3 - 7 - 4"),
    ({"number": 64, "using": [4, 7, 3, 25]}, "((25*3)-(7+4))"),
    ({"number": 2, "using": [8, 4, 2, 2]}, "8/4/2*2"),
    ({"number": 0.5, "using": [1, 3, 6]}, "3/6*1"),
    ({"number": 0.333, "tolerance": 0.001, "using": [1, 3]}, "1/3"),
    ({"number": -2, "using": [0, 2]}, "0-2"),
    ({"number": 5, "using": [5]}, "(5)"),
    ({"match": "= (.*)", "number": 6, "using": [2, 3]}, "x = 2 * 3"),
    ({"pointer": "/e", "number": 6, "using": [2, 3]}, '{"e": "2*3"}'),
    # Patterns.
    ({"accepts": ["2024-01-15", "1999-12-31"], "rejects": ["24-01-15"]}, " \\d{4}-\\d\\d-\\d\\d\n"),
    ({"accepts": ["a", "b" * MAX_STRING_LENGTH]}, "a|b+"),
    ({"accepts": ["", "é"], "rejects": ["éé"]}, ".?"),
    ({"accepts": ["a"], "rejects": []}, "a"),
    ({"accepts": [], "rejects": ["ab"]}, "a"),
    ({"rejects": ["ab"]}, "a"),  # a part of it
    ({"rejects": ["a"]}, "(?i)"),
    ({"accepts": ["a" * 256] * 32, "rejects": ["b" * 256] * 32}, "a{2}a{100}a{10}a+"),
    ({"match": "`(.*)`", "accepts": ["x"]}, "it is `[xyz]`."),
    ({"pointer": "/regex", "accepts": ["1"]}, r'{"regex": "\\d"}'),
    ({"not": {"accepts": ["a"]}}, "b"),
    # JSON.
    ({"pointer": ""}, " [] "),
    ({"pointer": "", "equals": "a"}, '"a"'),
    ({"pointer": "/a/1/b", "equals": None}, '{"a": [0, {"b": null}]}'),
    ({"pointer": "/~1~0/01", "equals": True}, '{"/~": {"01": true}}'),
    ({"pointer": "/", "equals": {"x": [1, {"y": "z"}]}}, '{"": {"x": [1.0, {"y": "z"}]}}'),
    ({"pointer": "/n", "equals": BIG + 1}, f'{{"n": {BIG + 1}}}'),
    ({"pointer": "/n", "number": 0.1}, '{"n": 1e-1}'),
    ({"pointer": "/n", "number": 1234}, '{"n": "1,234"}'),
    ({"match": r"(?s)```json\n(.*?)```", "pointer": "/n", "number": 5}, 'x\n```json\n{"n":5}\n```'),
    # Together.
    ({"any": [A, B]}, "b"),
    ({"all": [A, B]}, "ba"),
    ({"not": A}, "b"),
    ({"sum": [{**A, "weight": 0.25}, {**B, "weight": 0.75}]}, "ab"),
    ({"sum": [{**A, "weight": tenths / 10} for tenths in (1, 2, 7)]}, "a"),
    (nested(A, MAX_DEPTH - 1), "a"),
]
WRONG: list[tuple[Json, str]] = [
    ({"match": "a"}, ""),
    ({"match": r"#### (\d+)?", "equals": ""}, "#### x"),  # the group did not take part
    ({"match": r"#### (\d+)", "equals": "57"}, "#### 570"),
    ({"equals": "57"}, " 57"),
    *(({"number": 0}, text) for text in ("", "NaN", "Infinity", "0x0", "٠", "0_0", "0%", "1e")),
    ({"number": 1}, "1 2"),  # 12
    ({"number": BIG}, str(BIG + 1)),
    *(({"number": 64, "using": [25, 3, 7, 4]}, text) for text in (
        *("", "64", "25*3-7", "25*3-7-4-0", "25*3-7-4-4", "25*3-7-4=64", "25 3 7 4", "25*3-4-7-"),
        *("-25*3-7-4", "25*3-(7-4", "25*3)-7-4", "25(*3)-7-4", "()25*3-7-4", "25*(3-7)-4"),
        *("(" * 9_999, "25*3-7-4" + ")" * 9_999, "25*03-7-4", "٢٥*3-7-4", "²5*3-7-4", "25//3-7-4"),
        *("25**3-7-4", "2_5*3-7-4", "0" * 9_999 + "25*3-7-4", "25*3-7-4 so"),
    )),
    ({"number": 0, "using": [1, 0]}, "1/0"),
    ({"number": 0.333, "using": [1, 3]}, "1/3"),
    ({"pointer": "/e", "number": 6, "using": [6]}, '{"e": 6}'),
    *(({"accepts": ["aa", "ab"], "rejects": ["ba", ""]}, text) for text in (
        *("", "a", "aa", "aa|ba|ab", "a*b?", "(a.", "a[ab", "a**b", "a{1001}|a."),
        *("(?=a)..", "(a)\\1", "a.|" + "b" * MAX_LENGTH, r"a.|\pL{500}", "A."),
        "a.|((((x{9}){9}){9}){9}){9}",
    )),
    ({"accepts": ["a" * 256] * 64}, "a" * 5 + "a{150}a*"),  # too many steps
    ({"pointer": "/regex", "accepts": ["1"]}, '{"regex": 1}'),
    ({"pointer": "/regex", "rejects": ["1"]}, '{"regex": "\\ud800"}'),  # half a character
    ({"number": 0.1}, "0.1000000000000000055511151231257827021181583404541015625"),
    ({"number": 0, "tolerance": 1e308}, "1e400"),
    ({"number": 0.3, "tolerance": 0.1}, "0.4000001"),
    ({"number": 200, "relative_tolerance": 0.01}, "197.9"),
    *(({"pointer": ""}, text)
      for text in ("", "{", "NaN", "[1,]", "{}x", "\ufeff{}", "[" * 99_999)),
    ({"pointer": "", "number": 1}, "true"),
    ({"pointer": "", "equals": 1}, "true"),
    ({"pointer": "", "equals": True}, "1"),
    ({"pointer": "", "equals": "1"}, "1"),
    ({"pointer": "", "equals": [1]}, "[1, 2]"),
    ({"pointer": "", "equals": {"a": 1}}, '{"a": 1, "b": 2}'),
    ({"pointer": "", "number": 1}, "1e99999999999999999999999"),
    *(({"pointer": f"/a/{index}"}, '{"a": [0]}') for index in ("1", "-", "00", "-1", "9" * 900)),
    ({"pointer": "/a/b"}, '{"a": "b"}'),
    ({"any": [A, B]}, "c"),
    ({"all": [A, B]}, "b"),
    ({"not": A}, "a"),
    (nested(A, MAX_DEPTH), "a"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "text"), RIGHT)
def test_a_text_that_fits_scores_1(rule: Json, text: str) -> None:
    assert score(rule, text) == 1.0


@pytest.mark.parametrize(("rule", "text"), WRONG)
def test_any_other_text_scores_0(rule: Json, text: str) -> None:
    assert score(rule, text) == 0.0


def test_weights_make_other_scores() -> None:
    rule = {"sum": [{**A, "weight": 2}, {**B, "weight": -1}, {"match": "c"}]}
    texts = ["", "a", "b", "abc", "bc"]
    assert [score(rule, text) for text in texts] == [0.0, 2.0, -1.0, 2.0, 0.0]
    assert math.copysign(1, score({"sum": [{**A, "weight": -1}]}, "b")) == 1
    assert score({"not": rule}, "a") == -1.0
    assert score({"any": [rule, {"match": "b"}]}, "b") == 1.0
    assert score({"all": [rule, {"match": "b"}]}, "b") == -1.0


FAULTS: list[tuple[Any, str]] = [
    (3, "verify must be an object"),
    ("a", "verify must be an object"),
    ([], "verify has 0 rules and the request 1 prompts"),
    ([A, A], "verify has 2 rules and the request 1 prompts"),
    ([3], "verify[0] must be an object"),
    ({}, "number, accepts, rejects, any, all, not or sum"),
    ({"all": [A, {"any": [{}]}]}, "verify.all[1].any[0] must have match"),
    (
        {"all": [{"mtach": "a"}]},
        'verify.all[0].mtach is not a field; got {"all":[{"mtach":"a"}]}; did you mean \'match\'?',
    ),
    ({"x" * 9_999: 1}, "verify.xxx"),
    ({"zzz": 1}, "; it may have match, pointer, equals"),
    ({"any": []}, "verify.any must be a list of length >= 1"),
    ({"any": [A] * (MAX_RULES + 1)}, f"verify.any must be a list of length <= {MAX_RULES}"),
    ({"any": [A], "sum": [A]}, "verify.sum does not go with any in one rule"),
    ({"not": {"not": A, "equals": "b"}}, "verify.not.equals does not go with not in one rule"),
    ({"match": ""}, "verify.match must be a string of length >= 1"),
    ({"not": {"match": "("}}, "verify.not.match = '(' is not allowed: missing )"),
    ({"match": "a" * 1_001}, "verify.match must be a string of length <= 1000"),
    ({"match": "[a-z]{1000}" * 5}, f"of at most {MAX_PROGRAM} allowed"),
    ({"pointer": "a"}, 'verify.pointer must be empty or a JSON Pointer such as /answer/0; got "a"'),
    ({"pointer": "/~2"}, "verify.pointer must be"),
    ({"equals": 3}, "verify.equals must be a string where there is no pointer; got 3"),
    ({"match": "a", "equals": None}, "verify.equals must be a string"),
    ({"pointer": "", "equals": [[]] * MAX_NESTED}, "verify.equals must have at most"),
    ({"number": "about 5"}, "verify.number must be a number of at most 100 digits"),
    ({"number": True}, "verify.number must be a number"),
    ({"number": "NaN"}, "verify.number must be a number"),
    ({"number": 10**1_001}, "verify.number must be a number"),
    ({"number": int("7" * 101)}, "verify.number must be a number"),
    ({"number": 1, "equals": "1"}, "verify.equals does not go with number in one rule"),
    ({"number": 1, "tolerance": -1}, "verify.tolerance must be a number >= 0"),
    ({"match": "a", "relative_tolerance": 1}, "verify.relative_tolerance is allowed only with"),
    ({"tolerance": 1}, "verify.tolerance is allowed only with number"),
    ({"using": [1]}, "verify.using is allowed only with number"),
    ({"number": 1, "using": []}, "verify.using must be a list of length >= 1"),
    ({"number": 1, "using": [1] * (MAX_RULES + 1)}, f"must be a list of length <= {MAX_RULES}"),
    ({"number": 1, "using": [-1]}, "verify.using[0] must be an integer >= 0"),
    ({"number": 1, "using": [1, 10**10]}, "verify.using[1] must be an integer <= 1000000000"),
    ({"number": 1, "using": [1.5]}, "verify.using[0] must be an integer"),
    ({"accepts": [], "rejects": []}, "verify.accepts and verify.rejects must have 1 … 64"),
    ({"accepts": ["a", "b"], "rejects": ["c", "b"]}, "verify.rejects[1] is one of accepts too"),
    ({"any": [{"accepts": ["a"]}] * 9}, "verify has more than 8 rules with accepts or rejects"),
    ({"accepts": "a"}, 'verify.accepts must be a list or null; got {"accepts":"a"}'),
    ({"rejects": [1]}, "verify.rejects[0] must be a string"),
    ({"accepts": ["a" * 257]}, "verify.accepts[0] must be a string of length <= 256"),
    (
        {"rejects": ["a"] * (MAX_RULES + 1)},
        f"verify.rejects must be a list of length <= {MAX_RULES}",
    ),
    (
        {"accepts": ["a"], "rejects": ["b"] * MAX_RULES},
        "verify.accepts and verify.rejects must have 1 … 64 strings together, got 65",
    ),
    ({"accepts": ["a"], "equals": "a"}, "verify.equals does not go with accepts in one rule"),
    ({"rejects": ["a"], "number": 0}, "verify.number does not go with rejects in one rule"),
    ({"accepts": ["a"], "tolerance": 0}, "verify.tolerance does not go with accepts"),
    ({"accepts": ["a"], "any": [A]}, "verify.accepts does not go with any in one rule"),
    ({**A, "weight": 1}, "verify.weight is only for a rule in a list of sum"),
    ({"sum": [{"not": {**A, "weight": 1}}]}, "verify.sum[0].not.weight is only"),
    ({"sum": [{**A, "weight": 1e7}]}, "verify.sum[0].weight must be a number <= 1"),
    (nested(A, MAX_DEPTH + 1), f"{'.not' * MAX_DEPTH} is inside more than {MAX_DEPTH - 1}"),
    (nested(A, 300), f"{'.not' * MAX_DEPTH} is inside more than {MAX_DEPTH - 1}"),
    ({"any": [{"any": [A] * 64}] * 64}, f"verify has more than {MAX_CHECKED} rules"),
    (
        {"any": [{"any": [{"match": f"{i}{j}"} for j in range(33)]} for i in range(2)]},
        f"verify.any[1].any[31].match is one more than {MAX_PATTERNS} different ones",
    ),
    ({"any": [{"match": "[a-z]{950}" + "a" * i} for i in range(30)]}, "instructions"),
    ({"pointer": "/" + "a" * 1_000}, "verify.pointer must be a string of length <= 1000"),
]


@pytest.mark.parametrize(("rule", "reason"), FAULTS)
def test_a_rule_that_is_none_is_refused_with_its_place(rule: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        verifier(rule)
    assert reason in refused.value.message
    assert refused.value.param == "verify"
    assert len(refused.value.message) < 400


def test_a_rule_that_is_too_large_or_too_deep_is_refused() -> None:
    for rule in ('{"equals": "' + "a" * 2**20 + '"}', '{"not": ' * 2_000 + "3" + "}" * 2_000):
        with pytest.raises(InvalidRequest):
            parse_completion(b'{"prompt": "a", "verify": %b}' % rule.encode())


async def test_each_prompt_has_its_own_rule_or_all_have_one() -> None:
    samples = [(0, "a"), (1, "a"), (1, "b"), (0, "b")]
    assert await verifier([A, B], ["x", "y"]).scores(samples) == [1, 0, 1, 0]
    assert await verifier(A, ["x", "y"]).scores(samples) == [1, 1, 0, 0]
    with pytest.raises(InvalidRequest, match=r"verify\[1\].pointer"):
        verifier([A, {"pointer": "b"}], ["x", "y"])


@pytest.mark.parametrize(
    ("rule", "scores"),
    [
        ({"all": [{"pointer": "/a"}, {"match": "a"}]}, [0, 0, 1]),
        ({"any": [{"number": number} for number in range(60)]}, [0, 0, 0]),
        ({"any": [{"rejects": ["b"]}, {"match": "a"}]}, [1, 1, 1]),
    ],
)
async def test_long_texts_and_many_rules_are_checked_elsewhere(
    rule: Json, scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_here = list[bool]()
    one = verifier(rule)
    check = one._score

    def noted(sample: tuple[int, str]) -> float:
        is_here.append(threading.current_thread() is threading.main_thread())
        return check(sample)

    monkeypatch.setattr(one, "_score", noted)
    assert await one.scores([(0, "a"), (0, "a" * 50_000), (0, '{"a": 1}')]) == scores
    assert is_here == [False, False, True]


numbers = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.text("0123456789.,$-+eE ", max_size=8),
)


@given(numbers)
def test_a_number_is_read_exactly(text: str) -> None:
    value = as_number(text)
    try:
        expected = Fraction("".join(text.replace("$", "").replace(",", "").split()))
    except (ValueError, ZeroDivisionError):
        assert value is None
    else:
        assert value is not None and Fraction(value) == expected


@given(numbers, numbers, st.sampled_from(["#### ", "####", "so: ", "####\n"]))
def test_the_reward_of_gsm8k_is_a_rule(answer: str, text: str, mark: str) -> None:
    if as_number(answer) is None:
        return
    rule = {"match": ANSWER, "number": answer}
    for completion in (f"6 + 7\n{mark}{text}", f"{mark}{answer}", f"{mark}{text}{mark}{answer}"):
        assert score(rule, completion) == gsm8k_strict(completion, Question("?", f"#### {answer}"))


expressions = st.recursive(
    st.integers(0, 12).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        inner.map("({})".format),
        st.tuples(inner, st.sampled_from(["", " ", ")", "(", "+", "x"])).map("".join),
    ),
    max_leaves=6,
)


@given(expressions, st.integers(-5, 30))
def test_an_expression_has_the_value_of_countdown(text: str, other: int) -> None:
    tokens = re.findall(r"\d+|\S", text)
    used = [int(token) for token in tokens if token.isdigit()]
    try:
        value = evaluate(tokens)
    except (ValueError, ZeroDivisionError):
        assert score({"number": other, "using": used}, text) == 0
        return
    assert score({"number": other, "using": used}, text) == float(value == other)
    near = {"number": float(value), "tolerance": 1e-6, "using": used}
    assert score(near, text) == 1
    assert score({**near, "using": [*used, other % 7]}, text) == 0


@pytest.mark.parametrize(
    "pattern", [r"\pL{99}", "a{999}", "((a{9}){9}){9}", "(?:a{1,99}){1,99}", r"[^\PL]" * 30]
)
def test_a_pattern_that_takes_long_to_read_is_known(pattern: str) -> None:
    assert reading_work(pattern) > INLINE > 8 * reading_work(r"\d{4}-\d\d-\d\d")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: "Infinity" not in json.dumps(value))


@given(values, values, st.data())
def test_a_pointer_finds_each_part(value: Any, other: Any, data: st.DataObject) -> None:
    text, pointer, part = json.dumps(value), "", value
    while isinstance(part, dict | list) and part and data.draw(st.booleans()):
        key = data.draw(st.sampled_from([*part] if isinstance(part, dict) else [*range(len(part))]))
        part = part[key]
        pointer += "/" + str(key).replace("~", "~0").replace("/", "~1")
    assert score({"pointer": pointer, "equals": part}, text) == 1.0
    is_same = tagged(other) == tagged(part)
    assert score({"pointer": pointer, "equals": other}, text) == float(is_same)
    assert score({"pointer": pointer + "/none"}, text) == float(
        isinstance(part, dict) and "none" in part
    )


def tagged(value: Any) -> Any:
    """The value so that Python compares it as JSON does: true is not 1."""
    if isinstance(value, dict):
        return {name: tagged(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [*map(tagged, value)]
    return (isinstance(value, bool), value)


leaves = st.sampled_from([{"match": letter} for letter in "abc"])
rules = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"any": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"all": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"not": inner}),
    ),
    max_leaves=6,
)


def holds(rule: Json, text: str) -> bool:
    ((name, inner),) = rule.items()
    if name == "match":
        return inner in text
    if name == "not":
        return not holds(inner, text)
    return (any if name == "any" else all)(holds(part, text) for part in inner)


def depth(rule: Json) -> int:
    ((name, inner),) = rule.items()
    if name == "match":
        return 1
    return 1 + max(map(depth, [inner] if name == "not" else inner))


@given(rules.filter(lambda rule: depth(rule) <= MAX_DEPTH), st.text("abc", max_size=3))
def test_any_all_and_not_are_those_of_logic(rule: Json, text: str) -> None:
    assert score(rule, text) == float(holds(rule, text))


@given(st.text() | st.text('{}[]":,0123456789.eE-truefalsn \\u', max_size=20))
def test_any_text_may_be_read(text: str) -> None:
    read_json(text)
    assert score({"pointer": "/a", "number": 1}, text) in {0, 1}
    assert score({"number": 1}, text) in {0, 1}
