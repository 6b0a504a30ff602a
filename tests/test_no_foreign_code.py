"""Nothing that this project reads is run: no expression, pickle, shell command or module that a text or a file names.

Of an answer, sympy's parser evaluates the numbers, in other processes (tests/recipe/test_reward.py, ``test_no_answer_is_run``).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1]
FOLDERS = ("grail_advantage", "recipe", "scripts", "study", "benchmarks", "examples")
SOURCES = sorted(path for folder in FOLDERS for path in (SITE / folder).rglob("*.py"))
SHELL = sorted(path for folder in FOLDERS for path in (SITE / folder).rglob("*.sh"))

NEVER = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path", "runpy.run_module"),
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "cloudpickle.load",
        "cloudpickle.loads",
        "dill.load",
        "dill.loads",
    ),
    *("marshal.load", "marshal.loads", "shelve.open", "joblib.load", "pandas.read_pickle", "pd.read_pickle"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "shutil.unpack_archive", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "tempfile.mktemp"),
}


def findings(source: str) -> list[str]:
    """What a module does that none of the project's may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in NEVER:
            found.append(name)
        if name == "torch.load" and not _is(given.get("weights_only"), True):
            found.append("torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and "allow_pickle" in given and not _is(given["allow_pickle"], False):
            found.append("numpy.load of pickles")
        if "shell" in given and not _is(given["shell"], False):
            found.append(f"{name} through a shell")
        if _is(given.get("trust_remote_code"), True):
            found.append(f"{name} with a model's own code, whatever the user says")
    return found


def _name(node: ast.expr) -> str:
    """``a.b.c`` of a plain chain of names, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _name(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SITE)))
def test_module(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "import os\nos.system(text)",
        "import pickle\npickle.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_is_found(source: str) -> None:
    assert len(findings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "engine.eval_mode()",
        "torch.load(path, weights_only=True)",
        "numpy.load(path)",
        "subprocess.run([name])",
        "re.compile(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=trusted)",
    ],
)
def test_is_allowed(source: str) -> None:
    assert findings(source) == []


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(SITE)))
def test_script_evaluates_no_text(path: Path) -> None:
    code = re.sub(r"(?m)^\s*#.*$", "", path.read_text(encoding="utf-8"))
    assert not re.search(r"(?m)(^|[;&|]\s*|\bthen\s+|\bdo\s+)eval\s", code)
