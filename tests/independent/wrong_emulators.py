"""Wrong emulators, one fault each, in the interpreter's own source: a witness must notice each of them.

    python -m tests.independent.wrong_emulators [NAME ...]      asks the witnesses of all faults, or of these

faults.py changes a program's text; here the interpreter is changed, so that faults that no PTX can express are tried too:
orders of lanes, groups of copies, barriers, checks that are blind or see faults that do not exist. A fault is a text of the
interpreter's source and its replacement (wrong_emulators.json). The changed sources are compiled by themselves, in some
seconds, and cached by content. A witness is a program or a table by others and its required result; some are broken on purpose,
to be refused.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_kernels.emulator import EmulatorError, Options, build
from tests.independent import cuda_programs, interpreter
from tests.independent.cuda_programs import ALL_AT_ONCE, CONV_BYTES, GEMM_SM90, SPARSE_SM90
from tests.independent.products import Mma, loaded_wrong, moved_wrong, wrong
from tests.independent.triton_programs import Triton, committed
from tests.independent.triton_runs import execute, runs, worst

SOURCES = build.SOURCES
TABLE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[2]
SECONDS = 120  # a fault may make a loop endless
DENSE = [Mma(16, "f16"), Mma(16, "bf16"), Mma(16, "f16", "f16"), Mma(8, "tf32")]
SPARSE = [Mma(32, "f16", sparse=True, selector=selector) for selector in (0, 1)]


BYTES = [
    Mma(k, a, "s32", k == 64, other=b, saturate=saturate)
    for k in (16, 32, 64)
    for a, b, saturate in (("s8", "s8", False), ("s8", "u8", True), ("u8", "s8", False), ("u8", "u8", True))
]


# ---- witnesses: each returns whether all results are right


def right(*names: str, late: bool = False, seed: int = 0) -> bool:
    """Whether these Triton kernels compute the same as NumPy."""
    options = Options(async_mode="late" if late else "eager", seed=seed)
    return all(worst(committed(name), options) <= 1 for name in names)


def changed(name: str, old: str, new: str, which: int = 0) -> Triton:
    """Returns a Triton kernel with `new` in place of the text `old`: everywhere, or only at its `which`-th place."""
    kernel = committed(name)
    parts = kernel.ptx.split(old)
    if len(parts) <= which or len(parts) == 1:
        raise ValueError(f"{name} has {len(parts) - 1} times '{old}'")
    between = [new if which in (0, i) else old for i in range(1, len(parts))]
    return replace(kernel, ptx="".join(map("".join, zip(parts, [*between, ""], strict=True))))


def refused(kernel: Triton, words: str) -> bool:
    """Whether a kernel that was broken on purpose is refused with a message that begins with `words`."""
    try:
        worst(kernel, Options())
    except EmulatorError as e:
        return str(e).startswith(words)
    return False


def without_conflicts(name: str) -> bool:
    """Whether no ldmatrix and no copy of a Triton kernel meets a conflict of banks: Triton swizzles its tiles for that."""
    kernel = committed(name)
    excess = [execute(kernel, run, Options())[1].excess for run in runs(kernel)]
    return all(e["ldmatrix"] == 0 and e["cp.async"] == 0 for e in excess)


def placed() -> bool:
    """Whether fragments are loaded as CuTe says, and moved as it would store and load them."""
    return not any(loaded_wrong(count, trans) for count in (1, 2, 4) for trans in (False, True)) and not moved_wrong()


def cuda(
    sources: Path, name: str, words: str, *options: str, change: Mapping[str, str] | None = None, given: Sequence[str] = ()
) -> bool:
    """Whether a CUDA program with the arguments `given` prints `words`; `change`: regular expression -> replacement in its
    PTX.
    """
    more = ("--replace", json.dumps(dict(change))) if change else ()
    out, _ = cuda_programs.run(name, given, *options, *more, "--emulator", str(sources))
    if "Traceback" in out:
        raise RuntimeError(f"{name} was not run:\n{out}")
    return re.search(words, out) is not None


def in_clusters(sources: Path, words: str, change: Mapping[str, str], given: Sequence[str] = GEMM_SM90) -> bool:
    return cuda(sources, "gemm_sm90_2x2", words, change=change or None, given=given)


KEPT = {r"mapa\.shared::cluster\.u32 (\S+), *(\S+), *\S+;": r"mov.u32 \1, \2;"}  # no block hears that another has read
GEMM_SM90_SHORT = [*GEMM_SM90, "--k=128"]
RELAXED = {r"barrier\.cluster\.arrive;": "bar.sync 0; barrier.cluster.arrive.relaxed;"}  # orders a block alone
LAST_WAIT = {r"barrier\.cluster\.wait;(?![\s\S]*barrier\.cluster\.wait;)": ""}
GRID, ORDER = ("--resident", "8"), "launch refused: global order"
GROUPS, PROXIES = "wgmma.wait_group.sync.aligned {};", "fence.proxy.async.shared::cta;"
BULK_WAIT = "cp.async.bulk.wait_group \t0;"
WAITS, BARRIER = "cp.async.wait_group \t{};", "bar.sync \t0;"
WITNESSES: dict[str, Callable[[Path], bool]] = {
    "CuTe's fragments of mma": lambda s: not any(wrong(m) for m in (*DENSE, *SPARSE, *BYTES)),
    "CuTe's ldmatrix": lambda s: placed(),
    "Triton's matmul": lambda s: right("matmul"),
    "Triton's matmul, late copies": lambda s: right("matmul", late=True),
    "Triton's matmul, a wait short": lambda s: refused(changed("matmul", WAITS.format(2), WAITS.format(3)), "cp.async"),
    "Triton's swizzle": lambda s: without_conflicts("matmul"),
    "Triton's attention": lambda s: right("attention"),
    "Triton's softmax": lambda s: right("softmax"),
    "Triton's softmax, no 2nd barrier": lambda s: refused(changed("softmax", BARRIER, "", 2), "race: read after write"),
    "Triton's softmax, no 3rd barrier": lambda s: refused(changed("softmax", BARRIER, "", 3), "race: write after read"),
    "Triton's transpose": lambda s: right("transpose"),
    "Triton's rounded": lambda s: right("rounded"),
    "Triton's compared and masks": lambda s: right("compared", "masks", "carried"),
    "Triton's words and shorts": lambda s: right("words", "shorts"),
    "Triton's gathered_lanes": lambda s: right("gathered_lanes"),
    "Triton's dependent": lambda s: right("dependent"),
    "Triton's dependent, no wait": lambda s: refused(changed("dependent", "griddepcontrol.wait ;", ""), "dependent launch"),
    "Triton's matmul for Hopper": lambda s: right("matmul_hopper"),
    "Triton's matmul for Hopper, a wait short": lambda s: refused(
        changed("matmul_hopper", GROUPS.format(1), GROUPS.format(2)), "race"
    ),
    "Triton's matmul for Hopper, no proxy fence": lambda s: refused(changed("matmul_hopper", PROXIES, ""), "proxy fence"),
    "Triton's matmul for Hopper, no last wait": lambda s: refused(changed("matmul_hopper", GROUPS.format(0), ""), "wgmma"),
    "Triton's TMA": lambda s: right("tma_64x64x32"),
    "Triton's TMA, late copies": lambda s: right("tma_64x64x32", late=True),
    "Triton's TMA, a wait short": lambda s: refused(changed("tma_64x64x32", GROUPS.format(1), GROUPS.format(2)), "race"),
    "Triton's TMA, no proxy fence": lambda s: refused(changed("tma_64x64x32", PROXIES, ""), "proxy fence"),
    "Triton's TMA, no last wait": lambda s: refused(changed("tma_64x64x32", BULK_WAIT, ""), "pending"),
    "CuTe's wgmma": lambda s: cuda(s, "wgmma", "Passed"),
    "NVIDIA's wrappers for Hopper": lambda s: cuda(s, "bulk_copies", "Passed"),
    "NVIDIA's wrappers for stores": lambda s: cuda(s, "bulk_stores", "Passed"),
    "NVIDIA's wrappers for stores, a wait short": lambda s: cuda(
        s, "bulk_stores", "refused: race: write after read", change={r"wait_group\.read 1;": "wait_group.read 2;"}
    ),
    "CUTLASS's sparse product for Hopper": lambda s: cuda(s, "sparse_gemm_sm90", "Disposition: Passed", given=SPARSE_SM90),
    "CUTLASS's sparse product of bytes": lambda s: cuda(s, "sparse_gemm_bytes", "Passed"),
    "CUTLASS's sparse product of unsigned bytes": lambda s: cuda(s, "sparse_gemm_unsigned", "Passed"),
    "CUTLASS's convolution of bytes": lambda s: cuda(s, "conv_fprop_bytes", "Passed", given=CONV_BYTES),
    "CUTLASS's convolution for Hopper": lambda s: cuda(s, "conv_sm90", "Passed"),
    "CUTLASS's convolution, two blocks share pixels": lambda s: cuda(s, "conv_sm90_1x2", "Passed"),
    "CUTLASS's convolution, two blocks share filters": lambda s: cuda(s, "conv_sm90_2x1", "Passed"),
    "CUTLASS's product in clusters": lambda s: in_clusters(s, "Disposition: Passed", {}),
    "CUTLASS's product in clusters, no barrier": lambda s: in_clusters(
        s, "refused: cluster: it uses", {r"barrier\.cluster\.(arrive|wait)[^;]*;": ""}
    ),
    "CUTLASS's product in clusters, no fence": lambda s: in_clusters(
        s, "refused: mbarrier: warp 0 of block", {r"fence\.mbarrier_init\.release\.cluster;": ""}
    ),
    "CUTLASS's product in clusters, no release": lambda s: in_clusters(s, "refused: (race|in flight)", KEPT),
    "CUTLASS's product in clusters, left": lambda s: in_clusters(s, "refused: cluster: the block ends", KEPT, GEMM_SM90_SHORT),
    "nvcc's loops that lanes leave": lambda s: cuda(s, "divergence", "Passed"),
    "CUB's scan": lambda s: cuda(s, "scan", "Passed", *ALL_AT_ONCE),
    "CUB's scan, no acquire": lambda s: cuda(s, "scan", ORDER, *ALL_AT_ONCE, change={r"membar\.gl;": ""}),
    "CUB's scan, no release": lambda s: cuda(s, "scan", ORDER, *ALL_AT_ONCE, change={r"st\.release\.gpu": "st.relaxed.gpu"}),
    "CUB's merge sort as shipped": lambda s: cuda(s, "merge_sort", "dependent launch: global load"),
    "cooperative groups in a cluster": lambda s: cuda(s, "cluster_groups", "Passed"),
    "cooperative groups in a cluster, relaxed": lambda s: cuda(s, "cluster_groups", "refused: race", change=RELAXED),
    "cooperative groups in a cluster, left before": lambda s: cuda(
        s, "cluster_groups", "refused: cluster: it uses .* has ended", "--resident", "4", change=LAST_WAIT
    ),
    "cooperative groups in a cluster, left after": lambda s: cuda(  # in that order it has been used
        s, "cluster_groups", "refused: cluster: the block ends", "--resident", "4", "--seed", "3", change=LAST_WAIT
    ),
    "cooperative groups": lambda s: cuda(s, "grid_sync", "Passed", *GRID),
    "cooperative groups, no acquire": lambda s: cuda(s, "grid_sync", ORDER, *GRID, change={r"ld\.acquire": "ld.relaxed"}),
}
NEED_CUDA = ("CUB", "cooperative", "nvcc", "CuTe's wgmma", "CUTLASS", "NVIDIA")


# ---- faults


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: in `file` of the interpreter's sources, `after` replaces `before`, which occurs once; `witness` must notice
    it.
    """

    file: str
    before: str
    after: str
    witness: str


def faults() -> dict[str, Fault]:
    """Returns name -> fault, as wrong_emulators.json has them."""
    return {row.pop("fault"): Fault(**row) for row in json.loads(TABLE.read_text())}


def sources(fault: Fault | None, folder: Path) -> Path:
    """Returns a copy of the interpreter's sources with that fault. ValueError if its text does not occur once."""
    for path in (*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")):
        shutil.copy(path, folder)
    if fault:
        text = (folder / fault.file).read_text()
        if text.count(fault.before) != 1:
            raise ValueError(f"{fault.file}: '{fault.before}' stands there {text.count(fault.before)} times, expected once")
        (folder / fault.file).write_text(text.replace(fault.before, fault.after))
    return folder


@contextmanager
def emulator(fault: Fault | None) -> Iterator[Path]:
    """Returns, for the block, the sources of the interpreter with that fault, or with none; compiled, unless the cache has
    it.
    """
    with tempfile.TemporaryDirectory(prefix="gpu_runtime-") as folder:
        yield sources(fault, Path(folder))


def as_it_must_be(witness: str, folder: Path) -> bool:
    """Returns the witness's answer in a process of its own. An emulator that ends the process, or never ends, is wrong."""
    command = [sys.executable, "-m", "tests.independent.wrong_emulators", "--witness", witness, str(folder)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    if "as it must be" not in done.stdout and done.returncode >= 0:
        raise RuntimeError(f"{witness} was not asked:\n{done.stdout}{done.stderr}")
    return "is as it must be" in done.stdout


def noticed(fault: Fault) -> bool:
    with emulator(fault) as folder:
        return not as_it_must_be(fault.witness, folder)


def ask(witness: str, folder: Path) -> None:
    interpreter.use(folder)
    try:
        told = "is" if WITNESSES[witness](folder) else "is not"
    except EmulatorError as e:
        told = f"{e}\nis not"
    print(f"{told} as it must be")


def main() -> None:
    if sys.argv[1:2] == ["--witness"]:
        return ask(sys.argv[2], Path(sys.argv[3]))
    known = faults()
    if unknown := set(sys.argv[1:]) - set(known):
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; there are\n  " + "\n  ".join(known))
    for name in sys.argv[1:] or known:
        print(f"{name}: {'noticed' if noticed(known[name]) else 'NOT NOTICED'} by {known[name].witness}", flush=True)


if __name__ == "__main__":
    main()
