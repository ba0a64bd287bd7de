"""Lines of `srm score`."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from srm.engine.client.client import EngineClient
from srm.errors import EngineUnavailable, InvalidRequest, SRMError
from srm.server.commands import score as score_command
from srm.server.commands import score_lines
from srm.server.commands.score import ScoreFile
from srm.server.commands.score_lines import LineScore, Scoring
from srm.server.text.text import Text


def test_a_line_without_end_is_not_read_whole(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_lines, "MAX_LINE_BYTES", 20)
    file = BytesIO(b'{"prompt": [5, 6]}\n{"prompt": [' + b"5, " * 100 + b"6]}\n{}\n" + b"x" * 99)
    first, second, third, fourth = (score_lines.next_line(file) for _ in range(4))
    assert score_lines.parse(first, 1, text).num_prompt_tokens == 2
    for line in (second, fourth):
        with pytest.raises(InvalidRequest, match="at most 20 bytes"):
            score_lines.parse(line, 2, text)
    assert len(second) == 21 and third == b"{}\n" and not score_lines.next_line(file)


@pytest.mark.parametrize("error", [KeyError("a bug"), EngineUnavailable("it died")])
async def test_a_bug_ends_all_and_keeps_what_is_done(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def score(
        _client: EngineClient, _scoring: Scoring, number: int, _text: Text
    ) -> LineScore:
        if number < 3:
            return LineScore(number, ["a"], [5], [None], 1, 0.0, False)
        raise error

    monkeypatch.setattr("srm.server.commands.score.score", score)
    lines, output = BytesIO(b'{"prompt": [5, 6]}\n' * 9), tmp_path / "out.jsonl"
    with output.open("wb") as sink:
        file = ScoreFile(lines, sink, None, text, window=1)
        with pytest.raises(type(error)):
            await file.score(EngineClient("tcp://127.0.0.1:1"))
        assert output.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("id", ["a", 7, 7.0])
def test_an_id_of_a_column_of_pandas_is_taken(text: Text, id: str | int | float) -> None:
    """A column of numbers with a gap has 7.0, which was refused."""
    data = b'{"prompt": [1, 2], "id": %s}' % json.dumps(id).encode()
    assert score_lines.parse(data, 1, text).id == id


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill(_engine: object, _module: str, work: Any) -> None:
        work.__self__.sink.write(b"a result")

    monkeypatch.setattr(score_command, "with_engine", fill)
    (tmp_path / "in.jsonl").write_text("{}")
    with pytest.raises(SRMError, match=r"^input or output: No space left on device"):
        score_command.main([str(tmp_path / "in.jsonl"), "-o", "/dev/full"])
