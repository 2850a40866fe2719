"""The floors of the architecture, and the package as it is installed."""

from __future__ import annotations

import ast
import email
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]

# Floors from the ground up. What stands in `whiflash_agents/` itself and is not named here belongs
# to the floor called work.
GROUND, WORK, RUNS, PLACES, FACES = range(5)
FLOORS = {
    "whiflash_agents.engine": GROUND,
    "whiflash_agents.batch": RUNS,
    "whiflash_agents.bench": RUNS,
    "whiflash_agents.report": RUNS,
    "whiflash_agents.workers": PLACES,
    "whiflash_agents.integrations": FACES,
    "whiflash_agents.bench_peers": RUNS,
    "whiflash_agents.calibration": RUNS,
    "whiflash_agents.router_training": RUNS,
    "whiflash_agents.bench_report": RUNS,
    "whiflash_agents.bench_figures": RUNS,
    "whiflash_agents.bench_plot": RUNS,
    "whiflash_agents.router_building": RUNS,
    "whiflash_agents.study_outputs": RUNS,
    "whiflash_agents.training_texts": RUNS,
    "whiflash_agents.training_progress": RUNS,
    "whiflash_agents.drafter_training": RUNS,
    "whiflash_agents.drafter_card": RUNS,
    "whiflash_agents.drafter_plan": RUNS,
    "whiflash_agents.cli": FACES,
    "whiflash_agents.cli_options": FACES,
    "whiflash_agents.cli_study": FACES,
    "whiflash_agents.cli_train": FACES,
    "whiflash_agents.cli_train_heads": FACES,
    "whiflash_agents.cli_train_options": FACES,
}
ONLY_IN = {
    "ray": "whiflash_agents.workers",
    "langchain": "whiflash_agents.integrations",
    "langchain_core": "whiflash_agents.integrations",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module under the folders that are mapped into the package, with its import name."""
    for package, folder in PACKAGE_DIRS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            yield name, path


def imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """(module imported, line), wherever the import stands: in functions and for types as well."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).strip(".")
            yield base, node.lineno
            for alias in node.names:  # `from package import module`
                if f"{base}.{alias.name}" in NAMES:
                    yield f"{base}.{alias.name}", node.lineno


MODULES = dict(modules())
NAMES = set(MODULES)


def _inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def floor_of(name: str) -> int:
    return next((floor for prefix, floor in FLOORS.items() if _inside(name, prefix)), WORK)


@pytest.mark.parametrize("name", sorted(NAMES - {"whiflash_agents"}))
def test_module_imports_only_from_its_own_floor_and_below(name: str) -> None:
    wrong = [
        f"{MODULES[name]}:{line}: {imported}"
        for imported, line in imports(name, MODULES[name])
        if _inside(imported, "whiflash_agents")
        and imported != "whiflash_agents"
        and floor_of(imported) > floor_of(name)
    ]
    assert wrong == []


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_library_is_imported_on_its_own_floor_only(library: str) -> None:
    wrong = [
        f"{path}:{line}"
        for name, path in MODULES.items()
        for imported, line in imports(name, path)
        if _inside(imported, library) and not _inside(name, ONLY_IN[library])
    ]
    assert wrong == []


def test_the_engine_imports_no_other_floor_and_none_of_their_libraries() -> None:
    allowed = sys.stdlib_module_names | {
        "torch",
        "numpy",
        "transformers",
        "safetensors",
        "llguidance",
    }
    wrong = [
        f"{path}:{line}: {imported}"
        for name, path in MODULES.items()
        if _inside(name, "whiflash_agents.engine")
        for imported, line in imports(name, path)
        if imported.split(".")[0] not in allowed and not _inside(imported, "whiflash_agents.engine")
    ]
    assert wrong == []


def test_no_two_modules_import_each_other() -> None:
    graph = {
        name: {
            imported
            for imported, _ in imports(name, path)
            if imported in NAMES and imported != name and not _inside(name, imported)
        }
        for name, path in MODULES.items()
    }
    pairs = [(a, b) for a, needed in graph.items() for b in needed if a < b and a in graph[b]]
    assert pairs == []


def test_the_checks_above_see_what_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import ray\nfrom ..workers import pool\nfrom .. import chat\n")
    seen = {imported for imported, _ in imports("whiflash_agents.batch.module", path)}
    assert {"ray", "whiflash_agents.workers.pool", "whiflash_agents.chat"} <= seen
    assert floor_of("whiflash_agents.workers.pool") > floor_of("whiflash_agents.batch.plan")


def test_modules_are_called_after_the_noun_they_serve() -> None:
    nameless = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
    assert [name for name in NAMES if name.rpartition(".")[2] in nameless] == []


def loaded_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint('|'.join(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.strip().split("|"))


@pytest.mark.parametrize(
    "statement",
    [
        "import whiflash_agents",
        "import whiflash_agents.engine.errors",
        "import whiflash_agents.cli",
        "import whiflash_agents.settings",
        "import whiflash_agents.traces",
        "import whiflash_agents.batch",
    ],
)
def test_import_loads_nothing_heavy(statement: str) -> None:
    heavy = {"torch", "transformers", "ray", "langchain_core", "numpy"}
    assert loaded_after(statement) & heavy == set()


def test_help_loads_neither_pydantic_nor_rich() -> None:
    loaded = loaded_after("import whiflash_agents.cli")
    assert "click" in loaded
    assert loaded & {"pydantic", "rich", "orjson"} == set()


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        started = time.perf_counter()
        command = [sys.executable, "-m", "whiflash_agents.cli", "run", "--help"]
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.4


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that stale build folders play no part."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in set(PACKAGE_DIRS.values()):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_data_file_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (metadata,) = (name for name in held if name.endswith(".dist-info/METADATA"))
        headers = email.message_from_bytes(archive.read(metadata))
    assert headers["Name"] == "whiflash-agents"
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"whiflash_agents"}
    for name, path in MODULES.items():
        file = name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        assert file in held
    for package, folder in PACKAGE_DIRS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".jinja", ".json", ".typed"}:
                inside = Path(package.replace(".", "/")) / path.relative_to(ROOT / folder)
                assert inside.as_posix() in held


def test_installed_wheel_imports_every_module_from_where_it_was_installed(
    wheel: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(tmp_path), str(wheel)], check=True, timeout=120)
    program = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
for name in {sorted(NAMES)!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
