"""States of the Python API: what goes on from one is what the whole prompt gives."""

from __future__ import annotations

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
