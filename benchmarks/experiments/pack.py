"""`make gpu-pack`: all that `make gpu` loads, compiled and planned where there is no GPU. `make gpu` unpacks it.

    python -m benchmarks.experiments.pack [--small] [--devices h200,h100]

Into out/gpu, at most MOST_BYTES: plans/DEVICE/NAME_BATCH_KIND.plan, plans without weights (stored.py); NN_ROW.tar.xz, the cache
entries of each row's kernels, as machine code alone; manifest.json. Rows come by their priority, and one that no longer fits is
left out, and told. Plans of sources that have not changed are kept.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import tarfile
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import hardware, processes
from benchmarks.bench_networks import KINDS, Row, model_of, row_of
from benchmarks.experiments import kernels, stored
from benchmarks.processes import ROOT
from cuda_kernels import files
from cuda_kernels.compile import CompileError, cache_path, compile_kernel, entry_hash, is_kept, nvrtc_version, source_hash
from cuda_kernels.device import Device, named
from tactics.launches import Binary

MOST_BYTES = 45 << 20
DEVICES = ("h200", "h100")  # devices of one architecture, so that kernels serve both
PLANS = (
    *(f"resnet50:{n}:dense,sparse" for n in (1, 8, 32, 128, 256)),
    *(f"vgg19:{n}:dense,sparse" for n in (1, 32, 128)),
    *(f"vae_decoder:{n}:dense,sparse" for n in (1, 4)),
    "realesr:1:dense,sparse",
    "timm_poolformer_s12:32:dense",
    "tv_efficientnet_b0:32:dense",
    "tv_convnext_tiny:32:dense",
    *(f"resnet50_int8:{n}:dense,sparse" for n in (1, 32)),
)
SMALL_PLANS = ("two_layers:1:dense,sparse",)
ENTRY = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}\.(json|cubin)")
made = lru_cache(maxsize=1)(model_of)  # of one network follow several kinds and devices
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]  # kernels of a row are alike, megabytes apart
PLANNED_BY = (
    "cuda_kernels",
    "tactics",
    "gpu_runtime",
    *(f"benchmarks/{name}.py" for name in ("networks", "heavy", "topologies")),
)


def sources() -> str:
    """Returns a hash of all sources that plans depend on."""
    digest = hashlib.sha256()
    for name in PLANNED_BY:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".cu", ".cuh"):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]


# ---- plans


def plan(row: Row, kind: str, device: str) -> str:
    """Predicts and stores a plan; returns why that failed, or ""."""
    import gpu_runtime as gr

    path, begun = stored.path_of(device, row.name, row.batch, kind), time.monotonic()
    try:
        model, shapes = made(row.name, row.batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = gr.build(model, **KINDS[kind], device=device, shapes=shapes)
        files.write(path, stored.stored(engine))
    except Exception as e:  # the others are planned
        return f"{path.name} for {device}: {type(e).__name__}: {e}"[:500]
    print(f"{path.name} for {device}: {engine.plan.solution.total_us:.1f} us, {time.monotonic() - begun:.0f} s", flush=True)
    return ""


def plans(items: Sequence[str], devices: Sequence[str]) -> list[str]:
    """Makes the plans that are missing; returns why some failed."""
    wanted = [(row, kind, device) for row in (row_of(i, "dense") for i in items) for kind in row.kinds for device in devices]
    todo = [w for w in wanted if not stored.path_of(w[2], w[0].name, w[0].batch, w[1]).exists()]
    with processes.pool(os.cpu_count() or 1) as pool:
        return list(filter(None, pool.map(plan, *zip(*todo, strict=True)))) if todo else []


# ---- kernels


def compiled(wanted: Iterable[Binary], sm: str) -> tuple[list[Path], dict[str, str]]:
    """Compiles the kernels that the cache does not have; returns (cache entries, kernel -> why it has none)."""
    failed: dict[str, str] = {}

    def one(item: Binary) -> Path | None:
        try:
            compile_kernel(item[0], dict(item[1]), sm)
            return cache_path(item[0], item[1], sm)
        except CompileError as e:
            failed[str(item)] = str(e)[:300]
            return None

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [path for path in pool.map(one, wanted) if path is not None], failed


def archive(entries: Iterable[Path], whole: bool) -> bytes:
    """Returns cache entries as one compressed file; without their PTX, which no GPU needs, unless `whole`."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path in entries:
            meta = json.loads(path.read_bytes())
            if not whole:
                meta["ptx"] = ""
                meta["sha256"] = entry_hash(meta)
            code = path.with_suffix(".cubin").read_bytes()
            for name, content in ((path.name, json.dumps(meta).encode()), (f"{path.stem}.cubin", code)):
                info = tarfile.TarInfo(f"{path.parent.name}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return lzma.compress(data.getvalue(), filters=FILTERS)


def unpack() -> tuple[int, dict[str, Any]]:
    """Puts the packed kernels into the cache; returns (their number, the manifest), (0, {}) if nothing is packed or the pack is
    another compiler's. ValueError if an archive is damaged.
    """
    path = stored.PACK / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    if not manifest or manifest["nvrtc"] != nvrtc_version():
        return 0, {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return sum(pool.map(_extract, sorted(stored.PACK.glob("*.tar.xz")))), manifest


def _extract(path: Path) -> int:
    root, count = files.cache_dir() / "kernels", 0
    try:
        data = lzma.decompress(path.read_bytes())
    except lzma.LZMAError as e:
        raise ValueError(f"{path.name}: expected an archive of make gpu-pack: {e}: copy it again, or make it anew") from None
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            content = tar.extractfile(info)
            if not ENTRY.fullmatch(info.name) or content is None:
                raise ValueError(f"{path.name}: expected cache entries, got {info.name!r}: make gpu-pack writes it anew")
            if not (root / info.name).exists():
                files.keep(root / info.name, content.read())
                count += info.name.endswith(".cubin")
    return count


def missing(name: str, device: Device, small: bool, out: Path) -> list[Binary]:
    """Returns the kernels of a row that the cache does not have."""
    return [b for b in kernels.of_row(name, device, small, out) if not is_kept(b[0], dict(b[1]), device.sm)]


# ---- all of it


def fresh(digest: str) -> None:
    """Empties the folder if it was packed from other sources."""
    path = stored.PACK / "manifest.json"
    if not path.exists() or json.loads(path.read_bytes()).get("sources") != digest:
        shutil.rmtree(stored.PACK, ignore_errors=True)
    stored.PACK.mkdir(parents=True, exist_ok=True)


def main(argv: list[str] | None = None) -> int:
    from benchmarks.gpu import ROWS

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="for a rehearsal: few kernels, with their PTX")
    parser.add_argument("--devices", default=",".join(DEVICES), help="named devices of one architecture (default: %(default)s)")
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS), help="some of %(default)s")
    args, begun = parser.parse_args(argv), time.monotonic()
    devices, digest = args.devices.split(","), sources()
    fresh(digest)
    manifest: dict[str, Any] = {
        "sources": digest,
        "kernels": source_hash(),
        "nvrtc": nvrtc_version(),
        "small": args.small,
        "rows": {},
        "left_out": [],
    }
    hardware.write(stored.PACK / "manifest.json", manifest)
    manifest["failed"] = plans(SMALL_PLANS if args.small else PLANS, devices)
    done: set[Path] = set()
    room = MOST_BYTES - sum(path.stat().st_size for path in stored.PACK.rglob("*.plan"))
    for number, name in enumerate(args.rows.split(",")):
        wanted = [b for device in devices for b in kernels.of_row(name, named(device), args.small, hardware.DEFAULT)]
        entries, failed = compiled(dict.fromkeys(wanted), named(devices[0]).sm)
        data = archive((path for path in dict.fromkeys(entries) if path not in done), args.small)
        manifest["failed"] += [f"{kernel}: {why}" for kernel, why in failed.items()]
        if len(data) > room:
            manifest["left_out"].append(f"{name}: {len(data) >> 20} MiB, {room >> 20} are left")
        else:
            files.write(stored.PACK / f"{number:02}_{name}.tar.xz", data)
            room, done = room - len(data), done | set(entries)
            manifest["rows"][name] = len(entries)
        print(f"{name}: {len(entries)} kernels, {len(data) >> 10} KiB; {time.monotonic() - begun:.0f} s", flush=True)
        hardware.write(stored.PACK / "manifest.json", manifest)
    used = sum(path.stat().st_size for path in stored.PACK.rglob("*") if path.is_file())
    left_out = ", ".join(manifest["left_out"]) or "nothing"
    print(f"{stored.PACK}: {used / (1 << 20):.1f} MiB of {MOST_BYTES >> 20}; left out: {left_out}")
    for text in manifest["failed"]:
        print(f"FAILED {text}", file=sys.stderr)
    return 1 if manifest["failed"] or manifest["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
