"""What commands print, and the JSON that they print or write."""

from __future__ import annotations

import json

import click


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a text that may hold names out of files: no character of it commands the terminal."""
    from gpu_runtime.text import printable

    click.echo(printable(text, keep="\n"), err=err, nl=nl)


def json_bytes(data: object) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()
