# Copyright 2026 The depthmix authors. Licensed under the Apache License, Version 2.0.
"""What `pip install` gets: from a wheel, and from a source distribution."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement

import depthmix


ROOT = Path(__file__).parents[2]
OLDEST_SETUPTOOLS = 77  # pyproject.toml
# folder of each package, by the name that it is imported by
PACKAGES = {
    "depthmix": "depthmix",
    "depthmix/configuration": "configuration",
    "depthmix/conversion": "conversion",
    "depthmix/inspection": "depthmix/inspection",
    "depthmix/kernels": "kernels/depth_ops",
    "depthmix/modeling": "modeling",
}

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS, reason="builds need a newer setuptools"
    ),
]


def build_wheel(source, folder):
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True, cwd=folder.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel of the tree, the source distribution, and the wheel of that."""
    folder = tmp_path_factory.mktemp("distributions")
    # a copy, since building leaves files behind, and files left behind would end up in the next wheel
    tree = folder / "tree"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "demo_output")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], check=True, cwd=tree, stdout=subprocess.DEVNULL)
    (sdist,) = folder.glob("*.tar.gz")
    return build_wheel(tree, folder / "from-tree"), sdist, build_wheel(sdist, folder / "from-sdist")


def test_wheels(distributions):
    from_tree, sdist, from_sdist = distributions
    modules = {
        f"{package}/{path.name}" for package, folder in PACKAGES.items() for path in (ROOT / folder).glob("*.py")
    }
    prefix = f"depthmix-{depthmix.__version__}"
    for wheel in (from_tree, from_sdist):
        assert wheel.name == f"{prefix}-py3-none-any.whl"
        with zipfile.ZipFile(wheel) as archive:
            files = {name for name in archive.namelist() if ".dist-info/" not in name}
            assert files == modules | {"depthmix/py.typed", "depthmix/released_code.json"}
            assert f"{prefix}.dist-info/licenses/LICENSE" in archive.namelist()
            metadata = message_from_string(archive.read(f"{prefix}.dist-info/METADATA").decode())
            scripts = configparser.ConfigParser()
            scripts.read_string(archive.read(f"{prefix}.dist-info/entry_points.txt").decode())
        assert metadata["Version"] == depthmix.__version__
        assert metadata["Requires-Python"] == ">=3.11"
        requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
        required = {requirement.name for requirement in requirements if not requirement.marker}
        # neither Triton nor what only tests and checks need is forced on users
        assert required == {"torch", "transformers", "accelerate", "huggingface_hub", "pyyaml", "safetensors", "tqdm"}
        extras = {"coverage", "docs", "liger", "parity", "peft", "plot", "quality", "serve", "test"}
        assert set(metadata.get_all("Provides-Extra")) == extras
        assert dict(scripts["console_scripts"]) == {"depthmix": "depthmix.__main__:main"}
        assert dict(scripts["vllm.general_plugins"]) == {"depthmix": "depthmix.vllm_plugin:register"}
    assert sdist.name == f"{prefix}.tar.gz"


def test_wheel_works_without_the_repository(distributions, tmp_path):
    with zipfile.ZipFile(distributions[0]) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import depthmix\n"
        "from depthmix.conversion.cli import main\n"
        "assert depthmix.__file__.startswith(sys.argv[1]), depthmix.__file__\n"
        "assert depthmix.modeling.__file__.startswith(sys.argv[1]), depthmix.modeling.__file__\n"
        "depthmix.DepthQwen3Config().save_pretrained(sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "installed", tmp_path / "saved"], check=True, cwd=tmp_path)
    assert (tmp_path / "saved" / "modeling_depth_attention.py").is_file()


def test_wheel_works_in_a_checkout(distributions, tmp_path):
    """There Python finds the umbrella package in the working folder, and the others only where they are installed."""
    with zipfile.ZipFile(distributions[0]) as archive:
        archive.extractall(tmp_path / "installed")
    # -S: without the editable install of the test environment
    folders = [str(tmp_path / "installed"), *(path for path in sys.path if path.endswith("-packages"))]
    code = "import depthmix; print(depthmix.__file__); print(depthmix.modeling.__file__)"
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        text=True,
    )
    umbrella, modeling = run.stdout.split()
    assert Path(umbrella).is_relative_to(ROOT)
    assert Path(modeling).is_relative_to(tmp_path / "installed")
