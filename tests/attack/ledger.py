"""Batches that a server has accepted, and whether each line was answered once, and as always."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from srm.server.storage.store import Store

ENDED = {"completed", "failed", "expired", "cancelled"}
NOT_RUN = {"batch_expired", "batch_cancelled"}
"""Codes of lines that were given up together with their batch."""
KINDS = 60


def line_body(kind: int) -> dict[str, Any]:
    """One of the bodies of all lines; every seventh is refused."""
    body = {
        "prompt": f"the cat {kind}",
        "max_tokens": 4 + kind % 90,
        "n": 1 + kind % 3,
        "seed": kind,
    }
    if kind == 3:
        body |= {"n": 100, "ignore_eos": True}
    return body | ({"top_p": 2} if kind % 7 == 6 else {})


@dataclass
class Accepted:
    """A batch: its id, that of its file, and the kind of each line by custom_id."""

    id: str
    file_id: str
    kinds: dict[str, int]
    is_cancelled: bool = False
    is_damaged: bool = False
    """A bit was flipped in what is kept of it."""


class Ledger:
    """All batches that were accepted and not yet found right."""

    def __init__(self) -> None:
        self.open: list[Accepted] = []
        self.accepted = self.answered = 0
        """Lines, so far."""
        self._answers: dict[int, Any] = {}

    async def submit(self, http: httpx.AsyncClient, rng: random.Random, most: int) -> bool:
        """Upload a file and make a batch of it; whether the server took it."""
        kinds = {f"{number}": rng.randrange(KINDS) for number in range(rng.randint(1, most))}
        lines = (
            {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": line_body(kind)}
            for id, kind in kinds.items()
        )
        content = "".join(json.dumps(line) + "\n" for line in lines)
        files = {"file": ("a.jsonl", content.encode())}
        file = await http.post("/v1/files", data={"purpose": "batch"}, files=files)
        if file.status_code != 200:
            return False
        given = {"endpoint": "/v1/completions", "completion_window": "30d"}
        body = {**given, "input_file_id": file.json()["id"], "weight": rng.choice((0.001, 1, 1000))}
        batch = await http.post("/v1/batches", json=body)
        if batch.status_code != 200:
            return False
        self.open.append(Accepted(batch.json()["id"], file.json()["id"], kinds))
        self.accepted += len(kinds)
        return True

    async def cancel(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        """Cancel any of them, which may be at its end already."""
        if self.open:
            one = rng.choice(self.open)
            one.is_cancelled = True  # whatever becomes of the reply
            await http.post(f"/v1/batches/{one.id}/cancel")

    def note_damage(self, data: Path, path: Path) -> None:
        """A bit of this file was flipped: nothing certain is known of the batches it tells of."""
        store = Store(data)
        for accepted in self.open:
            batch = store.get_batch(accepted.id)
            ids = [accepted.id, accepted.file_id]
            if batch is not None:
                ids += [id for id in (batch.output_file_id, batch.error_file_id) if id]
            is_database = path.name.startswith("store")
            accepted.is_damaged |= is_database or any(path.name.startswith(id) for id in ids)
        store.close()

    async def settle(self, http: httpx.AsyncClient, within_s: float) -> list[str]:
        """Wait for the ends of all, look at each, delete what they made; what is wrong.

        A batch that has not got on for `within_s` is stuck.
        """
        faults = []
        for accepted in self.open:
            fault = await self._settle_one(http, accepted, within_s)
            faults += [f"batch {accepted.id}: {fault}"] if fault else []
        self.open.clear()
        return faults

    async def _settle_one(self, http: httpx.AsyncClient, one: Accepted, within_s: float) -> str:
        reported, same = "", 0
        while same < within_s / 0.25:
            reply = await http.get(f"/v1/batches/{one.id}")
            if reply.status_code == 404 and one.is_damaged:
                return ""
            if reply.status_code not in {200, 503}:
                return f"asked for it, got {reply.status_code} {reply.text[:200]}"
            if reply.status_code == 200 and reply.json()["status"] in ENDED:
                break
            same = same + 1 if reply.text == reported else 0
            reported = reply.text
            await asyncio.sleep(0.25)
        else:
            return f"does not get on, for {within_s:g} s: {reported[:600]}"
        batch = reply.json()
        fault = await self._fault_of(http, one, batch)
        for id in filter(None, (one.file_id, batch["output_file_id"], batch["error_file_id"])):
            await http.delete(f"/v1/files/{id}")
        return "" if one.is_damaged else fault

    async def _fault_of(self, http: httpx.AsyncClient, one: Accepted, batch: dict[str, Any]) -> str:
        results: list[dict[str, Any]] = []
        for id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            reply = await http.get(f"/v1/files/{id}/content")
            if reply.status_code != 200 and not one.is_damaged:
                return f"its file {id}: {reply.status_code} {reply.text[:200]}"
            if one.is_damaged:
                return ""
            results += [json.loads(line) for line in reply.content.split(b"\n") if line]
        ids = sorted(result["custom_id"] for result in results)
        if batch["status"] == "cancelled" and batch["in_progress_at"] is None:
            return ""  # before its lines were read
        if ids != sorted(one.kinds):
            missing, extra = len(set(one.kinds) - set(ids)), len(ids) - len(set(ids))
            return f"{batch['status']}: {missing} lines have no answer, {extra} have two: {batch}"
        for result in results:
            if fault := self._fault_of_line(one, batch["status"], result):
                return fault
        self.answered += len(ids)
        return ""

    def _fault_of_line(self, one: Accepted, status: str, result: dict[str, Any]) -> str:
        kind = one.kinds[result["custom_id"]]
        code = (result["error"] or {}).get("code")
        if code in NOT_RUN:
            is_expected = status in {"cancelled", "expired"}
            return "" if is_expected else f"{status}, and a line says {code}"
        if code is not None:
            return f"line of kind {kind}: {result['error']}"
        body = result["response"]["body"]
        answer = body.get("choices", body.get("error"))
        if self._answers.setdefault(kind, answer) != answer:
            return f"line of kind {kind} was answered in two ways: {answer} {self._answers[kind]}"
        return ""
