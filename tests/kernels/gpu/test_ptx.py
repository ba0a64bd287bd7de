"""Running PTX: what a kernel does, and the mistakes that a GPU would not have told."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.ptx.ptx import Kernel
from tests.kit.ptx.ptx_text import PTXError

REVERSE = """
.visible .entry reverse(
    .param .u64 .ptr .align 1 reverse_param_0
)
{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .shared .align 4 .b8 held[256];
    ld.param.b64 %rd1, [reverse_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.b32 %r2, [%rd3];
    mov.b32 %r3, held;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.b32 [%r5], %r2;
    bar.sync 0;
    sub.s32 %r6, %r3, %r4;
    ld.shared.b32 %r7, [%r6+252];
    st.global.b32 [%rd3], %r7;
    ret;
}
"""
"""64 threads turn 64 numbers round."""


def test_a_kernel_runs_and_is_counted() -> None:
    values = np.arange(64, dtype=np.int32)
    ran = Kernel(REVERSE).launch(1, 64, values)
    np.testing.assert_array_equal(values, np.arange(64)[::-1])
    lines = REVERSE.partition("held[256];")[2].count(";")
    assert ran == (64 * lines, 2 * lines, [2 * values.nbytes])  # two warps; read and written


def test_sectors_count_and_not_bytes() -> None:
    """Threads 8 numbers apart move a sector each."""
    strided = REVERSE.replace("mul.wide.u32 %rd2, %r1, 4", "mul.wide.u32 %rd2, %r1, 32")
    assert Kernel(strided).launch(1, 64, np.zeros(64 * 8, np.int32)).moved == [2 * 64 * 32]


def test_blocks_and_threads_have_three_axes() -> None:
    lines = """
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mov.u32 %r4, %ctaid.y; mov.u32 %r5, %ntid.z;
        mad.lo.s32 %r6, %r4, %r5, %r3;
        mad.lo.s32 %r6, %r6, 2, %r2;
        mad.lo.s32 %r6, %r6, 3, %r1;
        mul.wide.u32 %rd2, %r6, 4;
        add.s64 %rd3, %rd1, %rd2;
        st.global.b32 [%rd3], %r6;
        ret;
    }"""
    head = REVERSE[: REVERSE.index("    mov.u32 %r1, %tid.x;")]
    values = np.zeros(2 * 4 * 2 * 3, np.int32)
    Kernel(head + lines).launch((1, 2), (3, 2, 4), values)
    np.testing.assert_array_equal(values, np.arange(48))


WAIT, START = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (f"{WAIT}{START}LOAD", None),
        ("LOAD", "memory is read or written before the wait"),
        (f"LOAD{WAIT}{START}", "memory is read or written before the wait"),
        (f"{START}{WAIT}LOAD", "the next kernel is started before the wait"),
        (f"setp.eq.u32 %p1, %r1, 9;\n@%p1 bra $out;\n{WAIT}LOAD", "a thread ends before the wait"),
    ],
)
def test_dependent_kernels_wait_before_all_else(order: str, error: str | None) -> None:
    """Of a launch that does not wait by itself for the kernel before it."""
    load = "ld.global.b32 %r2, [%rd3];"
    text = REVERSE.replace(load, order.replace("LOAD", load)).replace("    ret;", "$out:\n    ret;")
    kernel, values = Kernel(text, is_dependent=True), np.arange(64, dtype=np.int32)
    if error is None:
        kernel.launch(1, 64, values)
        np.testing.assert_array_equal(values, np.arange(64)[::-1])
        return
    with pytest.raises(PTXError, match=error):
        kernel.launch(1, 64, values)


@pytest.mark.parametrize(
    ("line", "instead", "error"),
    [
        ("bar.sync 0;", "", "a race"),
        ("shl.b32 %r4, %r1, 2;", "mov.b32 %r4, 0;", "a race"),
        ("bar.sync 0;", "setp.lt.u32 %p1, %r1, 9;\n@%p1 bra.uni $out;\nbar.sync 0;", "a barrier"),
        ("[%r6+252]", "[%r6+256]", "an address outside"),
        ("ld.global.b32 %r2, [%rd3]", "ld.global.v2.b32 {%r2, %r8}, [%rd3]", "not aligned"),
        ("st.global.b32 [%rd3]", "st.global.b32 [%rd3+4]", "an address outside"),
        ("ld.global.b32 %r2, [%rd3]", "ld.global.b32 %r2, [%rd2]", "a global address"),
        ("bar.sync 0;", "bar.sync 0;\nfrob.b32 %r1, %r1;", "unknown instruction frob"),
        (
            "bar.sync 0;",
            "bar.sync 0;\nsetp.eq.u32 %p1, %r1, 5;\n@%p1 bra $out;\n"
            "shfl.sync.bfly.b32 %r8, %r1, 16, 31, -1;",
            "a warp exchanges",
        ),
    ],
)
def test_mistakes_are_told(line: str, instead: str, error: str) -> None:
    assert line in REVERSE
    text = REVERSE.replace(line, instead).replace("    ret;", "$out:\n    ret;")
    with pytest.raises(PTXError, match=error):
        Kernel(text).launch(1, 64, np.arange(64, dtype=np.int32))
