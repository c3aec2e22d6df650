"""A wheel for x86-64 Linux brings the emulator compiled, so that who installs it needs no C++ compiler.

Everything else about the package stands in pyproject.toml. Where a compiler is missing or refuses, or the machine is another
one, the wheel is one for any machine, and the emulator is compiled on its first use. An editable installation brings none:
its sources may change.
"""

import platform
import shutil
import sys
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from cuda_kernels.emulator import build  # noqa: E402


class WithEmulator(build_py):
    """The packages, and the emulator beside its sources."""

    prebuilt: Path | None = None

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, build.PREBUILT.relative_to(Path(__file__).parent))
        shutil.rmtree(folder, ignore_errors=True)  # of other sources, from a build before
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            try:
                self.prebuilt = build.prebuild(folder)
            except build.BuildError as e:
                warnings.warn(f"this wheel brings no emulator, which is compiled on its first use: {e}", stacklevel=2)


class PlatformWheel(bdist_wheel):
    """Tagged for the machines on which its emulator loads."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, any_platform = super().get_tag()
        library = self.get_finalized_command("build_py").prebuilt
        return python, abi, build.platform_of(library.read_bytes()) if library else any_platform


if __name__ == "__main__":
    setup(cmdclass={"build_py": WithEmulator, "bdist_wheel": PlatformWheel})
