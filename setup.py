"""Packaging of lightrft.

Version ranges have one home, lightrft/versions.toml; the version has one, lightrft/__init__.py.
"""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).resolve().parent
versions = runpy.run_path(str(root / "lightrft" / "versions.py"))

setup(
    name=versions["DISTRIBUTION"],
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
    license_files=["LICENSE"],
    keywords=(
        "reinforcement-learning rlhf grpo ppo dpo sft llm fine-tuning vllm sglang fsdp deepspeed"
    ),
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["lightrft", "lightrft.*"]),
    package_data={
        "": ["py.typed", "*.pyi", "*.html", "*.sh", "*.sql", "*.toml", "*.yaml", "tables/*.yaml"]
    },
    install_requires=versions["requirements"](versions["CORE"]),
    extras_require={
        extra: versions["requirements"](table) for extra, table in versions["EXTRAS"].items()
    },
    entry_points={
        "console_scripts": ["lightrft = lightrft.__main__:main"],
        "torchrun.handlers": ["lightrft = lightrft.models.launch.torchrun:install"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
