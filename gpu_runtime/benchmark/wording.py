"""Measured or predicted times as text and as files, in the form of trtexec's lines and JSON."""

from collections.abc import Mapping, Sequence

import numpy as np

from gpu_runtime.benchmark.records import Clocks, Settings, Statistics, Summary, Trace
from gpu_runtime.benchmark.summary import averages, predicted, remarks
from gpu_runtime.explain.figures import ms_of
from gpu_runtime.runtime.plan_record import EngineRecord
from gpu_runtime.text import printable, wrap

RULE = "=== {} ==="
EXPLANATIONS = (
    "Throughput: queries that ended in a second of Total Host Walltime. Where it is far below 1 / GPU Compute Time, the GPU "
    "waits for the host or for copies.",
    "Latency: H2D Latency + GPU Compute Time + D2H Latency of a query, without the time that it waits for the one ahead.",
    "Enqueue Time: how long the host takes to queue the kernels of a query. Where it is above GPU Compute Time, the GPU waits "
    "for the host.",
    "H2D Latency: copies of the inputs of a query from pinned memory to the GPU, between two events.",
    "GPU Compute Time: the kernels of a query, between two events.",
    "D2H Latency: copies of the outputs of a query from the GPU to pinned memory, between two events.",
    "Total Host Walltime: from when the first query after the warm-up began to be queued to when the last one had ended.",
    "Total GPU Compute Time: the sum over all queries. Where it is far below Total Host Walltime, the GPU waits for the host "
    "or for copies.",
)


def title(settings: Settings) -> str:
    """Returns the settings of a benchmark as a part of a sentence: streams, threads, CUDA graph, copies."""
    streams = "1 stream" if settings.streams == 1 else f"{settings.streams} streams"
    streams += ", a host thread each" if settings.threads and settings.streams > 1 else ""
    graph = "a CUDA graph" if settings.graph else "launches one by one (--noCudaGraph)"
    copies = "inputs and outputs copied" if settings.transfers else "nothing copied (--noDataTransfers)"
    return f"{streams}, {graph}, {copies}"


def statistics_text(found: Statistics, percents: Sequence[float]) -> str:
    """Returns statistics as trtexec prints them, in ms. `percents`: the percentages of `found.percentiles`."""
    parts = [f"{name} = {ms:.4f} ms" for name, ms in (("min", found.min), ("max", found.max), ("mean", found.mean))]
    parts.append(f"median = {found.median:.4f} ms")
    parts += [f"percentile({p:g}%) = {ms:.4f} ms" for p, ms in zip(percents, found.percentiles, strict=True)]
    return ", ".join(parts)


def text(
    trace: Trace, found: Summary, settings: Settings, *, runs: int | None = None, verbose: bool = False, emulated: bool = False
) -> str:
    """Returns trtexec's block of text; its lines are not folded, since programs read them.

    `runs`: adds lines with the mean times of each `runs` consecutive queries; None: no such lines. `verbose`: explains each
    line. `emulated`: the driver was emulated, so its times are no GPU's.
    """
    lines = [
        f"Warmup completed {found.warm_up} queries over {settings.warm_up_ms:g} ms",
        f"Timing trace has {found.queries} queries over {found.wall_s:.6g} s",
    ]
    if trace.left_out:
        lines.append(f"{trace.left_out} queries before these were measured too, and are not kept")
    if runs:
        lines += ["", RULE.format("Trace details"), f"Trace averages of {runs} runs:"]
        means = averages(trace.queries, runs)
        lines += [
            f"Average on {runs} runs - GPU latency: {gpu:.4f} ms - Host latency: {latency:.4f} ms (enqueue {enqueue:.4f} ms)"
            for gpu, latency, enqueue in means
        ]
        lines += [] if means else [f"No averages: {found.queries} queries are fewer than {runs}"]
    rows = (
        ("Latency", found.latency),
        ("Enqueue Time", found.enqueue),
        ("H2D Latency", found.h2d),
        ("GPU Compute Time", found.compute),
        ("D2H Latency", found.d2h),
    )
    made_up = " (an emulated driver's virtual clock: no GPU's times)" if emulated else ""
    lines += ["", RULE.format(f"Performance summary{made_up}"), f"Throughput: {found.throughput:.6g} qps"]
    lines += [f"{name}: {statistics_text(times, found.percents)}" for name, times in rows]
    lines += [f"Total Host Walltime: {found.wall_s:.6g} s", f"Total GPU Compute Time: {found.total_compute_s:.6g} s"]
    notes = [*remarks(found, settings)]
    if trace.clocks is None:
        notes.append("The GPU's clock is unknown: NVIDIA's management library does not answer here, as on a Jetson")
    elif trace.clocks.held:
        notes.append(clocks_text(trace.clocks))
    lines += [line for remark in notes for line in wrap(f"* {remark}")]
    if verbose:
        lines += ["", RULE.format("Explanations of the performance metrics")]
        lines += [line for sentence in EXPLANATIONS for line in wrap(sentence)]
    return "\n".join(lines)


def clocks_text(clocks: Clocks) -> str:
    """Returns the sentence that the GPU's clock was held down, with the reasons and the range of the clock."""
    why = ", ".join(f"{reason} in {count} of {clocks.samples} samples" for reason, count in clocks.held)
    low = f"{clocks.low_mhz} to {clocks.high_mhz}" if clocks.low_mhz < clocks.high_mhz else str(clocks.low_mhz)
    return f"The GPU's clock was held down while this was measured ({why}): {low} MHz of at most {clocks.most_mhz}"


def predicted_text(record: EngineRecord) -> str:
    """Returns the lines of trtexec's block that can be predicted; each line with a time says that it is predicted."""
    time, label = predicted(record), f"predicted({record.device.name})"
    per_s, ms = 1e6 / time.us if time.us else 0.0, [*map(ms_of, (time.us, time.low_us, time.high_us))]
    lines = [
        RULE.format("Performance summary (predicted, nothing was measured)"),
        f"Throughput: ~{per_s:.6g} qps, {label}: 1 stream, a GPU that never waits",
        f"GPU Compute Time: ~{ms[0]:.4f} ms, {label}: {ms[1]:.4f} to {ms[2]:.4f} ms",
    ]
    return "\n".join([*lines, "Latency, Enqueue Time, H2D Latency and D2H Latency are not predicted: the host decides them"])


# ---- files


def times_json(trace: Trace) -> list[dict[str, float]]:
    """Returns trtexec's --exportTimes: a record for each measured query, in milliseconds since the loop began."""
    records = [
        {
            "startEnqMs": q.enqueue_start,
            "endEnqMs": q.enqueue_end,
            "startH2dMs": q.h2d_start,
            "endH2dMs": q.compute_start,
            "startComputeMs": q.compute_start,
            "endComputeMs": q.compute_end,
            "startD2hMs": q.compute_end,
            "endD2hMs": q.d2h_end,
            "h2dMs": q.h2d_ms,
            "computeMs": q.compute_ms,
            "d2hMs": q.d2h_ms,
            "latencyMs": q.latency_ms,
        }
        for q in trace.queries
    ]
    return [{name: round(ms, 6) for name, ms in record.items()} for record in records]


def outputs_json(outputs: Mapping[str, np.ndarray]) -> list[dict[str, object]]:
    """Returns trtexec's --exportOutput: name, dimensions and values in C order of each output. Python's json writes infinity
    and NaN in them as Infinity and NaN.
    """
    return [{"name": name, "dimensions": _dims(a), "values": a.reshape(-1).tolist()} for name, a in outputs.items()]


def outputs_text(outputs: Mapping[str, np.ndarray]) -> str:
    """Returns trtexec's --dumpOutput: every value of every output, as text."""
    lines = ["Output Tensors:"]
    for name, a in outputs.items():
        values = (f"{v:g}" if a.dtype.kind == "f" else str(v) for v in a.reshape(-1).tolist())
        lines += [f"{printable(name)}: ({_dims(a)})", " ".join(values)]
    return "\n".join(lines)


def _dims(a: np.ndarray) -> str:
    return "x".join(map(str, a.shape))
