"""The import of an ONNX model. Read importer.py first.

Enters: an ONNX file, sizes of its open dimensions, whether weights are to be pruned to 2:4.

Leaves: `importer.Imported`: an onnx-ir graph that was checked, converted to one opset, folded and respelled.

files: reads and checks a model, and converts it to one opset; control_flow: replaces If and Loop by the nodes that run;
normalize: respells operators, so that each has one form; constants: folds constants; channels_first: turns products into
convolutions; split_attention: simplifies a softmax of two; travel, whole_numbers: quantised tensors as whole numbers; clean:
runs these on a checked model; importer: runs all in order; queries: questions about a graph; summaries: a model in words.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

# onnx-ir computes unknown sizes with SymPy, whose import takes a third of the time of all imports of a build. Here all sizes
# are known, so these two modules are executed only if one of their attributes is read.
LATER = ("sympy", "onnx_ir._symbolic_shapes")


class _Later:
    """An import hook that defers the execution of the modules in LATER."""

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
