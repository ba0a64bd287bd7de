"""Lines of `srm score`."""

from __future__ import annotations

from io import BytesIO

import pytest

from engine.errors import InvalidRequest
from server.commands import score_lines
from server.text.text import Text


def test_a_line_without_end_is_not_read_whole(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_lines, "MAX_LINE_BYTES", 20)
    file = BytesIO(b'{"prompt": [5, 6]}\n{"prompt": [' + b"5, " * 100 + b"6]}\n{}\n" + b"x" * 99)
    first, second, third, fourth = (score_lines.next_line(file) for _ in range(4))
    assert score_lines.parse(first, 1, text).num_prompt_tokens == 2
    for line in (second, fourth):
        with pytest.raises(InvalidRequest, match="at most 20 bytes"):
            score_lines.parse(line, 2, text)
    assert len(second) == 21 and third == b"{}\n" and not score_lines.next_line(file)
