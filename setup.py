"""Builds the optional kernels of `ddp` and `collectives`; everything else about the package is in setup.cfg.

They are plain shared libraries, loaded by ctypes: they use nothing of Python, so that one wheel serves every version. A
machine without a compiler installs the package all the same.
"""

from __future__ import annotations

import copy
import glob
import os
import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1 it was part of wheel, which only those need who make a wheel
    try:
        from wheel.bdist_wheel import bdist_wheel
    except ImportError:
        bdist_wheel = None

# One build for each level of the architecture that has wider vectors; the best that the CPU runs is loaded.
LEVELS = ("x86-64-v3", "x86-64-v4") if platform.machine() in ("x86_64", "AMD64") else ("",)
# No -ffast-math, which would flush subnormal numbers in the whole process; nothing here reads errno or floating-point
# exceptions.
FLAGS = ["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]


class BuildKernels(build_ext):
    """Names the libraries `kernels-LEVEL.so` and the like, without the tag of a Python; builds them side by side."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or len(LEVELS)

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Takes what an earlier editable install left beside the source, unless the source is newer."""
        built = self.get_ext_filename(ext.name)
        sources = max(map(os.path.getmtime, ("setup.py", *ext.depends)))
        if self.editable_mode and os.path.exists(built) and os.path.getmtime(built) > sources:
            self.mkpath(os.path.dirname(self.get_ext_fullpath(ext.name)))
            self.copy_file(built, self.get_ext_fullpath(ext.name))
        else:
            own = copy.copy(self)  # levels of one source are built side by side: each into a folder of its own
            own.build_temp = os.path.join(self.build_temp, ext.name)
            build_ext.build_extension(own, ext)


commands = {"build_ext": BuildKernels}

if bdist_wheel is not None:

    class AnyPython(bdist_wheel):
        """The tag of a wheel for any Python 3 of this platform."""

        def get_tag(self) -> tuple[str, str, str]:
            return ("py3", "none", super().get_tag()[2])

    commands["bdist_wheel"] = AnyPython

setup(
    ext_modules=[
        Extension(
            (source.replace("/", ".") + "-" + level).rstrip("-"),
            [source + ".c"],
            depends=glob.glob(os.path.dirname(source) + "/*.c"),  # those that it includes
            extra_compile_args=FLAGS + ([f"-march={level}"] if level else []),
            libraries=["m"],
            optional=True,
        )
        for source in ("ddp/_native/kernels", "collectives/conversions")
        for level in LEVELS
    ],
    cmdclass=commands,
)
