"""A small Llama with adapters of every kind, in float64 and in plain sums, as the oracle of tests.

It is written from the formulas of the papers and shares no code with jaxmux. One sequence at a
time; weights and adapters are those of jaxmux by value.
"""

import jax
import jax.numpy as jnp
import numpy as np

ACTIVATIONS = {"relu": lambda x: jnp.maximum(x, 0), "swish": lambda x: x / (1 + jnp.exp(-x))}


def loss_of(config, weights, kind, spec, adapter, samples, frozen=None):
    """Mean cross entropy of a global batch.

    Args:
      config: `BackboneConfig`.
      weights: `Backbone.weights`.
      kind: name of the adapter kind.
      spec: the specification of the adapter.
      adapter: its trained arrays, without a slot axis.
      samples: the samples.
      frozen: its other arrays, in a tree like that of the trained ones.
    """
    # Padding comes after the tokens, which do not see it.
    longest = max(len(sample.input_ids) for sample in samples)
    padded = [
        np.pad(
            (sample.input_ids, sample.target_mask), ((0, 0), (0, longest - len(sample.input_ids)))
        )
        for sample in samples
    ]
    ids, mask = np.moveaxis(np.asarray(padded, np.int32), 1, 0)

    @jax.vmap
    def losses(ids, mask):
        logits = logits_of(config, weights, kind, spec, adapter, ids[:-1], frozen)
        logits = logits[-(longest - 1) :]
        scores = jax.nn.log_softmax(logits, axis=-1)[np.arange(longest - 1), ids[1:]]
        return -jnp.sum(scores * mask[1:])

    return jnp.sum(losses(ids, mask)) / mask[:, 1:].sum()


def logits_of(config, weights, kind, spec, adapter, ids, frozen=None, inputs=None):
    """The logits of a sequence; the arguments are those of `loss_of`.

    Args:
      ids: the tokens.
      inputs: a dict that gets, by path and layer of every linear, what it reads.
    """
    layers, heads, kv = config.num_layers, config.num_heads, config.num_kv_heads
    w = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), weights)
    if kind in ("trained_tokens", "lora_tokens"):
        tokens = spec.indices if kind == "trained_tokens" else spec.trained_tokens
        (own,) = (own for own in adapter.values() if "rows" in own)
        rows = w["embed_tokens"]["weight"].at[np.array(tokens)].add(own["rows"][0])
        w["embed_tokens"] = {"weight": rows}
    x = w["embed_tokens"]["weight"][ids]
    head = w["lm_head"]["kernel"].values if "lm_head" in w else w["embed_tokens"]["weight"].T
    if kind == "lora_tables":
        added = {
            table: frozen[table]["scale"][0] * adapter[table]["a"][0] @ adapter[table]["b"][0]
            for table in ("embed_tokens", "lm_head")
            if table in adapter
        }
        x = x + added["embed_tokens"][ids] if "embed_tokens" in added else x
        head = head + added["lm_head"]
    if kind == "prompt_tuning":
        x = jnp.concatenate([adapter["embed_tokens"][0], x])
    n, half = len(x), config.head_dim // 2
    angles = np.arange(n)[:, None] / config.rope_theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(y):
        one, two = y[..., :half], y[..., half:]
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def norm(x, weight, name, layer):
        if kind == "ln_tuning" and name in adapter:
            weight = weight + adapter[name][layer]
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def linear(x, block, name, layer):
        own, module = w["layers"][block][name], f"{block}.{name}"
        if inputs is not None:
            inputs[module, layer] = x
        gains = adapter.get(module, {}) if kind == "ia3" else {}
        y = (x * gains["input"][layer] if "input" in gains else x) @ own["kernel"].values[layer]
        if kind == "lora" and module in adapter:
            a, b = adapter[module]
            y = y + spec.scale * (x @ a[layer]) @ b[layer]
        if kind in ("lora_pattern", "lora_tables", "lora_tokens") and module in adapter:
            a, b = adapter[module]["a"][layer], adapter[module]["b"][layer]
            y = y + frozen[module]["scale"][layer] * (x @ a) @ b
        if kind == "lora_from_weights" and module in adapter:
            # Ranks 2i and 2i + 1 are A and A - A0, and B - B0 and B0, of which A and B are trained.
            begun, scale = frozen[module], frozen[module]["scale"]
            a, a0 = adapter[module]["a"][layer][:, ::2], begun["a"][layer][:, ::2]
            a0 = a0 - begun["a"][layer][:, 1::2]
            b0 = begun["b"][layer][1::2]
            b = adapter[module]["b"][layer][::2] + b0
            y = y + scale * ((x @ a) @ b - (x @ a0) @ b0)
        if kind == "dora" and module in adapter:
            a, b = adapter[module]["a"][layer], adapter[module]["b"][layer]
            changed = own["kernel"].values[layer] + spec.scale * a @ b
            norm = jax.lax.stop_gradient(jnp.sqrt((changed**2).sum(axis=0)))
            y = (x @ changed) * adapter[module]["magnitude"][layer] / norm
        if kind == "diff_pruning" and module in adapter:
            columns = np.asarray(frozen[module]["columns"][layer], int) - 1
            y = y + x[:, columns] @ adapter[module]["values"][layer]
        if kind == "sparse_diff" and module in adapter:
            places = frozen[module]["entries"][layer].astype(int) - 1
            diff = jnp.zeros(own["kernel"].values[layer].shape)
            y = y + x @ diff.at[places >> 16, places % 2**16].set(adapter[module]["values"][layer])
        if kind == "vera" and module in adapter:
            u = x @ frozen[module]["a0"] * adapter[module]["ld"][layer]
            y = y + u @ frozen[module]["b0"] * adapter[module]["lb"][layer]
        y = y + own["bias"][layer] if "bias" in own else y
        return y * gains["output"][layer] if "output" in gains else y

    def add(x, h, block, layer):
        if kind != "bottleneck" or block not in adapter:
            return x + h
        own = adapter[block]
        z = {"pfeiffer": x + h, "houlsby": h, "parallel": x}[spec.form]
        act = ACTIVATIONS[spec.activation or ("swish" if spec.form == "houlsby" else "relu")]
        scaling = spec.scaling or (4.0 if spec.form == "parallel" else 1.0)
        z = act(z @ own["down"][layer] + own["down_bias"][layer])
        return x + h + scaling * (z @ own["up"][layer] + own["up_bias"][layer])

    causal = np.tril(np.ones((n, n), bool))
    for i in range(layers):
        h = norm(x, w["layers"]["input_layernorm"]["weight"][i], "input_layernorm", i)
        q, k, v = (linear(h, "self_attn", f"{name}_proj", i) for name in "qkv")
        q = rotate(q.reshape(n, heads, -1))
        k, v = rotate(k.reshape(n, kv, -1)), v.reshape(n, kv, -1)
        k, v = (jnp.repeat(y, heads // kv, axis=1) for y in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim)
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("hqk,khd->qhd", shares, v).reshape(n, -1)
        x = add(x, linear(out, "self_attn", "o_proj", i), "self_attn", i)
        name = "post_attention_layernorm"
        h = norm(x, w["layers"][name]["weight"][i], name, i)
        gate, up = (linear(h, "mlp", f"{name}_proj", i) for name in ("gate", "up"))
        h = linear(gate / (1 + jnp.exp(-gate)) * up, "mlp", "down_proj", i)
        x = add(x, h, "mlp", i)
    x = norm(x, w["norm"]["weight"], "norm", layers - 1)
    return x @ head
