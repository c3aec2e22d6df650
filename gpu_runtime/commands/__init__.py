"""The commands, one file each: options in, what a command prints and the files that it writes out.

Results go to stdout, errors and progress to stderr. A command writes all its files or none: targets are checked before
anything is built, every file is first written beside its target, and only then are they renamed, the engine last. Heavy
imports happen inside the commands, so that --help is immediate.

console: what is printed; options: those of several commands, and texts of options as values; targets: files to write and to
read; trtexec_flags: TensorRT's options; the others: a command each.
"""
