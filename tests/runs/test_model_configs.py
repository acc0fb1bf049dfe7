"""The configs of common models train a tiny model of the same architecture."""

import json
from pathlib import Path

import gin
import pytest
from transformers import PreTrainedTokenizerFast

from jaxmux import Backbone, save_backbone
from jaxmux.cli import gin_bindings
from jaxmux.cli.main import run_command
from jaxmux.models import BackboneConfig

CONFIGS = Path(__file__).parents[2] / "jaxmux" / "configs"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
NAMES = sorted(path.stem for path in CONFIGS.glob("*.gin") if not path.stem.startswith("demo"))
# One config trains in every run of the tests; tests/models has the architectures.
QUICK = ("qwen3_0_6b",)


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


@pytest.fixture(scope="module")
def tiny(backbone, tmp_path_factory):
    """Writes a tiny backbone of an architecture."""

    def write(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(backbone)
        tokenizer.save_pretrained(folder)
        config = BackboneConfig(
            architecture=architecture,
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
        save_backbone(Backbone.random(config, seed=1), folder)
        return folder

    return write


def test_there_are_configs_of_seven_models():
    assert len(NAMES) == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_models_config_describes_a_run(name):
    bindings = ['backbone="folder"', 'data="data.jsonl"']
    gin_bindings.parse([str(CONFIGS / f"{name}.gin")], bindings)
    run = gin_bindings.run_config()
    (task,) = run.tasks
    assert (run.backbone, task.data.path) == ("folder", "data.jsonl")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_models_config_trains_one_step(name, tiny, data, tmp_path):
    folder = tiny(ARCHITECTURES[name.split("_")[0]])
    options = [
        f"--gin_file=jaxmux:configs/{name}.gin",
        f'--gin.backbone="{folder}"',
        f'--gin.data="{data["short"]}"',
        f"--run_dir={tmp_path}",
        "--gin.task/Task.validation_fraction=0.2",
        '--gin.fine_tune.remat="none"',
    ]
    assert run_command("train", options, prog="jaxmux train") == 0
    task = json.loads((tmp_path / "summary.json").read_text())["tasks"]["task"]
    assert (task["status"], task["steps"], task["skipped"]) == ("succeeded", 1, 0)
    assert (tmp_path / "adapters" / "task" / "adapter_config.json").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", ["backbone", "data"])
def test_a_config_without_its_backbone_or_data_says_which(name, given, capsys):
    options = [f"--gin_file=jaxmux:configs/{name}.gin", f'--gin.{given}="/nowhere"']
    assert run_command("train", options, prog="jaxmux train") == 2
    (missing,) = {"backbone", "data"} - {given}
    assert f"{missing} is not set; a text is given by" in capsys.readouterr().err
