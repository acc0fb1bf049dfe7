"""The figures of the quality of formats are those of Welch's test. Models and formats that are left
out are named."""

import compare_formats
import numpy as np
import pytest
from scipy.stats import ttest_ind

from jaxmux.models import Backbone, BackboneConfig, save_backbone


def test_the_difference_of_losses_is_the_statistic_of_welch():
    rng = np.random.default_rng(0)
    losses = {
        format: [{"a": own, "b": 2 * own} for own in rng.lognormal(size=5)]
        for format in ("nf4", compare_formats.PEFT)
    }
    found = compare_formats.differences(losses, "nf4", compare_formats.PEFT, 2.0, "", {"jax": "0"})
    records = list(found)
    assert [r["name"] for r in records] == [
        f"nf4, {task}, difference of the held-out loss from PEFT's" for task in "ab"
    ]
    of_nf4, of_peft = (np.log([run["a"] for run in runs]) for runs in losses.values())
    welch = ttest_ind(of_nf4, of_peft, equal_var=False).statistic
    assert [r["value"] for r in records] == pytest.approx([welch, welch])


def test_without_the_shared_models_only_the_demo_is_compared(tmp_path, capsys):
    assert [model.name for model in compare_formats.models(tmp_path)] == ["demo"]
    assert "stories260k does not exist" in capsys.readouterr().out


@pytest.mark.long
def test_a_format_that_cannot_store_a_model_is_named(tmp_path, capsys):
    config = BackboneConfig("LlamaForCausalLM", 32, 64, 171, 1, 2, 1, 32)
    save_backbone(Backbone.random(config), tmp_path)
    model = compare_formats.Model("tiny", " on tiny", str(tmp_path), [])
    args = compare_formats.parse_arguments(["--out", "unused", "--formats", "nf4", "int8"])
    assert list(compare_formats.storable(model, args)) == ["int8"]
    assert "nf4 on tiny is left out: down_proj" in capsys.readouterr().out
