"""Lists what the kit measures: three calls, each with its parts in the order of their worth.

The sizes are those of a GPU, or tiny ones that rehearse every part on a processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LIMIT_S = {1: 280, 2: 400, 3: 330, 4: 415}
"""Seconds of a call, unpacking included."""
FIRST = {"machine", "opening", "adopt"}
"""Parts with which each call begins."""
EACH_BUFFER_ALONE = {"MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT": "0"}
"""MAX's pool of memory hides from a memory checker where a buffer ends."""


@dataclass(frozen=True, kw_only=True)
class KitPart:
    """`python -m MODULE TASK`, the task being a `research.bench.gpu.task.Task` of these
    settings."""

    name: str
    limit_s: int
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None  # instead of a task
    under: tuple[str, ...] = ()  # a program that runs it; the part is left out where it is missing
    environment: Mapping[str, str] = field(default_factory=dict)
    attempt_s: float = 20.0  # of one size, before its process ends
    opens: bool = False  # finds out with which environment a GPU opens
    needs_device: bool = True  # left out where none opened
    checks_products: bool = False
    needs_products: bool = False  # left out where a part before found one wrong
    needs_gpu: str = ""  # why a rehearsal on a processor leaves it out


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that differ between a GPU and a rehearsal."""

    device: str
    patience: int = 1  # by which times are multiplied
    widths: tuple[int, ...] = (1024, 512)
    common: Mapping[str, Any] = field(default_factory=dict)
    product_rows: tuple[int, ...] = (0, 1, 8, 64, 128, 1000)  # beside the first
    op_rows: tuple[int, ...] = (2, 129, 4096)
    op_seconds: float = 0.05  # of a repetition: there are a hundred sizes to time
    ops: tuple[str, ...] = ()
    first_rows: tuple[int, ...] = (2, 129, 4096, 65_536)
    first_steps: tuple[int, ...] = (65_536, 4096)
    first_seconds: float = 0.5  # of a repetition
    counted_rows: int = 16_384
    streams: tuple[int, ...] = (256, 4096)
    served: int = 64_000  # completions at once, of requests for many
    step_rows: tuple[int, ...] = (8192, 16_384, 32_768)  # beside the first
    forms: tuple[tuple[str, ...], ...] = (("captured",), ("compiled captured",), ("eager",))
    all_rows: tuple[int, ...] = (4096, 65_536, 1024, 16_384, 256)
    replayed_rows: tuple[int, ...] = (4096, 256, 1024, 8192, 16_384)
    products: tuple[tuple[int, int, int], ...] = (
        (8192, 8192, 8192),
        *((65_536, d, columns) for d in (1024, 512) for columns in (4 * d, d, 8192)),
        *((65_536, 4 * d, d) for d in (1024, 512)),
    )
    same_rows: tuple[int] = (4500,)  # that must say the same everywhere: more than small tiles get
    wide_slots: int = 600_000  # of d 1,024: more than 2^32 values
    many_slots: tuple[int, ...] = (65_536, 1_048_576, 4_194_304)  # of the narrowest
    scored: tuple[int, int] = (4, 12)  # prompts and tokens of each
    looked_at_rows: int = 65_536
    checked_rows: int = 64  # under a memory checker, which slows a step a hundredfold
    tests: tuple[str, ...] = tuple(
        f"tests/kernels/test_{name}.py"
        for name in ("embedding", "mixer", "taps", "constraints", "edits", "sampler", "score")
    )


GPU = Sizes(device="gpu")
REHEARSAL = Sizes(
    device="cpu",
    patience=20,  # whatever else the machine does, and it may compile
    widths=(256,),  # with the rest the shape of the demo model, whose graph the tests compile
    common={"vocab_size": 2048, "seconds": 0.01, "repetitions": 2, "gib": 0.01},
    product_rows=(0, 1, 2, 65),
    op_rows=(2, 129),
    op_seconds=0.01,
    ops=("proj_in", "embed"),
    step_rows=(2, 16),
    forms=(("eager",), ("eager",)),
    products=((64, 64, 64),),
    first_rows=(2, 65),
    first_steps=(16, 2),
    first_seconds=0.01,
    counted_rows=8,
    streams=(2,),
    served=8,
    same_rows=(12,),
    wide_slots=100,
    many_slots=(16, 64),
    scored=(2, 5),
    looked_at_rows=8,
    checked_rows=8,
    tests=("tests/kernels/test_embedding.py",),
)
SIZES = {"gpu": GPU, "cpu": REHEARSAL}


def calls(sizes: Sizes, cache_dir: str) -> dict[int, list[KitPart]]:
    """Return the parts of each call."""
    facts = KitPart(
        name="machine", limit_s=30, module="research.bench.gpu.machine", needs_device=False
    )
    opening = KitPart(
        name="opening",
        limit_s=65,
        module="research.bench.gpu.opening",
        attempt_s=0,  # each has its own
        opens=True,
        needs_device=False,
    )
    adopt = KitPart(
        name="adopt",
        limit_s=30,
        module="srm.engine.device.graph_notes",
        arguments=("adopt", cache_dir, sizes.device),
    )
    begin = [facts, opening, adopt] if sizes.device == "gpu" else [facts, opening]
    return {
        1: begin
        + _headline(sizes)
        + _pytorch(sizes, sizes.forms[:1])
        + _profiles(sizes)
        + _two_engines(sizes),
        2: begin + _everything(sizes) + _pytorch(sizes, sizes.forms[1:]),
        3: begin + _http(sizes) + _float8(sizes) + _checks(sizes),
        4: begin + _what_decides(sizes),
    }


def _what_decides(sizes: Sizes) -> list[KitPart]:
    """Replayed steps beside launched ones with the host's phases, float8 at the rows of its
    headline, PyTorch at every size, bundled models served, and every counter of each kernel."""
    gpu: dict[str, Any] = {"needs_gpu": "a processor launches no kernels and has no float8"}
    float8 = {"dtype": "float8", "product": "own", "seconds": sizes.op_seconds, **gpu}
    replays = {"rows": sizes.replayed_rows, "seconds": sizes.first_seconds, **gpu}
    rows = {"rows": sizes.first_rows, "op_rows": sizes.op_rows[-1:]}
    return [
        *(
            replace(
                _part("replays", 60, "", width, **replays), module="research.bench.host.replays"
            )
            for width in sizes.widths
        ),
        *(_part("ops float8", 45, "ops", width, **rows, **float8) for width in sizes.widths),
        KitPart(
            name="serve",
            limit_s=60,
            module="research.bench.host.bundled",
            attempt_s=40,
            needs_gpu="tests serve the bundled models on a processor",
        ),
        *_pytorch(sizes, (("compiled captured",), ("captured",)), sizes.all_rows),
        *_profiles(sizes),
        *_pytorch(sizes, (("max-autotune captured",),), sizes.all_rows[:2]),
    ]


def _headline(sizes: Sizes) -> list[KitPart]:
    """Whether our products are right, and what the engine makes of them: on disk in minutes."""
    return [
        *(
            part
            for width in sizes.widths
            for part in (
                _part(
                    "products",
                    60,
                    "ops",
                    width,
                    checks_products=True,
                    ops=sizes.ops,
                    rows=sizes.first_rows,
                    seconds=sizes.op_seconds,
                ),
                _part(
                    "decode",
                    60,
                    "steps",
                    width,
                    needs_products=True,
                    rows=sizes.first_steps,
                    seconds=sizes.first_seconds,
                ),
            )
        ),
        *(_part("logprobs", 40, "logprobs", width, rows=sizes.scored) for width in sizes.widths),
        KitPart(
            name="peaks",
            limit_s=40,
            module="research.bench.model.gpu_peak",
            settings={"products": sizes.products, "seconds": sizes.first_seconds / 2},
            needs_device=False,
        ),
    ]


def _pytorch(
    sizes: Sizes, forms: Iterable[tuple[str, ...]], rows: tuple[int, ...] = ()
) -> list[KitPart]:
    settings = {"rows": rows or sizes.first_steps, "seconds": sizes.first_seconds}
    return [
        KitPart(
            name=f"pytorch {', '.join(form)} {width}",
            limit_s=60,
            module="research.bench.model.recurrence_lines",
            settings={"d_model": width, "forms": form, **settings},
            attempt_s=60,
            needs_device=False,
        )
        for form in forms
        for width in sizes.widths
    ]


def _profiles(sizes: Sizes) -> list[KitPart]:
    return [
        _part(
            *("profile", 100, "profile", width),
            under=("ncu",),
            attempt_s=60,
            rows=(sizes.looked_at_rows,),
            op_rows=(sizes.counted_rows,) if width == max(sizes.widths) else (),
        )
        for width in sizes.widths
    ]


def _everything(sizes: Sizes) -> list[KitPart]:
    widest, narrowest = max(sizes.widths), min(sizes.widths)
    rows, checked = {"rows": sizes.step_rows}, _checked_ops(sizes)
    return [
        *(
            _part("ops", 120, "ops", width, checks_products=True, ops=sizes.ops, **checked)
            for width in sizes.widths
        ),
        _part(
            "wide pool",
            60,
            "states",
            widest,
            rows=sizes.same_rows,
            slots=sizes.wide_slots,
            attempt_s=50,
        ),
        *(
            _part(
                f"{slots} slots",
                60,
                "steps",
                narrowest,
                slots=slots,
                repetitions=1,
                rows=(min(slots, max(sizes.first_steps)),),
                attempt_s=50,
            )
            for slots in sizes.many_slots
        ),
        *(
            _part("decode more", 70, "steps", width, needs_products=True, **rows)
            for width in sizes.widths
        ),
        _part("probe", 60, "probe", widest, rows=sizes.step_rows[:1], ops=sizes.ops),
    ]


def _http(sizes: Sizes) -> list[KitPart]:
    return [
        _part("http", 90, "http", width, rows=sizes.streams, slots=sizes.served, attempt_s=60)
        for width in sorted(sizes.widths)
    ]


def _two_engines(sizes: Sizes) -> list[KitPart]:
    two = {"servers": 2, "slots": sizes.served, "repetitions": 2, "attempt_s": 60}
    return [_part("two engines", 75, "http", min(sizes.widths), **two)]


def _float8(sizes: Sizes) -> list[KitPart]:
    """Channel mixers in float8: their products are ours alone, there is no other to go on with."""
    common = {"dtype": "float8", "product": "own"}
    common["needs_gpu"] = "float8 is of an H100 or H200 alone: no processor rehearses it"
    rows = {"rows": sizes.first_steps, "seconds": sizes.first_seconds}
    checked = _checked_ops(sizes)
    parts = [
        _part("ops float8", 40, "ops", width, checks_products=True, **checked, **common)
        for width in sizes.widths
    ]
    for width in sizes.widths:
        parts += [
            _part("decode float8", 60, "steps", width, needs_products=True, **rows, **common),
            _part("logprobs float8", 40, "logprobs", width, rows=sizes.scored, **common),
        ]
    return parts


def _checked_ops(sizes: Sizes) -> dict[str, Any]:
    return {"rows": sizes.product_rows, "op_rows": sizes.op_rows, "seconds": sizes.op_seconds}


def _checks(sizes: Sizes) -> list[KitPart]:
    looked, checked = {"rows": (sizes.looked_at_rows,)}, {"rows": (sizes.checked_rows,)}
    narrowest, checker = (
        min(sizes.widths),
        (
            *("compute-sanitizer", "--error-exitcode", "9"),
            *("--report-api-errors", "no", "--tool"),  # MAX asks for parameters that are not there
        ),
    )
    return [
        _part("states", 60, "states", narrowest, rows=sizes.same_rows, attempt_s=50),
        KitPart(
            name="tests",
            limit_s=150,
            module="pytest",
            arguments=(
                *("-q", "-c", "deploy/gpu/pytest.ini", "--rootdir=.", "-p", "no:cacheprovider"),
                *("--confcutdir=tests/kernels", "-m"),
                "gpu and not slow" if sizes.device == "gpu" else "not gpu and not slow",
                *sizes.tests,
            ),
        ),
        *(
            _part(
                tool,
                90,
                "one_step",
                narrowest,
                under=(*checker, tool),
                environment=EACH_BUFFER_ALONE,
                attempt_s=80,
                **checked,
            )
            for tool in ("memcheck", "racecheck")
        ),
        *(_part("launches", 30, "one_step", width, **looked) for width in sizes.widths),
    ]


def _part(name: str, limit_s: int, module: str, width: int, **settings: Any) -> KitPart:
    fields = {key: settings.pop(key) for key in (*settings,) if key in KitPart.__dataclass_fields__}
    given = {"d_model": width, **settings}
    named = f"{name} {width}"
    return KitPart(
        name=named, limit_s=limit_s, module=f"research.bench.gpu.{module}", settings=given, **fields
    )
