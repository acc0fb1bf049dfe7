"""A GPU that runs out of memory: the engine goes on with more recomputation, and loses nothing."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

# Prints the losses of each round, the policies at the end, and whether memory ran out.
PROGRAM = """
import json, logging, sys
import jax, jax.numpy as jnp
from jaxmux import Backbone, BackboneConfig, Engine, EngineOptions
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling.random_tasks import in_other_names, random_task

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("jaxmux").addHandler(handler)
config = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512, hidden_size=1024, intermediate_size=4096, num_layers=16, num_heads=8,
    num_kv_heads=8, head_dim=128,
)
backbone = Backbone.random(config, dtype=jnp.bfloat16)
options = EngineOptions(smallest_shape_class([1024], 8192, chunk_len=128), remat=sys.argv[1])
engine = Engine(backbone, options)
engine.register_tasks(in_other_names(random_task(config, "t", [1024] * 16, 8, 4, 16), 2))
losses, end = [], False
while not end:
    end = engine.finished
    losses += [u.loss for u in (engine.drain() if end else engine.train_round())]
engine.close()
print(json.dumps({"losses": losses, "remat": engine.remat, "said": said}))
"""


def train(remat: str, gib: float) -> dict:
    import jax

    total = jax.local_devices()[0].memory_stats()["bytes_limit"] / 2**30
    # The limit that this process reports is a share of the device, like the one of the program.
    share = gib / (total / float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75)))
    limit = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.4f}",
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, remat],
        env=os.environ | limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_gpu_that_runs_out_of_memory_loses_nothing():
    enough, scarce = train("none", 12), train("none", 3)
    assert not enough["said"]
    assert any("ran out of memory" in line for line in scarce["said"])
    assert enough["remat"] == "none"
    assert scarce["remat"] != "none"
    np.testing.assert_allclose(scarce["losses"], enough["losses"], rtol=2e-3)
