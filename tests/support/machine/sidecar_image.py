"""The sidecar of Harbor's allow-lists: its own Dockerfile, scripts and rules over nftables, on a base of this machine's programs.

Its base, gost, is in no registry of packages: `tests/integration/harbor/programs/gost.py` stands in its place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.support.machine import tiny_image

BASE = "localhost/steno-gost:latest"
"""Also where Harbor may ask the kernel for nftables."""
PROGRAMS = "sh nft awk mkdir dirname touch rm sleep nl test grep gzip zcat cat sed".split()
_NFT = """#!/bin/sh
[ "$*" = "--file -" ] || exec nft-as-it-is "$@"
sed 's/hook output priority dstnat;/hook output priority -100;/' | nft-as-it-is --file -
"""
"""In the place of `nft`: Debian 12's nft 1.0.6 does not know the priority `dstnat` in the hook `output`."""
_NAME = """
import json, sys
from harbor.environments.docker.docker import DockerEnvironment as Docker
from harbor.utils.container_cache import docker_build_context_hash as digest
context, dockerfile = Docker._EGRESS_CONTROL_SIDECAR_CONTEXT_PATH, Docker._egress_control_sidecar_dockerfile_path()
found = digest(context=context, dockerfile_path=dockerfile, **json.loads(sys.argv[1]))
print(context, dockerfile, f"{Docker._EGRESS_CONTROL_SIDECAR_DOCKER_NAME}--{found}", sep="\\n")
"""
"""Prints context, Dockerfile and image name of Harbor's sidecar. With Docker, build arguments and platform change the name."""


def make(folder: Path, engine: str, harbor_python: str, gost: Path) -> None:
    """Under the name by which Harbor looks whether it has built it. Args: folder: where its base's files are gathered."""

    def add(root: Path) -> None:
        shutil.copy2(gost, root / "bin/gost")
        (root / "bin/nft").rename(root / "bin/nft-as-it-is")
        (root / "bin/nft").write_text(_NFT)
        for program in ("gost", "nft"):
            (root / "bin" / program).chmod(0o755)

    tiny_image.make(folder, engine, name=BASE, programs=PROGRAMS, add=add)
    goes_by = {} if engine == "podman" else {"build_args": {}, "platform": _platform(engine)}
    asked = [harbor_python, "-c", _NAME, json.dumps(goes_by)]
    context, dockerfile, name = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
    _, _, rest = Path(dockerfile).read_text().partition("\n")
    (folder / "Dockerfile").write_text(f"FROM {BASE}\n{rest}")
    subprocess.run(
        [engine, "build", f"--file={folder / 'Dockerfile'}", f"--tag={name}", context],
        check=True,
        capture_output=True,
        env=os.environ | {"DOCKER_BUILDKIT": "1"},
    )


def _platform(engine: str) -> str:
    asked = [engine, "version", "--format={{.Server.Os}}/{{.Server.Arch}}"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
