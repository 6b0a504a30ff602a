"""The page's own script reads the blocks that :mod:`grail_advantage.view.page.pack` writes, in Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources

import numpy as np
import pytest

from grail_advantage.view.page import pack

NODE = shutil.which("node")
READER = """
const [code, elements] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const parts = [];
new Function("parts", "document", code)(parts, { readyState: "complete" });
const r = { $: (id) => ({ textContent: elements[id], nextElementSibling: {} }) };
parts[0](r).then(() => r.rollout(0)).then(({ n, ids, mask, columns }) => {
  const lists = Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, [...values]]));
  console.log(JSON.stringify({ n, ids: [...ids], mask: [...mask], columns: lists }));
});
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize("bits", [pack.EXACT, 8, 6])
def test_the_script_reads_what_was_packed(bits: int) -> None:
    tokens, size = 1500, 900
    rng = np.random.default_rng(bits)
    numbers_T = rng.integers(0, size, tokens).astype(np.uint32)
    score_T = np.where(rng.random(tokens) < 0.1, np.nan, rng.lognormal(0, 3, tokens)).astype(np.float32)
    weight_T = np.where(rng.random(tokens) < 0.2, 1.0, rng.random(tokens) * 4).astype(np.float32)
    base_T = np.full(tokens, -0.75, dtype=np.float32)
    values = {
        "score": score_T,
        "weight": weight_T,
        "base_advantage": base_T,
        "advantage": weight_T * base_T,
        "entropy": rng.random(tokens).astype(np.float32),
        "score:other": score_T,
        "weight:other": weight_T[::-1].copy(),
    }
    columns, apart = pack.Columns(numbers_T, rng.random(tokens) < 0.9, values), {}
    _, rank = pack.by_frequency([columns], size)
    code = (resources.files("grail_advantage.report") / "assets/unpack.js").read_text()
    elements = {
        "index": pack.encode_json({}),
        "vocabulary": pack.encode_json({"ids": [], "texts": [], "special": []}),
        "r0": pack.pack(columns, rank, bits, apart),
    }
    done = subprocess.run(
        [NODE, "-e", READER], input=json.dumps([code, elements]), capture_output=True, text=True, check=True, timeout=60
    )
    read = json.loads(done.stdout)
    assert read["n"] == tokens and read["ids"] == rank[numbers_T].tolist()
    assert read["mask"] == columns.mask_T.astype(int).tolist()
    assert list(read["columns"]) == list(values)
    for name, true_T in values.items():
        read_T = np.array(read["columns"][name], dtype=np.float64)  # null becomes NaN
        off = 0.0 if bits == pack.EXACT else apart.get(name.split(":")[0], apart["weight"])
        np.testing.assert_allclose(read_T, true_T, rtol=1e-6, atol=off * 1.01)
        if name.startswith("weight"):
            assert ((read_T == 1) == (true_T == 1)).all()
