"""Prompts, the adapters that complete them, and their tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import DataError
from jaxmux.data.tokenizers import encode
from jaxmux.models import BackboneConfig
from jaxmux.peft import kind_of


class Request(NamedTuple):
    """A prompt, and the adapter that completes it.

    Attributes:
      prompt: the text, or its tokens. It must have at least one token.
      spec: the specification of the adapter, such as a `LoRA`; None if `adapter` is None.
      adapter: the trained weights, as `Engine.adapter` and `import_adapter` return them; None to
        use the backbone alone. Requests that share an adapter share this very object.
      is_rendered: whether the text contains its special tokens, as text of a chat template does. If
        not, the tokens that the tokenizer puts before a text are added, unless the text begins with
        them. Tokens that the tokenizer puts behind a text are never added.
      stops: tokens before which the completion ends, besides the tokenizer's end-of-sequence token;
        `end_of_turn` returns those of a chat template.
      tokenizer: the tokenizer of the prompt and the completion, from `adapter_tokenizer`; None for
        the backbone's.
    """

    prompt: str | Sequence[int]
    spec: Any = None
    adapter: Any = None
    is_rendered: bool = False
    stops: Sequence[int] = ()
    tokenizer: Any = None


class Prompt(NamedTuple):
    """The tokens of a request.

    Attributes:
      tokens: the tokens of the adapter's virtual tokens (see `Microbatch.tokens`), then those of
        the prompt.
      end: the position behind the last token that the sequence may have.
      stops: tokens before which the sequence ends.
    """

    tokens: list[int]
    end: int
    stops: frozenset[int] = frozenset()
    tokenizer: Any = None


def read_prompt(
    request: Request, tokenizer: Any, config: BackboneConfig, max_new_tokens: int
) -> Prompt:
    """The tokens of a request, and the limits of its completion; `tokenizer` is used if the request
    has none.

    Raises:
      DataError: the prompt has no tokens, has a token that the backbone does not know, or fills the
        backbone's context.
    """
    ids, tokenizer = request.prompt, request.tokenizer or tokenizer
    if isinstance(ids, str):
        ((ids, _),) = encode(tokenizer, [ids], is_rendered=request.is_rendered)
    if not ids:
        raise DataError("a prompt is empty, and the tokenizer adds no first token of its own")
    if (largest := max(ids)) >= config.vocab_size:
        raise DataError(
            f"a prompt has the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id "
            f"{largest}, which is outside the backbone's vocabulary of {config.vocab_size}; the "
            f"tokenizer is that of {tokenizer.name_or_path}"
        )
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
    return Prompt(tokens, min(len(tokens) + max_new_tokens, context), stops, tokenizer)


def distinct_adapters(requests: Sequence[Request]) -> tuple[list[Request], list[int]]:
    """A request for each different adapter object, and for every request the index of its adapter.

    There are at least two requests, because `Batch` needs two slots; the second may be one for the
    bare backbone.
    """
    index_of: dict[int, int] = {}
    firsts: list[Request] = []
    slots = []
    for request in requests:
        key = id(request.adapter) if request.spec else 0
        if key not in index_of:
            index_of[key] = len(firsts)
            firsts.append(request)
        slots.append(index_of[key])
    if len(firsts) == 1:
        firsts.append(Request(""))
    return firsts, slots
