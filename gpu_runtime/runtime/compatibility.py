"""Checks that an engine was built for this device and by these kernels."""

from dataclasses import asdict, replace

from cuda_kernels.device import Device
from cuda_kernels.named_devices import SMEM_PER_BLOCK
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime.plan_record import EngineRecord

LARGEST_DEVICE = {  # upper limits of a GPU's facts
    "num_sms": 1 << 12,
    "smem_per_block": 256 << 10,
    "smem_per_sm": 512 << 10,
    "max_threads_per_sm": 1 << 12,
    "max_blocks_per_sm": 1 << 7,
    "regs_per_sm": 1 << 20,
}


def planned_device(device: Device) -> Device:
    """Returns the device that a plan was made for, marked as not measured. Raises EngineError if it is no GPU."""
    numbers = {k: v for k, v in asdict(device).items() if type(v) in (int, float)}
    if odd := [k for k, v in numbers.items() if not 0 < v <= LARGEST_DEVICE.get(k, 1 << 40)]:
        raise EngineError(f"the engine's device is wrong: no GPU's {odd[0]} is {numbers[odd[0]]}; build the engine again")
    if device.sm.removesuffix("a") not in {f"sm_{cc}" for cc in SMEM_PER_BLOCK}:
        raise EngineError(f"the engine's device is wrong ({device.sm[:20]} is not known): build the engine again")
    return replace(device, measured=False)


def check_device(device: Device, device_sm: str) -> None:
    """Raises EngineError unless a plan for `device` runs on the architecture `device_sm`, such as "sm_90a"."""
    if device.sm.rstrip("af") != device_sm.rstrip("af"):
        raise EngineError(
            f"the engine was built for {device.title} ({device.sm}); this device is {device_sm}. "
            "Build the engine again for this device"
        )


def check_source(record: EngineRecord, source_hash: str) -> None:
    """Raises EngineError unless the engine was made with the kernel sources that have this hash."""
    if record.source_hash != source_hash:
        raise EngineError(
            f"the engine was built with other kernel sources: hash {record.source_hash[:12]}, "
            f"here {source_hash[:12]}. Build the engine again with this gpu_runtime"
        )
