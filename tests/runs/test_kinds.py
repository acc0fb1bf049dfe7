"""Tasks with different kinds of adapters, from the specification to the exported folder."""

import dataclasses
import functools
import gc
import json
import re
import shutil
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux import (
    IA3,
    Bottleneck,
    DataError,
    DiffPruning,
    DoRA,
    LNTuning,
    LoRA,
    PlanningError,
    PromptTuning,
    ServerOptions,
    SparseDiff,
    TaskError,
    TrainedTokens,
    VeRA,
    export_adapter,
    import_adapter,
    load_backbone,
    prepare_task,
    tuning_server,
)
from jaxmux.cli.main import run_command
from jaxmux.data import load_tokenizer
from jaxmux.engine.state.slots import refuse_outgrowing
from jaxmux.engine.tasks.prepared_task import pool_of_adapter
from jaxmux.generation import Request, complete
from jaxmux.generation.programs import prompts_in_rows
from jaxmux.generation.served_adapters import stacked_pools
from jaxmux.models import (
    AdapterOp,
    Calibration,
    ForwardOptions,
    SlotTable,
    checkpoint_tensors,
    hidden_states,
    logits_of,
)
from jaxmux.models.head_adapters import head_adapters
from jaxmux.peft import (
    KINDS,
    SPECIFICATIONS,
    AdapterError,
    AdapterKind,
    LeafSpec,
    kind_of,
    ops_of,
    own_leaves,
    register_kind,
    scale_of,
    size_of_adapter,
    write_merged,
)
from jaxmux.peft.leaves import named_leaves
from jaxmux.peft.targets import resolve_targets
from jaxmux.server.task import ENDED
from jaxmux.specifications.reading import task_from_json

from .conftest import RUN, SERVER

# Those of words; bytes are the first tokens of the vocabulary.
TOKENS = tuple(range(317, 257, -1))
# Those that a run trains here. Runs of tests/parity train tasks of all kinds of PEFT.
IN_RUN = ("lora", "pissa", "ln", "houlsby")
SPECS = {
    "lora": LoRA(2, 4.0, target_modules=("q_proj", "down_proj")),
    "ia3": IA3(("q_proj", "k_proj", "down_proj"), ("down_proj", "k_proj")),
    "ln": LNTuning(("norm", "input_layernorm")),
    "pfeiffer": Bottleneck(size=3, activation="gelu"),
    "houlsby": Bottleneck("houlsby", 5),
    "parallel": Bottleneck("parallel", 4, scaling=2.0),
    "columns": DiffPruning(4, ("v_proj", "down_proj")),
    "entries": SparseDiff(2, "magnitude", ("q_proj", "down_proj")),
    "dora": DoRA(2, 4.0, target_modules=("q_proj", "down_proj")),
    "vera": VeRA(8, projection_key=3, target_modules=("v_proj", "down_proj")),
    "prompt": PromptTuning(5, start_text="red apple"),
    "tokens": TrainedTokens(TOKENS),
    "pattern": LoRA(4, 8.0, rank_pattern={"q_proj": 2}, alpha_pattern={"mlp.down_proj": 1.5}),
    "pissa": LoRA(2, 4.0, target_modules=("q_proj", "down_proj"), initialisation="pissa_niter_4"),
    "olora": LoRA(
        3,
        2.0,
        target_modules=("o_proj", "down_proj"),
        rslora=True,
        initialisation="olora",
        rank_pattern={"o_proj": 2},
        alpha_pattern={"o_proj": 1.0},
    ),
    "eva": LoRA(2, 3.0, target_modules=("q_proj", "down_proj"), initialisation="eva"),
    "gradients": SparseDiff(2, "gradient", ("q_proj", "down_proj")),
    "tables": LoRA(3, 6.0, target_modules=("lm_head", "v_proj", "model.embed_tokens")),
    "lora-tokens": LoRA(2, target_modules="v_proj", trained_tokens=TOKENS[:4]),
}
# Of some adapters, folders hold a LoRA of another rank and the same scale.
FOLDERS = SPECS | {
    "eva": LoRA(4, 6.0, target_modules=("q_proj", "down_proj")),
    "pissa": LoRA(4, 8.0, target_modules=("q_proj", "down_proj")),
    "olora": LoRA(
        6,
        2.0 * 2**0.5,
        target_modules=("o_proj", "down_proj"),
        rslora=True,
        rank_pattern={"o_proj": 4},
        alpha_pattern={"o_proj": 2**0.5},
    ),
}
# Those that can be merged into the backbone.
MERGED = ("lora", "ia3", "ln", "columns", "entries", "dora", "vera", "tokens", "pattern")
MERGED += ("pissa", "olora", "tables", "lora-tokens")
SETTINGS = {
    "lora": ("adapter_model.safetensors", "peft_type", "LORA"),
    "ia3": ("adapter_model.safetensors", "feedforward_modules", ["down_proj", "k_proj"]),
    "ln": ("adapter_model.safetensors", "target_modules", ["input_layernorm", "norm"]),
    "pfeiffer": ("adapter.safetensors", "hidden_size", 32),
    "houlsby": ("adapter.safetensors", "name", "jaxmux"),
    "parallel": ("adapter.safetensors", "name", "jaxmux"),
    "columns": ("adapter_model.safetensors", "mask_type", "columns_4"),
    "entries": ("adapter_model.safetensors", "mask_type", "magnitude_entries"),
    "dora": ("adapter_model.safetensors", "use_dora", True),
    "vera": ("adapter_model.safetensors", "projection_prng_key", 3),
    "prompt": ("adapter_model.safetensors", "num_virtual_tokens", 5),
    "tokens": ("adapter_model.safetensors", "token_indices", list(TOKENS)),
    "pattern": ("adapter_model.safetensors", "rank_pattern", {"q_proj": 2}),
    "pissa": ("adapter_model.safetensors", "init_lora_weights", True),
    "olora": ("adapter_model.safetensors", "use_rslora", True),
    "eva": ("adapter_model.safetensors", "r", 4),
    "gradients": ("adapter_model.safetensors", "mask_type", "gradient_entries"),
    "tables": (
        "adapter_model.safetensors",
        "target_modules",
        ["embed_tokens", "lm_head", "v_proj"],
    ),
    "lora-tokens": ("adapter_model.safetensors", "trainable_token_indices", list(TOKENS[:4])),
}


@pytest.fixture(scope="module")
def model(backbone):
    return load_backbone(backbone, "float32")


@pytest.fixture(scope="module")
def base(backbone):
    return checkpoint_tensors(backbone, np.dtype(np.float32))


@pytest.fixture(scope="module")
def logits_of_all():
    """Logits of a sequence with each of several adapters, by one program."""

    @partial(jax.jit, static_argnums=(0, 1))
    def run(config, options, weights, pools, slots, tokens):
        microbatch = prompts_in_rows(tokens, np.full(len(tokens), tokens.shape[1]))
        at_head, _ = head_adapters(options.adapter_ops, pools, None, microbatch.chunk_slot)
        given = weights, pools, None, microbatch, slots, options, at_head
        states, _, _ = hidden_states(config, *given)
        return logits_of(weights, states, at_head)

    def compute(model, adapters):
        """`adapters`: pairs of a specification and its arrays."""
        tokens = np.tile(np.arange(286, 318, dtype=np.int32), (len(adapters), 1))
        requests = [Request("", spec, adapter) for spec, adapter in adapters]
        pools = {
            name: {point: jax.tree.map(jnp.asarray, arrays) for point, _, arrays in pool}
            for name, pool in stacked_pools(requests, model.config)
        }
        scale = np.float32([scale_of(spec) if spec else 0.0 for spec, _ in adapters])
        zeros = np.zeros_like(scale)
        slots = SlotTable(scale, zeros, zeros.astype(np.uint32))
        options = ForwardOptions("xla", max_sequences=1, adapter_ops=ops_of(pools))
        found = run(model.config, options, model.weights, pools, slots, tokens)
        return np.asarray(found).reshape(len(adapters), tokens.shape[1], -1)

    return compute


@pytest.fixture(scope="module")
def logits(logits_of_all):
    """Logits of a sequence, with an adapter or without."""
    return lambda model, spec=None, adapter=None: logits_of_all(model, [(spec, adapter)])[0]


@pytest.fixture(scope="module")
def toy_kind():
    """A kind from outside: a bias behind linears."""

    @dataclasses.dataclass(frozen=True)
    class BiasTuning:
        target_modules: tuple[str, ...] = ("q_proj",)

    class AddBias(AdapterOp):
        def norm_output(self, own, x, h, eps):
            return h + own[:, None]

    def targets(spec, config):
        return {"input_layernorm": np.ones(config.num_layers, bool)}

    def leaves(config, points, slots, rank):
        shape = (config.num_layers, slots, config.hidden_size)
        return {point: LeafSpec(shape, ("layer", "slot", "output")) for point in points}

    kind = AdapterKind(
        "bias",
        BiasTuning,
        AddBias(),
        targets,
        leaves,
        lambda spec, targets, config, seed, base: {
            point: np.zeros((config.num_layers, config.hidden_size), np.float32)
            for point in targets
        },
        lambda spec, targets: {point: mask.astype(np.float32) for point, mask in targets.items()},
        lambda settings: settings.get("peft_type") == "BIAS",
        lambda spec, config, serving: {"peft_type": "BIAS"},
        lambda settings, config: BiasTuning(),
        lambda spec, adapter, config, serving, base: dict(adapter),
        lambda spec, tensors, config, base: {"input_layernorm": tensors.pop("input_layernorm")},
    )
    register_kind(kind)
    yield BiasTuning
    del KINDS["bias"], SPECIFICATIONS["bias"]


@pytest.fixture(scope="module")
def trained(train, make_task, toy_kind, tmp_path_factory):
    """The folder of a training run of several kinds, one of which is from outside."""
    run_dir = tmp_path_factory.mktemp("kinds") / "run"
    # All samples in every step.
    toy = dataclasses.replace(make_task("toy", steps=4, batch_size=14), adapter=toy_kind())
    train(run_dir, toy, *tasks_of(IN_RUN, make_task, steps=4, batch_size=14))
    return run_dir


def tasks_of(names, make_task, **fields):
    return [dataclasses.replace(make_task(name, **fields), adapter=SPECS[name]) for name in names]


@pytest.fixture(scope="module")
def folder_of(trained, model, base, make_task, tmp_path_factory):
    """The folder of an adapter, by its name in `SPECS`: that of the run, or of an adapter with
    random values."""
    parent = tmp_path_factory.mktemp("adapters")

    @functools.cache
    def folder(name):
        if name in IN_RUN:
            return trained / "adapters" / name
        (task,) = tasks_of([name], make_task)
        tokenizer = load_tokenizer(model.name_or_path)
        first = prepare_task(task, model.config, tokenizer, base=base).make_adapter()
        adapter = moved(SPECS[name], first, model.config)
        export_adapter(parent / name, adapter, SPECS[name], model.config, "base", base=base)
        return parent / name

    return folder


def moved(spec, adapter, config):
    """The adapter with noise on all that tasks train."""
    kind, rng = kind_of(spec), np.random.default_rng(0)
    targets = kind.targets(spec, config)
    rates = named_leaves(kind.relative_rates(spec, targets))
    names = iter(named_leaves(adapter))

    def move(leaf, value):
        rate = rates.get(next(names))
        if not leaf.trained:
            return value
        noise = 0.1 * rng.standard_normal(value.shape).astype(np.float32)
        # What lies outside the layers has the rate of the first or the last one.
        rate = rate[-1:] if "last" in leaf.axes else rate[: len(value)]
        return value + rate.reshape(-1, *[1] * (value.ndim - 1)) * noise

    return jax.tree.map(move, own_leaves(spec, list(targets), config), adapter)


# The samples of a task go through the backbone for their initial values.
BY_SAMPLES = ("eva", "gradients")
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in BY_SAMPLES else name for name in SPECS
]


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_that_of_the_kind(name, folder_of, model, base):
    folder, (weights, key, value) = folder_of(name), SETTINGS[name]
    assert (folder / weights).is_file()
    assert json.loads((folder / "adapter_config.json").read_text())[key] == value
    spec, adapter = import_adapter(folder, model.config, base=base)
    kind, wanted = kind_of(spec), FOLDERS[name]
    assert kind is kind_of(wanted)
    assert kind.targets(spec, model.config).keys() == kind.targets(wanted, model.config).keys()
    for field in kind.identity:
        assert getattr(spec, field) == getattr(wanted, field)
    assert any(np.ptp(x) > 0 for x in jax.tree.leaves(adapter))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_was_written(name, folder_of, model, base, tmp_path):
    spec, adapter = import_adapter(folder_of(name), model.config, base=base)
    export_adapter(tmp_path / "again", adapter, spec, model.config, "base", base=base)
    again = import_adapter(tmp_path / "again", model.config, base=base)[1]
    # The weights of norms are added to differences, and subtracted again.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-7), adapter, again)


@pytest.mark.slow
def test_a_run_trains_tasks_of_all_kinds(train, make_task, model, base, tmp_path):
    train(tmp_path / "run", *tasks_of(SPECS, make_task, steps=4))
    for name in SPECS:
        folder = tmp_path / "run" / "adapters" / name
        spec, adapter = import_adapter(folder, model.config, base=base)
        assert kind_of(spec) is kind_of(FOLDERS[name])
        assert any(np.ptp(x) > 0 for x in jax.tree.leaves(adapter))
    tasks = [
        dataclasses.replace(
            make_task(name, steps=1, resume_from=str(tmp_path / "run" / "adapters" / name)),
            adapter=FOLDERS[name],
        )
        for name in ("ia3", "dora", "pattern", "eva", "tables")
    ]
    assert_lower_losses(train(tmp_path / "again", *tasks), tmp_path / "run")


def assert_lower_losses(summary, before):
    """The first losses are below those of the run whose adapters the tasks began with."""
    earlier = json.loads((before / "summary.json").read_text())["tasks"]
    for name, task in summary.tasks.items():
        assert task["train_loss_first"] < earlier[name]["train_loss_first"]


def test_training_goes_on_from_a_folder(trained, folder_of, train, make_task, toy_kind, tmp_path):
    specs = {"toy": toy_kind()} | {name: FOLDERS[name] for name in IN_RUN}
    tasks = {
        name: dataclasses.replace(
            make_task(name, steps=1, batch_size=14, resume_from=str(trained / "adapters" / name)),
            adapter=spec,
        )
        for name, spec in specs.items()
    }
    # The arrays of its pools are those of the first run, so its programs are those, too.
    summary = train(tmp_path / "run", *tasks.values(), reserved_adapters=[SPECS["pissa"]])
    assert_lower_losses(summary, trained)
    task = tasks["houlsby"]
    other = dataclasses.replace(task, adapter=Bottleneck(size=5))
    with pytest.raises(ValueError, match="form is houlsby, the task asks for pfeiffer"):
        train(tmp_path / "other", other)
    prompt = dataclasses.replace(
        task, adapter=PromptTuning(6), resume_from=str(folder_of("prompt"))
    )
    with pytest.raises(ValueError, match="virtual_tokens is 5, the task asks for 6"):
        train(tmp_path / "prompt", prompt)
    pissa = dataclasses.replace(
        task, adapter=SPECS["pissa"], resume_from=str(trained / "adapters" / "pissa")
    )
    with pytest.raises(ValueError, match=r"'lora_from_weights'; what it holds is LoRA\(rank=4, "):
        train(tmp_path / "pairs", pissa)
    lora = dataclasses.replace(task, adapter=LoRA(2))
    with pytest.raises(ValueError, match="of the kind 'bottleneck', the task asks for 'lora'"):
        train(tmp_path / "lora", lora)


@pytest.mark.slow
def test_prompts_are_completed_with_adapters_of_all_kinds_at_once(folder_of, model, base):
    tokenizer = load_tokenizer(model.name_or_path)
    read = [import_adapter(folder_of(name), model.config, base=base) for name in SPECS]
    requests = [Request("red apple", *own) for own in read] + [Request("red apple")]
    together = complete(model, tokenizer, requests, max_new_tokens=8)
    # Logits of every kind beside others are compared in tests/engine/test_cached_logits.py.
    for i in range(0, len(requests), 5):
        assert complete(model, tokenizer, [requests[i]], max_new_tokens=8) == [together[i]]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_prompt_begins_with_the_tokens_of_a_text_repeated_or_cut(rows, model, base, make_task):
    tokenizer = load_tokenizer(model.name_or_path)
    # The first one is that which the tokenizer puts before every text.
    ids = tokenizer("red apple")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and 2 < len(ids) < 7
    wanted = base("model.embed_tokens.weight")[(ids * rows)[:rows]]
    for spec in (
        PromptTuning(rows, start_text="red apple"),
        PromptTuning(rows, start_tokens=ids),
    ):
        task = dataclasses.replace(make_task(), adapter=spec)
        prepared = prepare_task(task, model.config, tokenizer, base=base)
        assert prepared.task == task
        np.testing.assert_array_equal(prepared.make_adapter()["embed_tokens"][0], wanted)


def test_a_text_without_tokens_and_ids_beyond_the_vocabulary_are_refused(model, base, make_task):
    class WithoutTokens:
        def __call__(self, text, **options):
            return {"input_ids": []}

    def prepare(spec, tokenizer=None):
        task = dataclasses.replace(make_task("red"), adapter=spec)
        return prepare_task(task, model.config, tokenizer, base=base)

    with pytest.raises(TaskError, match="task 'red': start_text has no tokens"):
        prepare(PromptTuning(start_text="apple"), WithoutTokens())
    with pytest.raises(TaskError, match="task 'red': .*start_tokens: 10000 is no token of the"):
        prepare(PromptTuning(start_tokens=(3, 10000)))
    with pytest.raises(ValueError, match="give one of start, start_text and start_tokens"):
        PromptTuning(start="random", start_text="apple")


@pytest.mark.long
def test_a_prompt_of_embeddings_completes_as_their_tokens(model, base):
    tokenizer = load_tokenizer(model.name_or_path)
    before = [9, 40, 31]
    rows = base("model.embed_tokens.weight")[before]
    request = Request("red apple", PromptTuning(3), {"embed_tokens": rows[None]})
    alone = Request(before + tokenizer("red apple")["input_ids"])
    (expected,) = complete(model, tokenizer, [alone], max_new_tokens=8)
    found = complete(model, tokenizer, [request, Request("red apple")], max_new_tokens=8)
    assert found[0] == expected != found[1]
    long = PromptTuning(model.config.max_position_embeddings)
    with pytest.raises(DataError, match="virtual tokens included"):
        complete(model, tokenizer, [Request("red", long, request.adapter)])


def test_the_commands_know_the_kinds(trained, backbone, tmp_path, capsys):
    arguments = [f"--run_dir={trained}", f"--out={tmp_path}", "--task=ln", "--task=houlsby"]
    assert run_command("export", arguments, prog="jaxmux export") == 0
    for name in ("ln", "houlsby"):
        weights = SETTINGS[name][0]
        found, wanted = tmp_path / name / weights, trained / "adapters" / name / weights
        assert found.read_bytes() == wanted.read_bytes()
    arguments = [f"--backbone={backbone}", f"--adapter={tmp_path / 'houlsby'}", "--prompt=red"]
    assert run_command("generate", arguments, prog="jaxmux generate") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("red")


def test_merged_checkpoints_have_the_logits_of_the_adapter(
    trained, folder_of, model, base, tmp_path, logits, logits_of_all, capsys
):
    by_command = [name for name in MERGED if name in IN_RUN]
    names = [f"--task={name}" for name in by_command]
    arguments = [f"--run_dir={trained}", f"--out={tmp_path}", "--merge", *names]
    assert run_command("export", arguments, prog="jaxmux export") == 0
    adapters = [import_adapter(folder_of(name), model.config, base=base) for name in MERGED]
    plain = logits(model)
    for name, own, wanted in zip(MERGED, adapters, logits_of_all(model, adapters), strict=True):
        if name not in by_command:
            write_merged(tmp_path / name, model.name_or_path, own[1], own[0], model.config)
        assert np.abs(wanted - plain).max() > 1e-2
        found = logits(load_backbone(tmp_path / name, "float32"))
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        load_tokenizer(tmp_path / name)
    assert run_command("export", arguments, prog="jaxmux export") == 2
    out = tmp_path / "others"
    arguments = [f"--run_dir={trained}", f"--out={out}", "--merge", "--task=ln", "--task=houlsby"]
    assert run_command("export", arguments, prog="jaxmux export") == 2
    assert "'houlsby' (kind 'bottleneck'); export them without --merge, and the others with " in (
        capsys.readouterr().err
    )
    assert not out.exists()


def test_merging_and_folding_a_scale_exclude_each_other(trained, tmp_path, capsys):
    arguments = [f"--run_dir={trained}", f"--out={tmp_path / 'out'}", "--merge", "--serving"]
    with pytest.raises(SystemExit):
        run_command("export", arguments, prog="jaxmux export")
    assert "--serving is for adapters, and --merge writes whole" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tied", "kinds"),
    [(False, ("lora", "ln", "tables")), (True, ("lora", "tokens", "lora-tokens"))],
    ids=["own head", "tied head"],
)
def test_a_backbone_of_several_files_is_merged_file_by_file(
    tied, kinds, folder_of, backbone, tmp_path, model, base, logits, logits_of_all
):
    """Each has the tensors that it had, so the index is that of the backbone. All kinds are merged
    into a backbone of one file in the test above."""
    split, whole = tmp_path / "split", load_file(backbone / "model.safetensors")
    shutil.copytree(backbone, split)
    (split / "model.safetensors").unlink()
    if tied:
        del whole["lm_head.weight"]
        settings = json.loads((split / "config.json").read_text())
        (split / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    names = sorted(whole)
    parts = {
        f"model-0000{i + 1}-of-00003.safetensors": {name: whole[name] for name in names[i::3]}
        for i in range(3)
    }
    for file, tensors in parts.items():
        save_file(tensors, split / file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in whole.values())},
        "weight_map": {name: file for file, own in parts.items() for name in own},
    }
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    bare = load_backbone(split, "float32")
    assert bare.config.tie_word_embeddings is tied
    adapters = [import_adapter(folder_of(kind), bare.config, base=base) for kind in kinds]
    plain = logits(bare)
    for kind, own, wanted in zip(kinds, adapters, logits_of_all(bare, adapters), strict=True):
        merged = tmp_path / kind
        write_merged(merged, split, own[1], own[0], bare.config)
        assert json.loads((merged / "model.safetensors.index.json").read_text()) == index
        expected = {"README.md", *(path.name for path in split.iterdir())}
        assert {path.name for path in merged.iterdir()} == expected
        found = {file: load_file(merged / file) for file in parts}
        assert {file: tensors.keys() for file, tensors in found.items()} == {
            file: tensors.keys() for file, tensors in parts.items()
        }
        size = sum(tensor.nbytes for tensors in found.values() for tensor in tensors.values())
        assert size == index["metadata"]["total_size"]
        assert np.abs(wanted - plain).max() > 1e-2
        np.testing.assert_allclose(logits(load_backbone(merged, "float32")), wanted, atol=1e-4)


def test_a_merged_checkpoint_has_all_other_files_of_the_backbone(
    folder_of, backbone, tmp_path, model, base
):
    folder = tmp_path / "backbone"
    shutil.copytree(backbone, folder)
    kept = (
        *("LICENSE", "USE_POLICY.md", "modeling.py", "preprocessor_config.json", "vocab.bpe"),
        *("chat_template.jinja", "additional_chat_templates/rag.jinja", "licences/a/NOTICE"),
    )
    left_out = (
        *("pytorch_model.bin", "consolidated.safetensors", "adapter_config.json", ".cache/a"),
        *("tf_model.h5", "original/params.json", "original/consolidated.00.pth", "model.gguf"),
        *("pytorch_model.bin.index.json", "model.safetensors.index.json", "merged/notes.txt"),
    )
    for name in (*kept, *left_out):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    spec, adapter = import_adapter(folder_of("lora"), model.config, base=base)
    out = folder / "merged" / "lora"
    write_merged(out, folder, adapter, spec, model.config)
    before = {path.name for path in backbone.iterdir()}
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {*kept, *before, "README.md"}
    assert all((out / name).read_text() == name for name in kept)


@pytest.mark.long
def test_the_norms_of_a_backbone_are_read_once_and_go_with_it(model, base):
    read = []

    def recorded(name):
        read.append(name)
        return base(name)

    spec, kind = SPECS["dora"], KINDS["dora"]
    one, other = (
        kind.initial(spec, kind.targets(spec, model.config), model.config, seed, recorded)
        for seed in (0, 1)
    )
    assert len(read) == len(set(read)) == 2 * model.config.num_layers
    np.testing.assert_array_equal(one["mlp.down_proj"]["norm"], other["mlp.down_proj"]["norm"])
    alive = weakref.ref(recorded)
    del recorded
    gc.collect()
    assert alive() is None


def test_vera_is_served_as_a_lora(folder_of, model, tmp_path, logits):
    own = import_adapter(folder_of("vera"), model.config)
    export_adapter(tmp_path / "served", *own[::-1], model.config, "base", serving=True)
    spec, adapter = import_adapter(tmp_path / "served", model.config)
    assert isinstance(spec, LoRA) and spec.scale == 1
    np.testing.assert_allclose(logits(model, spec, adapter), logits(model, *own), atol=1e-5)


def test_a_mask_of_magnitudes_holds_the_largest_weights(folder_of, model, base):
    spec, adapter = import_adapter(folder_of("entries"), model.config)
    assert spec.mask == "magnitude"
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        for layer, numbers in enumerate(adapter[module]["entries"].astype(int) - 1):
            weight = np.abs(base(f"model.layers.{layer}.{module}.weight"))
            chosen = weight[numbers % 2**16, numbers >> 16]
            assert len(set(numbers)) == spec.rank * sum(weight.shape)
            assert np.sort(chosen)[0] >= np.sort(weight, axis=None)[-len(numbers)]


def test_entries_that_occur_twice_are_added_up(folder_of, model, tmp_path, logits):
    """A mask of PEFT may be filled up so, whatever is its name."""
    folder = tmp_path / "twice"
    shutil.copytree(folder_of("entries"), folder)
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(weights)
    for name in [name for name in tensors if "indices" in name]:
        tensors[name][:, -3:] = tensors[name][:, :3]
    save_file(tensors, weights)
    settings.write_text(settings.read_text().replace("magnitude_entries", "mine"))
    spec, adapter = import_adapter(folder, model.config)
    write_merged(tmp_path / "merged", model.name_or_path, adapter, spec, model.config)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, weight in load_file(model.name_or_path + "/model.safetensors").items():
        if f"base_model.model.{name.removesuffix('.weight')}.shira_weight" in tensors:
            own = f"base_model.model.{name.removesuffix('.weight')}."
            for (i, j), value in zip(
                tensors[f"{own}shira_indices"].T, tensors[f"{own}shira_weight"], strict=True
            ):
                weight[i, j] += value
            np.testing.assert_allclose(merged[name], weight, atol=1e-6)
    found = logits(load_backbone(tmp_path / "merged", "float32"))
    np.testing.assert_allclose(logits(model, spec, adapter), found, atol=1e-4)


def test_projections_that_a_folder_lacks_are_drawn_again(folder_of, model, tmp_path):
    folder = folder_of("vera")
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: x for name, x in tensors.items() if "lambda" in name}
    assert len(kept) == len(tensors) - 2
    shutil.copytree(folder, tmp_path / "vera")
    save_file(kept, tmp_path / "vera" / "adapter_model.safetensors")
    whole, short = (import_adapter(path, model.config)[1] for path in (folder, tmp_path / "vera"))
    jax.tree.map(np.testing.assert_array_equal, whole, short)


def test_a_dropout_of_vera_is_refused(folder_of, model, tmp_path):
    shutil.copytree(folder_of("vera"), tmp_path / "vera")
    settings = tmp_path / "vera" / "adapter_config.json"
    fields = json.loads(settings.read_text())
    settings.write_text(json.dumps(fields | {"vera_dropout": 0.1}))
    with pytest.raises(AdapterError, match=r"vera_dropout=0\.1 is not supported in training"):
        import_adapter(tmp_path / "vera", model.config)


def test_differences_from_the_backbone_need_it(folder_of, model, tmp_path):
    with pytest.raises(AdapterError, match="weights of the backbone are needed"):
        import_adapter(folder_of("ln"), model.config)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("double_seq_bn[reduction_factor=4]", None),
        ("mam", "config='mam' is not supported; known names: seq_bn, "),
        ("prefix_tuning", "prefix tuning is left out"),
        ({"architecture": "lora", "r": 8}, "architecture='lora' is not supported; only b"),
        ({"reduction_factor": 8, "non_linearity": "relu", "ln_before": True}, "ln_before=True"),
        ({"reduction_factor": 8, "non_linearity": "elu"}, "non_linearity='elu'"),
        ({"reduction_factor": 8, "non_linearity": "relu", "scaling": "learned"}, "scaling="),
        ({"reduction_factor": {"1": 8}, "non_linearity": "relu"}, "one for each layer"),
        (
            {
                "reduction_factor": 8,
                "non_linearity": "relu",
                "mh_adapter": True,
                "is_parallel": True,
            },
            "parallel adapter behind attention",
        ),
    ],
    ids=str,
)
def test_configurations_of_adapter_hub(config, problem, folder_of, model, tmp_path):
    folder = folder_of("houlsby")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"config": config}))
    weights = "adapter.safetensors"
    (tmp_path / weights).write_bytes((folder / weights).read_bytes())
    # The tensors are those of size 5; a reduction by 4 means 8.
    with pytest.raises(AdapterError, match=problem or r"shape \[5, 32\], .* imply \[8, 32\]"):
        import_adapter(tmp_path, model.config)


def test_a_kind_from_outside_trains_beside_others(toy_kind, trained, model):
    results = json.loads((trained / "summary.json").read_text())["tasks"]
    for name in ("toy", "lora"):
        assert results[name]["train_loss_last"] < results[name]["train_loss_first"]
    spec, adapter = import_adapter(trained / "adapters" / "toy", model.config)
    assert isinstance(spec, toy_kind) and np.any(adapter["input_layernorm"])
    with pytest.raises(ValueError, match="there is an adapter kind 'bias' already"):
        register_kind(KINDS["bias"])


def test_tenants_may_ask_for_other_kinds(data, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(open(data["short"], "rb").read())

    def task(**adapter):
        fields = {"name": "x", "data": "a.jsonl", "steps": 1, "adapter": adapter}
        return task_from_json(json.dumps(fields), tmp_path).adapter

    assert task(kind="ia3") == IA3()
    assert task(kind="lora", target_modules="lm_head") == LoRA(target_modules="lm_head")
    assert task(kind="lora", trained_tokens=[5, 3]) == LoRA(trained_tokens=(5, 3))
    assert task(kind="ln_tuning", target_modules=["norm"]) == LNTuning(("norm",))
    assert task(kind="bottleneck", form="houlsby", size=8) == Bottleneck("houlsby", 8)
    assert task(kind="prompt_tuning", virtual_tokens=8) == PromptTuning(8)
    text = PromptTuning(start_text="Answer\tin JSON:\n")
    assert task(kind="prompt_tuning", start_text=text.start_text) == text
    assert task(kind="prompt_tuning", start_tokens=[3, 3]) == PromptTuning(start_tokens=(3, 3))
    assert task(kind="trained_tokens", indices=[5, 3]) == TrainedTokens((5, 3))
    niter = {"rank": 128, "initialisation": "pissa_niter_16"}
    assert task(kind="lora", **niter) == LoRA(**niter)
    eva = {"kind": "lora", "initialisation": "eva"}
    assert task(**eva, eva_rho=1.5) == LoRA(initialisation="eva", eva_rho=1.5)
    for adapter, problem in (
        ({"kind": "ia3", "target_modules": ".*"}, "the name of a linear such as"),
        ({"kind": "ia3", "target_modules": "lm_head"}, "the name of a linear such as"),
        ({"kind": "ln_tuning", "target_modules": "q_proj"}, "'q_proj' is no norm"),
        ({"kind": "bottleneck", "size": 10**6}, "of at most 256"),
        ({"kind": "prompt_tuning", "virtual_tokens": 10**6}, "of at most 256"),
        ({"kind": "prompt_tuning", "start_text": "a" * 4097}, "of at most 4096 characters"),
        ({"kind": "prompt_tuning", "start_text": "\x1b[2J"}, "without control characters"),
        (
            {"kind": "prompt_tuning", "start_tokens": [1] * 257},
            "at most 256 ids of tokens",
        ),
        ({"kind": "trained_tokens", "indices": [1.5]}, "a list of at most 256 different ids"),
        ({"kind": "trained_tokens", "indices": list(range(257))}, "at most 256 different ids"),
        ({"kind": "trained_tokens", "indices": [3, 3]}, "indices: a token occurs twice"),
        ({"kind": "bottleneck", "form": "x"}, "adapter.form should be"),
        ({"kind": "lora", **niter, "rank": 129}, "rank 258 .*; expected at most 256"),
        ({"kind": "lora", "initialisation": "pissa_niter_1e6"}, "initialisation should be one of"),
        ({"kind": "dora", "initialisation": "olora"}, "initialisation should be one of"),
        (
            {
                "kind": "lora",
                "rank": 128,
                "initialisation": "eva",
                "trained_tokens": [1],
                "eva_rho": 3,
            },
            "rank 384 .*; expected at most 256",
        ),
        (eva | {"eva_rho": 100}, r"eva_rho should be a number in \[1, 4\]"),
        (eva | {"calibration_tokens": 10**6}, "calibration_tokens should be .* of at most 8192"),
        ({"kind": "lora", "trained_tokens": [3, 3]}, "trained_tokens: a token occurs twice"),
        (
            {"kind": "dora", "trained_tokens": [3]},
            "trained_tokens: DoRA trains linears only",
        ),
        ({"kind": "dora", "target_modules": ["lm_head"]}, "DoRA trains linears only, found 'lm_"),
        ({"kind": "prefix_tuning"}, 'found "prefix_tuning"; prefix tuning is left out: it'),
        ({"kind": "lora", "initialisation": "corda"}, 'found "corda"; CorDA is left out: it'),
        ({"kind": "lora", "modules_to_save": []}, "modules_to_save is left out: it would"),
    ):
        with pytest.raises(ValueError, match=problem):
            task(**adapter)


def test_the_first_expression_of_a_pattern_counts_also_in_a_folder(model, tmp_path):
    spec = LoRA(2, 8.0, alpha_pattern={"self_attn.v_proj": 2, "v_proj": 4, "o_proj": 6})
    adapter = KINDS["lora_pattern"].initial(
        spec, resolve_targets("all-linear", model.config), model.config, 0, None
    )
    export_adapter(tmp_path / "a", adapter, spec, model.config, "base")
    found, _ = import_adapter(tmp_path / "a", model.config)
    assert found.alpha_pattern == spec.alpha_pattern
    for bad in ("(q_proj", "(?i)q_proj"):
        with pytest.raises(ValueError, match="is no valid regular expression"):
            LoRA(rank_pattern={bad: 2})


def test_a_pool_has_room_for_the_kinds_that_are_reserved(model):
    q_proj = partial(LoRA, target_modules="q_proj")
    reserved = [
        IA3(),
        Bottleneck(size=4),
        DoRA(3, target_modules="q_proj"),
        q_proj(2, alpha_pattern={"q_proj": 1}),
        q_proj(2, initialisation="pissa"),
        LoRA(2, target_modules="lm_head"),
    ]
    options = ServerOptions(**RUN, reserved_rank=2, reserved_adapters=reserved)

    def refuse(spec):
        targets = kind_of(spec).targets(spec, model.config)
        needed = pool_of_adapter(spec, targets, size_of_adapter(spec, model.config))
        refuse_outgrowing("x", needed, options.reserved(model.config))

    for spec in (
        IA3(),
        Bottleneck(size=3),
        DoRA(3, target_modules="q_proj"),
        q_proj(2, rank_pattern={"layers.0.*": 1}),
        q_proj(2, initialisation="olora"),
        q_proj(1, initialisation="eva"),
        LoRA(1, target_modules="lm_head"),
    ):
        refuse(spec)
    for spec, problem in (
        (Bottleneck(size=5), "the kind 'bottleneck' has size 5 (size), the pool's is 4"),
        (Bottleneck("houlsby", 3), "its adapter of the kind 'bottleneck' changes self_attn"),
        (LNTuning(), "kind 'ln_tuning' needs arrays that the pool does not have"),
        (
            DoRA(2, target_modules="v_proj"),
            "kind 'dora' changes self_attn.v_proj, for which the pool has no arrays",
        ),
        (q_proj(3, initialisation="olora"), "its rank is 6, the pool's is 4"),
        (q_proj(3, initialisation="eva"), "its rank is 6, the pool's is 4"),
        (
            LoRA(1, target_modules="embed_tokens"),
            "kind 'lora_tables' changes embed_tokens, for which the pool has no arrays",
        ),
    ):
        with pytest.raises(TaskError, match=re.escape(problem)):
            refuse(spec)


@pytest.mark.long
def test_a_server_trains_what_fits_into_its_reserved_pools(backbone, make_task, tmp_path):
    """Tasks that need more fail."""
    specs = {
        "fits": Bottleneck(size=3),
        "large": Bottleneck(size=5),
        "no-label": LoRA(1, initialisation="eva", calibration_tokens=1, target_modules="q_proj"),
    }
    options = ServerOptions(**SERVER, reserved_adapters=[Bottleneck(size=4)])
    with tuning_server(backbone, tmp_path / "server", options) as server:
        for name, spec in specs.items():
            server.register(dataclasses.replace(make_task(name, steps=2), adapter=spec))
        server.step()
        while not all(status.state in ENDED for status in server.statuses()):
            server.step()
        found = {status.name: (status.state, status.reason) for status in server.statuses()}
        adapter = server.adapter("fits")
    assert found["fits"] == ("succeeded", None)
    assert adapter["mlp"]["down"].shape[-1] == 3
    for name, problem in {
        "large": "its adapter of the kind 'bottleneck' has size 5 (size), the pool's is 4",
        "no-label": "none of the first 1 tokens of its training data counts in the loss",
    }.items():
        assert found[name][0] == "failed" and problem in found[name][1]


@pytest.mark.parametrize(
    ("reserved", "says"),
    [
        ([LoRA()], "a plain LoRA needs no entry; for its size there are reserved_rank"),
        (["ia3"], r"'ia3' is no specification of an adapter; there are @DoRA\(\), @IA3\(\), "),
        ([{"kind": "ia3"}], ".* is no specification of an adapter"),
        ([IA3], ".* is no specification of an adapter"),
        (IA3(), r"should be a list, such as \[@IA3\(\)\], found IA3\("),
        (None, "should be a list, such as"),
        ("ia3", "should be a list, such as"),
        ([IA3(target_modules="k_proj")], "IA3: feedforward_modules: mlp.down_proj is not among"),
        ([DoRA(target_modules="nope")], "DoRA: target_modules: 'nope' matches no"),
    ],
)
def test_an_adapter_that_cannot_be_reserved_is_refused_by_kind_and_field(reserved, says, model):
    with pytest.raises(PlanningError, match=f"^reserved_adapters:? {says}"):
        ServerOptions(reserved_adapters=reserved).reserved(model.config)


@pytest.fixture(scope="module")
def tied(backbone, tmp_path_factory):
    """A backbone whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied") / "backbone"
    shutil.copytree(backbone, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    return load_backbone(folder, "float32")


@pytest.mark.long
def test_tokens_of_a_head_that_is_the_embedding_change_both(tied, tmp_path, logits):
    base = checkpoint_tensors(tied.name_or_path, np.dtype(np.float32))
    spec, kind = TrainedTokens(TOKENS), KINDS["trained_tokens"]
    targets = kind.targets(spec, tied.config)
    first = kind.initial(spec, targets, tied.config, 0, base)
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 0.05, (1, len(TOKENS), tied.config.hidden_size)).astype(np.float32)
    adapter = {point: own | {"rows": rows} for point, own in first.items()}
    write_merged(tmp_path / "merged", tied.name_or_path, adapter, spec, tied.config)
    merged = load_backbone(tmp_path / "merged", "float32")
    wanted, found = logits(merged), logits(tied, spec, adapter)
    assert np.abs(wanted - logits(tied)).max() > 1e-2
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    tokenizer = load_tokenizer(tied.name_or_path)
    requests = [Request("red apple", spec, adapter)], [Request("red apple")]
    own, of_merged = (
        complete(model, tokenizer, request, max_new_tokens=8)
        for model, request in zip((tied, merged), requests, strict=True)
    )
    assert own == of_merged != complete(tied, tokenizer, requests[1], max_new_tokens=8)

    folder = tmp_path / "adapter"
    export_adapter(folder, adapter, spec, tied.config, "base", base=base)
    again = import_adapter(folder, tied.config, base=base)[1]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-7), adapter, again)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.trainable_tokens_delta"] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="of one table differ"):
        import_adapter(folder, tied.config, base=base)


def test_tokens_of_the_vocabulary_are_trained(model):
    targets = KINDS["trained_tokens"].targets
    with pytest.raises(ValueError, match="10000 is no token of the"):
        targets(TrainedTokens((3, 10000)), model.config)
    for bad in ((), (-1,), ("3",), (True,), (3, 3)):
        with pytest.raises(ValueError, match="indices"):
            TrainedTokens(bad)


def test_linears_are_named_as_for_lora(model):
    masks = KINDS["ia3"].targets(IA3("all-linear", ("down_proj",)), model.config)
    linears = resolve_targets("all-linear", model.config)
    assert {point.split("/")[0] for point in masks} == linears.keys()
    assert "mlp.down_proj/output" not in masks
    with pytest.raises(ValueError, match="mlp.up_proj is not among the target_modules"):
        KINDS["ia3"].targets(IA3(("q_proj",), ("up_proj",)), model.config)


@pytest.fixture
def refuse_calibration(monkeypatch):
    """From its call on, no samples go through the backbone for initial values."""

    def refuse():
        def refused(self):
            raise AssertionError("initial values are computed")

        monkeypatch.setattr(Calibration, "linear_inputs", refused)

    return refuse


def test_a_run_that_goes_on_computes_no_initial_values(
    train, make_task, tmp_path, refuse_calibration
):
    """It computes them if none of its checkpoints is complete."""

    def weights(steps):
        train(tmp_path / "run", dataclasses.replace(make_task(steps=steps), adapter=SPECS["eva"]))
        return load_file(tmp_path / "run" / "adapters" / "tiny" / "adapter_model.safetensors")

    first = weights(2)
    # As if it had been interrupted while the first one was written.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "adapters")
    again = weights(2)
    for name, tensor in first.items():
        np.testing.assert_array_equal(again[name], tensor)
    refuse_calibration()
    assert any(np.any(tensor != first[name]) for name, tensor in weights(3).items())


@pytest.mark.long
def test_a_server_that_goes_on_computes_no_initial_values(
    backbone, make_task, tmp_path, refuse_calibration
):
    options = ServerOptions(**SERVER)
    with tuning_server(backbone, tmp_path / "server", options) as server:
        server.register(dataclasses.replace(make_task("a", steps=4), adapter=SPECS["eva"]))
        while not any(status.step for status in server.statuses()):
            server.step()
        server.save()
    refuse_calibration()
    with tuning_server(backbone, tmp_path / "server", options) as server:
        server.register(dataclasses.replace(make_task("b", steps=4), adapter=SPECS["eva"]))
        while not all(status.state in ENDED for status in server.statuses()):
            server.step()
        assert [(own.name, own.state) for own in server.statuses()] == [
            ("a", "succeeded"),
            ("b", "failed"),
        ]
