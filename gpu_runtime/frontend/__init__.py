"""ONNX in. Read importer.py first.

Enters: an ONNX file, sizes of its open dimensions, whether weights are to be pruned to 2:4.

Leaves: `importer.Imported`: an onnx-ir graph that was checked, converted to one opset, folded and respelled.

load, check: read a file and find its faults; weights: their 2:4 pattern and pruning; control_flow: writes out If and Loop;
convert: to one opset; normalize: to one spelling; constants: folds them; channels_first: products as convolutions;
split_attention: by a softmax of two; quantized, whole_numbers: quantised tensors as whole numbers; clean: the
clean graph; importer: these in order; queries: questions about the graph; summaries: a model in words.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

# onnx-ir computes unknown sizes with SymPy, whose import takes a third of the time of all imports of a build. Sizes
# are known here, so these two modules are executed when one of their attributes is first read.
LATER = ("sympy", "onnx_ir._symbolic_shapes")


class _Later:
    """Finds these modules, and defers their execution."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in LATER else None
        if spec and spec.loader:
            spec.loader = LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Later)
try:
    import onnx  # noqa: F401  (the first that a message names)
    import onnx_ir  # noqa: F401
finally:
    sys.meta_path.remove(_Later)
