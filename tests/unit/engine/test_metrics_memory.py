"""The memory that metrics of all processes are in: what is written, damaged, or too much."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from srm.errors import ConfigError
from srm.metrics_memory import COUNTS_BYTES, GAUGES_BYTES, VARIABLE, JoinedRegion, Region, create
from srm.server.routes.scrape import merged
from tests.kit.serving import run_python


@contextmanager
def memory(*labels: str) -> Iterator[list[Region]]:
    regions = create(labels)
    try:
        yield regions
    finally:
        os.close(regions[0].fd)


def fill(region: Region, times: int = 1) -> None:
    """What one process measures."""
    own = JoinedRegion(region)
    own.new_value("counter", "done", "done_total", ("how",), ("well",), "Done.").inc(times)
    for bound in ("0.5", "1.0", "+Inf"):
        own.new_value("histogram", "took", "took_bucket", ("le",), (bound,), "Took.").inc(times)
    own.new_value("histogram", "took", "took_sum", (), (), "Took.").inc(0.25)
    own.new_value("gauge", "held", "held", (), (), "Held.", multiprocess_mode="livesum").set(times)


class Found(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def samples(region: Region) -> dict[str, float]:
    """What /metrics says, by name with labels."""
    text = generate_latest(Found(merged(region))).decode()
    return {
        sample.name
        + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_processes_are_summed_and_those_with_a_label_stand_alone() -> None:
    with memory("", "", "1") as regions:
        for times, region in enumerate(regions, 1):
            fill(region, times)
        assert samples(regions[0]) == {
            **{"done_total how=well": 3, "done_total engine=1 how=well": 3},
            **{"held": 3, "held engine=1": 3, "took_sum": 0.5, "took_sum engine=1": 0.25},
            **{"took_bucket le=0.5": 3, "took_bucket le=1.0": 6, "took_bucket le=+Inf": 9},
            **{f"took_bucket engine=1 le={le}": n for le, n in (("0.5", 3), ("1.0", 6))},
            **{"took_bucket engine=1 le=+Inf": 9, "took_count": 9, "took_count engine=1": 9},
        }


def test_any_flipped_bit_of_the_memory_leaves_metrics_that_can_be_read() -> None:
    """And a process that begins there."""
    with memory("", "") as regions:
        fill(regions[0])
        for start in (0, COUNTS_BYTES):
            used = int.from_bytes(os.pread(regions[0].fd, 8, start), "little")
            assert used > 64
            for bit in range(used * 8):
                place = start + bit // 8
                retained = os.pread(regions[0].fd, 1, place)
                os.pwrite(regions[0].fd, bytes([retained[0] ^ 1 << bit % 8]), place)
                samples(regions[1])
                if bit % 61 == 0:  # it writes: the rest is as before
                    before = os.pread(regions[0].fd, used, start)
                    fill(regions[0])
                    assert samples(regions[1])
                    os.pwrite(regions[0].fd, before, start)
                os.pwrite(regions[0].fd, retained, place)


def test_one_that_is_damaged_is_left_out_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    with memory("", "") as regions:
        for region in regions:
            fill(region)
        os.pwrite(regions[1].fd, b"\xff" * 64, 16 * 2**20 + 8)
        assert samples(regions[0])["done_total how=well"] == 1
        assert "metrics of region 1 are damaged and left out: " in caplog.text
        fill(regions[1])
        assert "damaged, and begin anew" in caplog.text
        assert samples(regions[0])["done_total how=well"] == 2


def test_more_series_than_there_is_room_for_are_counted_and_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with memory("") as (region,):
        own = JoinedRegion(region)
        meaning = "x" * (GAUGES_BYTES // 3)
        made = [own.new_value("gauge", f"g{i}", f"g{i}", (), (), meaning) for i in range(4)]
        for value in made:
            value.set(5)
        assert [value.get() for value in made] == [5] * 4
        assert "there is no room for more metrics: g2 is not shown" in caplog.text
        own.new_value("counter", "done", "done_total", (), (), "Done.").inc(1)
        assert samples(region)["done_total"] == 1


def test_a_process_whose_files_may_not_grow_measures_and_processes_of_its_own_do_not_join() -> None:
    """A full temp folder ended whoever measured anything."""
    program = (
        f"import os, resource; resource.setrlimit({resource.RLIMIT_FSIZE}, (0, 0))\n"
        "from srm.engine import metrics\nmetrics.STEPS.inc(3)\nfrom server import metrics\n"
        f"assert {VARIABLE!r} not in os.environ"
    )
    with memory("") as (region,):
        environment = {**os.environ, **region.environment, "PROMETHEUS_MULTIPROC_DIR": "/nowhere"}
        done = run_python(program, env=environment, pass_fds=[region.fd])
        assert (done.returncode, done.stderr) == (0, "")
        assert samples(region)["srm_engine_steps_total"] == 3


def test_no_memory_is_said_at_the_start() -> None:
    program = (
        f"import resource; resource.setrlimit({resource.RLIMIT_FSIZE}, (9, 9))\n"
        "from srm.metrics_memory import create\ncreate([''])"
    )
    failed = run_python(program)
    last = failed.stderr.splitlines()[-1]
    assert failed.returncode and ConfigError.__name__ in last
    assert "metrics need a file in memory of 16777216 bytes" in last
