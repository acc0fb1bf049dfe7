"""Prompts, the adapters that complete them, and their tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import DataError
from jaxmux.models import BackboneConfig
from jaxmux.peft import kind_of


class Request(NamedTuple):
    """A prompt, and the adapter that completes it.

    Attributes:
      prompt: the text, or its tokens. It must give at least one token.
      spec: the specification of the adapter, such as a `LoRA`; None if `adapter` is None.
      adapter: the trained weights, as `Engine.adapter` and `import_adapter` return them. Give
        `spec` and `adapter` together. None completes the prompt with the bare backbone. Requests
        that share an adapter share this very object.
      is_rendered: whether the text has its special tokens already, as those of chat templates do.
        Otherwise the tokenizer adds its first token, if it has one.
      stops: tokens before which the completion ends, besides the tokenizer's end-of-sequence token;
        those with which a chat template ends a turn are from `end_of_turn`.
    """

    prompt: str | Sequence[int]
    spec: Any = None
    adapter: Any = None
    is_rendered: bool = False
    stops: Sequence[int] = ()


class Prompt(NamedTuple):
    """The tokens of a request.

    Attributes:
      tokens: its tokens, after those that stand for its adapter's virtual tokens (see
        `Microbatch.tokens`).
      end: the place behind the last token that the sequence may have.
      stops: tokens before which the sequence ends.
    """

    tokens: list[int]
    end: int
    stops: frozenset[int] = frozenset()


def read_prompt(
    request: Request, tokenizer: Any, config: BackboneConfig, max_new_tokens: int
) -> Prompt:
    """The tokens of a request, and how far it may be completed.

    Args:
      request: the request.
      tokenizer: the backbone's tokenizer.
      config: configuration of the backbone.
      max_new_tokens: most new tokens.

    Raises:
      DataError: the prompt has no tokens, or fills the backbone's context.
    """
    ids = request.prompt
    if isinstance(ids, str):
        # Not verbose: the tokenizer would warn of long prompts, which are refused below.
        options = {"add_special_tokens": False} if request.is_rendered else {}
        ids = tokenizer(ids, verbose=False, **options)["input_ids"]
    if not ids:
        raise DataError("a prompt is empty, and the tokenizer adds no first token of its own")
    number = kind_of(request.spec).virtual_tokens(request.spec) if request.spec else 0
    tokens = [*(-1 - i for i in range(number)), *ids]
    if len(tokens) >= (context := config.max_position_embeddings):
        raise DataError(
            f"a prompt has {len(tokens)} tokens, but the backbone was made for {context} "
            "(max_position_embeddings), the completion and virtual tokens included"
        )
    stops = frozenset(request.stops)
    if tokenizer.eos_token_id is not None:
        stops |= {tokenizer.eos_token_id}
    return Prompt(tokens, min(len(tokens) + max_new_tokens, context), stops)


def distinct_adapters(requests: Sequence[Request]) -> tuple[list[Request], list[int]]:
    """A request for each different adapter, and the index of its own among them for every request.

    Adapters are different if they are different objects. There are at least two, of which the
    second one may be the bare backbone: `batches` needs two slots.
    """
    found: dict[int, int] = {}
    firsts: list[Request] = []
    slots = []
    for request in requests:
        key = id(request.adapter) if request.spec else 0
        if key not in found:
            found[key] = len(firsts)
            firsts.append(request)
        slots.append(found[key])
    if len(firsts) == 1:
        firsts.append(Request(""))
    return firsts, slots
