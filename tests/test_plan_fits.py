"""`python -m jaxmux.plan --fits=GIB` shows what fits on a device, from a config.json alone."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gin
import jax.numpy as jnp
import pytest

from jaxmux.cli.main import run_command
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.models import BACKBONE_FORMATS
from jaxmux.models.architectures import parse_config
from jaxmux.planner.costs.cost_models import estimated_memory
from jaxmux.planner.costs.device_profile import LayerPoint, write_profile
from jaxmux.planner.costs.memory_model import USABLE

main = partial(run_command, "plan", prog="jaxmux plan")

GIB = 2**30
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
Cells = dict[tuple[str, int, int], dict[str, Any]]


@pytest.fixture(autouse=True)
def clean_gin():
    """Clears gin's configuration, which is global."""
    yield
    gin.clear_config()


@pytest.fixture
def folder(tmp_path) -> Callable[..., Path]:
    """Makes the folder of a backbone, with nothing but a config.json."""

    def make(config: dict[str, Any] = LLAMA_8B, **changed: Any) -> Path:
        backbone = tmp_path / "backbone"
        backbone.mkdir(exist_ok=True)
        (backbone / "config.json").write_text(json.dumps(config | changed))
        return backbone

    return make


@pytest.fixture
def fits(tmp_path) -> Callable[..., tuple[dict[str, Any], Cells]]:
    """Runs the command; returns what it writes, and its cells by format, tokens and tasks."""

    def run(*arguments: str) -> tuple[dict[str, Any], Cells]:
        assert main([*arguments, f"--out={tmp_path}"]) == 0
        written = json.loads((tmp_path / "fits.json").read_text())
        cells = {
            (form, cell["tokens"], cell["tasks"]): cell
            for form, own in written["cells"].items()
            for cell in own
        }
        return written, cells

    return run


def measured_gib(name: str, baseline: str | None = None) -> float:
    """A measured peak of benchmarks/frozen_weights_h200.json."""
    records = json.loads((BENCHMARKS / "frozen_weights_h200.json").read_text())
    (record,) = (record for record in records if record["name"] == name)
    return record["baselines"][baseline] if baseline else record["value"]


@pytest.mark.long
def test_a_table_shows_every_cell_in_80_columns(folder, fits, capsys):
    written, cells = fits("--fits=24", f"--backbone={folder()}")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80 and lines[-1].endswith("fits.json")
    assert "LlamaForCausalLM (32 layers) on one device of 24 GiB," in lines
    assert "each task: LoRA of rank 16 on 7 linears, with adamw" in lines
    assert list(written["cells"]) == ["bfloat16", *BACKBONE_FORMATS] and not written["refused"]
    tokens, tasks = (1024, 2048, 4096, 8192, 16384), (1, 4, 16, 64)
    assert {cell[1:] for cell in cells} == {(n, t) for n in tokens for t in tasks}
    rows = [line.split() for line in lines]
    for form, count in ((form, n) for form in written["cells"] for n in tokens):
        expected = [f"{count:,}"]
        for own in (cells[form, count, t] for t in tasks):
            size = f"{own['peak_bytes'] / GIB:.1f}"
            expected += [size, next(iter(own["remat"]))] if own["fits"] else ["no", size]
        assert any(row[-len(expected) :] == expected for row in rows)


def test_memory_is_what_training_has_on_such_a_device(folder, fits):
    """JAX takes 92% of it, and the engine sets about a GiB of this apart."""
    written, cells = fits("--fits=24", f"--backbone={folder()}")
    assert 0.92 * 24 - 1.1 < written["memory_bytes"] / GIB < 0.92 * 24 - 0.9
    least = min(own["peak_bytes"] for own in cells.values() if not own["fits"])
    assert least > USABLE * written["memory_bytes"]
    limited = fits("--fits=24", f"--backbone={folder()}", "--gin.fine_tune.memory_gib=12")[0]
    assert limited["memory_bytes"] == 12 * GIB
    wider = fits("--fits=24", f"--backbone={folder()}", "--gin.fine_tune.memory_gib=100")[0]
    assert wider["memory_bytes"] == written["memory_bytes"]


@pytest.mark.long
def test_predictions_are_near_the_measured_peaks(folder, fits):
    """The tasks of scripts/benchmark_step.py are those of the table."""

    def gib(config: dict[str, Any], row_len: int, remat: str) -> Callable[..., float]:
        options = (f"--gin.fine_tune.row_len={row_len}", f"--gin.fine_tune.remat='{remat}'")
        _, cells = fits("--fits=141", f"--backbone={folder(config)}", *options)
        return lambda *cell: cells[cell]["peak_bytes"] / GIB

    near = partial(pytest.approx, rel=0.01)
    of_8b, name = gib(LLAMA_8B, 2048, "dots"), "peak memory, 8192 tokens, length 2048, 32 layers"
    for form in ("float8", "nf4"):
        assert of_8b(form, 8192, 4) == near(measured_gib(f"{form}, {name}"))
    assert of_8b("bfloat16", 8192, 4) == near(measured_gib(f"nf4, {name}", "bfloat16, GiB"))
    short = measured_gib("nf4, peak memory, 1024 tokens, length 256, 32 layers")
    assert gib(LLAMA_8B, 256, "dots")("nf4", 1024, 4) == near(short)
    large = measured_gib("nf4, peak memory, 4096 tokens, length 1024, 80 layers")
    assert gib(LLAMA_70B, 1024, "lean")("nf4", 4096, 4) == near(large)


def test_tasks_of_a_config_are_counted_with_their_sizes(folder, fits, tmp_path, capsys):
    config = tmp_path / "tasks.gin"
    config.write_text("""
        fine_tune.backbone = "nowhere"
        fine_tune.tasks = [@a/Task(), @b/Task(), @c/Task()]
        fine_tune.tokens_per_microbatch = 3072
        Task.data = "nowhere.jsonl"
        Task.steps = 1
        Task.max_length = 513
        Task.optimizer = @SGD()
        a/Task.name = "a"
        a/Task.adapter = @a/LoRA()
        a/LoRA.rank = 8
        a/LoRA.target_modules = ["q_proj"]
        b/Task.name = "b"
        b/Task.adapter = @b/LoRA()
        b/LoRA.rank = 32
        b/LoRA.target_modules = ["v_proj"]
        c/Task.name = "c"
        c/Task.adapter = @IA3()
    """)
    written, cells = fits("--fits=80", f"--gin_file={config}", f"--backbone={folder()}")
    shown = capsys.readouterr().out
    assert "each task: LoRA of rank 32 on 2 linears, ia3, with sgd" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    assert written["row_len"] == 512
    assert {t for _, _, t in cells} == {1, 3, 4, 16, 64} and 3072 in {n for _, n, _ in cells}
    pool = written["pool"]
    assert (pool["rank"], pool["optimizer"], pool["others"]) == (32, "sgd", ["ia3"])
    assert sorted(pool["modules"]) == ["self_attn.q_proj", "self_attn.v_proj"]
    # LoRA of rank 32 on q_proj and v_proj, and IA3's factors of the outputs of k_proj and v_proj
    # and the inputs of down_proj; each with an accumulator and a momentum.
    parameters = 32 * (32 * (4096 + 4096 + 4096 + 1024) + (1024 + 1024 + 14336))
    four, sixteen = (cells["bfloat16", 1024, t]["peak_bytes"] for t in (4, 16))
    assert sixteen - four == pytest.approx(12 * parameters * 3 * 4)


def test_a_format_that_the_backbone_cannot_have_is_shown_with_the_reason(folder, fits, capsys):
    arguments = ("--fits=16", f"--backbone={folder(intermediate_size=14301)}")
    written, _ = fits(*arguments)
    assert list(written["cells"]) == ["bfloat16", "float8", "int8"]
    reason = "down_proj: a weight of 14301 rows and 4096 columns cannot be stored in the format"
    assert list(written["refused"]) == ["nf4"] and written["refused"]["nf4"].startswith(reason)
    assert f"nf4: {reason}" in " ".join(capsys.readouterr().out.split())


def test_a_profile_in_a_format_speaks_for_this_format_only(folder, fits, tmp_path, small_profile):
    """A layer takes 1 µs per token, and other points nothing."""
    config = dataclasses.replace(parse_config(LLAMA_8B, "test"), backbone_format="int8")
    size = estimated_memory(size_of(config, jnp.dtype("bfloat16"))).backbone

    def price(point) -> float:
        return 1e-6 * point.tokens if isinstance(point, LayerPoint) else 0.0

    profile = tmp_path / "profile.json"
    made = {"row_lens": (1024,), "tokens": (1024, 16384), "sequences": (1,)}
    write_profile(small_profile(size, price, peak=lambda _: 1000, **made), profile)
    options = (f"--profile={profile}", "--gin.fine_tune.remat='dots'")
    written, cells = fits("--fits=80", f"--backbone={folder()}", *options)
    assert list(written["cells"]) == ["int8"]
    assert list(written["refused"]) == ["bfloat16", "float8", "nf4"]
    assert "was measured with linears in int8" in written["refused"]["nf4"]
    assert written["sources"]["int8"]["device"] == "Abacus"
    assert cells["int8", 4096, 4]["tokens_per_second"] == pytest.approx(1e6 / 32)


def test_it_says_so_if_nothing_fits(folder, fits, capsys):
    _, cells = fits("--fits=4", f"--backbone={folder(LLAMA_70B)}")
    assert not any(cell["fits"] for cell in cells.values())
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.long
def test_no_device_is_needed(folder):
    """JAX would refuse to use a device, because there is no such platform."""
    command = [sys.executable, "-m", "jaxmux.plan", "--fits=48", f"--backbone={folder()}"]
    environment = os.environ | {"JAX_PLATFORMS": "nothing"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "64 tasks" in result.stdout and "\x1b" not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--fits=24", "--mesh=pp2"), ("--fits=24", "--rounds=2"), ("--backbone=x",), ("--fits=1",)],
)
def test_options_that_do_not_belong_together_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert arguments[0].split("=")[0] in capsys.readouterr().err
