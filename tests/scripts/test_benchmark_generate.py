"""The baseline of the benchmark of generation: time limits, and records written at once."""

import json

import pytest
from benchmark_generate import hugging_face, parse_arguments
from generate_records import generate_table

RESULT = {"tokens/s": 9.0, "runs": 1, "device": "cpu", "versions": {"torch": "0"}}


@pytest.fixture
def python(tmp_path):
    """A program in place of the Python that has torch: eager prints a result, compiled hangs behind
    a first one with one adapter, and mixed fails."""
    path = tmp_path / "python"
    path.write_text(
        f"""#!/bin/sh
case "$*" in
*compiled-turns*) sleep 60 & sleep 60 ;;
*mixed*) exit 3 ;;
*) echo '{json.dumps(RESULT)}' ;;
esac
case "$*" in *compiled*) sleep 60 & sleep 60 ;; esac
"""
    )
    path.chmod(0o755)
    return path


def test_every_case_has_a_time_limit_and_is_written_at_once(python, tmp_path, capfd):
    out = tmp_path / "out.json"
    arguments = [f"--out={out}", "--cases", "1x1", "4x2", "--hf", f"--hf_python={python}"]
    found = hugging_face(parse_arguments([*arguments, "--hf_seconds=2"]))
    name = "Hugging Face ({})".format
    stopped, failed = "stopped after 2 s", "failed with exit status 3"
    assert found["1x1"] == {name("eager"): 9.0, name("compiled"): 9.0}
    assert found["4x2"] == {
        name("eager, turns"): 9.0,
        name("eager, mixed"): failed,
        name("compiled, turns"): stopped,
        name("compiled, mixed"): failed,
    }
    records = json.loads(out.read_text())
    names = [record["name"].partition(",")[0] for record in records]
    ways = ("eager", "eager and turns", "compiled")
    assert names == [f"writing by Hugging Face ({way})" for way in ways]
    assert f"Hugging Face (compiled), 1x1: {stopped}" in capfd.readouterr().out
    records[0]["baselines"] = found["4x2"]
    assert f"Hugging Face (eager, mixed) {failed}" in generate_table(records)
