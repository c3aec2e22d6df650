"""The commands of `gpu-runtime`, one file each.

Enters: arguments and options. Leaves: printed text, files and an exit code.

Results go to stdout, errors and progress to stderr. A command writes all its files or none: targets are checked before
anything is built, every file is first written beside its target, and only then are they renamed, the engine last. A process
imports the module of its own command only (cli.Commands). Modules of the extra `build`, and all modules that only `build`
needs, are imported inside of functions, so that --help needs no extra and is immediate.

console: printing; options: options of several commands, and their texts as values; reading: engines and arrays from files;
targets: files to write; trtexec_flags: trtexec's options; every other module: a command.
"""
