"""The names of ONNX's operators that can be built, as docs/operators.md lists them.

python -m benchmarks.operators
"""

import textwrap

import click

from tactics.problems.operators import OPERATORS

if __name__ == "__main__":
    click.echo(textwrap.fill(" ".join(f"`{name}`" for name in sorted(OPERATORS)), 128))
