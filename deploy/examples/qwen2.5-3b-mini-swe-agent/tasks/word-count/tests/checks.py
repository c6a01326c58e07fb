import pathlib
import subprocess
import sys


def run(*words):
    return subprocess.run([sys.executable, "count.py", *words], capture_output=True, text=True)


def check_sample():
    assert run("sample.txt").stdout.strip() == "3"


def check_empty():
    pathlib.Path("empty.txt").write_text("")
    assert run("empty.txt").stdout.strip() == "0"


def check_usage():
    done = run()
    assert done.returncode == 2 and "usage: count.py FILE" in done.stdout + done.stderr
