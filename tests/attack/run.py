"""`make attack`: a server is asked everything, killed, filled up and damaged for half an hour.

Own server of two engines, on loopback alone. Rounds: some seconds of random requests of every route
with a trouble of `TROUBLES` beside them; then quiet, in which everything must be as it should; then
a restart, before which one bit of what is stored is flipped. Exit code 1 if

* a process gave up, or a traceback is in the log,
* a 5xx was answered that is neither 503 with Retry-After nor 507 of a full disk, or nothing for
  five minutes,
* a slot or a waiting sequence is left over, or an accepted line of a batch has not one answer,
* a process holds more than `MOST_BYTES` when all is quiet,
* one key learns of another's prompts or request ids.

Requests and damage are drawn from `seed`; what meets what is up to the machine. Needs root, for the
small disks.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import psutil

from srm.loadtest.records import RECORDS, new_record, settings_of, write_record
from srm.settings import load
from tests.attack.damage import Clock, Disk, flip_bit
from tests.attack.hostile import hostile_folders
from tests.attack.ledger import Ledger
from tests.attack.requests import GARBAGE, KEYS, Call, random_call
from tests.attack.troubles import Troubles
from tests.chaos.jobs import KilledServer, table
from tests.kit.serving import MAX_WAITING, NUM_SLOTS, free_port, write_text_model

TROUBLES: dict[str, tuple[str, ...]] = {
    "none": (),
    "kills": ("kill",),
    "leavers and large bodies": ("leave", "send_large"),
    "full disk": ("fill_disk",),
    "frozen processes": ("freeze",),
    "full temp folder": ("fill_temp",),
    "other weights": ("change_weights",),
    "clock": ("turn_clock", "leave"),
    "all": (
        *("kill", "leave", "send_large", "fill_disk", "freeze", "change_weights"),
        "turn_clock",
    ),
}
"""Methods of `Troubles` that a round has beside its requests, by the round's name."""
SERVER_FLAGS = (
    *(f"--num-slots={NUM_SLOTS}", f"--max-step-rows={NUM_SLOTS}", f"--max-waiting={MAX_WAITING}"),
    *("--engines=2", "--api-processes=2", "--drain-s=2", "--snapshot-interval-s=5"),
    *("--step-timeout-s=10", "--stall-s=1000"),
)
ANSWER_S = 300.0
"""How long a reply may take where hundreds of long ones are ahead of it: longer is a hang."""
SETTLE_S = 60.0
"""How long a batch may show no progress when all is quiet."""
BATCH_LINES = 150
MOST_BYTES = 1_500_000_000
"""Memory of its own that a process may hold in quiet."""
_FAULTY_LOG = re.compile(r"Traceback|giving up|Task exception was never|was never awaited")


class AttackConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `make attack`."""

    minutes: float = 30.0
    """How long new rounds are begun."""
    round_s: float = 20.0
    """Seconds of requests in a round."""
    clients: int = 16
    """Requests under way at once."""
    disk_mib: int = 320
    """Size of the disk for what the server stores, of which uploads leave 256 MiB."""
    temp_mib: int = 32
    """Size of the disk for temporary files."""
    seed: int = 0
    """Seed from which requests and damage are drawn."""
    output: Path = RECORDS
    """Folder for the record."""


class Attack:
    """One run: the server, what was done to it, and what it did wrong."""

    def __init__(self, config: AttackConfig, folder: Path, disk: Disk, temp: Disk) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.data = disk.folder / "data"
        clock = Clock(folder / "clock")
        self.statuses: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ledger = Ledger()
        self.memory: Counter[str] = Counter()  # most bytes of a process in quiet, by its module
        model = folder / "tiny"
        write_text_model(model)
        (model / "seed").write_text("0")
        same, bad = folder / "same", folder / "bad"
        shutil.copytree(model, same)
        shutil.copytree(model, bad)
        (bad / "config.json").write_bytes(b'{"d_model": "\xff"}')
        self.folders = [str(same), str(bad), str(folder / "none"), "\x00", "x" * 4096]
        self.folders += hostile_folders(model, folder)
        self.port, self.admin_port = free_port(), free_port()
        self.log = folder / "log"
        self.server = KilledServer(
            model,
            self.data,
            *SERVER_FLAGS,
            *(f"--port={self.port}", f"--admin-port={self.admin_port}", "--pause-lease-s=0.2"),
            f"--weights-dir={folder}",
            log=self.log,
            environment={
                **os.environ,
                **clock.environment,
                "TMPDIR": str(temp.folder),
                "SRM_API_KEYS": ",".join(f"{name} {key}" for name, key in KEYS.items()),
            },
        )
        self._log_at = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.clients)
        url = f"http://127.0.0.1:{self.admin_port}"  # which has all routes
        self.http = httpx.AsyncClient(
            base_url=url, timeout=ANSWER_S, limits=limits, headers=header_of("admin")
        )
        self.troubles = Troubles(
            *(self.server, self.rng, disk, temp, clock, self.port, self.http),
            *(str(same), self.fault),
        )
        self.done = self.troubles.done

    def fault(self, text: str) -> None:
        """Note what the server did wrong."""
        self.faults[text] += 1
        sys.stderr.write(f"FAULT {text}\n")

    async def run(self) -> None:
        """Rounds until the time is over."""
        until = time.monotonic() + self.config.minutes * 60
        async with self.http:
            await self.until_ready()
            while time.monotonic() < until:
                trouble = list(TROUBLES)[self.done["rounds"] % len(TROUBLES)]
                await self.round(trouble)
                self.done["rounds"] += 1
                sys.stderr.write(
                    f"round {self.done['rounds']} ({trouble}): {self.done.total():,} deeds, "
                    f"{self.statuses.total():,} replies, {self.ledger.answered:,} lines answered, "
                    f"{self.faults.total()} faults\n"
                )
                await self.restart()

    async def round(self, trouble: str) -> None:
        """Requests and one kind of trouble, then quiet and a look at everything."""
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.config.clients):
                group.create_task(self.ask(done, random.Random(self.rng.random())))
            group.create_task(self.make_batches(done, random.Random(self.rng.random())))
            for name in TROUBLES[trouble]:
                group.create_task(getattr(self.troubles, name)(done))
            await asyncio.sleep(self.config.round_s)
            done.set()
        await self.until_ready()
        for fault in await self.ledger.settle(self.http, SETTLE_S):
            self.fault(fault)
        await self.check_idle()
        await self.check_tenants()
        self.check_memory()
        self.read_log()

    async def ask(self, done: asyncio.Event, rng: random.Random) -> None:
        """Send one request after the other; leave some before they are answered."""
        while not done.is_set():
            if rng.random() < 0.1:
                await self.send_garbage(rng.choice(GARBAGE) + rng.randbytes(rng.randint(0, 20)))
                continue
            call = random_call(rng, self.folders)
            patience = rng.expovariate(5) if rng.random() < 0.2 else None
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.send(call)

    async def send(self, call: Call) -> None:
        headers = {"content-type": call.kind} if call.body else {}
        headers |= header_of(self.rng.choice([*KEYS]))
        try:
            reply = await self.http.request(
                call.method, call.path, content=call.body or None, headers=headers
            )
        except httpx.TimeoutException:
            what = f"{call.method} {call.path[:80]} {call.body[:300]!r}"
            self.fault(f"no answer in {ANSWER_S:g} s: {what}")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            self.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.05)
        else:
            self.note(f"{call.method} {call.route}", reply, call.body)

    def note(self, route: str, reply: httpx.Response, body: bytes) -> None:
        """Count a reply; a 5xx must say when to come back, or that the disk is full."""
        status = reply.status_code
        self.statuses[f"{route} {status}"] += 1
        is_busy = status == 503 and "retry-after" in reply.headers
        if status >= 500 and status != 507 and not is_busy:
            self.fault(f"{route} {status} {reply.text[:200]} to {body[:300]!r}")

    async def send_garbage(self, content: bytes) -> None:
        self.done["garbage"] += 1
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(content)
                async with asyncio.timeout(0.5):
                    line = await reader.readline()
                if re.match(rb"HTTP/1.[01] 5(?!03)", line):
                    self.fault(f"{line!r} to {content[:200]!r}")
            finally:
                writer.close()

    async def make_batches(self, done: asyncio.Event, rng: random.Random) -> None:
        while not done.is_set():
            with suppress(httpx.TransportError):
                self.done["batches"] += await self.ledger.submit(self.http, rng, BATCH_LINES)
                if rng.random() < 0.3:
                    self.done["cancels"] += 1
                    await self.ledger.cancel(self.http, rng)
            await asyncio.sleep(rng.expovariate(0.5))

    async def restart(self) -> None:
        """Stop it with a batch under way, flip a bit, start it."""
        with suppress(httpx.TransportError):
            await self.ledger.submit(self.http, self.rng, 3 * BATCH_LINES)
        await asyncio.sleep(self.rng.random())
        if self.rng.random() < 0.5:
            self.done["kills of supervisor"] += 1
            self.server.process.kill()
        else:
            self.done["stops"] += 1
            self.server.process.terminate()
        code = await asyncio.to_thread(self.server.process.wait, 60)
        if code not in {0, -9}:
            self.fault(f"srm serve left with exit code {code}")
        await asyncio.sleep(0.5)  # its children go when it has gone
        path = flip_bit(self.data, self.rng)
        if path is not None:
            self.done[f"bits flipped in {re.sub('[0-9a-f]{32}', 'ID', path.name)}"] += 1
            await asyncio.to_thread(self.ledger.note_damage, self.data, path)
        self.server.start()
        await self.until_ready()

    async def until_ready(self) -> None:
        """Completions must be served again soon, whatever was done before."""
        for _ in range(240):
            if self.server.process.poll() is not None:
                self.fault(f"srm serve ended with exit code {self.server.process.returncode}")
                self.read_log()
                self.server.start()
            with suppress(httpx.TransportError):
                if (await self.http.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.25)
        raise SystemExit(f"the server is not ready after a minute:\n{self.log.read_text()[-4000:]}")

    async def check_idle(self) -> None:
        """No slot and no row may be held when nobody asks for anything."""
        held: dict[str, float] = {}
        for _ in range(120):
            text = (await self.http.get("/metrics")).text
            held = {name: _metric(text, name) for name in LEFT_OVER}
            slots, free = (_metric(text, f"srm_engine_{name}_slots") for name in ("num", "free"))
            held["slots"] = slots - free
            if not any(held.values()):
                return
            await asyncio.sleep(0.25)
        self.fault(f"left over after half a minute of quiet: {held}")

    async def check_tenants(self) -> None:
        """A key learns neither that another has asked the same, nor of its request ids."""
        secret = "".join(self.rng.choices("abcdefghij", k=40))
        body = {"prompt": secret, "max_tokens": 1, "request_id": "the-same"}
        for name in KEYS:
            reply = await self.http.post("/v1/completions", json=body, headers=header_of(name))
            details = reply.json().get("usage", {}).get("prompt_tokens_details") or {}
            # The first letters may be those of a prompt of its own.
            if reply.status_code != 200 or details.get("cached_tokens", 0) > len(secret) // 2:
                self.fault(f"key {name} learnt of another's prompt: {reply.text[:300]}")

    def check_memory(self) -> None:
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                held, command = process.memory_full_info().uss, process.cmdline()
                if len(command) < 4:  # it is ending
                    continue
                kind = " ".join([command[3], *(part for part in command[4:5] if part.isalpha())])
                self.memory[kind] = max(held, self.memory[kind])
                if held > MOST_BYTES:
                    self.fault(f"{held:,} bytes held by {' '.join(command)[:200]}")

    def read_log(self) -> None:
        """Fail if the new lines of the log tell of a bug."""
        with self.log.open("rb") as file:
            file.seek(self._log_at)
            new = file.read().decode(errors="replace")
            self._log_at = file.tell()
        for match in _FAULTY_LOG.finditer(new):
            self.fault(f"log: {new[match.start() : match.start() + 3000]}")


LEFT_OVER = (
    "srm_engine_running_sequences",
    "srm_engine_waiting_sequences",
    "srm_engine_parked_sequences",
    "srm_batch_lines_in_flight",
)


def header_of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[key]}"}


def _metric(text: str, name: str) -> float:
    matches = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, matches))


def markdown(attack: Attack) -> str:
    """The report: the damage done, the statuses answered, the faults found."""
    replies: Counter[str] = Counter()
    for name, count in attack.statuses.items():
        replies[f"replies: {name.rsplit(' ', 1)[-1]}"] += count
    rows = dict(sorted(attack.done.items())) | dict(sorted(replies.items()))
    rows |= {f"most MiB of {kind}": held >> 20 for kind, held in attack.memory.items()}
    rows |= {"lines accepted": attack.ledger.accepted, "lines checked": attack.ledger.answered}
    rows |= {"**faults**": attack.faults.total()}
    return table({name: f"{count:,}" for name, count in rows.items()})


def main(argv: list[str]) -> int:
    """Attack, write a record, print its table; 1 if there was a fault."""
    config = load(AttackConfig, argv, prog="python -m tests.attack.run")
    with tempfile.TemporaryDirectory(prefix="srm-attack-") as name:
        folder = Path(name)
        disks = Disk(folder / "disk", config.disk_mib), Disk(folder / "temp", config.temp_mib)
        try:
            attack = Attack(config, folder, *disks)
            with attack.server:
                asyncio.run(attack.run())
            attack.read_log()
        finally:
            for disk in disks:
                disk.close()
    record = new_record("make attack") | {
        "settings": settings_of(config),
        "done": dict(sorted(attack.done.items())),
        "replies": dict(sorted(attack.statuses.items())),
        "lines": {"accepted": attack.ledger.accepted, "checked": attack.ledger.answered},
        "memory": dict(attack.memory),
        "faults": dict(attack.faults),
    }
    write_record(record, "attack", markdown(attack), config.output)
    return 1 if attack.faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
