"""The metrics of every server, by one name in each: docs/serving.md has this table."""

from collections.abc import Iterator

from gpu_runtime.serving.rows import Failure, Joined

Count = tuple[str, float, str]  # name, amount, value of its label
# Name -> its label, empty without any; its description. All are counters.
COUNTERS = {
    "gpu_runtime_requests": ("", "requests that were answered, with outputs or an error"),
    "gpu_runtime_rows": ("", "rows that ran"),
    "gpu_runtime_padded_rows": ("", "rows that runs were padded with"),
    "gpu_runtime_runs": ("point", "runs, by the batch size that they were padded to"),
    "gpu_runtime_run_seconds": ("", "seconds of these runs"),
    "gpu_runtime_errors": ("kind", "errors in answers: request (it is wrong), size, run, fatal, replica, overload, timeout"),
    "gpu_runtime_nonfinite": ("layer", "runs in which this layer stored infinite values or NaN"),
}


def counts(joined: Joined) -> Iterator[Count]:
    """Yields (counter, amount, kind of error or "") for each counter that these answers and runs increase.

    An amount is never 0, which some servers' counters refuse.
    """
    yield "gpu_runtime_requests", len(joined.answers), ""
    yield from (("gpu_runtime_errors", 1, answer.kind) for answer in joined.answers if isinstance(answer, Failure))
    for run in joined.runs:
        yield "gpu_runtime_rows", run.rows, ""
        if run.point > run.rows:
            yield "gpu_runtime_padded_rows", run.point - run.rows, ""
        yield "gpu_runtime_runs", 1, str(run.point)
        yield "gpu_runtime_run_seconds", run.seconds, ""
        yield from (("gpu_runtime_nonfinite", 1, layer) for layer in run.nonfinite)
