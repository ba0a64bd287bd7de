"""What the Mojo programs beside this file print, kept between runs: the code of GPU kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from srm.engine.device.linear import KERNELS
from tests.kit.kept import keep_compiled


def printed(source: str, *defines: str) -> dict[str, bytes]:
    """What such a program prints of each kernel: PTX, or machine code where "object" is defined."""
    path = Path(__file__).with_name(source)
    output = keep_compiled(path.stem, [path, Path(__file__)], defines, lambda: _run(path, defines))
    texts = re.split(rb"^=== (.*)\n", output, flags=re.M)[1:]
    return {name.decode(): text for name, text in zip(texts[::2], texts[1::2], strict=True)}


def _run(path: Path, defines: tuple[str, ...]) -> bytes:
    """Build a program, and return what it prints."""
    mojo = Path(sys.executable).with_name("mojo")
    given = [part for name in defines for part in ("-D", name)]
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        build = map(str, [mojo, "build", *given, "-I", KERNELS.parent, path, "-o", program])
        subprocess.run(list(build), check=True, capture_output=True)
        return subprocess.run([program], check=True, capture_output=True).stdout
