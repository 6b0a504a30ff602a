"""What tokens received, in its file beside the dump's: written, read along, in words, and as a command."""

import json
from dataclasses import replace

import pytest

from grail_advantage.dump import read_dump
from grail_advantage.receipt import Finding
from grail_advantage.receipt.report import NOTHING, run_receipt, write
from grail_advantage.receipt.report import main as own_main
from grail_advantage.view.receipt import main
from tests.view.synthetic import SCALED, header, receipt, write_arrived

NOTE = Finding("unknown loss", "all updates", 0.0, "no formula", (), "", False)


def test_is_read_beside_the_responses(tmp_path):
    """Means over the steps are in the page, see ``test_page.py``; the last response was in no step."""
    path = write_arrived(tmp_path, update=1)
    assert path.name == "received_000003_update_1.parquet"
    dump = read_dump(tmp_path)
    first, second, third = dump
    assert dump.problems == []
    assert dump.steps == [3]
    assert first.updates.tolist() == [0, 2]
    # The second token was clipped in one of two steps.
    assert first.clipped_by_update_KT.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert second.received_T.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert third.updates.tolist() == []
    assert len(third.by_update_KT) == 0


def test_findings_of_a_run_are_put_together():
    """Mismatches first, those that cover most tokens first."""
    lost = replace(SCALED, name="lost", tokens=5)
    run = run_receipt(
        [
            header(1, clipped=0.0, tokens=30),
            header(2, NOTE, SCALED, clipped=0.2, tokens=10),
            header(2, SCALED, lost, update=1),
        ]
    )
    # Three receipts of four steps each, of 30 + 10 + 7 tokens.
    totals = [run[name] for name in ("receipts", "steps", "tokens", "losses")]
    assert totals == [3, 12, 47, ["vanilla"]]
    assert run["clipped"] == pytest.approx((0.2 * 10 + 0.125 * 7) / 47)
    names = ("name", "step", "update", "receipts", "tokens")
    findings = [tuple(finding[name] for name in names) for finding in run["findings"]]
    assert findings == [
        ("scaled", 2, 0, 2, 6),
        ("lost", 2, 1, 1, 5),
        ("unknown loss", 2, 0, 1, 0),
    ]


@pytest.mark.parametrize(
    ("findings", "statuses"),
    [((), (0, 0, 0)), ((NOTE,), (0, 1, 0)), ((NOTE, SCALED), (1, 1, 0))],
)
def test_exit_status_by_severity(tmp_path, findings, statuses, capsys):
    """Of a run's folder and of the dump's, by default as for mismatches."""
    write_arrived(tmp_path / "tokens", *findings)
    for severity, status in zip(("mismatch", "note", "nothing"), statuses, strict=True):
        assert main([str(tmp_path), "--fail-on", severity]) == status
    capsys.readouterr()
    assert main([str(tmp_path)]) == main([str(tmp_path / "tokens")]) == statuses[0]
    printed = capsys.readouterr().out
    for finding in findings:
        assert finding.name in printed
        assert finding.causes in printed


def test_json_and_the_address_of_each_token(tmp_path, capsys):
    """Tokens are counted from 1, as on the page, whose address counts from 0; there is no -0.0."""
    examples = (("a_1_0", 2, 0.5, -0.0), ("gone", 0, 1.0, 2.0))
    write_arrived(tmp_path, replace(SCALED, examples=examples), update=1)
    assert main([str(tmp_path), "--json"]) == 1
    printed = capsys.readouterr().out
    assert "-0.0" not in printed
    first, second = json.loads(printed)["findings"][0]["examples"]
    assert (first["response"], first["token"], first["intended"]) == ("a_1_0", 3, 0.5)
    address = "#overlay=received&rollout=3u1.1&token=2"
    assert first["link"] == address
    assert "link" not in second
    assert main([str(tmp_path)]) == 1
    assert f"report.html{address}" in capsys.readouterr().out


def test_the_receipts_of_a_file(tmp_path, capsys):
    """As a loop of one's own writes them: by the command alone, and by the one that reads dumps too."""
    path = tmp_path / "receipts.jsonl"
    for step, findings in enumerate(((), (SCALED,))):
        write(path, receipt(*findings), "ppo", step)
    assert own_main([str(path)]) == main([str(path)]) == 1
    whole, again = capsys.readouterr().out.split("Receipt of ")[1:]
    assert whole == again
    assert "a_1_0, token 3" in whole
    assert "ppo" in whole


def test_nothing_to_read(tmp_path, capsys):
    assert main([str(tmp_path)]) == NOTHING
    write_arrived(tmp_path).write_bytes(b"PAR1 broken")
    assert main([str(tmp_path)]) == NOTHING
    assert "received_000003.parquet" in capsys.readouterr().err
