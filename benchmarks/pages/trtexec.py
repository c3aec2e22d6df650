"""Every option of trtexec and its treatment here, as docs/trtexec.md quotes it.

python -m benchmarks.pages.trtexec
"""

from gpu_runtime.commands.trtexec_flags import TRTEXEC_FLAGS
from tactics.planner.grouping import grouped


def document() -> str:
    """Returns a table for each verdict; options that share a sentence are one row."""
    lines: list[str] = []
    for verdict, title in (("accepted", "Accepted"), ("ignored", "Ignored, with a line that says so"), ("refused", "Refused")):
        flags = (flag for flag in TRTEXEC_FLAGS if flag.verdict == verdict)
        rows = grouped((flag.sentence, f"`{flag.name}{'=' if flag.takes_value else ''}`") for flag in flags)
        lines += [f"### {title}", "", "| options | |", "| --- | --- |"]
        lines += [
            f"| {' '.join(names)} | {text.replace('{value}', 'VALUE') or 'as trtexec does'} |" for text, names in rows.items()
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
