"""States of the Python API: what goes on from one is what the whole prompt gives."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srm.engine.messages import SamplingParams
from srm.engine.python.state import State
from srm.engine.state_file import StateContent, to_file
from srm.errors import ContextTooLong, InvalidRequest
from tests.unit.engine.python.test_offline import make, tokens

PARAMS = SamplingParams(n=3, max_tokens=6, seed=2)
WHOLE, HEAD, REST = "the cat sat on the mat", "the cat", " sat on the mat"


def test_what_goes_on_from_a_state_is_what_the_whole_gives(text_model: Path) -> None:
    llm, steps = make(text_model)
    with llm:
        (whole,) = llm.generate([WHOLE], PARAMS)
        state = llm.state(HEAD)
        (part,) = llm.generate([REST], PARAMS, state=state)
        assert part.prompt_token_ids.tolist() == whole.prompt_token_ids.tolist()
        assert tokens(part.completions) == tokens(whole.completions)
        end = llm.state(REST, state=state)
        assert end.token_ids.tolist() == whole.prompt_token_ids.tolist()
        (again,) = llm.generate([""], PARAMS, state=end)
        assert tokens(again.completions) == tokens(whole.completions)
        assert end.values.shape == (steps.model.state_width,) and not end.values.flags.writeable
        one = llm.state("")  # the token that begins a text
        assert (len(one.token_ids), len(one.values)) == (1, 0)
        assert tokens(llm.generate([HEAD], PARAMS, state=one)[0].completions) == tokens(
            llm.generate([HEAD], PARAMS)[0].completions
        )


def test_a_file_of_a_state_is_that_of_a_server(text_model: Path, tmp_path: Path) -> None:
    with make(text_model)[0] as llm:
        for prompt in (HEAD, ""):
            state = llm.state(prompt)
            state.save(tmp_path / "state")
            own = StateContent(state.token_ids.tobytes(), state.values.tobytes())
            file = to_file(own, state.fingerprint, state.arithmetic)
            assert (tmp_path / "state").read_bytes() == file
            again = State.load(str(tmp_path / "state"))
            assert not again.values.flags.writeable
            (same,), (expected,) = (
                llm.generate([REST], PARAMS, state=given) for given in (again, state)
            )
            assert tokens(same.completions) == tokens(expected.completions)
    (tmp_path / "state").write_bytes(file[:-1])
    with pytest.raises(InvalidRequest, match="it is no srm-state-1 file, or is damaged"):
        State.load(tmp_path / "state")


def test_a_changed_state_changes_no_other_prompt(text_model: Path) -> None:
    llm, _ = make(text_model)
    with llm:
        (whole,) = llm.generate([WHOLE], PARAMS)
        state = llm.state(HEAD)
        changed = replace(state, values=state.values + 9)
        (other,) = llm.generate([REST], PARAMS, state=changed)
        assert tokens(other.completions) != tokens(whole.completions)
        assert tokens(llm.generate([WHOLE], PARAMS)[0].completions) == tokens(whole.completions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "x"}, "state was made by weights x in cpu float32, and this engine has"),
        ({"arithmetic": "gpu"}, "state was made by weights .* in gpu, and this engine has"),
        ({"values": np.zeros(3, np.float32)}, "state must have [0-9]+ bytes, got 12"),
        ({"values": np.zeros(0, np.float32)}, "state must have [0-9]+ bytes, got 0"),
    ],
)
def test_a_wrong_state_is_refused(text_model: Path, changes: Any, message: str) -> None:
    with make(text_model)[0] as llm:
        state = replace(llm.state(HEAD), **changes)
        with pytest.raises(InvalidRequest, match=message):
            llm.generate([REST], PARAMS, state=state)
        with pytest.raises(ContextTooLong):
            llm.state([3] * 200)
        assert llm.generate([HEAD], PARAMS)


FINITE, IDS = "values must be a row of finite float32, got ", "token_ids must be a row of integers"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": [0.5, float("nan")]}, f"{FINITE}[0.5, nan]"),
        ({"values": [1e39]}, f"{FINITE}[1e+39]"),
        ({"values": np.zeros((1, 8), np.float32)}, FINITE),
        ({"values": ["a"]}, f"{FINITE}['a']"),
        ({"token_ids": []}, f"{IDS} 0 … 2**31 - 1, at least one; got []"),
        ({"token_ids": np.array([2**32 + 3])}, IDS),
        ({"token_ids": [-1]}, IDS),
        ({"token_ids": [2.0, 3.0]}, f"{IDS} 0 … 2**31 - 1, at least one; got [2.0, 3.0]"),
        ({"token_ids": [[1, 2]]}, IDS),
    ],
)
def test_no_state_is_made_of_what_cannot_be_one(changes: Any, message: str) -> None:
    fields: dict[str, Any] = {"token_ids": [1, 2], "values": [0.5, 2]}
    with pytest.raises(InvalidRequest) as refused:
        State(**{**fields, **changes}, fingerprint="", arithmetic="")
    assert refused.value.message.startswith(message) and [refused.value.param] == [*changes]


def test_a_file_of_a_state_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    own = StateContent(np.array([1, 2], "<i4").tobytes(), np.array([np.inf], "<f4").tobytes())
    (tmp_path / "state").write_bytes(to_file(own, "", ""))
    with pytest.raises(InvalidRequest, match="values must be a row of finite float32"):
        State.load(tmp_path / "state")


def test_a_file_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"token_ids": [1, 2], "values": [0.5], "arithmetic": ""}
    State(**fields, fingerprint="before").save(path := tmp_path / "state")

    def write_half(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space left"):
        State(**fields, fingerprint="after").save(path)
    assert State.load(path).fingerprint == "before" and [*tmp_path.iterdir()] == [path]


def test_other_types_are_refused_and_lists_count_as_arrays(text_model: Path) -> None:
    with make(text_model)[0] as llm:
        wrong: Any = {"state": "abc", "until": len}
        for name, value in wrong.items():
            with pytest.raises(InvalidRequest, match=f"^{name} must be an? {name.title()}, got"):
                llm.generate([REST], PARAMS, **{name: value})
        state: Any = llm.state(HEAD)
        listed = replace(state, token_ids=state.token_ids.tolist(), values=state.values.tolist())
        (same,), (expected,) = (
            llm.generate([REST], PARAMS, state=given) for given in (listed, state)
        )
        assert tokens(same.completions) == tokens(expected.completions)
