"""What a bfloat16 step of d 512, 8 layers and 4,096 rows asks of an H100, call by call."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.kit.fake_driver.driver import (
    Call,
    FakeDriver,
    calls_of,
    enqueued,
    launches_of,
    parts,
    read_log,
    words,
)
from tests.kit.fake_driver.programs import D_MODEL, ROWS
from tests.kit.kept import cache_folder
from tests.kit.ptx.cubin import ACQBULK, LDG, PREEXIT, STG, codes_of_kernels
from tests.kit.serving import ROOT

LAYERS, VOCAB = 8, 8_192
PROCESSORS = 132
SHARED = 213_056
"""Bytes of shared memory of a product."""
LARGE, SMALL = ((64, 128), 2), ((64, 64), 4)
"""Of a product's tiles: the box of a descriptor, and the blocks of a cluster."""
BEGIN = [((17, 1, 1), (256, 1, 1)), ((ROWS // 4, 1, 1), (64, 4, 1))]
"""Grid and block of expand and embed."""
UP, DOWN = ((PROCESSORS, 1, 1), (384, 1, 1)), ((128, 1, 1), (384, 1, 1))
MIX = ((ROWS // 4, 1, 1), (16, 4, 4))
LAYER = [UP, DOWN, DOWN, MIX, DOWN]
"""up, down, proj_in, mix, proj_out: rows suffice for large tiles on every processor in up alone."""
END = [UP, ((1, 1, 1), (256, 1, 1)), ((512, 1, 1), (256, 1, 1)), ((1, 1, 1), (256, 1, 1))]
"""head, edit, sample and score."""
PRODUCTS = [  # columns, depth and tiles
    *[
        (4 * D_MODEL, D_MODEL, LARGE),
        (D_MODEL, 4 * D_MODEL, SMALL),
        (D_MODEL, D_MODEL, SMALL),
        (D_MODEL, D_MODEL, SMALL),
    ]
    * LAYERS,
    (VOCAB, D_MODEL, LARGE),
]
BFLOAT16, SWIZZLE_128B = 9, 3
"""Numbers of CUtensorMapDataType and CUtensorMapSwizzle."""
STEP = ["up", *["launch"] * 46, "down", "down", "event"]
ON_HOST = {
    *("cuStreamIsCapturing", "cuEventCreate", "cuEventDestroy", "cuEventQuery"),
    *("cuDeviceGetAttribute", "cuTensorMapEncodeTiled"),
}
"""Calls that ask or prepare something on the host alone."""
ENQUEUED = {"cuMemcpyHtoDAsync", "cuLaunchKernelEx", "cuMemcpyDtoHAsync", "cuEventRecord"}


@pytest.fixture(scope="module")
def log(
    fake: FakeDriver, graphs: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Call]]:
    path = tmp_path_factory.mktemp("steps") / "log"
    path.touch()
    ran = fake.run("steps", graphs, log=path)
    assert ran["arithmetic"] == "gpu bfloat16 own"
    return parts(read_log(path))


def test_a_step_is_46_launches_of_these_grids_and_blocks(log: dict[str, list[Call]]) -> None:
    launches = launches_of(log["third"])
    assert [(tuple(launch["grid"]), tuple(launch["block"])) for launch in launches] == [
        *BEGIN,
        *LAYER * LAYERS,
        *END,
    ]
    assert all(launch["status"] == 0 for launch in launches)
    kernels = [launch["kernel"] for launch in launches]
    assert all(kernels[2:7] == kernels[at : at + 5] for at in range(2, 42, 5))
    assert len({*kernels}) == 11


def test_products_have_the_shared_memory_and_clusters_they_are_made_for(
    log: dict[str, list[Call]],
) -> None:
    launches = launches_of(log["third"])
    products = [launch for launch in launches if launch["block"] == [384, 1, 1]]
    assert [product["cluster"] for product in products] == [
        [size, 1, 1] for _, _, (_, size) in PRODUCTS
    ]
    assert {(product["shared"], product["opt_in"]) for product in products} == {(SHARED, SHARED)}
    others = [launch for launch in launches if launch not in products]
    assert {(item["shared"], *item["cluster"]) for item in others} == {(0, 1, 1, 1)}
    opted = calls_of(log["first"], "cuFuncSetAttribute")
    assert {(call["attribute"], call["value"]) for call in opted if call["value"] > 0} >= {
        (8, SHARED)
    }


def test_every_descriptor_is_of_its_factor(log: dict[str, list[Call]]) -> None:
    """[K, rows] of bfloat16 in rows one behind the other; 128 bytes of K, swizzled as wgmma reads
    them; beyond the last row zeros. x, then w, which is where it was uploaded to."""
    products = [launch for launch in launches_of(log["third"]) if launch["block"] == [384, 1, 1]]
    assert len(calls_of(log["third"], "cuTensorMapEncodeTiled")) == 2 * len(products)
    weights = {call["to"]: call["bytes"] for call in calls_of(log[""], "cuMemcpyHtoDAsync")}
    for product, (columns, depth, (box, _)) in zip(products, PRODUCTS, strict=True):
        x, weight, *_ = product["parameters"]
        for result, rows in ((x, ROWS), (weight, columns)):
            assert result["address"] % 64 == 0  # two sectors of L2; a descriptor needs 16 bytes
            assert result | {"address": 0} == {
                **{"address": 0, "dims": [depth, rows], "stride": 2 * depth, "box": list(box)},
                **{"steps": [1, 1], "dtype": BFLOAT16, "rank": 2, "interleave": 0},
                **{"swizzle": SWIZZLE_128B, "promotion": 0, "fill": 0},
            }
        assert weights.pop(weight["address"]) == 2 * columns * depth


def test_a_product_reads_what_was_written_before_it(log: dict[str, list[Call]]) -> None:
    """up reads the stream, down what up wrote, and all of it is in the workspace."""
    products = [launch for launch in launches_of(log["third"]) if launch["block"] == [384, 1, 1]]
    out = [words(product["parameters"][3])[0] for product in products]
    read = [product["parameters"][0]["address"] for product in products]
    for layer in range(LAYERS):
        up, down, proj_in, proj_out = range(4 * layer, 4 * layer + 4)
        assert read[down] == out[up] and read[proj_in] == out[down]
        assert read[proj_out] != out[proj_in], "mix is between them"
        assert read[proj_out + 1] == out[proj_out]


def test_all_is_enqueued_on_one_stream(log: dict[str, list[Call]]) -> None:
    streams = {line["stream"] for lines in log.values() for line in lines if "stream" in line}
    made = calls_of(log[""], "cuStreamCreateWithPriority")
    assert streams - {call["stream"] for call in made[1:]} == {made[0]["stream"]}
    for name in ("third", "overlap", "read the first"):
        assert {call["stream"] for call in log[name] if "stream" in call} == {made[0]["stream"]}


def test_a_step_is_an_upload_launches_downloads_and_an_event(log: dict[str, list[Call]]) -> None:
    assert [*enqueued(log["third"])][: len(STEP) + 1] == [*STEP, "wait"]


def test_the_next_step_is_enqueued_before_one_is_waited_for(log: dict[str, list[Call]]) -> None:
    both = [*enqueued(log["overlap"])]
    assert both[: 2 * len(STEP) + 1] == [*STEP, *STEP, "wait"]
    recorded, waited = (
        [call["event"] for call in calls_of(log[part], name)]
        for part, name in (("overlap", "cuEventRecord"), ("overlap", "cuEventSynchronize"))
    )
    assert waited == recorded[:1] and recorded[0] != recorded[1]
    (second,) = calls_of(log["read the first"], "cuEventSynchronize")
    assert second["event"] == recorded[1]


def test_no_step_after_the_first_ones_waits_fills_or_allocates(log: dict[str, list[Call]]) -> None:
    """Nor looks anything up: all that a step calls is known."""
    for name in ("third", "overlap", "read the first"):
        called = Counter(call["call"].removesuffix("_v2") for call in log[name])
        assert called.pop("cuEventSynchronize") == 1
        assert called.keys() <= ENQUEUED | ON_HOST


def test_a_replayed_step_is_one_launch_of_a_graph(log: dict[str, list[Call]]) -> None:
    """The first step of a size runs, and is then captured without waiting or copying."""
    captured = log["captured"]
    begins, ends = (
        next(place for place, call in enumerate(captured) if call["call"] == name)
        for name in ("cuStreamBeginCapture", "cuStreamEndCapture")
    )
    assert [*enqueued(captured[:begins])][: len(STEP)] == STEP  # then MAX backs all its memory
    assert [*enqueued(captured[begins:ends])] == ["launch"] * 46
    assert captured[ends]["launches"] == 46
    assert [*enqueued(log["replayed"])] == ["up", "graph of 46", "down", "down", "event", "wait"]
    # MAX makes a graph executable in a thread of its own, which may be late.
    called = {call["call"].removesuffix("_v2") for call in log["both"]}
    assert called <= ENQUEUED | ON_HOST | {"cuGraphLaunch", "cuEventSynchronize"}


def test_steps_that_cannot_be_replayed_are_launched(log: dict[str, list[Call]]) -> None:
    assert [*enqueued(log["eager beside it"])].count("launch") == 46
    both = ["up", "graph of 46", "down", "down", "event"]
    assert [*enqueued(log["both"])] == [*both, *both, "wait", "wait"]


def test_weights_are_uploaded_once(log: dict[str, list[Call]]) -> None:
    uploads = calls_of(log[""], "cuMemcpyHtoDAsync")
    assert len(uploads) == 2 + 12 * LAYERS
    assert len({upload["to"] for upload in uploads}) == len(uploads)
    matrices = LAYERS * (8 + 2) * D_MODEL**2 + 2 * VOCAB * D_MODEL
    assert 2 * matrices <= sum(upload["bytes"] for upload in uploads) <= 2.1 * matrices
    later = [calls_of(log[name], "cuMemcpyHtoDAsync") for name in ("first", "second", "third")]
    assert [len(item) for item in later] == [1, 1, 1]
    assert max(item["bytes"] for (item,) in later) < 64 * ROWS


def test_a_step_copies_no_more_than_its_rows_need(log: dict[str, list[Call]]) -> None:
    up, *down = (call["bytes"] for call in log["third"] if "copy" in call)
    assert up <= 60 * ROWS and down == [4 * ROWS, 4 * ROWS]


def test_launches_are_in_the_order_of_the_stream(log: dict[str, list[Call]]) -> None:
    """MAX launches from a thread of its own, but a graph's call returns only when it has:
    copies come from the thread of steps, and never between two launches of a step."""
    order = [
        call for call in log["overlap"] if "copy" in call or call["call"] == "cuLaunchKernelEx"
    ]
    threads = [token["thread"] for token in order]
    assert len({*threads}) == 2
    assert sum(item != other for item, other in pairwise(threads)) == 2 * 2


@pytest.fixture(scope="module")
def dependent(
    fake: FakeDriver, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, list[Call]], bytes]:
    """The log of steps of variant pdl, and their graph, which is compiled once and kept."""
    module, shape = "srm.engine.device.precompile", ["--d-model", str(D_MODEL)]
    flags = [*shape, "--dtype", "bfloat16", "--variants", "pdl", "--output", str(cache_folder())]
    compiled = subprocess.run(
        [sys.executable, "-m", module, *flags], cwd=ROOT, check=True, stderr=subprocess.PIPE
    )
    graph = Path(compiled.stderr.decode().splitlines()[-1].partition(": ")[0])
    path = tmp_path_factory.mktemp("dependent") / "log"
    path.touch()
    ran = fake.run("steps", cache_folder(), "pdl", log=path)
    assert ran["arithmetic"] == "gpu bfloat16 own pdl"
    return parts(read_log(path)), graph.read_bytes()


@pytest.mark.slow
def test_all_kernels_but_the_first_may_start_early(
    log: dict[str, list[Call]], dependent: tuple[dict[str, list[Call]], bytes]
) -> None:
    """The first is behind an upload. All else of a launch is as today, of captured ones too."""
    assert not any(launch["is_dependent"] for launch in launches_of(log["third"]))
    for name in ("third", "captured"):
        today, early = (launches_of(lines[name])[-46:] for lines in (log, dependent[0]))
        assert [launch["is_dependent"] for launch in early] == [0, *[1] * 45]
        for launch, other in zip(today, early, strict=True):
            for fact in ("grid", "block", "shared", "cluster", "status"):
                assert launch[fact] == other[fact]
    replayed = [*enqueued(dependent[0]["replayed"])]
    assert replayed == ["up", "graph of 46", "down", "down", "event", "wait"]


@pytest.mark.slow
def test_each_kernel_that_may_start_early_waits_once(
    dependent: tuple[dict[str, list[Call]], bytes],
) -> None:
    """Before memory is read or written, and before it lets the next kernel start."""
    started, codes = dependent[0]["third"], codes_of_kernels(dependent[1])
    early = {call["kernel"] for call in launches_of(started) if call["is_dependent"]}
    assert len(early) == 10
    for name in early:
        code = codes[name]
        assert (code.count(ACQBULK), code.count(PREEXIT)) == (1, 1)
        assert code.index(ACQBULK) < min(code.index(other) for other in (PREEXIT, LDG, STG))
