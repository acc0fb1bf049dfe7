"""Samples hold all tokens of the text, and their masks mark exactly the tokens to learn."""

import functools
import itertools
import json
import re

import numpy as np
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from jaxmux.data import DataError, Source, load_samples, load_tokenizer, tokenization
from jaxmux.generation import Conversation
from jaxmux.generation.requests import Request, read_prompt
from jaxmux.models import BackboneConfig

from .conftest import CHATML

PROMPT, COMPLETION = "What is the capital of France?", " The capital is Paris."
PAIR = {"prompt": PROMPT, "completion": COMPLETION}


def load(path, tokenizer, max_length=512, vocab_size=None, **options):
    return load_samples(
        Source(str(path), **options), tokenizer, max_length=max_length, vocab_size=vocab_size
    )


def load_one(path, tokenizer, **options):
    (sample,) = load(path, tokenizer, **options).samples
    return sample


def test_sample_is_the_whole_text_and_eos(tokenizer, write_jsonl):
    sample = load_one(write_jsonl(PAIR), tokenizer)
    expected = [*tokenizer(PROMPT + COMPLETION)["input_ids"], tokenizer.eos_token_id]
    assert sample.input_ids.dtype == np.int32
    assert sample.target_mask.dtype == bool
    np.testing.assert_array_equal(sample.input_ids, expected)
    assert sample.stream_length == len(expected) - 1
    assert sample.target_tokens == sample.target_mask.sum()


def test_targets_are_completion_and_eos(tokenizer, write_jsonl):
    sample = load_one(write_jsonl(PAIR), tokenizer)
    *completion, last = sample.input_ids[sample.target_mask]
    assert last == tokenizer.eos_token_id
    assert tokenizer.decode(completion).strip() == COMPLETION.strip()
    prompt_tokens = sample.input_ids[~sample.target_mask]
    assert tokenizer.decode(prompt_tokens, skip_special_tokens=True) == PROMPT


def test_loss_on_all_targets_everything_but_the_first_token(tokenizer, write_jsonl):
    for fields in (PAIR, {"text": PROMPT + COMPLETION}):
        sample = load_one(write_jsonl(fields), tokenizer, loss_on="all")
        assert not sample.target_mask[0]
        assert sample.target_mask[1:].all()


def test_token_across_the_border_is_a_target(gpt, write_jsonl):
    # "capital" is one token, so its first half cannot be a token of its own.
    sample = load_one(write_jsonl({"prompt": "The cap", "completion": "ital"}), gpt)
    assert gpt.decode(sample.input_ids[sample.target_mask]) == " capital<|endoftext|>"


def test_characters_of_several_tokens_are_targets_whole(gpt, write_jsonl):
    sample = load_one(write_jsonl({"prompt": "a ", "completion": "日本🙂"}), gpt)
    assert gpt.decode(sample.input_ids[sample.target_mask]) == "日本🙂<|endoftext|>"


@pytest.mark.parametrize("text", ["The dog", "<s>The dog", "<s> The dog</s>"])
def test_bos_and_eos_occur_once_even_where_the_text_spells_them(llama, write_jsonl, text):
    sample = load_one(write_jsonl({"text": text}), llama)
    assert np.flatnonzero(sample.input_ids == llama.bos_token_id).tolist() == [0]
    assert np.flatnonzero(sample.input_ids == llama.eos_token_id).tolist() == [sample.stream_length]


def test_eos_that_the_tokenizer_appends_is_a_target_and_not_doubled(llama, write_jsonl):
    path = write_jsonl(PAIR)
    expected = load_one(path, llama)
    llama.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", llama.bos_token_id), ("</s>", llama.eos_token_id)],
    )
    sample = load_one(path, llama)
    np.testing.assert_array_equal(sample.input_ids, expected.input_ids)
    np.testing.assert_array_equal(sample.target_mask, expected.target_mask)


def test_sample_id_is_the_record_index_even_if_records_are_dropped(gpt, write_jsonl):
    long = {**PAIR, "completion": COMPLETION * 20}
    samples, read, truncated, dropped, *_ = load(
        write_jsonl(PAIR, long, PAIR), gpt, max_length=60, overlong="drop"
    )
    assert [s.sample_id for s in samples] == [0, 2]
    assert (read, truncated, dropped) == (3, 0, 1)


def test_truncation_keeps_the_beginning_and_is_counted(tokenizer, write_jsonl):
    path = write_jsonl(PAIR, {"prompt": "The", "completion": " dog"})
    whole = load(path, tokenizer).samples
    max_length = len(whole[0].input_ids) - 3
    samples, read, truncated, dropped, *_ = load(path, tokenizer, max_length=max_length)
    assert (read, truncated, dropped) == (2, 1, 0)
    np.testing.assert_array_equal(samples[0].input_ids, whole[0].input_ids[:max_length])
    np.testing.assert_array_equal(samples[0].target_mask, whole[0].target_mask[:max_length])
    np.testing.assert_array_equal(samples[1].input_ids, whole[1].input_ids)


def test_sample_of_exactly_max_length_is_kept_whole(tokenizer, write_jsonl):
    path = write_jsonl(PAIR)
    n = len(load_one(path, tokenizer).input_ids)
    assert load(path, tokenizer, max_length=n, overlong="error").truncated == 0
    with pytest.raises(DataError, match=f"train.jsonl:1: {n} tokens exceed max_length={n - 1}"):
        load(path, tokenizer, max_length=n - 1, overlong="error")


def test_sample_that_truncation_leaves_without_targets_is_dropped(gpt, write_jsonl):
    path = write_jsonl(
        {"prompt": PROMPT * 5, "completion": "x"}, {"prompt": "a", "completion": "b"}
    )
    samples, read, truncated, dropped, *_ = load(path, gpt, max_length=16)
    assert [s.sample_id for s in samples] == [1]
    assert (read, truncated, dropped) == (2, 0, 1)


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_no_sample_left_is_refused(gpt, write_jsonl, overlong):
    path = write_jsonl({"prompt": PROMPT * 5, "completion": "x"})
    with pytest.raises(DataError, match=re.escape(path) + ": no samples left.*max_length=16"):
        load(path, gpt, max_length=16, overlong=overlong)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"prompt": PROMPT, "completion": ""}, {}),
        ({"instruction": PROMPT, "output": ""}, {}),
        ({"text": ""}, {}),
        ({"prompt": "", "completion": ""}, {"loss_on": "all"}),
    ],
)
def test_record_without_target_tokens_is_named(tokenizer, write_jsonl, fields, options):
    good = {name: "The dog" for name in fields}
    with pytest.raises(DataError, match="train.jsonl:2: no target tokens"):
        load(write_jsonl(good, fields), tokenizer, **options)


def test_later_record_lacking_a_field_is_named(gpt, write_jsonl):
    path = write_jsonl(PAIR, PAIR, {"prompt": "a", "answer": "b"})
    problem = ":3: no field 'completion'.*found fields: 'prompt', 'answer'"
    with pytest.raises(DataError, match=re.escape(path) + problem):
        load(path, gpt)


def test_token_outside_the_vocabulary_names_tokenizer_and_sizes(gpt, gpt_folder, write_jsonl):
    path = write_jsonl(PAIR)
    largest = int(load_one(path, gpt).input_ids.max())
    load(path, gpt, vocab_size=largest + 1)
    with pytest.raises(DataError, match=f"train.jsonl:1: token id {largest}") as caught:
        load(path, gpt, vocab_size=largest)
    for part in (str(gpt_folder), f"vocabulary of {largest}", f"has {len(gpt)} tokens"):
        assert part in str(caught.value)


def test_tokenizer_without_eos_is_refused(gpt, gpt_folder, write_jsonl):
    gpt.eos_token = None
    with pytest.raises(DataError, match=f"train.jsonl: .*{gpt_folder} has no EOS"):
        load(write_jsonl(PAIR), gpt)


def test_max_length_below_two_is_refused(gpt, write_jsonl):
    with pytest.raises(DataError, match="max_length=1"):
        load(write_jsonl(PAIR), gpt, max_length=1)


def test_samples_do_not_depend_on_their_neighbours(tokenizer, write_jsonl):
    records = [{"prompt": PROMPT[:n], "completion": COMPLETION[: n + 1]} for n in range(1, 30)]
    together = load(write_jsonl(*records), tokenizer).samples
    for record, sample in zip(records, together, strict=True):
        alone = load_one(write_jsonl(record), tokenizer)
        np.testing.assert_array_equal(sample.input_ids, alone.input_ids)
        np.testing.assert_array_equal(sample.target_mask, alone.target_mask)


def test_tokenizer_folder_errors_name_the_folder(tmp_path):
    with pytest.raises(DataError, match="nowhere: tokenizer folder not found"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}: holds no tokenizer (tokenizer")):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}: no tokenizer can be loaded")):
        load_tokenizer(tmp_path)


@pytest.fixture
def stories260k(shared_dir):
    return load_tokenizer(shared_dir / "models" / "stories260k")


def test_stories260k_tokenizer_gives_the_golden_ids(stories260k, shared_dir):
    golden = json.loads((shared_dir / "models" / "stories260k" / "golden.json").read_text())
    for case in golden:
        assert stories260k(case["prompt"])["input_ids"] == case["input_ids"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["instruct_small", "gsm8k"])
def test_real_data_trains_on_completion_and_eos_only(stories260k, shared_dir, name):
    path = shared_dir / "data" / name / "test.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    samples = load(path, stories260k, max_length=4096).samples
    for record, sample in zip(records, samples, strict=True):
        prompt_ids = stories260k(record["prompt"])["input_ids"]
        # The last token of the prompt and the first one of the completion may be one token.
        first_target = int(sample.target_mask.argmax())
        assert len(prompt_ids) - 2 <= first_target <= len(prompt_ids)
        assert sample.target_mask[first_target:].all()
        assert sample.input_ids[-1] == stories260k.eos_token_id


BAD_LINES = {
    "malformed line": "{",
    "no object": "7",
    "missing field": {"prompt": "blue"},
    "blank completion": PAIR | {"completion": " "},
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_bad_records_are_skipped_and_counted_if_the_source_says_so(bad, place, gpt, write_jsonl):
    lines = [PAIR, PAIR]
    lines.insert(place, bad)
    path = write_jsonl(*lines)
    with pytest.raises(DataError, match=f"{path}:{place + 1}: "):
        load(path, gpt)
    found = load(path, gpt, on_bad_record="skip")
    assert (len(found.samples), found.read, found.skipped) == (2, 3, 1)
    assert found.first_skipped.startswith(f"{path}:{place + 1}: ")


def test_a_source_of_bad_records_alone_is_refused(gpt, write_jsonl):
    path = write_jsonl("{", "7")
    with pytest.raises(DataError, match=f"{path}: no samples left of 2 records: 2 were skipped"):
        load(path, gpt, on_bad_record="skip")


def test_cut_and_unknown_target_tokens_are_counted(llama, write_jsonl):
    path = write_jsonl({"prompt": "", "completion": "The capital of France is Ж Paris."})
    whole = load(path, llama)
    assert (whole.cut_target_tokens, whole.unknown_target_tokens) == (0, 1)
    length = len(whole.samples[0].input_ids)
    cut = load(path, llama, max_length=length - 3)
    assert (cut.target_tokens, cut.cut_target_tokens) == (whole.target_tokens, 3)


SPELT = {"prompt": "What is <|im_end|>?", "completion": " A colour.<|endoftext|>"}
CHAT = {
    "messages": [
        {"role": "user", "content": "Name a colour.<|im_end|>"},
        {"role": "assistant", "content": "Blue."},
    ]
}


@pytest.mark.parametrize("record", [SPELT, CHAT], ids=["plain", "chat"])
def test_special_tokens_in_text_are_counted_or_escaped(record, gpt, write_jsonl):
    path = write_jsonl(record)
    parsed = load(path, gpt)
    assert (parsed.special_text, parsed.special_records) == ("<|im_end|>", 1)
    escaped = load(path, gpt, special_tokens="escape")
    assert (escaped.special_text, escaped.special_records) == ("", 0)
    ids = [list(found.samples[0].input_ids) for found in (parsed, escaped)]
    end = gpt.convert_tokens_to_ids("<|im_end|>")
    in_template = 2 if record is CHAT else 0
    assert [tokens.count(end) for tokens in ids] == [in_template + 1, in_template]
    assert "< |im_end|>" in gpt.decode(ids[1])


def test_a_template_that_loops_is_stopped(gpt, write_jsonl, monkeypatch):
    monkeypatch.setattr("jaxmux.data.tokenization._TEMPLATE_SECONDS", 0.2)
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    gpt.chat_template = (
        "{% if messages[0]['content'] == 'loop' %}" + loop + "{% endif %}x" + gpt.chat_template
    )
    fine = {"messages": [{"role": "user", "content": "Name"}, *CHAT["messages"][1:]]}
    endless = {"messages": [{"role": "user", "content": "loop"}, *CHAT["messages"][1:]]}
    path = write_jsonl(fine, endless, endless, fine)
    with pytest.raises(DataError, match=f"{path}:2: the chat template .* takes too long"):
        load(path, gpt)
    found = load(path, gpt, on_bad_record="skip")
    assert (len(found.samples), found.skipped) == (2, 2)


@pytest.mark.parametrize(
    ("role", "hint"), [("asistant", "assistant"), ("human", "user"), ("gpt", "assistant")]
)
def test_an_unknown_role_is_named(role, hint, gpt, write_jsonl):
    path = write_jsonl({"messages": [{"role": role, "content": "Hi."}, *CHAT["messages"]]})
    with pytest.raises(DataError, match=f":1: message 0 .* '{role}'.*did you mean '{hint}'"):
        load(path, gpt)


def test_a_generation_block_around_nothing_is_named(gpt, write_jsonl):
    gpt.chat_template += "{% generation %}{% endgeneration %}"
    path = write_jsonl({"messages": [{"role": "user", "content": "Hi."}, *CHAT["messages"][1:]]})
    with pytest.raises(DataError, match=":1: no target tokens: .*{% generation %} stands around"):
        load(path, gpt)


@pytest.mark.parametrize("depth", [500, 900, 5000])
def test_a_deeply_nested_record_is_an_error_of_the_data(depth, tokenizer, tmp_path):
    path = tmp_path / "deep.jsonl"
    nested = "[" * depth + "]" * depth
    path.write_text(f'{{"text": "A cat."}}\n{{"text": "A dog.", "more": {nested}}}\n')
    assert load(path, tokenizer, on_bad_record="skip").skipped <= 1
    if depth > 800:
        with pytest.raises(DataError, match=f"{path}:2: .*(deeply|recursion)"):
            load(path, tokenizer)


def test_samples_do_not_depend_on_how_texts_are_grouped(tokenizer, write_jsonl, monkeypatch):
    rows = [{"text": "A cat. " * n} for n in (1, 30, 2, 1, 9, 40, 1)]
    path = write_jsonl(*rows)
    expected = load(path, tokenizer).samples
    calls = []
    tokenize = tokenization._tokenize_group
    monkeypatch.setattr(tokenization, "_CHARACTERS_PER_CALL", 30)
    monkeypatch.setattr(
        tokenization, "_tokenize_group", lambda *args: calls.append(len(args[0])) or tokenize(*args)
    )
    found = load(path, tokenizer).samples
    assert calls == [1, 1, 2, 1, 1, 1]
    assert [s.sample_id for s in found] == [s.sample_id for s in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.target_mask, other.target_mask)


SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Name a colour,  then\n    return 2024\n\t\tdone ",
    " leading and    several   spaces\r\n\r\n",
    "e\u0301tude Ärger ﬁn Привет 你好 👩‍👧🙂 def f(x): # no",
    "a <|im_end|>  b</s>\nc <s> d",
]


def byte_level(*before, prefix_space=False) -> Tokenizer:
    core = Tokenizer(models.BPE())
    splits = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=not before)
    core.pre_tokenizer = pre_tokenizers.Sequence([*before, splits])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*TEXTS, "Name a colour, then\n    return"] * 9, trainer)
    return core


def pieces(normalizer=None, scheme=None) -> Tokenizer:
    """A tokenizer like those that are made from SentencePiece, with bytes for unknown letters."""
    vocab = dict.fromkeys([*SPECIALS, *(f"<0x{n:02X}>" for n in range(256))])
    merges = [("▁", "▁"), ("c", "o"), ("▁", "a"), ("N", "a"), ("▁", "Na"), ("l", "o")]
    letters = dict.fromkeys(chain for pair in merges for part in pair for chain in part)
    vocab |= letters | dict.fromkeys("".join(pair) for pair in merges)
    core = Tokenizer(
        models.BPE(
            {token: n for n, token in enumerate(vocab)},
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    core.add_special_tokens(SPECIALS)
    core.normalizer = normalizer
    if scheme:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    return core


def unigram() -> Tokenizer:
    letters = [(chr(n), -5.0 - n / 1000) for n in range(33, 127)]
    core = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁a", -3.0), *letters], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens(SPECIALS)
    return core


def taking_spaces() -> Tokenizer:
    """A tokenizer whose end of a turn takes the white space around it with it."""
    content = json.loads(byte_level().to_str())
    for token in content["added_tokens"]:
        token["lstrip"] = token["rstrip"] = token["content"] in ("<|im_end|>", "</s>")
    return Tokenizer.from_str(json.dumps(content))


_LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
_DIGITS = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
TOKENIZERS = {
    "Qwen": lambda: byte_level(),
    "DeepSeek": lambda: byte_level(_DIGITS, pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "SmolLM": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "GPT with a space": lambda: byte_level(prefix_space=True),
    "Llama 2": lambda: pieces(_LEGACY),
    "Llama 2 without legacy": lambda: pieces(scheme="first"),
    "Yi": lambda: pieces(normalizers.Replace(" ", "▁")),
    "Unigram": unigram,
    "taking spaces": taking_spaces,
}
BOS, EOS = 1, 2


def save(core: Tokenizer, folder, model_type="llama", name="PreTrainedTokenizerFast", **settings):
    """A folder with a tokenizer.json and the files that say which class reads it."""
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = named | ({"tokenizer_class": name} if name else {}) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokens_are_those_of_tokenizer_json_whatever_the_class(kind, tmp_path, caplog):
    """The tokenizers package reads the file as it stands."""
    core = TOKENIZERS[kind]()
    texts = [text for text in TEXTS if kind != "Unigram" or text.isascii()]
    classes = ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", None]
    for n, (model_type, name) in enumerate(itertools.product(["llama", "qwen2"], classes)):
        folder = save(core, tmp_path / str(n), model_type, name)
        caplog.clear()
        tokenizer = load_tokenizer(folder)
        of_class = AutoTokenizer.from_pretrained(folder)
        differs = False
        for text in texts:
            ids = core.encode(text).ids
            assert tokenizer(text)["input_ids"] == ids, (model_type, name, text)
            decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            assert decoded == core.decode(ids, skip_special_tokens=False)
            differs |= of_class(text)["input_ids"] != ids
            differs |= of_class.decode(ids, clean_up_tokenization_spaces=False) != decoded
        warnings = [r for r in caplog.messages if r.startswith(f"{folder}: warning: ")]
        assert len(warnings) == differs
        assert not differs or f"makes a {type(of_class).__name__} of this folder" in warnings[0]
        load_tokenizer(folder)
        assert len([r for r in caplog.messages if r.startswith(str(folder))]) == differs


def test_special_tokens_that_only_the_class_names_stay(tmp_path):
    folder = save(pieces(_LEGACY), tmp_path / "a")
    settings = {"tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert len(tokenizer) == pieces(_LEGACY).get_vocab_size()


def test_a_folder_that_autotokenizer_refuses_is_read_by_its_file(tmp_path, caplog):
    folder = save(byte_level(), tmp_path / "a", "unheard_of", name=None)
    settings = {"auto_map": {"AutoTokenizer": ["code.Slow", "code.Fast"]}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert tokenizer(TEXTS[0])["input_ids"] == byte_level().encode(TEXTS[0]).ids
    assert tokenizer.eos_token == "</s>"
    assert "AutoTokenizer does not load this folder" in "".join(caplog.messages)


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", BOS), ("</s>", EOS), ("<|im_end|>", 4)]
    )


POST_PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(trim_offsets=False),
    "BOS": template("<s> $A"),
    "EOS": template("$A </s>"),
    "BOS and EOS": template("<s> $A </s>"),
    "another EOS": template("<s> $A <|im_end|>"),
    "bytes, BOS and EOS": processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template("<s> $A </s>")]
    ),
    "RoBERTa's": processors.RobertaProcessing(("</s>", EOS), ("<s>", BOS), trim_offsets=False),
}
byte_level_json = functools.cache(lambda: byte_level().to_str())
WITH_BOS = "{{ bos_token }}" + CHATML
WITHOUT_BOS = CHATML


@pytest.mark.parametrize("flags", [*itertools.product([None, True, False], repeat=2)], ids=str)
@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_training_and_generation_read_the_same_tokens(name, flags, tmp_path, write_jsonl, caplog):
    core = Tokenizer.from_str(byte_level_json())
    if POST_PROCESSORS[name] is not None:
        core.post_processor = POST_PROCESSORS[name]
    settings = zip(("add_bos_token", "add_eos_token"), flags, strict=True)
    settings = {key: value for key, value in settings if value is not None}
    folder = save(core, tmp_path / "a", **settings)
    tokenizer = load_tokenizer(folder)
    config = BackboneConfig("LlamaForCausalLM", core.get_vocab_size(), 8, 8, 1, 1, 1, 8)

    def prompt_ids(request: Request) -> list[int]:
        return read_prompt(request, tokenizer, config, 1).tokens

    # Transformers, too, does as tokenizer.json says.
    adds_bos = core.encode("a").ids[0] == BOS
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == core.encode("a").ids
    warned = f"{folder}: warning: tokenizer_config.json has add_bos_token" in caplog.text
    assert warned == (flags[0] is not None and flags[0] != adds_bos)

    plain = core.encode("Name a colour", add_special_tokens=False).ids
    answer = core.encode(" Red", add_special_tokens=False).ids
    cases = list(itertools.product(("", "<s>"), ("", "</s>")))
    pairs = [{"prompt": f"{bos}Name a colour", "completion": f" Red{end}"} for bos, end in cases]
    samples = load(write_jsonl(*pairs), tokenizer).samples
    for (bos, _), pair, sample in zip(cases, pairs, samples, strict=True):
        wanted = [BOS] * (adds_bos or bos != "") + plain
        assert prompt_ids(Request(pair["prompt"])) == wanted
        assert sample.input_ids.tolist() == [*wanted, *answer, EOS]
        assert sample.target_mask.tolist() == [False] * len(wanted) + [True] * (1 + len(answer))
    for jinja in (WITH_BOS, WITHOUT_BOS):
        tokenizer.chat_template = jinja
        roles = ("user", "assistant")
        chats = [
            [
                {"role": role, "content": text}
                for role, text in zip(roles, pair.values(), strict=True)
            ]
            for pair in pairs
        ]
        samples = load(write_jsonl(*({"messages": chat} for chat in chats)), tokenizer).samples
        for chat, sample in zip(chats, samples, strict=True):
            text = Conversation(tokenizer, chat[:1]).prompt()
            ids = prompt_ids(Request(text, is_rendered=True))
            assert ids == core.encode(text, add_special_tokens=False).ids
            assert (ids[0] == BOS) == (jinja is WITH_BOS)
            assert sample.input_ids[~sample.target_mask].tolist()[: len(ids)] == ids


def test_a_prompt_with_tokens_that_the_backbone_lacks_is_refused(gpt):
    config = BackboneConfig("LlamaForCausalLM", 200, 8, 8, 1, 1, 1, 8)
    with pytest.raises(DataError, match="outside the backbone's vocabulary of 200; the tokenizer"):
        read_prompt(Request("What is the capital of France?"), gpt, config, 1)
