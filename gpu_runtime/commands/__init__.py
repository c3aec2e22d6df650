"""The commands, one file each: options in, what a command prints and the files that it writes out.

Results go to stdout, errors and progress to stderr. A command writes all its files or none: targets are checked before
anything is built, every file is first written beside its target, and only then are they renamed, the engine last. A process
imports the module of its own command only (cli.Commands). Modules of the extra `build`, and all that `build` itself takes, are
imported inside of functions, so that --help needs no extra and is immediate.

console: what is printed; options: those of several commands, and texts of options as values; reading: engines and arrays
that are read; targets: files to write; trtexec_flags: TensorRT's options; the others: a command each.
"""
