"""The three formats of traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from loadtest.trace import Arrival, read


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_own_lines(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "trace.jsonl",
        '{"timestamp": 3}\n{"timestamp": 1.5, "prompt_tokens": 7, "output_tokens": 8, "n": 9}\n\n'
        '{"timestamp": 1.5, "hash_ids": [4]}\n',
    )
    assert read(file) == [Arrival(1.5, 7, 8, 9), Arrival(1.5, blocks=(4,)), Arrival(3)]


def test_lines_as_mooncake_wrote_them(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "conversation_trace.jsonl",
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 0, "hash_ids": [46, 2366]}\n',
    )
    assert read(file) == [
        Arrival(27.482, 6955, 52, blocks=(46, 47)),
        Arrival(30.535, 6472, 1, blocks=(46, 2366)),
    ]


def test_tables_as_azure_wrote_them(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "AzureLLMInferenceTrace_conv.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n",
    )
    first, second = read(file)
    assert (first.prompt_tokens, first.output_tokens, first.n) == (374, 44, None)
    assert (second.prompt_tokens, second.output_tokens, second.blocks) == (396, 109, ())
    assert second.timestamp - first.timestamp == pytest.approx(4.314579, abs=1e-6)


def test_tables_of_a_later_year_have_a_time_zone(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00+00:00,2399,6\n"
    )
    first, second = read(write(tmp_path, "week.csv", text))
    assert first.prompt_tokens == 2399
    assert second.timestamp - first.timestamp == pytest.approx(0.00993, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"timestamp": 1}\n{"timestamp": 1, "prompt_token": 5}', "line 2: .*unknown"),
        ("a.jsonl", '{"timestamp": 1}\n{"timestamp": "1"}', "line 2: Expected `float`"),
        ("a.jsonl", '{"timestamp": 1, "n": 0}', "line 1: .*n`; allowed is timestamp"),
        ("a.jsonl", '{"prompt_tokens": 3}', "line 1: .*required field `timestamp`"),
        ("a.jsonl", "seven", "line 1: JSON is malformed"),
        ("a.jsonl", "", "no line; allowed is timestamp"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "type": "text"}',
            "line 1: .*unknown field `type`",
        ),
        ("a.csv", "", "line 1: got .*allowed is a header TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a.csv", "time,tokens\n1,2\n", "line 1: got"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", "line 2: "),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2: .*noon"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,-1,2\n",
            "line 2: .*below 0",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "line 2: no line"),
    ],
)
def test_what_is_no_trace_is_told_by_file_and_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        read(file)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "trace.jsonl")
