"""Commands as a pod is given them: two lines on stdin, so that nothing of them is in a URL, which the cluster writes into its
logs, and no limit of a URL's length holds. Values in, values out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from shlex import quote

from .manifest import SECRETS

BOOT = 'IFS= read -r a; IFS= read -r b; eval "$(printf %b "$a")"'
"""The program of every exec: it reads what to do. `%b` undoes `_one_line`."""
MARK = "STENO_EXEC"
"""Variable by which all processes of a command are found."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TAKE = 'b=$(printf %b. "$b"); b=${b%.}; s=$(command -v bash || command -v sh)\n'
"""Dot: the shell takes newlines off the end of what a command prints."""
_AS = """u={user}
while IFS=: read -r n _ i _; do [ "$i" = "$u" ] && u=$n && break; done 2>/dev/null </etc/passwd
if [ "$u" != "$(id -un 2>/dev/null)" ] && [ "$u" != "$(id -u)" ]; then
  if [ "$(id -u)" != 0 ]; then echo "this pod runs as user $(id -u), and Harbor asks for $u: let it run as root" >&2; exit 126; fi
  exec su "$u" -s "$s" -c "$b" {stdin}
fi
"""


def script(
    command: str,
    *,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | int | None = None,
    mark: str | None = None,
    reads: bool = False,
) -> bytes:
    """The two lines. Args: secrets: values that are not written here but read in the pod, by the names of their files. user:
    None: the container's. reads: the command reads what follows these lines. Raises: ValueError: no name of a variable."""
    files = {value: name for name, value in (secrets or {}).items() if not value.endswith("\n")}
    lines = []
    for name, value in {**(env or {}), **({MARK: mark} if mark else {})}.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"environment: {name!r}: no name of a variable (letters, digits and _)")
        text = f'"$(cat {quote(f"{SECRETS}/{files[value]}")})"' if value in files else quote(value)
        lines.append(f"export {name}={text}\n")
    if cwd is not None:
        lines.append(f"cd {quote(cwd)} || exit 126\n")
    stdin = "" if reads else "</dev/null"
    lines.append(_TAKE)
    if user is not None:
        lines.append(_AS.format(user=quote(str(user)), stdin=stdin))
    lines.append(f'exec "$s" -c "$b" {stdin}\n')
    return f"{_one_line(''.join(lines))}\n{_one_line(command)}\n".encode()


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def kill(mark: str) -> str:
    """Ends all processes that a command with this mark has begun, and that kept its environment."""
    return (
        "for p in /proc/[0-9]*; do "
        f"if tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -qxF {MARK}={mark}; then kill -9 ${{p#/proc/}} 2>/dev/null; fi; "
        "done; true"
    )


def unpack(folder: str, size: int) -> str:
    """Of `size` bytes of a tar on stdin. (The protocol has no end of stdin before its fifth version.)"""
    return f"mkdir -p {quote(folder)} && head -c {size} | tar -xf - -C {quote(folder)}"


def write(path: str, size: int) -> str:
    parent = path.rpartition("/")[0] or "/"
    return (
        f"mkdir -p {quote(parent)} && head -c {size} >{quote(path)} && "
        f'n=$(wc -c <{quote(path)}) && if [ "$n" -ne {size} ]; then echo "$n of {size} bytes came" >&2; exit 1; fi'
    )


def read(path: str) -> str:
    """Its size on stderr, and as many bytes on stdout."""
    return (
        f"f={quote(path)}; if [ ! -f \"$f\" ]; then echo 'no such file' >&2; exit 44; fi; "
        'n=$(wc -c <"$f") && echo "$n" >&2 && head -c "$n" "$f"'
    )


def pack(folder: str) -> str:
    """A folder's content. Files that change meanwhile are no failure."""
    return f"cd {quote(folder)} || exit 44; tar -cf - .; e=$?; [ $e -eq 1 ] && e=0; exit $e"
