"""What is believed of a GPU: the driver's answers, the named devices' facts, and no division by what a driver does not tell."""

import sys

import pytest

from cuda_kernels import device
from cuda_kernels.device import DRIVER_NAMES, NAMED, RELATIVES, reported
from cuda_kernels.named_devices import REFUSED, _spoken

CLOCK, MEMORY, BUS, BLOCKS = 13, 36, 37, 106


def props(name: str, cc: int, sms: int, **more) -> dict:
    """As cupy.cuda.runtime.getDeviceProperties answers."""
    return {
        "name": name.encode(),
        "major": cc // 10,
        "minor": cc % 10,
        "multiProcessorCount": sms,
        "l2CacheSize": 6 << 20,
        "sharedMemPerBlockOptin": 99 << 10,
        "sharedMemPerMultiprocessor": 100 << 10,
        "maxThreadsPerMultiProcessor": 1536,
        "regsPerMultiprocessor": 65536,
    } | more


def attributes(clock_khz=1_740_000, memory_khz=7_250_000, bus=384, blocks=16) -> dict:
    return {CLOCK: clock_khz, MEMORY: memory_khz, BUS: bus, BLOCKS: blocks}


@pytest.mark.parametrize(
    "name, cc, rate, share",
    [
        ("NVIDIA A100-SXM4-80GB", 80, 1024, 1.0),
        ("NVIDIA A100-PCIE-40GB", 80, 1024, 1.0),
        ("NVIDIA A10", 86, 512, 1.0),
        ("NVIDIA A40", 86, 512, 1.0),
        ("NVIDIA RTX A6000", 86, 512, 1.0),
        ("NVIDIA GeForce RTX 3080", 86, 256, 1.0),
        ("NVIDIA L4", 89, 512, 1.0),
        ("NVIDIA L40S", 89, 512, 1.0),
        ("NVIDIA GeForce RTX 4070", 89, 256, 1.0),
        ("NVIDIA H100 PCIe", 90, 2048, 0.667),
        ("NVIDIA B300", 103, 4096, 0.25),
        ("NVIDIA Thor", 110, 4096, 0.25),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 512, 1.0),
        ("NVIDIA GeForce RTX 5070", 120, 256, 1.0),
        ("NVIDIA GB10", 121, 512, 1.0),
        ("NVIDIA X999", 130, 512, 1.0),
    ],
)
def test_products_per_clock_by_name_and_capability(name, cc, rate, share):
    d = reported(props(name, cc, 84), attributes())
    assert (d.mma_fma_per_clk, d.mma_sync_share, d.cc, d.measured) == (rate, share, cc, True)
    assert d.sources and (name in DRIVER_NAMES or "mma_sync_share" in d.assumed)


@pytest.mark.parametrize(
    "cc, sms, l2, memory_khz, bus, gbps",
    [
        (87, 16, 4 << 20, 1_300_000, 256, 205),  # a Jetson AGX Orin, as its deviceQuery prints it
        (87, 8, 4 << 20, 612_000, 256, 205),  # the same with half of its SMs
        (87, 8, 2 << 20, 918_000, 64, 102),  # an Orin NX
        (87, 8, 2 << 20, 624_000, 64, 102),  # an Orin Nano, whose 68 none of ours names
        (110, 20, 32 << 20, 1_000_000, 128, 273),
        (99, 8, 2 << 20, 1_000_000, 128, 32),  # of an unknown one the driver's
    ],
)
def test_an_integrated_gpu_has_the_memory_of_its_module(cc, sms, l2, memory_khz, bus, gbps):
    told = props("Orin", cc, sms, l2CacheSize=l2)
    assert reported(told | {"integrated": 1}, attributes(memory_khz=memory_khz, bus=bus)).dram_gbps == gbps
    assert reported(told | {"integrated": 0}, attributes(memory_khz=memory_khz, bus=bus)).dram_gbps < max(gbps, 84)


def test_what_the_driver_reports_is_believed():
    d = reported(props("NVIDIA RTX A5500", 86, 84), attributes())
    assert (d.clock_mhz, d.dram_gbps, d.max_blocks_per_sm, d.num_sms) == (1740, 696, 16, 84)
    assert reported(props("NVIDIA L40S", 89, 142), attributes(blocks=24)).max_blocks_per_sm == 24
    assert d.dense_tflops == pytest.approx(149.7, rel=0.003), "as the A40, of the same chip and clock"
    l2 = NAMED["a10"]
    assert d.l2_bytes_per_clk == round(l2.l2_bytes_per_clk * 84 / 72), "per SM as its relative's"


def test_a_zero_is_not_believed_and_never_divides():
    d = reported(props("NVIDIA RTX A5500", 86, 84, l2CacheSize=0), attributes(0, 0, 0, 0))
    a10 = NAMED["a10"]
    assert (d.clock_mhz, d.dram_gbps, d.max_blocks_per_sm, d.l2_bytes) == (
        a10.clock_mhz,
        a10.dram_gbps,
        a10.max_blocks_per_sm,
        a10.l2_bytes,
    )
    assert {"clock_mhz", "dram_gbps", "max_blocks_per_sm"} <= set(d.assumed.split(", "))
    assert reported(props("NVIDIA RTX A5500", 86, 84), attributes(bus=0)).dram_gbps == a10.dram_gbps


@pytest.mark.parametrize("title, name", DRIVER_NAMES.items())
def test_a_named_device_at_hand_is_the_named_one(title, name):
    d = NAMED[name]
    found = reported(props(title, d.cc, d.num_sms), attributes(0, 0, 0, 0))
    for field in (
        "mma_fma_per_clk",
        "mma_sync_share",
        "l2_bytes_per_clk",
        "launch_us",
        "clock_mhz",
        "dram_gbps",
        "sm",
        "assumed",
    ):
        assert getattr(found, field) == getattr(d, field), field


def test_every_relative_is_named_and_has_a_source():
    assert all(r.name in NAMED and r.source for r in RELATIVES.values())
    with pytest.raises(ValueError, match="compute capability 7.5: expected 8.0 or newer"):
        reported(props("Tesla T4", 75, 40), attributes())


def test_cupy_is_asked_only_where_there_is_a_driver(monkeypatch):
    """It takes 0.1 s to import."""
    monkeypatch.setattr(device, "has_cupy", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it fails
    monkeypatch.setattr(device, "DRIVER", "libnone.so.1")
    assert device.why_no_gpu() == "no CUDA driver is found (libnone.so.1)" and not device.has_gpu()
    monkeypatch.setattr(device, "DRIVER", "libc.so.6")
    assert device.why_no_gpu().startswith("CuPy is not installed")


@pytest.mark.parametrize(
    "said, name",
    [(title, name) for title, name in DRIVER_NAMES.items()]
    + [(d.title, d.name) for d in NAMED.values()]
    + [("RTX 4090", "rtx4090"), ("rtx-4080", "rtx4080"), ("A100_PCIE", "a100_pcie"), ("Jetson Orin NX 16GB", "orin_nx16")],
)
def test_a_device_is_known_by_what_nvidia_smi_prints(said, name):
    assert device.named(said) is NAMED[name]


@pytest.mark.parametrize(
    "said, says",
    [
        ("h1000", "did you mean h100 or"),
        ("L5", "did you mean l4? expected one of a10, a100, "),
        ("orin", "did you mean orin_agx64 or orin_agx32 or orin_nx16 or orin_nx8 or orin_nano8?"),
        ("volta", "unknown device 'volta': expected one of a10"),
        ("", "unknown device '': expected one of a10"),
        ("Tesla T4", "device Tesla T4: compute capability 7.5: expected 8.0"),
        ("NVIDIA GeForce RTX 2080 Ti", "compute capability 7.5: expected 8.0"),
    ],
)
def test_an_unknown_device_is_refused_with_the_names_like_it(said, says):
    with pytest.raises(ValueError) as caught:
        device.named(said)
    assert says in str(caught.value)


def test_no_two_devices_are_called_alike():
    said = [_spoken(name) for name in (*NAMED, *REFUSED)]
    assert len(set(said)) == len(said) and not set(REFUSED) & set(NAMED)


def test_a_power_mode_has_measurements_of_its_own():
    """Drivers call each module of a generation "Orin": the clock tells its modes apart, and is no part of a card's key."""
    orin = reported(props("Orin", 87, 8, integrated=1), attributes(clock_khz=918_000))
    assert orin.key != reported(props("Orin", 87, 8, integrated=1), attributes(clock_khz=612_000)).key
    assert reported(props("NVIDIA A40", 86, 84), attributes()).key == "NVIDIA A40|sm_86|84|6291456"
