"""Cards of adapters, read by the parser of huggingface_hub and by a reader of Markdown's rules."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from jaxmux.data import Rendering
from jaxmux.peft.model_card import Notes, adapter_card, merged_card, model_name, public_name

LORA = {"peft_type": "LORA", "r": 12}
HOSTILE = [
    'a"b\n---\nlicense: other\n---\n.jsonl',
    "`]|<script>alert(1)</script>``` |\u2028# heading",
    "\ud800\x00\u202e-->",
    "",
]


def card(settings=LORA, base="/models/Llama-3.2-1B", notes=None, merges=True) -> str:
    return adapter_card(settings, base, "nf4", "lora", merges, notes)


def parsed(text: str, tmp_path) -> ModelCard:
    path = tmp_path / "README.md"
    path.write_text(text)
    return ModelCard.load(path)


def test_the_metadata_are_those_that_peft_writes(tmp_path):
    found = parsed(card(), tmp_path).data.to_dict()
    # The keys and values of `PeftModel.create_or_update_model_card`, without the folder of the
    # base model, and with our own tag.
    assert found == {
        "base_model": "Llama-3.2-1B",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["base_model:adapter:Llama-3.2-1B", "jaxmux", "lora", "transformers"],
    }
    validate_repo_id(found["base_model"])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/base", "base"),
        ("/cache/models--meta-llama--Llama-3.2-1B/snapshots/0123abcd", "meta-llama/Llama-3.2-1B"),
        ("meta-llama/", "meta-llama"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
    ],
)
def test_a_backbone_is_named_without_its_folder(path, name, tmp_path):
    assert model_name(path) == name
    text = card(base=path)
    assert parsed(text, tmp_path).data.base_model == name
    assert "/home" not in text and "/cache" not in text


@pytest.mark.parametrize(
    ("noted", "public"),
    [
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("/home/me/Llama-3.2-1B", None),
        ("./models/base", None),
        ("models/a/b", None),
        ("Llama-3.2-1B", None),
        ("", None),
        (None, None),
        (3, None),
    ],
)
def test_a_name_that_transformers_has_noted_is_the_public_one(noted, public, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": noted}))
    assert public_name(str(tmp_path)) == public
    text = card(base=str(tmp_path))
    assert (f'name = "{public}"' in text) == ("vllm serve meta" in text) == (public is not None)
    assert str(tmp_path) not in text
    (tmp_path / "config.json").write_text("[]")
    assert public_name(str(tmp_path)) is None


@pytest.mark.parametrize("base", ["/x/two words", "/x/a--b", "/x/-a", "/x/" + "a" * 97, "/x/é"])
def test_a_name_that_the_hub_refuses_is_left_out_of_the_metadata(base, tmp_path):
    found = parsed(card(base=base), tmp_path)
    assert found.data.base_model is None and found.data.tags == ["jaxmux", "lora", "transformers"]
    assert model_name(base) in found.text


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_users_breaks_neither_yaml_nor_markdown(text, tmp_path):
    values = {"File": text, "Files": [text, "b"], "Object": {"key": text, "list": [text]}}
    notes = Notes(text, {"Data": values}, ["org/name"])
    for whole in (card(base=f"/x/{text}", notes=notes), merged_card(f"/x/{text}", "lora", notes)):
        whole.encode(errors="strict")
        found = parsed(whole, tmp_path)
        assert found.data.to_dict().keys() <= {
            "base_model",
            "base_model_relation",
            "library_name",
            "pipeline_tag",
            "tags",
            "datasets",
        }
        assert headings(found.text)[1:] == ["## Data", "## Versions", "## Use"]
        assert cells(found.text, "File") == 2 and cells(found.text, "Files") == 2
        assert "<script>" not in without_code(found.text)
        block = re.search(r"^```json\n(.*?)\n```$", found.text, re.S | re.M)[1]
        assert json.loads(block) == {"key": text, "list": [text]}


def without_code(text: str) -> str:
    """Markdown without its blocks and spans of code, by CommonMark's rules."""
    text = re.sub(r"^```[^\n]*\n.*?^```$", "", text, flags=re.S | re.M)
    return re.sub(r"(?<!`)(`+)(?!`)([^\n]*?)(?<!`)\1(?!`)", "", text)


def headings(text: str) -> list[str]:
    return [line for line in without_code(text).splitlines() if line.startswith("#")]


def cells(text: str, label: str) -> int:
    """The cells of a table's row; a bar behind a backslash ends none."""
    (row,) = (line for line in text.split("\n") if line.startswith(f"| {label} |"))
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def test_only_what_vllm_loads_is_said_to_be_loaded_by_it():
    assert "--max-lora-rank 16" in card()
    assert "no room for rank 1024" in card(LORA | {"r": 1024})
    assert "--serving" in card(LORA | {"rank_pattern": {"q_proj": 4}})
    assert "vllm serve" not in card(LORA | {"use_dora": True})
    assert "--merge" in card(LORA | {"use_dora": True})
    assert "--merge" not in card({"peft_type": "PROMPT_TUNING"}, merges=False)


@pytest.mark.parametrize("settings", [LORA, {"config": {}}])
def test_a_card_says_how_prompts_are_rendered(settings, tmp_path):
    own = Rendering(chat_templates=(None, "{{ messages }}"))
    for rendering, sentence in (
        (own, "on chats that the chat template in `chat_template.jinja` renders."),
        (own._replace(texts=True), "renders, and on texts without a template."),
        (Rendering(chat_templates=(None,)), "the chat template of the model's tokenizer renders."),
        (Rendering(texts=True), "on texts without a chat template"),
    ):
        text = adapter_card(settings, "/models/base", None, "lora", True, None, rendering)
        assert sentence in parsed(text, tmp_path).text
        has_file = rendering.own_template is not None
        assert ("tokenizer.chat_template = file.read()" in text) == has_file
        served = "--chat-template chat_template.jinja" in text
        assert served == (has_file and settings is LORA)
        merged = merged_card("/models/base", "lora", None, rendering)
        assert ("chats that the chat template of the tokenizer" in merged) == has_file
    assert "template" not in card()


def test_bottlenecks_are_loaded_by_adapters(tmp_path):
    found = parsed(card({"config": {}}), tmp_path)
    assert found.data.library_name == "adapter-transformers" and "adapters.init" in found.text


def test_the_metadata_of_a_merged_checkpoint_are_those_of_a_model(tmp_path):
    found = parsed(merged_card("/models/base", "dora", Notes("billing", {})), tmp_path)
    assert found.data.library_name == "transformers"
    assert found.data.to_dict()["base_model_relation"] == "finetune"


def test_the_tokenizer_is_read_from_its_file_as_training_reads_it(tmp_path):
    for settings in ({}, {"config": {}}):
        assert "= AutoTokenizer.from_pretrained" in card(settings, base=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    merged = merged_card(str(tmp_path), "dora", None)
    for text in (merged, card(base=str(tmp_path)), card({"config": {}}, base=str(tmp_path))):
        assert "import AutoModelForCausalLM, PreTrainedTokenizerFast\n" in text
        assert "tokenizer = PreTrainedTokenizerFast.from_pretrained" in text
        assert "AutoTokenizer" not in text


def test_a_number_as_the_name_of_a_backbone_stays_text():
    front = card(base="/models/1e5").split("---")[1]
    assert yaml.safe_load(front)["base_model"] == "1e5"
