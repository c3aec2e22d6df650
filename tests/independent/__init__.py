"""Programs and tables that the emulator's authors did not write; read README.md, then packages.py."""
