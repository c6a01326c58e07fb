"""What Linux says of a process."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on, which proc(5) counts as the third; empty where there is no such process."""
    try:  # the name before them may be any bytes
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return []


def began(pid: int) -> str:
    """In clock ticks since boot; "": there is no such process, or it has ended."""
    fields = stat_of(pid)
    return fields[19] if fields and fields[0] != "Z" else ""
