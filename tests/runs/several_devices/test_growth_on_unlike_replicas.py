"""A trained model and real tasks: what growth changes where replicas round differently."""

import time

import jax
import numpy as np
import pytest

from jaxmux.optimizers import AdamW, Schedule
from jaxmux.peft import LoRA, initial_adapter, resolve_targets
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.tasks import Task

# The demo's tasks: batch size, longest sample in tokens, rank, dropout and learning rate. Those of
# "record" are cut, and those of "telegram" would need rows of 512 tokens.
DEMO = {
    "mood": (16, 64, 4, 0.0, 6e-3),
    "pirate": (8, 128, 8, 0.05, 4e-3),
    "record": (8, 128, 8, 0.0, 4e-3),
}


@pytest.fixture
def tasks() -> list[Task]:
    schedule = Schedule(kind="cosine", warmup_ratio=0.05)
    return [
        Task(
            name,
            f"jaxmux:demo/tasks/{name}.train.jsonl",
            steps=20,
            batch_size=batch_size,
            max_length=longest,
            adapter=LoRA(rank, 2.0 * rank, dropout),
            optimizer=AdamW(rate, schedule=schedule),
        )
        for name, (batch_size, longest, rank, dropout, rate) in DEMO.items()
    ]


@pytest.mark.slow
def test_growth_moves_tasks_of_a_trained_model_by_rounding(shared_dir, tasks, tmp_path):
    """Samples go to another replica when sizes and neighbours change."""
    model = shared_dir / "models" / "stories260k"

    def trained(places: int, elastic: bool):
        options = ServerOptions(
            mesh="pp2 + tp2",
            reserved_slots=places,
            row_len=128,
            tokens_per_microbatch=512,
            elastic=elastic,
        )
        folder, sizes = tmp_path / f"elastic {elastic}", set()
        with tuning_server(model, folder, options, say=lambda line: None) as server:
            for task in tasks:
                server.register(task)
            while not server.statuses() or any(s.state != "succeeded" for s in server.statuses()):
                server.step()
                sizes.add(server._engine.size)
                while server._size and server._size._ahead and not server._size._ahead.ready:
                    time.sleep(0.01)
            config = server._engine.backbone.config
            return sizes, config, {task.name: server.adapter(task.name) for task in tasks}

    # One after another, and then all together.
    sizes, config, expected = trained(1, elastic=False)
    assert len(sizes) == 1
    sizes, _, found = trained(4, elastic=True)
    assert {(1, 1), (4, 4)} <= sizes
    for task in tasks:
        targets = resolve_targets(task.adapter.target_modules, config)
        before = initial_adapter(task.adapter, targets, config, task.seed)
        arrays = (jax.tree.leaves(own) for own in (before, expected[task.name], found[task.name]))
        begin, calm, grown = (np.concatenate([x.ravel() for x in own]) for own in arrays)
        assert np.linalg.norm(grown - calm) < 1e-4 * np.linalg.norm(calm - begin), task.name
