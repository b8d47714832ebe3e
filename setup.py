"""Packaging of lightrft.

Version ranges have one home, lightrft/versions.py; the version has one, lightrft/__init__.py.
"""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).resolve().parent
versions = runpy.run_path(str(root / "lightrft" / "versions.py"))

setup(
    name="lightrft",
    version=re.search(
        r'__version__ = "(.+)"', (root / "lightrft" / "__init__.py").read_text()
    ).group(1),
    description=(
        "Reinforcement fine-tuning of language and vision-language models, one process per device"
    ),
    long_description=(root / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The lightrft authors",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["lightrft", "lightrft.*"]),
    package_data={"lightrft.observe": ["report.html"], "lightrft.compat": ["tables/*.yaml"]},
    install_requires=versions["requirements"](versions["CORE"]),
    extras_require={
        extra: versions["requirements"](table) for extra, table in versions["EXTRAS"].items()
    },
    entry_points={
        "console_scripts": ["lightrft = lightrft.__main__:main"],
        "torchrun.handlers": ["lightrft = lightrft.launch.torchrun:install"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
