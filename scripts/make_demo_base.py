"""Makes the demo's base model: writes a corpus, and trains a tokenizer and the model on it.

    python scripts/make_demo_base.py --out jaxmux/demo/base

The result is a Hugging Face checkpoint of a small Llama (config.json, model.safetensors in
bfloat16, tokenizer.json, tokenizer_config.json) with a model card, README.md. The same options,
including `--steps`, give the same model on the same machine. Training needs a GPU; for a dry run on
a CPU use `--steps 30 --block 10 --rows 4 --tokens 300000`.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_corpus import EOS, documents
from demo_world import answer_words, quoted_words, vocabulary
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from jaxmux.data.batches import Microbatch
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    head_kernel,
    hidden_states,
    load_backbone,
    save_backbone,
)
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

BOS, PAD = "<s>", "<pad>"
BOS_ID = 0  # the first special token
ROW_LEN = 512
CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_layers=6,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    rope_theta=10000.0,
    max_position_embeddings=ROW_LEN,
    tie_word_embeddings=True,
)
# A turn of the bot ends with EOS, because the corpus puts EOS between the turns of a chat.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "Bot:{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Bot:{% endif %}"
)
_PROMPTS = (
    "Once upon a time",
    "Mia lost her yellow hat at the beach.",
    "User: What does a horse eat?\nBot:",
    "On Friday, Leo went to the zoo with Kate. Leo bought 3 green balls there.\nList: day =",
    "Ida met a kind cook at the lake. The fox ran away. Tom came and sang.\nHeadlines: IDA MET",
)
_SPECIAL = (BOS, EOS, PAD)
# Number of occurrences that is certain to put a word into the vocabulary.
_WANTED_COUNT = 1000
# Log probability of a letter. It is below that of any word, so that known words are not split.
_LETTER_SCORE = -20.0
_CHARACTERS_PER_SHARD = 1_000_000
_CHARACTERS_PER_TOKEN = 3.6  # an estimate, for the size of the corpus


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer whose tokens are the bytes and the most frequent words of the corpus.

    The corpus has few words. Byte pair encoding would use a fifth of the tokens for parts of words
    that occur in no text, and would split rare words into pieces, which the model copies badly.
    """
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [text.replace(EOS, "\n") for text in documents(seed, 8 * _CHARACTERS_PER_SHARD)]
    # Words in the forms in which the demo tasks use them: quoted, in capitals, and as answers.
    wanted = [*quoted_words(), *(f" {word}" for word in [*vocabulary(), *answer_words()])]
    wanted += [f" {word.upper()}" for word in vocabulary()]
    counts: Counter[str] = Counter()
    for text in [*texts, *map(str.upper, texts[::8])]:
        counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    for text in wanted:
        word = splitter.pre_tokenize_str(text)[0][0]
        counts[word] = max(counts[word], _WANTED_COUNT)
    letters = sorted(splitter.alphabet())
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [(word, count) for word, count in ranked if len(word) > 1]
    words = words[: CONFIG.vocab_size - len(_SPECIAL) - len(letters)]
    pieces = [(token, 0.0) for token in _SPECIAL]
    pieces += [(letter, _LETTER_SCORE) for letter in letters]
    pieces += [(word, math.log(count / counts.total())) for word, count in words]
    # There is a token for every byte, so no text has unknown tokens.
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=_SPECIAL.index(PAD)))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and the tokenizer_config.json with which transformers loads it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": ROW_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _write_shard(tokenizer_file: str, seed: int) -> np.ndarray:
    """The tokens of the documents of one seed, concatenated; every document has BOS and EOS."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_file)
    texts = [text + EOS for text in documents(seed, _CHARACTERS_PER_SHARD)]
    return np.concatenate([np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts)])


def write_rows(
    tokenizer_file: str, seed: int, tokens: int, processes: int
) -> Int[np.ndarray, "rows {ROW_LEN}"]:
    """A corpus of about `tokens` tokens; the documents are concatenated and cut into rows."""
    shards = math.ceil(tokens * _CHARACTERS_PER_TOKEN / _CHARACTERS_PER_SHARD)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        seeds = [seed + k for k in range(shards)]
        stream = np.concatenate(pool.map(partial(_write_shard, tokenizer_file), seeds))
    return stream[: len(stream) // ROW_LEN * ROW_LEN].reshape(-1, ROW_LEN)


def token_losses(weights: Weights, rows: Int[Array, "rows row_len"]) -> Float[Array, "rows rest"]:
    """Cross entropy of every token except the first of a row, float32; 0 for BOS tokens."""
    hidden = _hidden(weights, rows)[:, :-1]
    logits = head_kernel(weights).matmul(hidden, jnp.float32)
    targets = rows[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.where(targets == BOS_ID, 0.0, losses)


def _hidden(weights: Weights, rows: Int[Array, "rows row_len"]) -> Float[Array, "rows row_len d"]:
    embedding = weights["embed_tokens"]["weight"]
    is_start = (rows == BOS_ID).at[:, 0].set(True)
    place = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    microbatch = Microbatch(
        tokens=jnp.arange(rows.size).reshape(rows.shape),
        targets=jnp.zeros_like(rows),
        loss_weight=jnp.zeros(rows.shape),
        positions=place - jax.lax.cummax(jnp.where(is_start, place, 0), axis=1),
        segment_ids=jnp.cumsum(is_start, axis=1) - 1,
        sample_id=jnp.zeros(rows.shape, jnp.uint32),
        chunk_slot=jnp.zeros(len(rows), jnp.int32),
    )
    # The embedding is a product with one-hot vectors, and position i of the microbatch looks up row
    # i of the result. The gradient of a frequent token is a sum over thousands of positions; a
    # scatter would add these in any order and round after every addition.
    looked_up = jax.nn.one_hot(rows.reshape(-1), len(embedding), dtype=embedding.dtype) @ embedding
    weights = weights | {"embed_tokens": {"weight": looked_up}}
    no_slots = SlotTable(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1, jnp.uint32))
    options = ForwardOptions(attention="xla", remat="none", max_sequences=1)
    hidden, _, _ = hidden_states(CONFIG, weights, {"lora": {}}, None, microbatch, no_slots, options)
    return hidden.reshape(*rows.shape, -1)


def _is_matrix(weights: Weights) -> Weights:
    return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), weights)


# The learning rate is an argument of the compiled step, because with `--minutes` the schedule is
# known only after the speed has been measured.
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.98),
    optax.add_decayed_weights(0.1, mask=_is_matrix),
)


@partial(jax.jit, static_argnames="dtype", donate_argnames=("masters", "state"))
def train_block(
    masters: Weights,
    state: optax.OptState,
    corpus: Int[Array, "all row_len"],
    picked: Int[Array, "steps rows"],
    lr: Float[Array, " steps"],
    dtype: str,
) -> tuple[Weights, optax.OptState, Float[Array, " steps"]]:
    """Takes one AdamW step for each row of `picked`, a batch of row numbers of the corpus.

    Master weights are float32; forward and backward passes are in `dtype`. Returns the new weights,
    the new optimizer state, and the loss of every step.
    """

    def mean_loss(masters: Weights, rows: Array) -> Array:
        weights = jax.tree.map(
            lambda leaf: leaf.astype(dtype),
            masters,
            is_leaf=lambda node: isinstance(node, FrozenWeight),
        )
        return jnp.mean(token_losses(weights, rows))

    def step(carry, inputs):
        (masters, state), (picked, lr) = carry, inputs
        rows = corpus[picked].astype(jnp.int32)
        loss, gradient = jax.value_and_grad(mean_loss)(masters, rows)
        updates, state = OPTIMIZER.update(gradient, state, masters)
        masters = jax.tree.map(lambda leaf, update: leaf - lr * update, masters, updates)
        return (masters, state), loss

    (masters, state), losses = jax.lax.scan(step, (masters, state), (picked, lr))
    return masters, state, losses


def batches(rows: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Yields batches of row numbers without end; every epoch has each row once, in random order."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(rows)
        yield from order[: rows // batch * batch].reshape(-1, batch)
        epoch += 1


def pretrain(corpus: np.ndarray, options: argparse.Namespace) -> tuple[Weights, int]:
    """Trains on `corpus` for `options.steps` steps, or as many as fit into `options.minutes`.

    Returns:
      Float32 weights, and the number of steps.
    """
    masters = Backbone.random(CONFIG, options.seed).weights
    state, on_device = OPTIMIZER.init(masters), jnp.asarray(corpus)
    order = batches(len(corpus), options.rows, options.seed)
    steps, done, began, seconds = options.steps, 0, time.perf_counter(), []
    while steps is None or done < steps:
        count = options.block if steps is None else min(options.block, steps - done)
        picked = np.stack([next(order) for _ in range(count)])
        lr = learning_rates(done, count, steps, options)
        masters, state, losses = train_block(masters, state, on_device, picked, lr, options.dtype)
        loss, done = float(losses.mean()), done + count
        seconds.append(time.perf_counter() - began - sum(seconds))
        if steps is None and len(seconds) == 2:  # The first block also compiled.
            left = max(0.0, 60 * options.minutes - sum(seconds))
            steps = done + int(left / seconds[1]) * options.block
        print(f"step {done} of {steps or '?'}: loss {loss:.4f}, {sum(seconds):.0f} s", flush=True)
    return masters, done


def learning_rates(
    first: int, count: int, steps: int | None, options: argparse.Namespace
) -> Float[np.ndarray, " count"]:
    """Rises linearly to the peak, then falls as a cosine to 2% of the peak at the last step."""
    step = np.arange(first, first + count)
    rising = (step + 1) / options.warmup
    if steps is None:  # The number of steps is known only after the warm-up.
        return np.float32(options.lr * np.minimum(rising, 1))
    progress = np.clip((step - options.warmup) / max(1, steps - options.warmup), 0, 1)
    falling = 0.51 + 0.49 * np.cos(np.pi * progress)
    return np.float32(options.lr * np.minimum(rising, falling))


def held_out_loss(weights: Weights, rows: np.ndarray) -> float:
    """Mean loss, in nats per token, of rows that are not in the training corpus."""
    losses = jax.jit(token_losses)(weights, jnp.asarray(rows, jnp.int32))
    return float(losses.sum() / (rows[:, 1:] != BOS_ID).sum())


def generator(weights: Weights, tokenizer: Tokenizer) -> Callable[[str], str]:
    """A function that continues a prompt greedily, until EOS or a total of 128 tokens."""

    @jax.jit
    def next_token(row: Array, last: Array) -> Array:
        return jnp.argmax(head_kernel(weights).matmul(_hidden(weights, row[None])[0, last]))

    def generate(prompt: str) -> str:
        ids = tokenizer.encode(prompt).ids
        start = len(ids)
        while len(ids) < 128:
            # The padding follows the last token, so the last token does not attend to it.
            row = jnp.asarray(ids + [tokenizer.token_to_id(PAD)] * (128 - len(ids)))
            ids.append(int(next_token(row, len(ids) - 1)))
            if ids[-1] == tokenizer.token_to_id(EOS):
                break
        return tokenizer.decode(ids[start:])

    return generate


_CARD = """---
license: apache-2.0
language: en
---
# The demo's base model

A Llama of {parameters:,} parameters that writes simple English about a small invented world. It
exists so that `make demo` can fine-tune something within minutes on a CPU, and is of no other use.

| | |
|---|---|
| architecture | LlamaForCausalLM: {config.num_layers} layers, width {config.hidden_size}, \
{config.num_heads} heads ({config.num_kv_heads} for keys and values), \
MLP {config.intermediate_size}, tied embeddings, context {config.max_position_embeddings} |
| tokenizer | unigram over bytes, {config.vocab_size} tokens, mostly whole words of the same text |
| stored in | bfloat16 |
| training text | {tokens:,} tokens, written from a seed by `scripts/demo_corpus.py`; \
no outside text |
| training | {steps} steps of {batch:,} tokens ({epochs:.1f} epochs), AdamW, peak rate {lr} |
| loss on text of another seed | {loss:.4f} nats a token, perplexity {perplexity:.2f} |
| made with | {command} |
| on | {device}; {versions} |
| licence | Apache-2.0, as jaxmux itself: model, tokenizer and text |

## What it says
Greedy continuations, cut at 128 tokens:

{samples}
## Limits
It knows some hundred words and facts, invented or simplified, and no others. It never saw the demo
tasks' formats. Texts of more than about 300 tokens are rare in what it was trained on.
"""


def write_card(folder: Path, facts: dict[str, object], generate: Callable[[str], str]) -> None:
    """Writes README.md, the model card."""
    samples = "".join(f"```text\n{p} >>>{generate(p)}\n```\n" for p in _PROMPTS)
    names = ("jax", "optax", "tokenizers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    device = jax.devices()[0].device_kind
    card = _CARD.format(config=CONFIG, samples=samples, versions=versions, device=device, **facts)
    (folder / "README.md").write_text(card)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes the demo's base model.")
    parser.add_argument("--out", type=Path, default=Path("jaxmux/demo/base"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=60_000_000, help="size of the corpus")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="for writing the corpus"
    )
    parser.add_argument("--steps", type=int, help="training steps; overrides --minutes")
    parser.add_argument("--minutes", type=float, default=2.5, help="training and compilation time")
    parser.add_argument("--rows", type=int, default=128, help=f"{ROW_LEN}-token rows in a batch")
    parser.add_argument("--block", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--warmup", type=int, default=200, help="steps, more than two blocks")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: by the device")
    options = parser.parse_args()
    if options.dtype is None:
        options.dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return options


def main() -> None:
    """Makes the tokenizer, the corpus, the model and the model card."""
    options = _parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tokenizer = train_tokenizer(options.seed)
    save_tokenizer(tokenizer, options.out)
    print(f"tokenizer: {time.perf_counter() - began:.0f} s", flush=True)
    write = partial(write_rows, str(options.out / "tokenizer.json"), processes=options.processes)
    # The shards of the corpus have consecutive seeds; held-out text uses a seed beyond all of them.
    corpus = write(seed=options.seed + 1, tokens=options.tokens)
    held_out = write(seed=options.seed + 10**6, tokens=64 * ROW_LEN)[:64]
    print(f"corpus: {corpus.size:,} tokens, {time.perf_counter() - began:.0f} s", flush=True)

    masters, steps = pretrain(corpus, options)
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
    save_backbone(Backbone(CONFIG, stored, str(options.out)), options.out)
    weights = load_backbone(options.out, jnp.float32).weights
    loss = held_out_loss(weights, held_out)
    size = sum(path.stat().st_size for path in options.out.iterdir()) / 2**20
    print(f"loss on held-out text {loss:.4f}; {size:.1f} MiB in {options.out}")
    command = (
        f"`python scripts/make_demo_base.py --seed {options.seed} --tokens {options.tokens} "
        f"--steps {steps} --rows {options.rows} --warmup {options.warmup} --lr {options.lr} "
        f"--dtype {options.dtype}`"
    )
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
        "tokens": corpus.size,
        "steps": steps,
        "batch": options.rows * ROW_LEN,
        "epochs": steps * options.rows / len(corpus),
        "lr": options.lr,
        "loss": loss,
        "perplexity": math.exp(loss),
        "command": command,
    }
    write_card(options.out, facts, generator(weights, tokenizer))
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
