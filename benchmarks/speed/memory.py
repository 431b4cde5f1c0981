"""Peak memory of a run: the growth of the process, whatever library runs in it."""

import ctypes
import re
from pathlib import Path


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """`with PeakMemory() as peak: ...` measures the growth of the resident memory,
    `peak.bytes`. It is `None` where the system does not report it, which takes Linux.

    The allocator is asked to give back the memory that it keeps, and usually does. Less
    than a few MiB means nothing.
    """

    bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        self._before = None
        try:
            ctypes.CDLL(None).malloc_trim(0)
            _CLEAR.write_text(_RESET_PEAK)
            self._before = _read("VmRSS")
        except (OSError, AttributeError):
            pass
        return self

    def __exit__(self, *exception) -> None:
        if self._before is not None:
            self.bytes = max(0, _read("VmHWM") - self._before)


def _read(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
