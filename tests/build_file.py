"""BUILD, read as the Starlark it is and compared with what the modules import.

``python tests/build_file.py`` lists what is wrong with BUILD; ``--write`` brings the lists of sources and dependencies
up to date: a target keeps its place, comments and other attributes; a module in no target joins that of its folder.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping

FOLDERS = ("glass_jax", "models", "benchmarks", "tests")
LIBRARY, TEST = "py_library", "py_test"
_CALLS = ("load", "package", LIBRARY, TEST)

# Import names that differ from the distribution's.
_DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint", "tvm": "tilelang", "xdist": "pytest-xdist"}


class BuildFileError(Exception):
    """BUILD holds something that is not part of the subset used here."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One rule of BUILD.

    Attributes:
      rule: ``py_library`` or ``py_test``.
      name: its name; ``:name`` is its label.
      srcs: its modules, paths from the root.
      deps: labels of what it depends on.
      data: files that it needs at run time, paths from the root.
      other: source text of its remaining attributes, ``data`` included.
      lines: its first line and the one after its last, counted from 0.
    """

    rule: str
    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    other: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lines: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        """The rule as BUILD's text."""
        lists = {key: _list(value) for key, value in (("srcs", self.srcs), ("deps", self.deps)) if value}
        attributes = {"name": f'"{self.name}"'} | lists | self.other
        order = sorted(attributes, key=lambda key: (key != "name", key == "deps", key != "srcs"))
        return f"{self.rule}(\n" + "".join(f"    {key} = {attributes[key]},\n" for key in order) + ")"


def _list(items: tuple[str, ...]) -> str:
    if len(items) == 1:
        return f'["{items[0]}"]'
    return "[\n" + "".join(f'        "{item}",\n' for item in items) + "    ]"


# --- reading -------------------------------------------------------------------------------------------------------


def read(root: pathlib.Path) -> list[Target]:
    """The targets of ``root``/BUILD, in its order.

    Raises:
      BuildFileError: BUILD is more than calls of load, package, py_library and py_test with strings, lists and globs.
    """
    text = (root / "BUILD").read_text()
    targets = []
    for node in ast.parse(text, "BUILD").body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _CALLS):
            raise BuildFileError(f"BUILD:{node.lineno}: only calls of {', '.join(_CALLS)} are read here")
        values = {keyword.arg: _evaluate(keyword.value, root) for keyword in call.keywords}
        positional = [_evaluate(argument, root) for argument in call.args]
        if call.func.id not in (LIBRARY, TEST):
            continue
        if positional or not isinstance(values.get("name"), str) or not isinstance(values.get("srcs"), tuple):
            raise BuildFileError(f"BUILD:{node.lineno}: {call.func.id} needs name and srcs, by keyword")
        source = {keyword.arg: ast.get_source_segment(text, keyword.value) for keyword in call.keywords}
        targets.append(
            Target(
                rule=call.func.id,
                name=values["name"],
                srcs=values["srcs"],
                deps=values.get("deps", ()),
                data=values.get("data", ()),
                other={key: value for key, value in source.items() if key not in ("name", "srcs", "deps")},
                lines=(node.lineno - 1, node.end_lineno),
            )
        )
    return targets


def _evaluate(node: ast.expr, root: pathlib.Path) -> str | tuple[str, ...]:
    """A string, list, sum or glob."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.List):
        return tuple(_evaluate(item, root) for item in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluate(node.left, root) + _evaluate(node.right, root)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "glob" and not node.keywords:
        patterns = [pattern for argument in node.args for pattern in _evaluate(argument, root)]
        paths = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
        found = sorted(path.relative_to(root).as_posix() for path in paths)
        if not found:
            raise BuildFileError(f"BUILD:{node.lineno}: glob({patterns}) matches no file")
        return tuple(found)
    raise BuildFileError(f"BUILD:{node.lineno}: `{ast.unparse(node)}` is not a string, list, sum or glob")


def modules(root: pathlib.Path) -> list[str]:
    """Every Python file of :data:`FOLDERS`, as a path from the root."""
    return sorted(path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def declared(root: pathlib.Path) -> set[str]:
    """Labels of the distributions that pyproject.toml names, in its dependencies or in an extra."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {pip_label(re.match(r"[\w.-]+", item).group()) for group in groups for item in group}


def pip_label(distribution: str) -> str:
    """The label of a distribution."""
    return "@pip//" + re.sub(r"[-_.]+", "_", distribution).lower()


# --- imports -------------------------------------------------------------------------------------------------------


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names that the file imports, anywhere in it; ``from a import b`` counts as ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise BuildFileError(f"{path}:{node.lineno}: a relative import; imports are absolute here")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def resolve(name: str, importer: str, files: set[str]) -> str | None:
    """The file of this repository that an import of ``name`` reaches; None if it is somebody else's.

    pytest puts the folders of the tests on the path, so a test also finds the helpers beside it and in tests/.
    """
    folders = [""] if not importer.startswith("tests/") else ["", importer.rpartition("/")[0] + "/", "tests/"]
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        stem = "/".join(parts[:length])
        for folder in folders:
            for file in (f"{folder}{stem}.py", f"{folder}{stem}/__init__.py"):
                if file in files:
                    return file
    return None


def dependencies(target: Target, owner: Mapping[str, str], root: pathlib.Path) -> tuple[str, ...]:
    """The labels that ``target`` depends on by its imports; ``owner`` names the target of each module.

    A test depends on pytest, which runs it, and on the conftest.py that pytest loads for it.
    """
    labels: set[str] = set()
    for source in target.srcs:
        for name in imports(root / source):
            top = name.partition(".")[0]
            if file := resolve(name, source, set(owner)):
                labels.add(f":{owner[file]}")
            elif top not in sys.stdlib_module_names:
                labels.add(pip_label(_DISTRIBUTIONS.get(top, top)))
        if target.rule == TEST:
            labels.add(pip_label("pytest"))
            conftests = [f"{parent}/conftest.py" for parent in pathlib.PurePosixPath(source).parents]
            labels.update(f":{owner[file]}" for file in conftests if file in owner)
    return tuple(sorted(labels - {f":{target.name}"}))


# --- what it should be ---------------------------------------------------------------------------------------------


def home(module: str, names: Collection[str]) -> tuple[str, str]:
    """Rule and target name for a module that BUILD does not mention; ``names`` are the targets that it has.

    Tests, their helpers and the modules at the top of the library have a target each. Others join the target of their
    folder or of the folder around it, and where there is none, their folder becomes a target.
    """
    path = pathlib.PurePosixPath(module)
    if path.parts[0] == "tests":
        return TEST if path.stem.startswith("test_") else LIBRARY, str(path.with_suffix(""))
    if str(path.parent) == "glass_jax":
        return LIBRARY, "glass_jax" if path.stem == "__init__" else f"glass_jax/{path.stem}"
    folders = [str(folder) for folder in path.parents if str(folder) not in (".", "glass_jax")]
    return LIBRARY, next((folder for folder in folders if folder in names), folders[0])


def expected(root: pathlib.Path) -> list[Target]:
    """The targets that BUILD should hold, its own choice of targets kept."""
    targets, files = read(root), modules(root)
    owner = {source: target.name for target in targets for source in target.srcs}
    rules = {target.name: target.rule for target in targets}
    for module in files:
        if module not in owner:
            rule, owner[module] = home(module, rules)
            rules.setdefault(owner[module], rule)
    owner = {module: owner[module] for module in files}
    old = {target.name: target for target in targets}
    result = []
    for name, rule in rules.items():
        srcs = tuple(module for module in files if owner[module] == name)
        if not srcs:
            continue
        runner = {"args": _list(srcs), "main_module": '"pytest"'} if rule == TEST else {}
        target = dataclasses.replace(old.get(name, Target(rule, name, (), other=runner)), srcs=srcs)
        result.append(dataclasses.replace(target, deps=dependencies(target, owner, root)))
    return result


def problems(root: pathlib.Path) -> Iterator[str]:
    """What is wrong with BUILD, each with the text that would be right."""
    targets, files = read(root), modules(root)
    listed = [source for target in targets for source in target.srcs]
    for source in sorted(set(listed) | set(files)):
        if (count := listed.count(source)) != 1:
            yield f"{source} is in {count} targets; it should be in one"
        elif source not in files:
            yield f"{source} is in BUILD and does not exist"
    if set(files) != set(listed):
        return
    owner = {source: target.name for target in targets for source in target.srcs}
    labels = declared(root)
    for target in targets:
        if (deps := dependencies(target, owner, root)) != target.deps:
            yield f'"{target.name}" imports something else than it declares. It imports:\n    deps = {_list(deps)},'
        for label in deps:
            if label.startswith("@pip") and label not in labels:
                yield f'"{target.name}" imports {label}, which pyproject.toml does not name'
    if cycle := find_cycle({f":{target.name}": target.deps for target in targets}):
        yield "targets that depend on each other: " + " -> ".join(cycle)


def find_cycle(graph: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The labels along one cycle of ``graph``, the first repeated at the end; empty if it has none."""
    finished: set[str] = set()

    def visit(label: str, path: list[str]) -> list[str]:
        if label in path:
            return [*path[path.index(label) :], label]
        if label not in finished:
            for dep in graph.get(label, ()):
                if cycle := visit(dep, [*path, label]):
                    return cycle
            finished.add(label)
        return []

    return next(filter(None, (visit(label, []) for label in graph)), [])


def rewritten(root: pathlib.Path) -> str:
    """BUILD's text with every target as it should be; new ones follow the last of their rule and top folder."""
    lines: list[str | None] = list((root / "BUILD").read_text().splitlines())
    right = {target.name: target for target in expected(root)}
    last: dict[tuple[str, str], int] = {}
    for target in read(root):
        start, end = target.lines
        lines[start:end] = [None] * (end - start)
        last[target.rule, target.name.split("/")[0]] = start
        if target.name in right:
            lines[start] = str(right.pop(target.name))
    for name, target in right.items():
        place = last.get((target.rule, name.split("/")[0]))
        if place is None:
            lines += ["", str(target)]
        else:
            lines[place] = "\n\n".join(filter(None, (lines[place], str(target))))
    text = "\n".join(line for line in lines if line is not None)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def main(arguments: list[str]) -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    if arguments == ["--write"]:
        (root / "BUILD").write_text(rewritten(root))
    found = list(problems(root))
    print("\n".join(found) or "BUILD is what the modules import")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
