"""Tokenizers of folders, and how they divide a text into tokens."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import batched, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Otherwise transformers warns, when it is imported, that torch is missing; tokenizers do not need
# torch. Only functions import transformers, because the import takes seconds.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_FILE = "tokenizer.json"
# Texts on which two tokenizers are compared.
_PROBES = (
    "Hello world, how are you? I'm fine; they'll say it's 20,000.",
    " leading space, two  spaces, four    spaces and one behind ",
    "def f(x, y=[1, 2]):\n    if x != 10:\n\t\treturn {'a': x**2}  # don't\n\n\n\r\n\r done",
    "1234567890 3.14159 2024-01-31 1 22 333 4444",
    "Ärger über naïve Füße; e\u0301tude cafe\u0301 ﬁn Ⅳ ½ № ｆｕｌｌ",
    "Привет мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界。 こんにちは世界 안녕하세요 세계",
    "👩‍👩‍👧‍👦 🙂🙂 🇫🇷 \u00a0nbsp\u200bzero \ufeff \u3000ideographic ▁ Ġ",
    "CamelCase snake_case UPPER lower! <b>x</b> [INST] ## ... --- === https://a.b/c?d=e&f",
    "\n\nbegins with lines\n  \n ends with them\n\n",
)


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Loads the Hugging Face tokenizer of a folder, usually the backbone's, from local files only.

    If the folder has a tokenizer.json, its normalizer, pre-tokenizer, vocabulary, added tokens,
    decoder and post-processor are used as they are. `AutoTokenizer` would replace some of them by
    those of a class that belongs to the model's type; a warning is logged once if this class gives
    other tokens or texts. tokenizer_config.json adds the names of special tokens and the chat
    templates. Its `add_bos_token` and `add_eos_token` change nothing, as in transformers 5; a
    warning is logged once if `add_bos_token` contradicts tokenizer.json.

    Raises:
      DataError: the folder is missing, holds no tokenizer that can be loaded, or its tokenizer is
        not "fast". Only fast tokenizers return the character offsets of tokens, with which the
        tokens that count in the loss are found.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: tokenizer folder not found")
    if not any(folder.glob("tokenizer*")):
        raise DataError(f"{folder}: holds no tokenizer (tokenizer.json, tokenizer_config.json)")
    try:
        if (folder / _FILE).is_file():
            tokenizer = _tokenizer_of_file(folder)
        else:
            tokenizer = _tokenizer_of_class(folder)
    except Exception as error:  # transformers and tokenizers raise many kinds of exceptions
        raise DataError(f"{folder}: no tokenizer can be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise DataError(
            f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer (no tokenizer.json)"
        )
    return tokenizer


def _tokenizer_of_class(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer as transformers loads it. The folder's files name its class; otherwise the
    class follows from the model's type."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )


def _tokenizer_of_file(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder's tokenizer.json. Warns if the class of transformers gives other
    results."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    added = content.get("added_tokens", ())
    texts = [*_PROBES, *_around_added_tokens(added)]
    tokenizer, names, difference = None, {}, ""
    try:
        of_class = _tokenizer_of_class(folder)
    except Exception as error:  # a class may expect another kind of vocabulary, or need code
        difference = f"AutoTokenizer does not load this folder ({error})"
    else:
        by_class = _probed(of_class, texts)
        # Some classes have special tokens that no file names. They are used if the file has them.
        spelt = {token["content"] for token in added}
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):
            spelt |= {piece for piece, _ in vocabulary}
        names = {
            name: token
            for name, token in of_class.special_tokens_map.items()
            if isinstance(token, str) and (token in spelt or token in vocabulary)
        }
        tokenizer = of_class if type(of_class) is PreTrainedTokenizerFast else None
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, **names
        )
    # transformers adds special tokens again, and may change which white space they absorb. Restore
    # the settings of the file.
    tokenizer.backend_tokenizer.add_tokens(
        [AddedToken(**{k: v for k, v in token.items() if k != "id"}) for token in added]
    )
    if not difference and (example := _difference(tokenizer, texts, by_class)):
        difference = (
            f"AutoTokenizer makes a {type(of_class).__name__} of this folder, which does not do "
            f"what tokenizer.json says: {example}"
        )
    if difference:
        _warn(
            f"{folder}: warning: {difference}. jaxmux uses tokenizer.json. In other programs, load "
            "it by PreTrainedTokenizerFast.from_pretrained to get the same tokens"
        )
    if difference := _other_first_token(folder, tokenizer):
        _warn(f"{folder}: warning: {difference}")
    return tokenizer


def _around_added_tokens(added: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Texts that contain all added tokens, 64 in each, because some tokenizers have thousands."""
    for group in batched((token["content"] for token in added), 64):
        yield "".join(f"a {token} b{token}c\n{token}" for token in group)


class _Probe(NamedTuple):
    """The tokens of a text (`ids`), these tokens together with the tokens that the tokenizer adds
    (`all_ids`), and the text of `ids` (`decoded`)."""

    ids: list[int]
    all_ids: list[int]
    decoded: str


def _probed(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[_Probe]:
    ids, all_ids = (
        tokenizer(list(texts), add_special_tokens=added, verbose=False)["input_ids"]
        for added in (False, True)
    )
    decoded = [tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in ids]
    return list(map(_Probe, ids, all_ids, decoded))


def _difference(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], by_class: Sequence[_Probe]
) -> str:
    """Describes the first difference between the tokens or texts of a tokenizer and those of a
    class; empty if there is none."""
    for text, of_file, of_class in zip(texts, _probed(tokenizer, texts), by_class, strict=True):
        for ids, others in ((of_file.ids, of_class.ids), (of_file.all_ids, of_class.all_ids)):
            if ids == others:
                continue
            start = next(n for n, pair in enumerate(zip_longest(ids, others)) if len({*pair}) > 1)
            shown, instead = (
                " ".join(map(str, tokenizer.convert_ids_to_tokens(each[start : start + 4])))
                for each in (ids, others)
            )
            return (
                f"in the text {text[:40]!r}…, token {start + 1} and the next ones are "
                f"{instead or 'missing'} for the class and {shown or 'missing'} for the file"
            )
        if of_file.decoded != of_class.decoded:
            return (
                f"the tokens of {text[:40]!r}… are decoded to {of_class.decoded[:40]!r}… by the "
                f"class and to {of_file.decoded[:40]!r}… by the file"
            )
    return ""


def _other_first_token(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Describes how `add_bos_token` in tokenizer_config.json contradicts tokenizer.json; empty if
    it does not. `add_eos_token` is not compared, because samples always end with EOS and prompts
    never do."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    wanted = settings.get("add_bos_token")
    adds = tokenizer.bos_token_id in _first_tokens(tokenizer)
    if wanted is None or bool(wanted) == adds:
        return ""
    return (
        f"tokenizer_config.json has add_bos_token: {json.dumps(wanted)}, but the post-processor of "
        f"tokenizer.json puts {'a' if adds else 'no'} BOS token before a text. jaxmux does as "
        "tokenizer.json says, like transformers 5"
    )


@cache
def _warn(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)


class Encoded(NamedTuple):
    """The tokens of a text. `offsets` has the range of characters of each token, start included and
    end excluded; empty ranges for added tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def encode(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], *, is_rendered: bool
) -> list[Encoded]:
    """Tokenizes texts in the same way for training samples and for prompts.

    Tokens that the tokenizer's post-processor puts before a text, such as BOS, are added, unless
    the text begins with them or `is_rendered` says that a chat template has added all special
    tokens. Tokens that it puts after a text are not added: a prompt is to be continued, and
    `load_samples` itself ends samples with EOS.
    """
    if not texts:
        return []
    # Not verbose, because the tokenizer would warn of long texts; callers cut or refuse these.
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    pairs = map(Encoded, encoded["input_ids"], encoded["offset_mapping"])
    if is_rendered or not (first := _first_tokens(tokenizer)):
        return list(pairs)
    return [_with_first_tokens(pair, first, tokenizer.bos_token_id) for pair in pairs]


def _first_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    inner, whole = (
        tokenizer(_PROBES[0], add_special_tokens=added)["input_ids"] for added in (False, True)
    )
    starts = (n for n in range(len(whole)) if whole[n : n + len(inner)] == inner)
    return whole[: next(starts, 0)]


def _with_first_tokens(text: Encoded, first: list[int], bos: int | None) -> Encoded:
    ids, offsets = text
    if ids[: len(first)] == first:
        return text
    if ids[:1] == [bos] and bos in first:
        ids, offsets = ids[1:], offsets[1:]
    return Encoded([*first, *ids], [(0, 0)] * len(first) + list(offsets))
