"""Triton's matrix products, compiled for sm_80: {tile: a kernel as tests/independent/triton_kernels.py prints it} as JSON.

    python -m benchmarks.sass.triton_matmul M,N,K,WARPS,STAGES ...

Needs the extra [truth].
"""

import json
import sys

from tests.independent.triton_kernels import compiled, product


def main() -> None:
    found = {}
    for word in sys.argv[1:]:
        m, n, k, warps, stages = map(int, word.split(","))
        found[word] = compiled(product(tile=(m, n, k), one=("a_k", "b_k"), warps=warps, stages=stages))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
