"""`gpu-runtime triton-repo ENGINE -o REPO --name NAME`: a model of NVIDIA Triton's python backend that runs an engine."""

import json
import os
import re
import shutil
from pathlib import Path

import click

from cuda_kernels import device as devices
from cuda_kernels.compile import source_hash
from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import quiet_option
from gpu_runtime.engine import Engine, load
from gpu_runtime.runtime.compatibility import check_device, check_source
from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.serving.rows import sizes

OURS = "# Written by gpu-runtime triton-repo, which does not change it again: edit the settings below the outputs.\n"
TYPES = {"float32": "FP32", "float16": "FP16"}  # where it is not NumPy's name in capitals
MODEL = '''"""Runs model.engine of this folder; the Python that Triton starts needs gpu-runtime and NumPy 1."""
from gpu_runtime.serving.triton import TritonPythonModel  # noqa: F401
'''
# The queue holds two seconds of requests at most: later ones are refused at once, not late.
SETTINGS = """
instance_group [ {{ count: {instances} kind: {kind} }} ]
dynamic_batching {{
  preferred_batch_size: {points}
  max_queue_delay_microseconds: 2000
  default_queue_policy {{ timeout_action: REJECT default_timeout_microseconds: 2000000 max_queue_size: 1024 }}
}}
version_policy {{ latest {{ num_versions: 1 }} }}
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "yes" }} }}
parameters {{ key: "emulate" value {{ string_value: "{emulate}" }} }}
"""


@click.command("triton-repo")
@click.argument("engine", type=click.Path())
@click.option("-o", "--output", type=click.Path(), required=True, metavar="REPO", help="Triton's model repository.")
@click.option("--name", required=True, help="The model's name in Triton.")
@click.option("--instances", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes, on each GPU.")
@click.option(
    "--kind", type=click.Choice(["gpu", "cpu"]), default="gpu", show_default=True, help="cpu runs in the emulator, for tests."
)
@quiet_option
def triton_repo_command(engine: str, output: str, name: str, instances: int, kind: str) -> None:
    """Write the folder REPO/NAME for Triton's python backend: config.pbtxt, and the engine as version 1.

    With a model that this command wrote, ENGINE becomes the next version; its inputs and outputs have to be the same.
    config.pbtxt then stays as it is, with --instances and --kind.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise click.UsageError(f"--name: expected letters, digits, '_', '-' and '.', got {name!r}")
    if os.path.lexists(output) and not os.path.isdir(output):
        raise click.UsageError(f"--output {output}: expected a folder, Triton's model repository, got a file")
    loaded = load(engine)
    size = sizes(loaded)
    _check_runs_here(loaded, kind)
    tensors = {"input": loaded.inputs, "output": loaded.outputs}
    ends = "".join(f"{end} [ {', '.join(map(_tensor, specs))} ]\n" for end, specs in tensors.items())
    interface = f'name: "{name}"\nbackend: "python"\nmax_batch_size: {size.max}\n{ends}'
    points, emulate = list(size.exact or loaded.points), str(kind == "cpu").lower()
    settings = SETTINGS.format(instances=instances, kind=f"KIND_{kind.upper()}", points=points, emulate=emulate)
    model = Path(output) / name
    try:
        version = _next_version(model, interface)
        _place(model, version, Path(engine), OURS + interface + settings)
    except OSError as e:
        raise ValueError(f"{e.filename}: the model could not be written: {e.strerror or e}") from None
    say(f"Wrote {model}, version {version}{f': {_served(size)}' if version == 1 else ''}")


def _served(size: Batch) -> str:
    """Returns the words for the requests that the model will answer. `size`: the rows that a run takes."""
    if not size.exact:
        return f"requests of 1 to {size.max} rows, joined into runs of {size} rows"
    counts = " or ".join(map(str, size.exact))
    return f"only requests of exactly {counts} rows, each run alone; an engine of a range of batches answers and joins others"


def _check_runs_here(engine: Engine, kind: str) -> None:
    """Raises EngineError for an engine of other kernel sources, or for `kind` "gpu" of another architecture than a GPU that is
    visible.
    """
    check_source(engine.record, source_hash())
    if kind == "gpu" and devices.has_gpu():
        check_device(engine.record.device, devices.current().sm)


def _tensor(spec: TensorSpec) -> str:
    name, dims = json.dumps(spec.name, ensure_ascii=False), list(spec.shape[1:])
    kind = f"TYPE_{TYPES.get(spec.dtype.name, spec.dtype.name.upper())}"
    return f"{{ name: {name} data_type: {kind} dims: {dims or '[1] reshape { shape: [] }'} }}"


def _next_version(model: Path, interface: str) -> int:
    """Returns the number of the version to write: 1 for a new model. `interface`: the inputs and outputs in config.pbtxt.

    Raises ValueError if another program made the model's folder, or the model has another interface.
    """
    if not os.path.lexists(model):
        return 1
    config = model / "config.pbtxt"
    text = config.read_text() if config.is_file() else ""
    if not text.startswith(OURS):
        raise ValueError(f"{model}: exists, and triton-repo did not write it: give another --name, or move it away")
    if interface not in text:
        raise ValueError(
            f"{config}: its batch, inputs or outputs are not the engine's, and all versions have the same: give another "
            f"--name. Expected\n{interface}"
        )
    return 1 + max((int(p.name) for p in model.iterdir() if p.name.isdigit()), default=0)


def _place(model: Path, version: int, engine: Path, config: str) -> None:
    """Writes the version's folder, and with version 1 the model's, under another name first: Triton, which may watch the
    repository, sees it only when it is complete.
    """
    target = model / str(version) if version > 1 else model
    target.parent.mkdir(exist_ok=True)  # the repository may be new, and the folder around it has to be there
    draft = target.parent / f".{target.name}.{os.getpid()}"
    try:
        folder = draft if version > 1 else draft / "1"
        folder.mkdir(parents=True)
        shutil.copyfile(engine, folder / "model.engine")
        (folder / "model.py").write_text(MODEL)
        if version == 1:
            (draft / "config.pbtxt").write_text(config)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
