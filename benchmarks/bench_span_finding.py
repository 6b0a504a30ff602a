"""Speed of the search for the answer spans of a batch, in tokens a second of CPU time on one core.

    python benchmarks/bench_span_finding.py

Qwen's vocabulary, 256 worked solutions of 500 to 4000 tokens with LaTeX, one box near the end of most. Compared with the
plain way that follows the definition: join the bytes of all tokens, search the text, map bytes back to tokens. Both
must agree on every row. Writes ``results/span_finding-cpu.json``. Needs the package ``dashscope`` for the vocabulary.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import RESULTS, Clock, record, write

from grail_advantage.answer_span import AnswerSpan, find_answer_span, find_answer_spans, iter_boxed, token_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.real_tokenizers import qwen_tokenizer

SENTENCES = [
    "First, I restate the problem so that nothing is lost: we look for every integer {a} that satisfies the condition. ",
    "Let $x$ be the number of marbles in the first box, so the second one holds $x + {a}$ of them.\n\n",
    "Wait, that is not quite right, because the case $n = {a}$ was counted twice; let me check it again.\n",
    "Substituting, we get\n\\[\n\\frac{{{a}x + {b}}}{{x - {b}}} = \\sqrt{{{a}}} \\cdot \\left( x^{{2}} - {b} \\right).\n\\]\n",
    "Since both sides are positive, we may square them, and the inequality keeps its direction. ",
    "The set of solutions is therefore $\\{{{a}, {b}\\}}$, and each of them has to be tested in the original equation.\n",
    "By symmetry the other triangle has the same area, so the total is twice as large as before: {a} + {a} = {b}. ",
    "Now think about the remainder modulo {a}: it can only take the values 0, 1 and {b}, as the table above shows. ",
    "### Step {a}\n\nNext, expand the product and collect the terms that contain $y$. ",
    "Hmm, what if the order of the two operations mattered? It does not, as one sees from $f(g(x)) = g(f(x))$.\n\n",
]


def make_rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Token ids of so many solutions; one in ten has no box, one in ten a box in its middle as well."""
    rng = random.Random(seed)
    tokenizer = qwen_tokenizer()
    rows = []
    for row in range(count):
        length, ids = rng.randrange(500, 4000), []
        while len(ids) < length:
            text = "".join(
                sentence.format(a=rng.randrange(2, 500), b=rng.randrange(2, 500))
                for sentence in rng.choices(SENTENCES, k=10)
            )
            ids += tokenizer.encode(text)
        ids = ids[:length]
        if row % 10 == 1:
            ids[length // 2 : length // 2] = tokenizer.encode("it would be $\\boxed{17}$, but ")
        if row % 10 != 0:
            ids += tokenizer.encode("\n\nThe final answer is $\\boxed{\\frac{3}{4}}$. This matches the estimate.")
        rows.append(torch.tensor([*ids, tokenizer.eos_token_id]))
    return rows


def plain_spans(rows: list[torch.Tensor], bytes_of: list[bytes]) -> list[AnswerSpan | None]:
    """The last span of every row by the bytes of all its tokens."""
    spans: list[AnswerSpan | None] = []
    for row in rows:
        texts = [bytes_of[token] for token in row.tolist()]
        boxes = list(iter_boxed(b"".join(texts)))
        if not boxes:
            spans.append(None)
            continue
        ends = list(itertools.accumulate(map(len, texts)))
        start, content_start, content_end, end = boxes[-1]
        first, last = bisect.bisect_right(ends, start), bisect.bisect_right(ends, end - 1)
        if content_start == content_end:
            spans.append(AnswerSpan(first, last, last, last + 1))
        else:
            content = bisect.bisect_right(ends, content_start), bisect.bisect_right(ends, content_end - 1) + 1
            spans.append(AnswerSpan(first, *content, last + 1))
    return spans


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median CPU time of a call, which other processes on the machine change less than its wall-clock time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = record("span_finding", "cpu", Clock("cpu"), 1)
    tokenizer = qwen_tokenizer()
    rows = make_rows(args.rows)
    tokens = sum(map(len, rows))
    arrays = [row.numpy() for row in rows]

    start = time.process_time()
    spans = find_answer_spans(rows, tokenizer, "last")
    first_call = time.process_time() - start
    vocabulary = token_bytes(tokenizer)
    bytes_of = [vocabulary.get(token, b"") for token in range(max(vocabulary) + 1)]
    if spans != plain_spans(rows, bytes_of):
        raise SystemExit("the spans of the two ways differ")

    ways: dict[str, Callable[[], object]] = {
        "plain way": lambda: plain_spans(rows, bytes_of),
        "find_answer_spans, tensors": lambda: find_answer_spans(rows, tokenizer, "last"),
        "find_answer_spans, arrays": lambda: find_answer_spans(arrays, tokenizer, "last"),
        "find_answer_span, row by row": lambda: [find_answer_span(row, tokenizer) for row in rows],
    }
    seconds = {name: cpu_seconds(run, args.repeats) for name, run in ways.items()}

    print(
        f"{args.rows} rows, {tokens} tokens, {sum(span is not None for span in spans)} spans, median of {args.repeats} runs"
    )
    print(f"first call, which builds the vocabulary's table: {first_call:.2f} s")
    for name, taken in seconds.items():
        print(
            f"{name:30s} {tokens / taken / 1e6:8.1f} M tokens/s   {seconds['plain way'] / taken:5.2f} x the plain way"
        )
    result |= {
        "rows": args.rows,
        "tokens": tokens,
        "spans": sum(span is not None for span in spans),
        "first_call_seconds": first_call,
        "seconds": seconds,
        "repeats": args.repeats,
    }
    write(result, args.results)


if __name__ == "__main__":
    main()
