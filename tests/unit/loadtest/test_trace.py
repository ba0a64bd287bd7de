"""The three formats of traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from srm.errors import ConfigError
from srm.loadtest.trace import Arrival, read

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = f"{HEADER}\n"
MOONCAKE = '{"timestamp": 1, "input_length": 1, "output_length": 1, "type": "text"}'


@pytest.mark.parametrize(
    ("name", "lines", "expected"),
    [
        ("marked.jsonl", ['\ufeff{"timestamp": 3}'], [Arrival(3)]),
        ("UPPER.CSV", ["\ufeff" + HEADER, "1970-01-01 00:01:46.5,374,44", "", ""],
         [Arrival(106.5, 374, 44)]),
        ("own.jsonl",
         ['{"timestamp": 3}', '{"timestamp": 1.5, "prompt_tokens": 7, "output_tokens": 8, "n": 9}',
          "", '{"timestamp": 1.5, "hash_ids": [4]}'],
         [Arrival(1.5, 7, 8, 9), Arrival(1.5, blocks=(4,)), Arrival(3)]),
        ("mooncake.jsonl",
         ['{"timestamp": 27482, "input_length": 95, "output_length": 52, "hash_ids": [6, 7]}',
          '{"timestamp": 30535, "input_length": 72, "output_length": 0, "hash_ids": [6]}'],
         [Arrival(27.482, 95, 52, blocks=(6, 7)), Arrival(30.535, 72, 1, blocks=(6,))]),
        ("azure.csv",
         [HEADER, "1970-01-01 00:01:46.5000000,374,44", "1970-01-01 00:01:50.25,396,0"],
         [Arrival(106.5, 374, 44), Arrival(110.25, 396, 1)]),
        ("azure_by_hand.csv",
         ["TIMESTAMP, ContextTokens, GeneratedTokens", "1970-01-01 00:00:01, 374.0, 44 "],
         [Arrival(1, 374, 44)]),
        ("of_pandas.jsonl", ['{"timestamp": 1.0, "prompt_tokens": 5.0, "hash_ids": [4.0]}'],
         [Arrival(1, 5, blocks=(4,))]),
        ("azure_of_a_later_year.csv",
         [HEADER, "1970-01-01 02:00:00.5+02:00,2162,5", "1970-01-01 00:00:00+00:00,9,6"],
         [Arrival(0, 9, 6), Arrival(0.5, 2162, 5)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_formats(
    tmp_path: Path, name: str, lines: list[str], expected: list[Arrival], end: str
) -> None:
    (tmp_path / name).write_text(end.join(lines), newline="")
    assert read(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 1}\n{"timestamp": 1, "prompt_token": 5}',
         "line 2: prompt_token is not a field"),
        ("a.jsonl", '{"timestamp": 1}\n{"timestamp": "1"}',
         "line 2: timestamp must be a number; got a string"),
        ("a.jsonl", '{"timestamp": 1, "n": 0}', "line 1: n must be .*; allowed is timestamp"),
        ("a.jsonl", '{"prompt_tokens": 3}', "line 1: timestamp is missing"),
        ("a.jsonl", "seven", "line 1: JSON is malformed"),
        ("a.jsonl", "", "no line; allowed is timestamp"),
        ("a.jsonl", MOONCAKE, "line 1: type is not a field"),
        ("a.csv", "", f"line 1: got .*allowed is a header {HEADER}"),
        ("a.csv", "time,tokens\n1,2\n", "line 1: got"),
        ("a.csv", f"{AZURE}2023-11-16,1\n", r"line 2: got 2 fields: \['2023-11-16', '1'\]"),
        ("a.csv", f"{AZURE}noon,1,2\n", "line 2: .*noon"),
        ("a.csv", f"{AZURE}2023-11-16,-1,2\n",
         "line 2: a length must be a whole number from 0 .* got '-1'"),
        ("a.csv", f"{AZURE}2023-11-16,1.5,2\n", "line 2: a length must .* got '1.5'"),
        ("a.csv", f"{AZURE}2023-11-16,{2**31},2\n", "line 2: a length must .* to 2147483647; got"),
        ("a.csv", f"{AZURE}2023-11-16,{'9' * 200_000},2\n",
         "line 2: field larger than field limit"),
        ("a.csv", f"{AZURE}2023-11-16,{'9' * 100_000},2\n", "line 2: .{,210}; allowed is a header"),
        ("a.csv", AZURE, "line 2: no line"),
        ("a.jsonl", None, "cannot read"),
    ],
)  # fmt: skip
def test_broken_traces_are_named_by_file_and_line(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)(?=.*{name}).*{message}"):
        read(tmp_path / name)
