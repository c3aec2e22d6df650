"""The report as one HTML file that needs no network.

Texts come from files that may be hostile. Three measures confine them: the page's scripts never make markup of a text; no
character of the data can end the block of JSON that holds it; and the page's policy allows one script to run, by its hash, and
nothing to be fetched.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_runtime.explain.facts import KINDS
from gpu_runtime.report.data import joined, page
from gpu_runtime.runtime.plan_record import EngineRecord

HERE = Path(__file__).parent
SCRIPTS = ("base", "verdict", "table", "detail", "graph", "charts", "compare", "main")
MOST_PLAIN = 700_000  # characters of readable data; longer data is compressed, so that the file stays below 1 MB
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def data(record: EngineRecord, other: EngineRecord | None = None) -> dict[str, Any]:
    """Returns the data that the page shows, and that its button saves, as a JSON object: "pages", "kinds" and "joined".

    "pages": the data of each engine, as report.data.page returns it; "kinds": (key, name) of each kind of layer; "joined", only
    with two engines: pairs of layer numbers that belong together. `other`: a second engine, to be shown side by side.
    """
    pages = [page(each) for each in (record, other) if each is not None]
    both = {"joined": joined(*(p["layers"] for p in pages))} if len(pages) > 1 else {}
    return {"pages": pages, "kinds": [*KINDS.items()], **both}


def report(record: EngineRecord, other: EngineRecord | None = None) -> bytes:
    """Returns the HTML file as bytes, always the same bytes for the same engines. `other`: a second engine to compare with, or
    None.
    """
    shown = data(record, other)
    names = dict.fromkeys(f"{p['verdict']['model']} on {p['verdict']['device']}" for p in shown["pages"])
    title = " and ".join(names) + (", two plans" if len(names) < len(shown["pages"]) else "")
    script = '"use strict";\n' + "\n".join((HERE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    style = (HERE / "style.css").read_text(encoding="utf-8")
    encoding, text = _encoded(shown)
    return filled(
        "page.html", {"title": html.escape(title), "style": style, "script": script, "encoding": encoding, "data": text}
    )


def filled(template: str, parts: Mapping[str, str]) -> bytes:
    """Returns the bytes of a template of this folder with each {{name}} replaced by `parts[name]`.

    {{style_sha256}} and {{script_sha256}} are replaced by the hashes of the parts "style" and "script", for the page's policy.
    """
    hashes = {f"{name}_sha256": _sha256_of(parts[name]) for name in ("style", "script") if name in parts}
    known, text = {**parts, **hashes}, (HERE / template).read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: known[found[1]], text).encode()


def _encoded(shown: dict[str, Any]) -> tuple[str, str]:
    """Returns (encoding, text) of the page's data. "plain": JSON in which no character can end a script; "gzip", for long data:
    compressed JSON in base 64.
    """
    text = json.dumps(shown, separators=(",", ":"))
    if len(text) > MOST_PLAIN:
        return "gzip", base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return "plain", re.sub("[<>&]", lambda found: ESCAPES[found[0]], text)


def _sha256_of(text: str) -> str:
    """Returns the SHA-256 of a text in base 64, as a content security policy has it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
