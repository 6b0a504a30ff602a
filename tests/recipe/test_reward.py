"""The judge: what it accepts, what it refuses, and that no answer can stop, crash or trick it."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grail_advantage import reward
from grail_advantage.reward import _verify_pool
from tests.recipe.hostile_answers import GOLD, hostile_responses

DATA = Path(os.environ.get("GRAIL_DATA_DIR", Path(__file__).resolve().parents[3] / "shared" / "data"))
KEYS = {"score": float, "acc": float, "answer_found": float, "verify_failed": float, "pred": str}


def judge(gold: Any, answer: str) -> dict[str, Any]:
    result = reward.compute_score("test", f"Some reasoning.\nSo the answer is $\\boxed{{{answer}}}$.", gold)
    assert {key: type(value) for key, value in result.items()} == KEYS
    assert result["score"] == result["acc"] and result["score"] in (0.0, 1.0)
    return result


def accepts(gold: Any, answer: str) -> bool:
    result = judge(gold, answer)
    assert result["verify_failed"] == 0.0
    return result["score"] == 1.0


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half a second of processor time for each answer."""
    _verify_pool.close()
    monkeypatch.setenv("GRAIL_REWARD_TIMEOUT", "0.5")
    yield
    _verify_pool.close()


def workers(server: int | None = None) -> list[int]:
    """Process ids of a server's two workers, which may be about to be replaced."""
    server = _verify_pool.server().process.pid if server is None else server
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(server).children()) != 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return [child.pid for child in children]


def _run(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    return json.loads(done.stdout)


# --- which box -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no box", None),
        ("", None),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        (r"\boxed{}", ""),
        (r"first \boxed{4}, then \boxed{5}. Done", "5"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("é\\boxed{π\ud800}", "π\ud800"),
    ],
)
def test_last_complete_box_counts(text: str, answer: str | None) -> None:
    assert reward.last_boxed(text) == answer


def test_result_says_whether_an_answer_was_found() -> None:
    none, empty, wrong, right = (
        reward.compute_score("gsm8k", text, "5") for text in ("5", r"\boxed{}", r"\boxed{ $6.$ }", r"\boxed{5}")
    )
    assert none == {"score": 0.0, "acc": 0.0, "answer_found": 0.0, "verify_failed": 0.0, "pred": ""}
    assert empty == {"score": 0.0, "acc": 0.0, "answer_found": 1.0, "verify_failed": 0.0, "pred": ""}
    assert wrong == {"score": 0.0, "acc": 0.0, "answer_found": 1.0, "verify_failed": 0.0, "pred": "6"}
    assert right == {"score": 1.0, "acc": 1.0, "answer_found": 1.0, "verify_failed": 0.0, "pred": "5"}


def test_pred_can_be_written_anywhere() -> None:
    result = judge("5", "a\ud800\x00\n" + "b" * 5000)
    assert len(result["pred"]) <= 128
    assert result["pred"].startswith("a\ufffd\ufffd b")
    json.dumps(result, ensure_ascii=False).encode("utf-8")


# --- what is equal ---------------------------------------------------------------------------------------------------

EQUAL = [
    # fractions and decimals
    ("1/2", r"\frac12"),
    ("1/2", r"\frac{1}{2}"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", r"\tfrac 1 2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".5"),
    (r"\frac{3}{2}", r"1\frac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("2", r"\frac{4}{2}"),
    ("5", "5.0"),
    ("5", "5."),
    ("5", "05"),
    ("0.333333", r"\frac{1}{3}"),
    (r"\sqrt{2}", "1.41421356"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("4.5e33", r"4.50\cdot10^{33}"),
    ("0.006", r"6 \times 10^{-3}"),
    ("4.5e33", r"4.5e33\text{ erg}"),
    ("1.6e-19", r"1.6 \times 10^{-19} \text{ C}"),
    ("0.2", "2e-1"),
    ("2e-1", "-1+2e"),
    ("2e - 1", "2e-1"),
    # ways to write a number
    ("-5", "\u22125"),
    ("5", "$5$"),
    ("$5$", "5"),
    (r"\boxed{5}", "5"),
    ("18", r"\$18"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("1234", "1{,}234"),
    ("1234567", r"1\,234\,567"),
    ("1234", "1 234"),
    ("1,234.50", "1234.5"),
    # percent, in both readings
    ("50", r"50\%"),
    (r"50\%", "50"),
    ("50", "50 percent"),
    (r"50\%", "0.5"),
    ("0.5", r"50\%"),
    (r"\frac{1}{8}", r"12.5\%"),
    (r"50\%", r"50\,\%"),
    (r"\frac{1}{3}", r"\frac{100}{3}\%"),
    (r"10\%, 20\%", "20, 10"),
    # units and degrees
    ("5", "5 cm"),
    ("5", r"5\text{ cm}"),
    ("5", r"5~\mathrm{cm}^2"),
    (r"5\text{ cm}", "5"),
    ("18", r"18\text{ dollars}"),
    ("45", r"45^\circ"),
    (r"45^{\circ}", "45"),
    ("45", "45\u00b0"),
    # sets, lists, tuples, intervals
    ("1,2", "2, 1"),
    (r"\{1,2\}", "2,1"),
    (r"\{1,2\}", r"\left\{2, 1\right\}"),
    (r"\{1,2\}", r"1\text{ and }2"),
    ("(1,2)", r"\left(1, 2\right)"),
    ("(0,1]", r"\left(0, 1\right]"),
    ("$(45,2),(-10,-9)$", "(-10,-9), (45,2)"),
    ("3 \\pm 2", "1, 5"),
    # equations and inequalities
    ("5", "x=5"),
    ("x=5", "5"),
    ("2x+1", "y=2x+1"),
    ("$x^{2}-4 x-2=0$", "x^2-4x-2=0"),
    ("x>1", r"(1,\infty)"),
    # text and choices
    ("A", r"\text{(A)}"),
    ("A", "(A)"),
    ("(A)", "A"),
    ("Yes", r"\text{Yes}"),
    (r"\text{no solution}", "no solution"),
    # expressions
    ("$10-4 n$", "-4n+10"),
    (r"$\frac{48 i-56}{85}$", r"-\frac{56}{85}+\frac{48}{85}i"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("2^{10}", "1024"),
    (r"\frac{\sqrt{3}}{2}", r"\cos\frac{\pi}{6}"),
    ("3t", r"t \cdot 3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\frac{\pi}{10^{20}}", r"\frac{2\pi}{2 \cdot 10^{20}}"),
    # gold answers that are not strings
    (5, "5"),
    (27.0, "27"),
    (0.5, r"\frac{1}{2}"),
    (1e-07, "10^{-7}"),
    (["2"], "2"),
    ([r"$\frac{1}{2 n+2}$"], r"\frac{1}{2(n+1)}"),
    (["$2$", "3"], "3, 2"),
    (["$2$", "3"], r"\{2,3\}"),
    (["1", "234"], "1, 234"),
]

DIFFERENT = [
    ("5", "6"),
    ("5", "-5"),
    ("5", "5!"),
    ("5", ""),
    ("5", "15"),
    ("1234", "1,235"),
    ("1.234", "1,234"),
    ("12", "1,2"),
    (["1", "234"], "1234"),
    ("1/3", "0.33"),
    ("2", "2.0000001"),
    ("0", "0.0000001"),
    ("50", "0.5"),
    (r"50\%", r"0.5\%"),
    (r"50\%", "500"),
    ("100", r"10, 20\%"),
    # math-verify alone finds the two of each of these pairs equal
    (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}"),
    ("1.6e-19", "0.0"),
    ("4.5e33", "4.6e33"),
    ("2e-1", "3e-1"),
    (r"1.6 \times 10^{-19} \text{ C}", "0.0"),
    (r"\frac{\pi}{10^{20}}", r"\frac{3}{10^{20}}"),
    ("3t", "3"),
    ("2x+3t", "2x+3"),
    ("2bc", "2"),
    ("(0,1]", "[0,1)"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2\}", r"\{1,3\}"),
    (["2", "3"], "2"),
    (["2", "3"], "2, 3, 4"),
    ("A", "B"),
    ("Yes", "No"),
    ("x", "y"),
    ("2x+1", "2x-1"),
    ("x=5", "x=6"),
    (r"\pi", "3.14"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt{2}}{2}"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_forms_are_accepted(gold: Any, answer: str) -> None:
    assert accepts(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers_are_refused(gold: Any, answer: str) -> None:
    assert not accepts(gold, answer)


def test_numpy_golds() -> None:
    numpy = pytest.importorskip("numpy")
    assert accepts(numpy.array(["$2$", "3"], dtype=object), "3,2")
    assert accepts(numpy.float64(27.0), "27")
    assert accepts(numpy.int64(27), "27")


@pytest.mark.parametrize("gold", [None, "", "  ", [], {}, float("nan"), b"5", object()])
def test_unusable_gold_scores_zero_and_is_flagged(gold: Any) -> None:
    result = judge(gold, "5")
    assert (result["score"], result["answer_found"], result["verify_failed"]) == (0.0, 1.0, 1.0)


def test_response_that_is_no_text_scores_zero() -> None:
    assert reward.compute_score("", None, "5")["score"] == 0.0  # type: ignore[arg-type]


_NUMERALS = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.builds("{}.{:03d}".format, st.integers(-999, 999), st.integers(0, 999)),
    st.builds("{}/{}".format, st.integers(-99, 99), st.integers(1, 99)),
    st.builds("\\frac{{{}}}{{{}}}".format, st.integers(0, 99), st.integers(1, 99)),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(gold=_NUMERALS, other=_NUMERALS, digits=st.sampled_from([None, 3, 5, 6, 9]))
def test_number_path_agrees_with_math_verify(gold: str, other: str, digits: int | None) -> None:
    """Numbers are compared without math-verify; it has to say the same, also of a rounded copy of the gold answer."""
    number = reward._number(gold)
    assert number is not None
    value, decimal = number
    answer = other if digits is None else f"{float(value):.{digits}f}"
    if 0 < abs(value) < Fraction(1, 1000):
        return  # there, this judge is stricter on purpose
    answer_number = reward._number(answer)
    assert answer_number is not None
    assert reward._same_number((value, decimal), answer_number) == _verify_pool.verify(gold, answer)


# --- the data sets' own answers --------------------------------------------------------------------------------------


def _golds(name: str) -> list[Any]:
    file = DATA / f"{name}.jsonl"
    if not file.is_file():
        pytest.skip(f"{file} is missing; set GRAIL_DATA_DIR to the folder that holds it")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if name.startswith("olympiad"):
        return [row["final_answer"] for row in rows]
    if name.startswith("minerva"):
        return [reward.last_boxed(row["solution"]) for row in rows]
    if name.startswith("gsm8k"):
        return [row["answer"].split("####")[1].strip() for row in rows]
    return [row["answer"] for row in rows]


def _as_text(gold: Any) -> str:
    return gold[0] if isinstance(gold, list) else str(gold)


@pytest.mark.parametrize(
    "name",
    ["gsm8k_test", "aime24", "amc23", "college_math_sample5", "minerva_math_sample5", "olympiadbench_sample5"],
)
def test_gold_accepts_itself(name: str) -> None:
    golds = _golds(name)
    assert len(golds) >= 5
    assert [gold for gold in golds if not accepts(gold, _as_text(gold))] == []


@pytest.mark.parametrize("name", ["aime24", "amc23"])
def test_no_gold_accepts_another_problems_answer(name: str) -> None:
    golds = _golds(name)
    pairs = [(a, b) for a in golds for b in golds if float(a) != float(b)]
    assert len(pairs) > 500
    assert [pair for pair in pairs if accepts(pair[0], _as_text(pair[1]))] == []


def test_contest_answers_through_math_verify() -> None:
    """The same with answers that are no plain numbers, so that each goes through a worker."""
    golds = [_as_text(gold) for name in ("aime24", "amc23") for gold in _golds(name)]
    with ThreadPoolExecutor(4) as executor:
        same = list(executor.map(lambda gold: accepts(gold, f"x = {gold}"), golds))
        other = list(executor.map(lambda gold: accepts(gold, f"x = {float(gold) + 1:.0f}"), golds))
    assert all(same) and not any(other)


# --- hostile answers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hostile_answers_score_zero_and_leave_a_working_pool(short_limit: None, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    responses = hostile_responses(str(marker))
    assert len(responses) >= 50
    with ThreadPoolExecutor(8) as executor:
        scores = executor.map(lambda response: reward.compute_score("", response, GOLD), responses.values())
        results = dict(zip(responses, scores, strict=True))
    assert {name: result["score"] for name, result in results.items() if result["score"] != 0.0} == {}
    assert not marker.exists()
    # These can only have been ended by the limit; were it not enforced, the test would not get here.
    for name in ("power tower", "huge factorial", "long sum", "polynomial to a high power", "nested parentheses"):
        assert results[name]["verify_failed"] == 1.0, name
    for name in ("python call", "tex input", "nul bytes", "empty"):
        assert results[name]["verify_failed"] == 0.0, name
    assert accepts(GOLD, r"\frac12\sqrt{3}")
    assert len(workers()) == 2


def test_no_verdict_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    gold, answer = r"\frac{\sqrt{5}-1}{4}", r"\sin(\frac{\pi}{10})"
    _verify_pool.close()
    monkeypatch.setenv("GRAIL_REWARD_TIMEOUT", "0.01")
    starved = judge(gold, answer)
    monkeypatch.delenv("GRAIL_REWARD_TIMEOUT")
    _verify_pool.close()
    assert (starved["score"], starved["verify_failed"]) == (0.0, 1.0)
    assert accepts(gold, answer)


def test_long_answers_are_not_parsed_unless_equal() -> None:
    assert judge("5", "1+" * 500 + "5")["verify_failed"] == 1.0
    assert judge("5", "1+" * 499 + "5")["verify_failed"] == 0.0


def test_resources_of_a_worker_are_bounded() -> None:
    """2^(10^10) has 1.25 GB; a worker that may take 200 MB must get through it without ever holding more."""
    script = """
import json, resource
from pathlib import Path
from grail_advantage.reward import _verify_worker as worker

def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) << 10

worker.MEMORY = 200 << 20
worker.equal("x+1", "1+x")
mapped = status("VmSize")
worker.confine([])
limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("FSIZE", "CORE", "NPROC", "NOFILE")]
verdict = worker.compare("x+1", "2^{10^{10}}", 60.0)
print(json.dumps([verdict, status("VmPeak") - mapped, limits]))
"""
    verdict, growth, limits = _run(script)
    assert verdict is False
    assert 100 << 20 < growth <= 201 << 20
    assert limits == [[0, 0], [0, 0], [0, 0], [64, 64]]


def test_the_judge_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    _verify_pool.close()
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert accepts("x+71", "71+x")
    environment = Path(f"/proc/{_verify_pool.server().process.pid}/environ").read_bytes()
    assert b"PYTHONHASHSEED=0" in environment and b"HF_TOKEN" not in environment


AUDITED = r"""
import json, os, re, sys
import _verify_worker as worker

READING = {"open", "os.listdir", "os.scandir", "marshal.loads", "object.__getattr__", "exec", "array.__new__"}
# Numbers, and sympy's own programs: names for its parser, functions on monomials.
HARMLESS = re.compile(
    r"from sympy import \*|def monomial_\w+\([A-Z, k]+\):.*|(Integer|Float|\d[eE][+-]?\d|[\s\d.'()+*/-])*", re.DOTALL
)
watching = False


def loading():
    frame = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def hook(event, arguments):
    global watching
    if not watching or event in ("import", "sys._getframe"):
        return
    watching = False
    text = arguments[0].decode() if event == "compile" and isinstance(arguments[0], bytes) else arguments[0]
    harmless = event in READING and (event != "open" or not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event == "compile":
        harmless = HARMLESS.fullmatch(text) is not None if isinstance(text, str) else not isinstance(text, bytes)
    if not harmless and not loading():
        os.write(1, json.dumps([answer, event, repr(text)[:200]]).encode() + b"\n")
    watching = True


sys.addaudithook(hook)
gold, answers = json.load(sys.stdin)
worker.equal(gold, "x+1")
for answer in answers:
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    watching = True
    if answer == "control":
        eval("len('')")
        open(os.devnull, "w").close()
        os.system("true")
    else:
        worker.compare(gold, answer, 0.5)
    os._exit(0)
"""
_PIECES = [
    *(
        "__import__('os').system('true')",
        "eval",
        "exec",
        "open('/tmp/x','w')",
        "lambda: 0",
        "().__class__",
        "os.fork()",
    ),
    *(
        r"\operatorname{",
        r"\text{",
        r"\mathrm{",
        r"\variable{",
        r"\frac{",
        "}{",
        "}",
        "{",
        "_{",
        "^{",
        "(",
        ")",
        "[",
        "]",
    ),
    *(
        "=",
        ",",
        " ",
        "'",
        '"',
        "\\",
        "\n",
        "$",
        "%",
        ";",
        "#",
        "@",
        "1",
        "2.5",
        "0x1f",
        "1_000",
        "1e5",
        "1j",
        "x",
        "\u0663",
    ),
    *(
        r"\sqrt",
        r"\int_0^1 ",
        r"\sum_{k=1}^{3}",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        "&",
        " and ",
        "final answer is ",
    ),
]


@pytest.mark.slow
def test_no_answer_is_run(tmp_path: Path) -> None:
    """Of an answer, math-verify and sympy evaluate numbers alone; they write, start and connect nothing."""
    rng = random.Random(0)
    answers = [reward.last_boxed(response) or "" for response in hostile_responses(str(tmp_path / "marker")).values()]
    answers += ["".join(rng.choices(_PIECES, k=rng.randint(2, 9))) for _ in range(200)]
    answers = ["control", *(reward._clean(answer) for answer in answers if len(answer) <= reward.MAX_ANSWER_CHARS)]
    run = subprocess.run(
        [sys.executable, "-c", AUDITED],
        input=json.dumps([GOLD, answers]),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(reward.__file__).parent,
    )
    events = [json.loads(line) for line in run.stdout.splitlines()]
    control = [event for answer, event, _ in events if answer == "control"]
    assert control == ["compile", "open", "os.system"]
    assert events[len(control) :] == []


# --- threads and processes -------------------------------------------------------------------------------------------


def _gone(pids: list[int], seconds: float = 60.0) -> bool:
    """Waits until no process of ``pids`` runs any more."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_many_threads_get_their_own_verdicts() -> None:
    def check(i: int) -> bool:
        return accepts(f"{i}+\\sqrt{{7}}", f"\\sqrt{{7}}+{i}") and not accepts(
            f"{i}+\\sqrt{{7}}", f"\\sqrt{{7}}+{i + 1}"
        )

    with ThreadPoolExecutor(16) as executor:
        assert all(executor.map(check, range(48)))


@pytest.mark.parametrize("victims", ["server", "idle workers"])
def test_killed_processes_are_replaced(victims: str) -> None:
    assert accepts("x+41", "41+x")
    pids = [_verify_pool.server().process.pid] if victims == "server" else workers()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert all(accepts(f"x+4{i}y", f"4{i}y+x") for i in range(4))
    assert len(workers()) == 2 and _gone(pids)


def test_worker_killed_at_work_is_replaced(short_limit: None) -> None:
    assert accepts("x+51", "51+x")
    with ThreadPoolExecutor(1) as executor:
        hanging = executor.submit(judge, GOLD, "9^{9^{9^8}}")
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        assert (hanging.result()["score"], hanging.result()["verify_failed"]) == (0.0, 1.0)
    assert accepts("x+52", "52+x")


@pytest.mark.slow
def test_workers_that_never_reply_are_replaced(short_limit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, they use no processor time, so the wall clock decides; a late reply must not reach the next question."""
    assert accepts("x+53", "53+x")
    stopped = workers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(_verify_pool, "_PATIENCE_SECONDS", 0.0)
    assert not accepts("x+54", "53+x")
    assert _gone(stopped)


def test_workers_that_cannot_start_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _verify_pool.close()
    monkeypatch.setattr(_verify_pool, "_SCRIPT", tmp_path / "missing.py")
    result = judge("x+61", "61+x")
    assert (result["score"], result["verify_failed"]) == (0.0, 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "missing.py ended with status 2; its error output says why" in caplog.text
    monkeypatch.undo()
    assert accepts("x+61", "61+x")


PIDS = """
import json, os, threading, time
import psutil
from grail_advantage.reward import _verify_pool, compute_score
from grail_advantage.reward._verify_pool import verify

def pids():
    server = psutil.Process(_verify_pool.server().process.pid)
    return [server.pid, *(child.pid for child in server.children())]
"""


@pytest.mark.slow
def test_thread_of_another_program_and_a_clean_exit() -> None:
    """Off the main thread, where SIGALRM does not work, in a thread that ends; afterwards no process is left."""
    scores, pids = _run(
        PIDS
        + r"""
scores = []

def judge(answer):
    scores.append(compute_score("", "\\boxed{" + answer + "}", "x+1")["score"])

for answer in ("1+x", "2+x"):
    thread = threading.Thread(target=judge, args=(answer,))
    thread.start()
    thread.join()
print(json.dumps([scores, pids()]))
"""
    )
    assert scores == [1.0, 0.0]
    assert len(pids) == 3 and _gone(pids)


@pytest.mark.slow
def test_forked_child_uses_its_own_workers() -> None:
    """Also when other threads of the parent hold every worker at the time of the fork."""
    child, child_pids, parent, parent_pids = _run(
        PIDS
        + """
os.environ["GRAIL_REWARD_TIMEOUT"] = "1"

def hang():
    try:
        verify("x+1", "9^{9^{9^9}}")
    except _verify_pool.VerifyFailed:
        pass

verify("x+1", "1+x")
own = pids()
threads = [threading.Thread(target=hang) for _ in range(2)]
for thread in threads:
    thread.start()
time.sleep(0.5)
read, write = os.pipe()
child = os.fork()
if child == 0:
    verdicts = [verify("x+2", "2+x"), verify("x+2", "3+x")]
    os.write(write, json.dumps([verdicts, pids()]).encode())
    raise SystemExit
os.waitpid(child, 0)
for thread in threads:
    thread.join()
parent = [verify("x+3", "3+x"), verify("x+3", "4+x")]
print(json.dumps([*json.loads(os.read(read, 65536)), parent, own + pids()]))
"""
    )
    assert child == parent == [True, False]
    assert len(child_pids) == 3 and not set(child_pids) & set(parent_pids)
    assert _gone(child_pids + parent_pids)


@pytest.mark.slow
def test_killed_program_leaves_no_workers() -> None:
    """Neither an idle worker nor one that hangs outlives a program that had no chance to clean up."""
    program = (
        PIDS
        + """
verify("x+1", "1+x")
threading.Thread(target=verify, args=("x+1", "9^{9^{9^9}}"), daemon=True).start()
print(json.dumps(pids()), flush=True)
threading.Event().wait()
"""
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = json.loads(process.stdout.readline())
    time.sleep(0.5)  # so that the hanging answer has reached its worker
    process.kill()
    process.wait()
    assert len(pids) == 3 and _gone(pids, 2.0)  # sooner than the limit of the hanging answer


@pytest.mark.parametrize(
    ("name", "value"), [("GRAIL_REWARD_WORKERS", "0"), ("GRAIL_REWARD_WORKERS", "two"), ("GRAIL_REWARD_TIMEOUT", "-1")]
)
def test_bad_environment_is_refused_at_import(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment variable {name}={value!r}: set it to a positive number"):
        importlib.reload(reward)


# --- inside verl -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_as_verls_custom_reward_function_in_a_ray_actor() -> None:
    """verl's reward manager in a Ray actor calls the judge from executor threads."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("verl")

    class Judge:
        def run(self, responses: list[str], golds: list[Any]) -> Any:
            import asyncio

            import numpy as np
            import torch
            from omegaconf import OmegaConf
            from verl import DataProto
            from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
            from verl.trainer.ppo.reward import get_custom_reward_fn

            function = {"path": "pkg://recipe.reward", "name": "compute_score", "reward_kwargs": {}}
            config = OmegaConf.create({"reward": {"custom_reward_function": function}})

            class Tokenizer:
                def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
                    return responses[int(token_ids[0])]

            async def score_all() -> list[dict[str, Any]]:
                manager = NaiveRewardManager(config, Tokenizer(), get_custom_reward_fn(config))
                manager.loop = asyncio.get_running_loop()
                rows = []
                for i, gold in enumerate(golds):
                    row = DataProto.from_dict(
                        {"responses": torch.tensor([[i]]), "attention_mask": torch.tensor([[1]])},
                        {
                            "data_source": np.array(["test"], dtype=object),
                            "reward_model": np.array([{"ground_truth": gold}], dtype=object),
                            "extra_info": np.array([{}], dtype=object),
                        },
                    )
                    rows.append(manager.run_single(row))
                return await asyncio.gather(*rows)

            from grail_advantage.reward import _verify_pool

            return [row["reward_score"] for row in asyncio.run(score_all())], _verify_pool.server().process.pid

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(Judge).remote()
        responses = [r"\boxed{1+x}", r"\boxed{2+x}", r"\boxed{\frac{1}{2}}", "none"]
        scores, server = ray.get(actor.run.remote(responses, ["x+1", "x+1", "0.5", "5"]))
        assert scores == [1.0, 0.0, 1.0, 0.0]
        pids = [server, *workers(server)]
        assert len(pids) == 3
        ray.kill(actor)
        assert _gone(pids)
    finally:
        ray.shutdown()
