"""Where this checkout's packages are: what tests and the programs that they start import."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in _PYTEST["pythonpath"])
"""A value of PYTHONPATH."""
