"""Builds the packages and the small C libraries: graph optimizers, and what several hosts need."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# A release is built with the address where the project lives.
REPOSITORY = os.environ.get("TF_OOO_REPOSITORY_URL", "").rstrip("/")
URLS = {
    "Source": REPOSITORY,
    "Documentation": f"{REPOSITORY}/blob/main/docs/index.md",
    "Issues": f"{REPOSITORY}/issues",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
}
CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: C",
    *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
SHIM = "grappler_passes/plugin/shim.c"
TENSORFLOW = ">=2.21,<2.22"
# Markdown links like this to a file beside it: a mark if it is a picture, the text, the file.
RELATIVE_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!#|\w+:)([^)]+)\)")


def for_registry(readme: str, repository: str) -> str:
    """A registry shows the README far from the files that it links to.

    Links lead to the repository; without one they become their texts, and pictures go with their captions.
    """
    if not repository:
        return RELATIVE_LINK.sub(r"\2", _without_pictures(readme))
    kinds = {"!": "raw", "": "blob"}
    return RELATIVE_LINK.sub(
        lambda link: f"{link[1]}[{link[2]}]({repository}/{kinds[link[1]]}/main/{link[3]})", readme
    )


def _without_pictures(readme: str) -> str:
    """Leave out paragraphs that are a picture, and those below one that are no heading."""
    paragraphs = readme.split("\n\n")
    above = ["", *paragraphs]
    kept = [
        paragraph
        for previous, paragraph in zip(above, paragraphs, strict=False)
        if not paragraph.startswith("![") and (paragraph.startswith("#") or not previous.startswith("!["))
    ]
    return "\n\n".join(kept)


def shim(device_type: str) -> Extension:
    """The plug-in for one device type; loaded by path, never imported as a module."""
    return Extension(
        f"grappler_passes.plugin._shim_{device_type.lower()}",
        [SHIM],
        define_macros=[("OOO_DEVICE_TYPE", f'"{device_type}"')],
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
        libraries=["dl"] if sys.platform == "linux" else [],
    )


def library(room: str, name: str) -> Extension:
    """Builds what keeps servers to one address, notices silent ones, or waits; for Linux, loaded by path."""
    return Extension(
        f"tf_ooo.{room}._{name}",
        [f"tf_ooo/{room}/{name}.c"],
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
        libraries=["dl", "pthread"],
    )


class BuildShims(build_ext):
    """Builds each shim in its own folder (one source, two objects); says so where there is no compiler."""

    def build_extensions(self) -> None:
        """Stops with one line where there is no compiler."""
        command = getattr(self.compiler, "compiler_so", None) or ["cc"]
        if shutil.which(command[0]) is None:
            sys.exit(
                f"tf_ooo: C compiler {command[0]!r} not found; install one (on Debian: apt-get install gcc) "
                "or name one with CC=..., then run pip install again"
            )
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        """Leave out the tag of a Python: none of them is a Python extension."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Gives the extension an object folder of its own."""
        base = self.build_temp
        self.build_temp = os.path.join(base, ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = base


class WheelForAnyPython(bdist_wheel):
    """One wheel for every Python: it is tied to the platform's C library only."""

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-linux_x86_64``; auditwheel makes ``manylinux`` of it."""
        return "py3", "none", super().get_tag()[2]


README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
LIBRARIES = (library("hosts", "listening"), library("hosts", "silence"), library("demo", "wait"))

setup(
    name="tf_ooo",
    version="0.1.0",
    description="Out-of-order backprop for unmodified TensorFlow and Keras",
    long_description=for_registry(README, REPOSITORY),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["tensorflow", "keras", "backpropagation", "pipeline parallelism", "data parallel", "horovod"],
    classifiers=CLASSIFIERS,
    project_urls=URLS if REPOSITORY else {},
    packages=find_packages(include=["tf_ooo*", "grappler_passes*", "keras_callbacks*"]),
    package_data={
        "tf_ooo": ["py.typed", "__init__.pyi"],
        "tf_ooo.hosts": ["listening.c", "silence.c"],
        "tf_ooo.demo": ["wait.c"],
        "tf_ooo.cli": ["data/*"],
        "tf_ooo.planning.pictures": ["templates/*"],
        "grappler_passes": ["py.typed"],
        "keras_callbacks": ["py.typed"],
        "grappler_passes.plugin": ["shim.c"],
    },
    python_requires=">=3.10,<3.14",
    install_requires=["numpy", "rustworkx", "click", "rich", "plotly", "jinja2", "matplotlib"],
    extras_require={
        "cpu": [f"tensorflow-cpu{TENSORFLOW}"],
        "gpu": [f"tensorflow[and-cuda]{TENSORFLOW}"],
        "horovod": ["horovod==0.28.1"],
        "legacy": ["tensorflow-cpu==2.15.1", "tensorflow-addons==0.23.0", "tqdm"],
        "digits": ["scikit-learn"],
        "datasets": ["tensorflow-datasets"],
        "dev": [
            "cmake<4",
            "hypothesis",
            "ipykernel",
            "mypy",
            "nbclient",
            "ortools",
            "pytest",
            "pytest-timeout",
            "ruff",
            "scikit-learn",
            "sybil",
            "tensorflow-datasets",
        ],
    },
    entry_points={"console_scripts": ["tf-ooo = tf_ooo.cli:main"]},
    ext_modules=[shim("CPU"), shim("GPU"), *(LIBRARIES if sys.platform == "linux" else ())],
    cmdclass={"build_ext": BuildShims, "bdist_wheel": WheelForAnyPython},
)
