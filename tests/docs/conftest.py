"""The folder in which the snippets of a page run, and what is put in place of their names."""

import json
import re
import shutil
from itertools import islice
from pathlib import Path

import pytest

import jaxmux

ROOT = Path(__file__).parents[2]
DEMO = Path(jaxmux.__file__).parent / "demo"
# By regular expression, what takes its place when a snippet runs: the demo's model for any model,
# so contexts of at most 512 tokens and few steps.
SUBSTITUTIONS = {
    r"/models/[\w.-]+": str(DEMO / "base"),
    r"pp4,tp2": "pp2,dp2",
    r"max_length = 2048": "max_length = 128",
    r"row_len = 2048": "row_len = 128",
    r"(steps ?= ?)[5-9]\d\d": r"\g<1>4",
    r"steps=20\b": "steps=4",
    r"range\(20\)": "range(2)",
    r"eval_every = 50": "eval_every = 2",
    r"epochs( ?= ?)3": r"epochs\g<1>1",
    r"tokens_per_microbatch=4096": "tokens_per_microbatch=512",
}


@pytest.fixture(scope="session")
def substituted():
    """Returns a snippet's code with the substitutions."""

    def substitute(code: str) -> str:
        for expression, replacement in SUBSTITUTIONS.items():
            code = re.sub(expression, replacement, code)
        return code

    return substitute


@pytest.fixture(scope="session")
def trained(tmp_path_factory, substituted):
    """A folder with the data and the config of the README, and the run of the config."""
    folder = tmp_path_factory.mktemp("trained")
    lines = (DEMO / "tasks" / "mood.train.jsonl").read_text().splitlines()
    for name, first in (("billing", 0), ("billing_eval", 48)):
        text = "\n".join(lines[first : first + 48]) + "\n"
        for path in (folder, folder / "data", folder / "tenants" / "acme" / "data"):
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{name}.jsonl").write_text(text)
    pairs = (DEMO / "tasks" / "mood_pairs.eval.jsonl").read_text().splitlines()[:48]
    (folder / "preferences.jsonl").write_text("\n".join(pairs) + "\n")
    chats = [chat(json.loads(line)) for line in islice(lines, 48)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    write_parquet(folder / "chats.parquet", chats)
    config = re.search(r"```gin\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (folder / "two_tasks.gin").write_text(substituted(config))
    from jaxmux.cli.arguments import train_options
    from jaxmux.cli.train_command import run

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(train_options(["--gin_file=two_tasks.gin"], "jaxmux train")) == 0
    return folder


def chat(record):
    return {
        "messages": [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["completion"].strip()},
        ]
    }


def write_parquet(path, records):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), path)


@pytest.fixture
def workshop(trained, tmp_path):
    """A copy of the trained folder, for the snippets of one page."""
    return Path(shutil.copytree(trained, tmp_path / "workshop"))
