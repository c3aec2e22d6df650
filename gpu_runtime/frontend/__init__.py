"""ONNX in. Read importer.py first.

Enters: an ONNX file, sizes of its open dimensions, whether weights are to be pruned to 2:4.
Leaves: `importer.Imported`: an onnx-ir graph that was checked, converted to one opset, folded and respelled.

load and check what is wrong with a file; weights how they stand to 2:4, and their pruning; control_flow none is left; convert
one opset; normalize one spelling; constants folded; channels_first products; split_attention by a softmax of two; clean nothing
left that constants decide; importer these in order; pattern what inspect-sparsity shows; queries questions about the graph;
describe what a model is.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

# onnx-ir computes sizes that are unknown with SymPy, whose import takes as long as a third of all that a build imports. Sizes
# are known here, so these two are executed when something of them is first asked for.
LATER = ("sympy", "onnx_ir._symbolic_shapes")


class _Later:
    """Finds them."""

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
