"""The rules of the house that a compiler does not know, checked over the whole tree in seconds:
include order of src/ (tests/house/layers.txt), torch headers only where marked (also through other
headers), links in CMakeLists.txt, file sizes, opening comments, names, the number of `catch` per folder
(tests/house/catches.txt), nothing large or generated in git, no machine's paths, the documents, the tests
that docs/cases.md names.

    python tests/house/house_test.py [BUILD_DIR]

One line per fault, exit code 1 if there is any. Before the tree itself a small bad tree is checked,
which must give every kind of fault: a rule that finds nothing there is broken. With BUILD_DIR the
program's own `tandem flags --markdown` must equal docs/flags.md."""

import ast
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
TEXTS = SOURCES | {".py", ".sh", ".md", ".txt", ".cmake", ".json", ".toml", ".lock", ""}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
CATCH = re.compile(r"\bcatch\s*\(")
BAD_NAME = re.compile(r"\b(?:class|struct|union)\s+(?:\[\[\w+\]\]\s*)?(\w*(?:Manager|Helper|Utils?|Impl|Factory|Base))\b")
BAD_FOLDERS = {"utils", "util", "common", "core", "interfaces", "misc"}
UNFINISHED = re.compile(r"\b(" + "TO" + "DO|FIX" + "ME|X" + "XX)\\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:(?:home|Users)/\w+/|root/\w|work/(?:main|shared))")
GENERATED = re.compile(r"(^|/)(build[^/]*|\.venv[^/]*|models|runs|__pycache__)/|"
                       r"\.(o|so|a|pyc|gguf|safetensors|whl|deb|pt|bin)$")
GTEST = re.compile(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", re.M)
PYTHON_DEF = re.compile(r"^\s*def (\w+)\(", re.M)
CASE = re.compile(r"C\d\d")
DOCUMENTS = ["README.md", "DEVELOPING.md", "LICENSE", "docs/flags.md", "docs/architecture.md", "docs/glossary.md"]
MAX_LINES = 800
MAX_BYTES = 1_000_000


def read_layers(root):
    """folder -> (number, may include torch)."""
    layers = {}
    for line in (root / "tests/house/layers.txt").read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            layers[words[0]] = (int(words[1]), "torch" in words[2:])
    return layers


def may_use(layers, folder, other):
    return folder == other or layers[other][0] > layers[folder][0]


class Tree:
    """src/ as read once: file -> text, and which project headers it includes."""

    def __init__(self, root):
        self.root = root
        self.texts = {path.relative_to(root / "src").as_posix(): path.read_text(encoding="utf-8")
                      for path in sorted((root / "src").rglob("*")) if path.suffix in SOURCES}
        self.includes = {name: INCLUDE.findall(text) for name, text in self.texts.items()}

    def torch_chain(self, name, seen):
        """The include chain from `name` to a torch header, or None."""
        for _, target in self.includes.get(name, []):
            if TORCH.match(target):
                return [name, target]
            if target in self.texts and target not in seen:
                seen.add(target)
                chain = self.torch_chain(target, seen)
                if chain:
                    return [name, *chain]
        return None


def check_includes(tree, layers):
    for name, includes in tree.includes.items():
        folder = name.split("/")[0]
        if folder not in layers:
            yield f"src/{name}: folder '{folder}' is not in tests/house/layers.txt"
            continue
        for mark, target in includes:
            other = target.split("/")[0]
            if mark == '"' and target not in tree.texts:
                yield (f"src/{name}: includes \"{target}\", which is no file under src/ (own headers "
                       "from src/ in quotes, others in <>)")
            elif other in layers and target in tree.texts and not may_use(layers, folder, other):
                yield (f"src/{name}: includes {target}, but {folder} ({layers[folder][0]}) may use only itself "
                       f"and folders above its number, {other} is {layers[other][0]}")
        if not layers[folder][1]:
            chain = tree.torch_chain(name, {name})
            if chain:
                yield f"src/{name}: reaches a torch header, its folder is not marked torch: {' > '.join(chain)}"


def check_links(root, layers):
    text = (root / "CMakeLists.txt").read_text()
    for folder, words in re.findall(r"td_folder\((\w+)\s+([^)]*)\)", text):
        if folder not in layers:
            yield f"CMakeLists.txt: td_folder({folder}) is not in tests/house/layers.txt"
            continue
        if ("TORCH" in words.split()) and not layers[folder][1] and folder != "cli":
            yield f"CMakeLists.txt: td_folder({folder}) has TORCH, tests/house/layers.txt has no mark for it"
        for other in words.split():
            if other in layers and other != folder and not may_use(layers, folder, other):
                yield f"CMakeLists.txt: {folder} ({layers[folder][0]}) links {other} ({layers[other][0]})"


def check_shape(tree):
    for name, text in tree.texts.items():
        lines = text.count("\n")
        if lines > MAX_LINES:
            yield f"src/{name}: {lines} lines, at most {MAX_LINES}: split it"
        if not text.startswith(("//", "/*")):
            yield f"src/{name}: does not open with a comment that says what it is"
        if name.endswith((".h", ".cuh")) and "#pragma once" not in text:
            yield f"src/{name}: has no '#pragma once'"
        for bad in BAD_NAME.findall(text):
            yield f"src/{name}: type '{bad}': say what it owns"
        for part in set(name.split("/")[:-1]) & BAD_FOLDERS:
            yield f"src/{name}: folder '{part}' says nothing"


def check_catches(tree, root):
    allowed, found = {}, {}
    for line in (root / "tests/house/catches.txt").read_text().splitlines():
        words = line.split("#")[0].split()
        if words:
            allowed[words[0]] = int(words[1])
    for name, text in tree.texts.items():
        code = re.sub(r"//.*", "", text)
        count = len(CATCH.findall(code))
        if count:
            found.setdefault(name.split("/")[0], {})[name] = count
    for folder in sorted(allowed.keys() | found.keys()):
        count = sum(found.get(folder, {}).values())
        if count != allowed.get(folder, 0):
            where = ", ".join(f"{name} {n}" for name, n in sorted(found.get(folder, {}).items()))
            yield (f"src/{folder}: {count} catch, tests/house/catches.txt allows exactly "
                   f"{allowed.get(folder, 0)} ({where or 'none found'})")


def tracked_files(root):
    """Paths in git; of a tree without git (the bad tree of the self-check), all of them."""
    if not (root / ".git").exists():
        return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], check=True, capture_output=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()]


def check_files(root):
    for name in tracked_files(root):
        path = root / name
        size = path.stat().st_size
        if size > MAX_BYTES:
            yield f"{name}: {size} bytes in git, at most {MAX_BYTES}"
        if GENERATED.search(name) and not name.startswith("tests/golden/"):
            yield f"{name}: generated or fetched, must not be in git"
        if path.suffix not in TEXTS or size > MAX_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if UNFINISHED.search(line):
                yield f"{name}:{number}: unfinished: {line.strip()[:60]}"
            if MACHINE_PATH.search(line):
                yield f"{name}:{number}: names a place of one machine: {line.strip()[:80]}"
        if path.suffix == ".py":
            try:
                ast.parse(text)
            except SyntaxError as fault:
                yield f"{name}:{fault.lineno}: not Python: {fault.msg}"
        if path.suffix == ".sh" and subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode:
            yield f"{name}: not a bash script (bash -n)"


def check_documents(root):
    for name in DOCUMENTS:
        if not (root / name).is_file() or not (root / name).read_text(encoding="utf-8").strip():
            yield f"{name}: missing or empty"


def check_cases(root):
    """docs/cases.md: every test that a row names is in tests/, and no row is without one."""
    page = root / "docs/cases.md"
    if not page.is_file():
        return
    tests = set()
    for path in (root / "tests").rglob("*"):
        if path.suffix == ".cpp":
            tests |= {f"{suite}.{name}" for suite, name in GTEST.findall(path.read_text(encoding="utf-8"))}
        elif path.suffix == ".py":
            tests |= {f"{path.stem}.{name}" for name in PYTHON_DEF.findall(path.read_text(encoding="utf-8"))}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not CASE.fullmatch(cells[0]):
            continue
        named = re.findall(r"`([^`]+)`", cells[-1])
        if not named:
            yield f"docs/cases.md: {cells[0]} names no test"
        for name in named:
            if name not in tests:
                yield f"docs/cases.md: {cells[0]}: no test is called {name}"


def check_flags_page(root, program):
    shown = subprocess.run([str(program), "flags", "--markdown"], capture_output=True, text=True, timeout=60)
    page = root / "docs/flags.md"
    if shown.returncode:
        yield f"{program.name} flags --markdown: exit code {shown.returncode}: {shown.stderr.strip()[:200]}"
    elif page.is_file() and shown.stdout != page.read_text(encoding="utf-8"):
        yield "docs/flags.md: out of date: write `tandem flags --markdown` into it"


def check_tree(root):
    layers = read_layers(root)
    tree = Tree(root)
    for folder in sorted({path.name for path in (root / "src").iterdir() if path.is_dir()} - layers.keys()):
        yield f"src/{folder}: not in tests/house/layers.txt"
    yield from check_includes(tree, layers)
    yield from check_links(root, layers)
    yield from check_shape(tree)
    yield from check_catches(tree, root)
    yield from check_files(root)
    yield from check_documents(root)
    yield from check_cases(root)


BAD_TREE = {  # file -> (text, the words of each fault that it must give)
    "tests/house/layers.txt": ("low 2\nhigh 1\nheavy 3 torch\n", []),
    "tests/house/catches.txt": ("high 1\n", ["src/high: 0 catch"]),
    "CMakeLists.txt": ("td_folder(low TORCH LINK high)\n", ["low) has TORCH", "links high"]),
    "src/low/a.h": ("// a\n#pragma once\n#include \"high/b.h\"\n", ["but low (2)"]),
    "src/low/c.cpp": ("// c\n#include <ATen/ATen.h>\n", ["c.cpp > ATen/ATen.h"]),
    "src/low/d.cpp": ("// d\n#include \"heavy/t.h\"\n", ["d.cpp > heavy/t.h > torch/t.h"]),
    "src/heavy/t.h": ("// t\n#pragma once\n#include <torch/t.h>\n", []),
    "src/high/b.h": ("class TaskManager;\n", ["does not open", "pragma once", "TaskManager"]),
    "src/high/e.cpp": ("// e\n#include \"e.h\"\n" + "\n" * 801, ["which is no file", "lines, at most"]),
    "src/low/f.cpp": ("// f\nvoid f() { try {} catch (...) {} }\n// TO" + "DO\n", ["src/low: 1 catch", "unfinished"]),
    "src/utils/g.cpp": ("// g\n", ["says nothing", "is not in tests", "not in tests/house/layers.txt"]),
    "tools/h.py": ("def (\n# see /ho" + "me/somebody/x\n", ["not Python", "one machine"]),
    "tools/i.sh": ("if then\n", ["bash -n"]),
    "models/j.gguf": ("x" * (MAX_BYTES + 1), ["bytes in git", "generated"]),
    "README.md": ("", ["README.md: missing"]),
    "tests/unit/k_test.cpp": ("TEST(Some, Test) {}\n", []),
    "docs/cases.md": ("| C01 | a | b | `Some.Test` |\n| C02 | a | b | `Some.Other` |\n| C03 | a | b | none |\n",
                      ["C02: no test is called Some.Other", "C03 names no test"]),
}


def self_check():
    """Faults of the rules themselves: what the bad tree should give and does not."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, (text, _) in BAD_TREE.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        faults = list(check_tree(root))
    for name, (_, wanted) in BAD_TREE.items():
        for words in wanted:
            if not any(words in fault for fault in faults):
                yield f"house_test itself: the bad {name} gave no fault with '{words}'"


def main(arguments):
    faults = list(self_check()) + list(check_tree(ROOT))
    program = pathlib.Path(arguments[0]) / "tandem" if arguments else None
    if program and program.is_file():
        faults += check_flags_page(ROOT, program)
    for fault in faults:
        print(fault)
    print(f"house: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
