"""Programmatic dependent launch (PDL) of sm_90: kernels that start while the one before them ends.

A kernel launched with `launch_attributes` may start once every block of the kernel before it in the
stream has called `start_after_last`, or has ended. Until it calls that itself, it may read nothing
but weights, and write nothing. Each thread calls it, so a kernel that has ended has waited for the
one before it, and what is visible after the wait is all that was ever written before.
"""

from max.gpu.host.launch_attribute import (
    LaunchAttribute,
    LaunchAttributeID,
    LaunchAttributeValue,
)
from std.sys._assembly import inlined_assembly


def launch_attributes[pdl: Bool]() -> List[LaunchAttribute]:
    """Say how a kernel is launched.

    Parameters:
        pdl: Whether it calls `start_after_last`.

    Returns:
        The attributes, none for an ordinary launch.
    """
    var attributes = List[LaunchAttribute]()
    comptime if pdl:
        attributes.append(
            LaunchAttribute(
                LaunchAttributeID.PROGRAMMATIC_STREAM_SERIALIZATION,
                LaunchAttributeValue(True),
            )
        )
    return attributes^


@always_inline
def start_after_last[pdl: Bool]():
    """Wait until the kernel before this one has ended and all that it wrote is visible; then let
    the next kernel start. MAX's own functions compile to nothing without a GPU in the machine.

    Parameters:
        pdl: Whether to; else the launch has waited.
    """
    comptime if pdl:
        comptime for action in ["wait", "launch_dependents"]:
            inlined_assembly[
                "griddepcontrol." + action + ";",
                NoneType,
                constraints="~{memory}",
                has_side_effect=True,
            ]()
