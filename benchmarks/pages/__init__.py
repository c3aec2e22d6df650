"""Generators of parts of docs/, and `quotes`, which holds every page to the commands that it quotes."""
