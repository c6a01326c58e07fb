# Shared by the scripts beside it; sourced, never run. Each caller has `set -euo pipefail` and is at the root of the checkout.

# Tests and demos start dozens of programs: without bytecode each compiles the project's modules again, a third of a proxy's start.
unset PYTHONDONTWRITEBYTECODE

# What fails inside `$(…)` ends it, as it ends the script: else half an environment would be marked as whole.
shopt -s inherit_errexit

# pip ends with 1 after Ctrl-C, as after any failure: the shell would go on, to the next thing to try.
trap 'exit 130' INT

TORCH_VERSION=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/runtime.txt)

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

# counting COMMAND...: on a terminal, the seconds that a silent command takes are counted until it ends.
counting() {
  if ! [ -t 2 ]; then
    "$@"
    return
  fi
  local began=$SECONDS clock code=0
  # Ctrl-C does not reach a shell in the background: it ends with this one.
  (while sleep 1 && kill -0 $$ 2>/dev/null; do printf '\r    %d s' $((SECONDS - began)) >&2; done) &
  clock=$!
  "$@" || code=$?
  kill "$clock" 2>/dev/null || true
  wait "$clock" 2>/dev/null || true
  printf '\r\033[K' >&2
  return "$code"
}

quietly() { "$@" 2>/dev/null; }
to_file() { "${@:2}" >"$1" 2>&1; }

die() {
  printf '\033[1;31merror:\033[0m %s\n' "$*" >&2
  exit 1
}

# The first supported Python on PATH that can make environments, or else the first one; the pins have wheels for 3.11 to 3.13. Tried by
# running it: a version manager's shim may be on PATH for a Python that is not there.
find_python() {
  local name first=""
  for name in "${STENO_TEST_PYTHON:-python3.11}" python3 python3.12 python3.13 python; do
    "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue
    first=${first:-$name}
    if has_venv "$name"; then
      command -v "$name"
      return
    fi
  done
  [ -n "$first" ] || die "no Python 3.11, 3.12 or 3.13 found on PATH. Debian 12 and later, Ubuntu 24.04: apt install python3 python3-venv. Ubuntu 22.04: apt install python3.11 python3.11-venv"
  command -v "$first"
}

# venv_package PYTHON: Debian's package with its venv: that of another Python's does not help.
venv_package() { "$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'; }

# need_commands COMMAND=PACKAGE...: Debian's packages of the commands that are missing, and what .venv needs, installed by apt where
# that may be done; else all that is missing is named in one line.
need_commands() {
  local pair python missing=()
  for pair in "$@"; do
    command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
  done
  if ! has_pip "$PWD/.venv"; then
    python=$(find_python)
    has_venv "$python" || missing+=("$(venv_package "$python")")
  fi
  need_packages "${missing[@]}"
}

need_packages() {
  [ $# -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "missing: $*. Debian and Ubuntu: sudo apt install $*"
  say "installing $*"
  apt-get update -qq || die "missing: $*, and apt-get update failed: is there a network?"
  local said
  said=$(mktemp)
  if ! counting to_file "$said" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; then
    tail -n 20 "$said" >&2
    rm "$said"
    die "apt-get could not install $* (its last lines are above). Try: apt-get install $*"
  fi
  rm "$said"
}

has_pip() { "$1/bin/python" -m pip --version >/dev/null 2>&1; }
has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

# make_venv FOLDER: a virtual environment with pip, made anew if the one there does not work (a moved checkout, a Python that is gone).
make_venv() {
  local folder=$1 python
  if has_pip "$folder"; then return; fi
  python=$(find_python)
  has_venv "$python" || need_packages "$(venv_package "$python")"
  say "making ${folder#"$PWD"/} with $("$python" --version)"
  "$python" -m venv --clear "$folder"
}

# pip_install VENV ARGUMENT...: says what a failure mostly means. pip's own last lines are about a version that there is.
pip_install() {
  local venv=$1
  shift
  counting "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@" \
    || die "pip could not install what is needed (its reason is above). If it says that hashes do not match, the file that it was given is not the one that requirements/ pins. Without a network it can't install: is a package index reachable (pip config list, https_proxy)?"
}

# merged_pins FILE...: the pins with their hashes, without torch, which is installed apart. Where two files pin the same package, the
# first one counts.
merged_pins() {
  cat "$@" | awk '
    /^[^ ]/ { name = tolower($1); sub(/==.*/, "", name); gsub(/[-_.]+/, "-", name); take = /^[A-Za-z0-9]/ && name != "torch" && !seen[name]++ }
    take'
}

# install_pins VENV FILE...: exactly the pinned set, and nothing when the files have not changed since. A file whose hash is not among
# those pinned is refused.
install_pins() {
  local venv=$1 stamp want
  shift
  stamp="$venv/.installed-$(basename "$1" .txt)"
  want=$(cat "$@" pyproject.toml | sha256sum)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then return; fi
  say "installing $*"
  # --no-deps: the pins are the whole set, and torch's own requirement list would bring 3 GB of CUDA along.
  merged_pins "$@" >"$venv/.pins.txt"
  pip_install "$venv" --no-deps --require-hashes -r "$venv/.pins.txt"
  install_torch "$venv"
  # Not where several checkouts share an environment.
  [ "$venv" != "$PWD/.venv" ] || install_checkout "$venv"
  printf '%s\n' "$want" >"$stamp"
}

# install_checkout VENV: the checkout itself, editable: it brings the command `steno`. Once, since for a moment it is not there, and other
# programs may be using it.
install_checkout() {
  local venv=$1 stamp="$1/.installed-checkout" want
  want="$PWD $(sha256sum <pyproject.toml)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then return; fi
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
  printf '%s\n' "$want" >"$stamp"
}

# The CPU build of torch, where one can be had; else PyPI's, which on x86-64 Linux is the CUDA build and works without a GPU. torch is
# the one package installed without a hash: its CPU build (`+cpu`) is another file than the one the pins have hashes of, and comes from
# another index or a folder of wheels; the default build brings CUDA packages that are not pinned.
install_torch() {
  local venv=$1
  if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
    return
  fi
  say "installing torch $TORCH_VERSION, CPU build"
  if counting quietly "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps "torch==$TORCH_VERSION+cpu"; then return; fi
  # Not where pip looks. uv knows PyTorch's own index.
  if "$venv/bin/python" -m pip install -q --disable-pip-version-check uv \
    && counting "$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" --no-deps --torch-backend cpu "torch==$TORCH_VERSION"; then
    return
  fi
  say "no CPU build of torch can be had here; installing the default build with its dependencies (about 3 GB)"
  "$venv/bin/python" -m pip install --disable-pip-version-check "torch==$TORCH_VERSION"
}
