"""A watch on the GPU's clock, and on the reasons why it is held down, from NVIDIA's management library (NVML)."""

from collections import Counter
from typing import Any

from gpu_runtime.benchmark.records import Clocks

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean that the GPU is slower than it could be (NVML API Reference,
# "Clocks Event Reasons"); being idle, and clocks that a user has set, do not.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def management(pci_bus_id: str) -> tuple[Any, Any]:
    """Returns (NVIDIA's management library, its handle of a GPU). Raises ImportError without the library, or one of its errors
    without a driver or without this GPU.
    """
    import pynvml

    pynvml.nvmlInit()
    alone = pynvml.nvmlDeviceGetCount() == 1
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0) if alone else pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())


class ClockWatch:
    """Records the GPU's clock, and the reasons why it is held down, each time that `look` is called.

    `pci_bus_id`: identifies the GPU. Without NVIDIA's management library, or if it does not answer, nothing is recorded.
    """

    def __init__(self, pci_bus_id: str) -> None:
        self._clocks: list[int] = []
        self._held: Counter[str] = Counter()
        self._nvml: Any = None
        try:
            nvml, self._handle = management(pci_bus_id)
            self._most = int(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
            self._nvml = nvml
        except Exception:  # no library, no driver, no permission: times are shown without clocks
            return

    def look(self) -> None:
        """Records the present clock and the present reasons; after an error of the library nothing more is recorded."""
        if self._nvml is None:
            return
        try:
            mhz = int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
            bits = self._reasons()
        except Exception:  # as above
            self._nvml = None
            return
        self._clocks.append(mhz)
        self._held.update(name for bit, name in REASONS.items() if bits & bit)

    def _reasons(self) -> int:
        """Returns the bits for the reasons why the clock is held down now.

        NVML's function has a new name since driver 535; the old name, which NVML deprecates, is the fallback.
        """
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except (AttributeError, self._nvml.NVMLError):  # an older pynvml or driver
            return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def seen(self) -> Clocks | None:
        """Returns the recorded clocks; None if none could be read."""
        if not self._clocks:
            return None
        return Clocks(len(self._clocks), min(self._clocks), max(self._clocks), self._most, tuple(self._held.most_common()))
