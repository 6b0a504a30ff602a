"""The verifier's processes: no answer can stop, crash or trick them, none is run, and none outlives its program."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from grail_advantage import reward
from grail_advantage.reward import _verify_pool, _verify_worker
from grail_advantage.reward._normal import normal
from tests.recipe.test_reward import accepts, json_lines, judge
from tests.run_life.processes import comes_true, lives

# No plain number, so that every answer has to be parsed.
GOLD = r"\frac{\sqrt{3}}{2}"


def hostile_responses(marker: Path) -> dict[str, str]:
    """Responses made to hang, crash, blow up or trick a verifier, by name; none states :data:`GOLD`. Those with code in
    them try to create the file ``marker``. A line has the pieces of one, and how often each is repeated."""
    texts = {}
    for row in json_lines(Path(__file__).with_name("hostile_answers.jsonl")):
        text = "".join(piece * times for piece, times in row["parts"])
        texts[row["name"]] = text.replace("MARKER", str(marker))
    return texts


def end_server():
    """The next comparison starts a new one, with the environment as it is then."""
    if _verify_pool._server is not None:
        _verify_pool._server.process.kill()
        _verify_pool._server.process.wait()


@pytest.fixture
def short_limit(monkeypatch):
    """Half a second of processor time for each answer."""
    end_server()
    monkeypatch.setenv("GRAIL_REWARD_TIMEOUT", "0.5")
    yield
    end_server()


def workers() -> list[psutil.Process]:
    """The server's two workers, which may be about to be replaced."""
    server = psutil.Process(_verify_pool.server().process.pid)
    assert comes_true(lambda: len(server.children()) == 2)
    return server.children()


HANGING = (
    "power tower",
    "huge factorial",
    "long sum",
    "polynomial to a high power",
    "nested parentheses",
)


@pytest.mark.slow
def test_hostile_answers_score_zero_and_leave_a_working_pool(short_limit, tmp_path, caplog):
    caplog.set_level("DEBUG", "grail_advantage.reward")
    responses = hostile_responses(tmp_path / "marker")
    with ThreadPoolExecutor(8) as executor:
        scores = executor.map(
            partial(reward.compute_score, "", ground_truth=GOLD), responses.values()
        )
        results = dict(zip(responses, scores, strict=True))
    assert [name for name, result in results.items() if result["score"] != 0.0] == []
    assert not (tmp_path / "marker").exists()
    assert results["empty"]["verify_failed"] == 0.0
    # Answer, ground truth and reason of each that has no verdict. Were the limit not enforced, the test would not get here.
    logged = [record.args for record in caplog.records if isinstance(record.args, tuple)]
    reasons = {answer: str(reason) for answer, _, reason in logged}
    for name in (*HANGING, "python call", "tex input", "nul bytes"):
        reason = reasons[reward.last_boxed(responses[name])]
        is_unread = "cannot read" in reason or "words" in reason
        assert results[name]["verify_failed"] == 1.0 and is_unread != (name in HANGING), (
            name
        )
    # After all that the workers still judge.
    assert accepts(GOLD, r"\frac12\sqrt{3}")
    for worker in workers():
        # A worker that has just been forked sets its limits, this one last.
        assert comes_true(
            lambda worker=worker: worker.rlimit(psutil.RLIMIT_NOFILE) == (64, 64)
        )
        for limit in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_CORE, psutil.RLIMIT_NPROC):
            assert worker.rlimit(limit) == (0, 0)
        memory = worker.rlimit(psutil.RLIMIT_AS)[1] - worker.memory_info().vms
        assert 0 < memory <= _verify_worker.MEMORY


AUDITED = r"""
import json, os, re, sys
import _verify_worker as worker

READING = {"open", "os.listdir", "os.scandir", "marshal.loads", "object.__getattr__", "exec", "array.__new__"}
# Numbers, and sympy's own programs: names for its parser, functions on monomials.
HARMLESS = re.compile(
    r"from sympy import \*|def monomial_\w+\([A-Z, k]+\):.*|(Integer|Float|\d[eE][+-]?\d|[\s\d.'()+*/-])*", re.DOTALL
)
watching = False


def loading(frame):
    return frame and (frame.f_code.co_filename.startswith("<frozen importlib") or loading(frame.f_back))


def hook(event, arguments):
    global watching
    if not watching or event in ("import", "sys._getframe"):
        return
    watching = False
    text = arguments[0].decode() if event == "compile" and isinstance(arguments[0], bytes) else arguments[0]
    harmless = event in READING and (event != "open" or not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event == "compile":
        harmless = not isinstance(text, str) or HARMLESS.fullmatch(text)
    if not harmless and not loading(sys._getframe()):
        os.write(1, json.dumps([answer, event]).encode() + b"\n")
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


@pytest.mark.slow
def test_no_answer_is_run(tmp_path):
    """Of an answer, math-verify and sympy evaluate numbers alone; they write, start and connect nothing."""
    responses = hostile_responses(tmp_path / "marker").values()
    answers = [reward.last_boxed(response) or "" for response in responses]
    # Code, LaTeX and braces, put together at random.
    answers += json.loads(Path(__file__).with_name("hostile_pieces.json").read_text())
    texts = [normal(answer) for answer in answers if len(answer) <= reward.MAX_ANSWER_CHARS]
    stdin = json.dumps([GOLD, ["control", *texts]])
    folder = Path(reward.__file__).parent
    command = [sys.executable, "-c", AUDITED]
    output = subprocess.check_output(command, input=stdin, text=True, cwd=folder)
    events = [json.loads(line) for line in output.splitlines()]
    assert events == [["control", event] for event in ("compile", "open", "os.system")]


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    """Whether none of these processes runs any more, within this time."""

    def some_run():
        # One that ends meanwhile is left out.
        return any(
            process.pid in pids and lives(process) for process in psutil.process_iter()
        )

    return comes_true(lambda: not some_run(), seconds)


@pytest.mark.slow
def test_killed_and_stopped_processes_are_replaced(short_limit, monkeypatch):
    """And none of them gets a key of the program's."""
    monkeypatch.setenv("GRAIL_REWARD_TIMEOUT", "2")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert accepts("x+51", "51+x")
    environment = Path(f"/proc/{_verify_pool.server().process.pid}/environ").read_bytes()
    assert b"PYTHONHASHSEED=0" in environment
    assert b"HF_TOKEN" not in environment
    processes = workers()
    used = sum(process.cpu_times().user for process in processes)
    with ThreadPoolExecutor(1) as executor:
        # 9^(9^(9^8)) takes as long as its limit lets it.
        hanging = executor.submit(judge, GOLD, "9^{9^{9^8}}")
        assert comes_true(
            lambda: sum(process.cpu_times().user for process in processes) > used + 0.1
        )
        for process in processes:
            process.kill()
        assert (hanging.result()["score"], hanging.result()["verify_failed"]) == (0.0, 1.0)
    server = _verify_pool.server().process.pid
    monkeypatch.setenv("GRAIL_REWARD_TIMEOUT", "0.5")
    # The next answer starts another server.
    os.kill(server, signal.SIGKILL)
    assert accepts("x+52", "52+x")
    assert workers()
    assert gone([server, *(process.pid for process in processes)])
    # Stopped, they use no processor time, so the wall clock decides; a late reply must not reach the next question.
    stopped = workers()
    for process in stopped:
        process.suspend()
    monkeypatch.setattr(_verify_pool, "_PATIENCE_SECONDS", 0.0)
    assert not accepts("x+54", "53+x")
    assert gone([process.pid for process in stopped])


@pytest.mark.slow
def test_a_worker_ends_if_its_server_did_before_it_was_bound_to_it():
    """Else it would keep the connections open, and a question to another worker would wait for all of the patience."""
    program = "import _verify_worker as worker, multiprocessing as m; a, b = m.Pipe(); worker.work(b, 1.0, server=1)"
    folder = Path(reward.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, timeout=60)
    assert done.returncode == _verify_worker.CLOSED


FORKED = """
import json, os, threading
import psutil
from grail_advantage.reward import _verify_pool
from grail_advantage.reward._verify_pool import verify

def say(number):
    verdicts = [verify(f"x+{number}", answer) for answer in (f"{number}+x", "x")]
    server = psutil.Process(_verify_pool.server().process.pid)
    print(json.dumps([verdicts, [server.pid, *(child.pid for child in server.children())]]), flush=True)

say(1)
if child := os.fork():
    os.waitpid(child, 0)
    say(2)
    threading.Thread(target=verify, args=("x+1", "9^{9^{9^9}}"), daemon=True).start()
    threading.Event().wait()
say(3)
"""


@pytest.mark.slow
def test_a_fork_has_its_own_workers_and_none_outlives_its_program():
    """Neither an idle worker nor one that hangs, of a program that had no chance to clean up."""
    with subprocess.Popen([sys.executable, "-c", FORKED], stdout=-1, text=True) as process:
        # First, in the fork, and after the fork.
        answers = [json.loads(process.stdout.readline()) for _ in range(3)]
        verdicts, (first, forks, later) = zip(*answers, strict=True)
        ended = gone(forks)
        # The hanging answer reaches its worker meanwhile.
        time.sleep(0.5)
        process.kill()
    assert list(verdicts) == [[True, False]] * 3
    assert ended
    assert len(first) == len(forks) == 3
    assert first == later
    assert not set(first) & set(forks)
    # Sooner than the limit of the hanging answer, 3 s of processor time.
    assert gone(first, 2.0)
