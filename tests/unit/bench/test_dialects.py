"""`srm bench dialects` notices samples that are not the same, whatever a reply has of them."""

from __future__ import annotations

from typing import Any

import pytest

from research.bench.server.dialects import DIALECTS, check_same, digests
from srm.errors import ConfigError

REPLIES: dict[str, Any] = {
    "/v1/completions": {"choices": [{"index": i, "text": t} for i, t in enumerate("ab")]},
    "/v1/chat/completions": {
        "choices": [
            {"index": i, "message": {"content": t}, "token_ids": None} for i, t in enumerate("ab")
        ]
    },
    "/inference/v1/generate": {"choices": [{"index": i, "token_ids": [i]} for i in (1, 0)]},
    "/generate": [{"index": i, "text": t, "output_ids": [i]} for i, t in enumerate("ab")],
}
OTHERS = {
    "/v1/completions": {"choices": [{"index": i, "text": t} for i, t in enumerate("ba")]},
    "/v1/chat/completions": {"choices": [{"index": 0, "message": {"content": "a"}}]},
    "/inference/v1/generate": {"choices": [{"index": i, "token_ids": [7]} for i in (1, 0)]},
}


@pytest.mark.parametrize("other", [None, *OTHERS])
def test_other_samples_of_as_many_tokens_are_noticed(other: str | None) -> None:
    replies = REPLIES | ({other: OTHERS[other]} if other else {})
    assert replies.keys() == DIALECTS.keys()
    asked = {route: [{"tokens": 2, **digests(reply)}] for route, reply in replies.items()}
    assert [*asked["/generate"][0]] == ["tokens", "texts", "ids"]
    assert [len(requests[0]) for requests in asked.values()] == [2, 2, 2, 3]
    if other is None:
        check_same(asked)
        return
    with pytest.raises(ConfigError, match=f"{other} has other (texts|ids) than /generate in turn"):
        check_same(asked)


def test_a_single_sample_of_generate_is_no_list() -> None:
    single = {"text": "a", "output_ids": [0], "meta_info": {"completion_tokens": 1}}
    assert DIALECTS["/generate"][1](single) == 1
    assert digests(single) == digests([{"index": 0, **single}])
