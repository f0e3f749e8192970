"""Scripts as programs: what Python sees when one of them is run."""

import importlib.machinery
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = (ROOT / "scripts", ROOT / "scripts" / "bench")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_script_has_the_name_of_an_installed_package(folder):
    """A script's folder is first in `sys.path`; a `kernels.py` hid what transformers needs."""
    installed = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT)]
    names = sorted(path.stem for path in folder.glob("*.py"))
    assert names
    hidden = [
        name
        for name in names
        if name in sys.stdlib_module_names
        or importlib.machinery.PathFinder.find_spec(name, installed)
    ]
    assert not hidden
