"""The documentation says what the code does: generated pages are fresh, links lead somewhere, commands and calls exist."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client import REGISTRY

from scripts.generate_docs import PAGES, PROGRAMS, ROOT, proxy_metrics
from scripts.panels import PROXY_PANELS
from steno.contracts.errors import BY_CODE
from steno.contracts.records import ForkReason
from steno_cli.main import whole_app
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from tests.support.sources import SOURCES

PROSE = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("README.md")])
_HERE = re.compile(r"(<<'?(\w+)'?\n).*?^\2$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FOLDER = re.compile(r"`([\w/]+)/`")
_IMAGE = re.compile(r'<img src="([^"]+)"')


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command in a shell block, without what it reads from the block; lines continued by a backslash are
    one."""
    for page in PROSE:
        for language, block in _FENCE.findall(page.read_text()):
            if language not in ("bash", "sh", "shell"):
                continue
            for line in _HERE.sub(r"\1", block.replace("\\\n", " ")).splitlines():
                if line.strip():
                    yield str(page.relative_to(ROOT)), shlex.split(line, comments=True)


LINES = list(shell_lines())
ROOMS = ("steno", "steno_cli", "adapters", "proxy", "inference_worker", "trainer_bridge", "rollouts")


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_what_scripts_docs_would_write_now(page: str) -> None:
    assert (ROOT / page).read_text() == PAGES[page](), f"{page} is stale: run ./scripts/docs"


def test_every_panel_draws_metrics_that_there_are_by_labels_that_they_have() -> None:
    known = {metric.name for metric in proxy_metrics()}
    for panel in PROXY_PANELS:
        for text in (panel.query, panel.alert):
            shown = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", text))))
            for name, label in re.findall(r"(steno_proxy_\w+)_total(?:\{(\w+)=)?", text):
                assert name in known, f"{panel.title}: {name}"
                labels = REGISTRY._names_to_collectors[name]._labelnames
                assert shown | {label} - {""} <= set(labels), f"{panel.title}: {name} has {labels}"


def test_the_page_of_metrics_has_the_labels_of_workers_too() -> None:
    """Theirs are in a registry of their own."""
    assert "| `steno_worker_unsent_tokens_total` | counter | `why` |" in PAGES["docs/metrics.md"]()


def test_every_setting_metric_route_and_error_is_documented() -> None:
    settings, metrics, api = ((ROOT / f"docs/{name}.md").read_text() for name in ("settings", "metrics", "api"))
    for program in PROGRAMS.values():
        assert [name for name in program.model_fields if f"`{name}`" not in settings] == []
    assert [metric.name for metric in proxy_metrics() if metric.name not in metrics] == []
    assert [path for path in _paths() if f" {path}`" not in api] == []
    answered = [code for code, kind in BY_CODE.items() if kind.status != 500] + ["body_timeout", "internal_error"]
    assert [code for code in answered if f"`{code}`" not in api] == []


def test_every_fork_reason_is_explained() -> None:
    explained = (ROOT / "docs/reading.md").read_text().partition("## Why a turn forked")[2]
    assert [reason for reason in ForkReason if f"`{reason}`" not in explained] == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()) + _IMAGE.findall(page.read_text()):
        if not target.startswith(("http:", "https:", "#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PROSE
        for target in _LINK.findall(page.read_text())
    }
    assert [page.name for page in PROSE if page.resolve() not in linked and page.name != "README.md"] == []


def test_the_glossary_says_each_word_once_in_whole_sentences() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [A-Z].+\. \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = [word.strip("` ") for row in rows for word in row.split(",")]
    assert sorted(set(words)) == sorted(words)
    lines = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == len([line for line in lines if line != "| word | meaning |"])


def test_a_module_that_code_names_is_there() -> None:
    """In docstrings and comments: a file beside, one that has a name of its own, or the end of a path."""
    code = [path for folder in SOURCES.split(os.pathsep) for path in Path(folder).glob("steno*/**/*.*")]
    code = [path for path in code if path.suffix in (".py", ".lua")]
    assert len(code) > 300
    ends = Counter("/".join(path.parts[-n:]) for path in code for n in range(1, 6))
    wrong = []
    for path in code:
        for named in re.findall(r"`((?:[\w-]+/)*[a-z_]+\.(?:py|lua))[`:]", path.read_text()):
            places = ends[named] if "/" in named else ends[named] == 1
            beside = path.parent / named
            if beside == path or not (beside.exists() or places or (ROOT / named).exists()):
                wrong.append(f"{path.relative_to(ROOT)}: {named}")
    assert wrong == []


def test_a_name_that_code_gives_with_its_module_is_there() -> None:
    """`module.name` in docstrings and comments, if the product has such a module, or a function or class of this name. Not what
    is Python's, a dependency's or an object of the file's own code."""
    code = {path: path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    names: dict[str, set[str]] = {}
    for path, text in code.items():
        *_, above, module = [part for part in path.with_suffix("").parts if part != "__init__"]
        names.setdefault(above, set()).add(module)
        names.setdefault(module, set()).update(
            re.findall(r"^ *(?:(?:async )?def |class )?(\w+)(?=[:(]| =)", text, re.M)
        )
    everywhere = {name for text in code.values() for name in re.findall(r"^(?:async def|def|class) (\w+)", text, re.M)}
    others = {*sys.stdlib_module_names, "litellm", "vllm"}
    ends = {"html", "js", "json", "lua", "parquet", "py", "safetensors", "toml", "txt"}
    fields = ["text.format", "agent.env"]  # OpenAI's, Harbor's
    wrong = []
    for path, text in code.items():
        for module, name in re.findall(r"`([a-z_]\w*)\.([A-Za-z_]\w*)`", text):
            meant = (module in names or name in everywhere) and module not in others and name not in ends
            if meant and name not in names.get(module, ()) and f"{module}.{name}" not in fields:
                nodes = list(ast.walk(ast.parse(text)))
                if module not in {getattr(node, kind, None) for node in nodes for kind in ("id", "attr", "arg")}:
                    wrong.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert wrong == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_module_that_a_page_names_by_its_path_is_there(page: Path) -> None:
    """From the root, or by its file's name alone; evidence is dated, and shortens the paths of tests."""
    if page.is_relative_to(ROOT / "docs/evidence") or page.name == "CHANGELOG.md":
        return
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|lua))`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_package_folder_has_its_place_in_the_architecture() -> None:
    """By its path, in a heading or in a row of rooms; or by its name, in the row of a folder above it, or after one beside it."""
    page = (ROOT / "docs/architecture.md").read_text()
    named = {path for line in re.findall(r"^### (.*)$", page, re.MULTILINE) for path in _FOLDER.findall(line)}
    for rooms, text in re.findall(r"^\| (`\S+/`.*?) \| (.*) \|$", page, re.MULTILINE):
        first, *beside = _FOLDER.findall(rooms)
        named |= {first, *(f"{Path(first).parent}/{name}" for name in beside)}
        named |= {f"{first}/{name}" for name in _FOLDER.findall(text)}
    folders = [path.parent for room in ROOMS for path in (ROOT / room).glob("**/__init__.py")]
    assert len(folders) > 60
    assert [name for path in folders if (name := str(path.relative_to(ROOT))) not in named] == []


def test_every_page_of_docs_has_one_line_in_the_index_under_a_heading() -> None:
    """Which is the site's navigation too (scripts/site_pages.py). Decisions are listed by their own README."""
    index = ROOT / "docs/index.md"
    _, *sections = re.split(r"^## (.+)$", index.read_text(), flags=re.MULTILINE)
    assert sections[::2] == ["Start", "How to", "Reference", "Explanation", "Evidence"]
    listed = [
        (index.parent / target).resolve()
        for text in sections[1::2]
        for target in re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .+$", text, re.MULTILINE)
    ]
    assert sorted(set(listed)) == sorted(listed)
    owed = [page for page in PROSE if page.name == "README.md" or not page.is_relative_to(ROOT / "docs/adr")]
    assert [str(page.relative_to(ROOT)) for page in owed if page not in listed and page != index] == []


@pytest.mark.parametrize(("page", "words"), LINES, ids=[" ".join(words)[:60] for _, words in LINES])
def test_a_documented_command_exists_with_its_options(page: str, words: list[str]) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[0] == "[":  # only where there is no such file yet
        words = words[words.index("||") + 1 :]
    name = words[0]
    if name in ("export", "install") or (page == "docs/tutorial.md" and name in ("mkdir", "python", "grep")):
        return  # the tutorial is walked as it is written, by tests/integration/loop/test_tutorial.py
    if name == "curl":
        _check_curl(words[1:])
    elif name.endswith("steno"):
        _check_steno(words[1:])
    elif name.startswith("./"):
        assert (ROOT / name).stat().st_mode & 0o111, f"{page}: {name} can't be run"
    elif name == "torchrun":
        _check_torchrun(words[1:])
    elif words[:3] == ["python", "-m", "steno_cli.torchrun"]:
        _check_torchrun(words[3:])
    elif name == "docker":
        _check_docker(words[1:])
    elif name == "inspect":  # itself it is run by tests/integration/adapters
        provider = (ROOT / "adapters/steno_adapters/inspect/provider.py").read_text()
        given = [word.partition("=")[0] for flag, word in itertools.pairwise(words) if flag == "-M"]
        assert given and [argument for argument in given if f" {argument}: str" not in provider] == []
    elif words[:3] == ["ray", "job", "submit"]:  # Ray's own words: as it was run once, by hand
        _check_steno(words[words.index("--") + 2 :])
    elif name in ("helm", "kubectl"):
        _check_chart(words[1:])
    elif name == "python":
        source = (ROOT / words[1]).read_text()
        assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source] == []
    elif name == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        pytest.fail(f"{page}: nothing here knows how to check {name!r}")


_KEY = re.compile(
    r"(?i)bearer|x-api-key|(?:^|[-_])(?:key|secret|password|token)=|\$\{?\w*(?:key|secret|password|token)\b"
    r"|://[^/@]*:[^/@]+@|\bsk-|ak-steno"
)
_KEY_FLAGS = frozenset({"--key", "--admin-key", "--worker-key", "--trial-secret", "--api-key", "--from-literal"})


def keys_among(words: list[str]) -> list[str]:
    """The arguments that are a key, or an option for one: whoever lists processes reads them. What the shell keeps to itself
    (an export, `:`, a here-string, a process substitution) is none."""
    if words[0] in ("export", ":"):
        return []
    arguments = [word for before, word in itertools.pairwise(words) if before != "<<<" and "=<(" not in word]
    return [word for word in arguments if _KEY.search(word) or word.partition("=")[0] in _KEY_FLAGS]


@pytest.mark.parametrize("text", [
    'curl -H "authorization: Bearer $STENO_ADMIN_KEY" http://a', "steno worker --key k", "steno proxy --admin-key=$K",
    "docker run -e STENO_ADMIN_KEY=$K steno", 'curl -H "x-api-key: $K" http://a',
    "kubectl create secret generic a --from-literal admin-key=$(openssl rand -hex 32)", "redis-cli -a $REDIS_PASSWORD",
    'steno admin "${STENO_ADMIN_KEY}"', "steno proxy --redis-url redis://:word@redis:6379/0",
])  # fmt: skip
def test_a_key_on_a_command_line_is_found(text: str) -> None:
    assert keys_among(shlex.split(text))


def shipped_lines() -> Iterator[tuple[str, list[str]]]:
    """(file, words) of what is run or read outside the pages: deploy's scripts and containers, the chart's notes."""
    notes = ROOT / "helm/steno/templates/NOTES.txt"
    printed = re.sub(r"\{\{.*?\}\}", "X", notes.read_text())
    texts = {path: path.read_text().replace("\\\n", " ") for path in (ROOT / "deploy").rglob("*.sh")}
    texts[notes] = "\n".join(line for line in printed.splitlines() if line.startswith("  "))
    for path, text in texts.items():
        for line in text.splitlines():
            if words := shlex.split(line, comments=True):
                yield str(path.relative_to(ROOT)), words
    for path in (ROOT / "deploy").rglob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            for words in _container_commands(manifest):
                yield str(path.relative_to(ROOT)), words


def _container_commands(node: Any) -> Iterator[list[str]]:
    for name, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if name in ("command", "args", "entrypoint", "test") and isinstance(value, (str, list)) and value:
            yield shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
        else:
            yield from _container_commands(value)


def test_no_command_of_deploy_or_of_the_charts_notes_has_a_key_on_its_command_line() -> None:
    lines = list(shipped_lines())
    seen = {(Path(path).suffix, word) for path, words in lines for word in words}
    assert seen >= {(".sh", "worker"), (".yaml", "redis-server"), (".txt", "curl")}  # each kind was read
    assert [(path, found) for path, words in lines if (found := keys_among(words))] == []


def test_no_documented_command_has_a_key_on_its_command_line() -> None:
    assert [(page, found) for page, words in LINES if (found := keys_among(words))] == []
    inline = [(page.name, code) for page in PROSE for code in re.findall(r"`(steno [^`]+)`", page.read_text())]
    assert [(page, code) for page, code in inline if " --key " in code or "-key KEY" in code] == []


def _check_torchrun(words: list[str]) -> None:
    """Read by torchrun's own parser, which takes our options for its own where they are the beginning of one."""
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    assert given.module and given.training_script == "steno"
    _check_steno(given.training_script_args)


def _check_docker(words: list[str]) -> None:
    """No daemon here: the ports and volumes that a line names are those of the Dockerfile (tests/integration/image runs it)."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert words[0] in ("build", "run", "compose")
    for flag, value in itertools.pairwise(words):
        if flag == "-p":
            assert f"EXPOSE {value.rpartition(':')[2]}\n" in dockerfile
        elif flag == "-f":
            assert (ROOT / value).exists()
        elif flag == "--target":
            assert f" AS {value}\n" in dockerfile
        elif flag == "-v":
            assert f"VOLUME {value.rpartition(':')[2]}\n" in dockerfile


def _check_chart(words: list[str]) -> None:
    """No cluster here: values that a line sets, and kinds that it names, are the chart's (tests/integration/helm renders it)."""
    chart = ROOT / "helm/steno"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    templates = "\n".join(page.read_text() for page in (chart / "templates").glob("*.yaml")).lower()
    for flag, word in itertools.pairwise(words):
        if flag == "--set":
            found = values
            for key in word.partition("=")[0].split("."):
                found = found[key]
        elif flag == "-k":
            assert (ROOT / word / "kustomization.yaml").exists()
        elif word.startswith("helm/"):
            assert (ROOT / word / "Chart.yaml").exists()
        elif "/steno" in word:
            assert f"kind: {word.partition('/')[0]}\n" in templates


_app = functools.cache(whole_app)


@functools.cache
def _paths() -> dict[str, Any]:
    """Of the REST interface: path -> operations."""
    paths: dict[str, Any] = create_app(ProxySettings()).openapi()["paths"]
    return paths


def _check_steno(words: list[str]) -> None:
    command = _app()
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    given = {word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None] if word[0] == "-"}
    assert given <= known, f"{given - known} are not options of {command.name}"


def _check_curl(words: list[str]) -> None:
    url = next(word for word in words if word.startswith("http"))
    method = "post" if "-d" in words else "get"
    patterns = [re.sub(r"\{\w+\}", "[^/]+", path) for path, operations in _paths().items() if method in operations]
    assert any(re.fullmatch(pattern, urlsplit(url).path) for pattern in patterns), f"no route takes {method} {url}"


def test_the_pins_satisfy_what_the_distribution_asks_for() -> None:
    pins = {}
    for name in ("runtime", "lock"):
        for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
            if "==" in line:
                package, version = line.removesuffix(" \\").split("==")
                assert canonicalize_name(package) not in pins, f"{package} is pinned twice"
                pins[canonicalize_name(package)] = version
    of_verl = (ROOT / "requirements/verl.txt").read_text()
    pins["ray"] = dict(re.findall(r"^(\S+)==(\S+)$", of_verl, re.MULTILINE))["ray"]  # its tests run where verl's do
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # vLLM has a list of its own: its CPU build pins everything. The trainer's pins come with its optimisation step. Harbor has
    # a Python of its own, and in it what speaks to Kubernetes.
    for text in [
        *project["dependencies"],
        *(
            text
            for name, texts in extras.items()
            if name not in ("vllm", "trainer", "harbor", "kubernetes")
            for text in texts
        ),
    ]:
        requirement = Requirement(text)
        if requirement.name == "steno":
            continue
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{text} has no pin: run ./scripts/lock"
        assert requirement.specifier.contains(pinned), f"{text} is not met by {pinned}: run ./scripts/lock"


def test_every_word_of_the_glossary_is_used_in_the_code_or_the_docs() -> None:
    page = ROOT / "docs" / "glossary.md"
    cells = re.findall(r"^\| (.+?) \| ", page.read_text(), re.MULTILINE)
    words = [word.strip("` ") for cell in cells if cell != "word" for word in cell.split(", ")]
    assert len(words) > 80
    code = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    others = [path.read_text() for path in (*code, *PROSE) if path != page]
    used = re.sub(r"[\s_-]+", " ", " ".join(others)).lower()
    assert [word for word in words if re.sub(r"[\s_-]+", " ", word).lower() not in used] == []
