"""Adapters and initialisations of Hugging Face PEFT that jaxmux leaves out, with the reasons, for
error messages."""

import re

# By name in small letters and digits, the usual spelling of the name and the reason.
_LEFT_OUT = {
    "boft": ("BOFT", "its butterfly factors would need a product of their own for every linear"),
    "oft": ("OFT", "its rotations give linears that read the same input different inputs"),
    "prefixtuning": (
        "prefix tuning",
        "it trains worse than prompts and low-rank adapters; take PromptTuning or LoRA",
    ),
    "modulestosave": (
        "modules_to_save",
        "it would be a whole copy for each task; train some rows of the embedding "
        "(`trained_tokens`) or low-rank adapters of the tables (`target_modules`)",
    ),
    "loftq": (
        "LoftQ",
        "it quantises the backbone anew for every adapter, and here all tasks share one",
    ),
    "loraga": (
        "LoRA-GA",
        "it begins with the gradients of whole weights; take 'eva', which begins with the task's "
        "data too",
    ),
    "corda": (
        "CorDA",
        "it begins with the inverted covariances of all inputs; take 'eva', which begins with the "
        "task's data too",
    ),
}


def why_left_out(name: object) -> str:
    """Returns the reason why jaxmux leaves out an adapter or an initialisation, as in "OFT is left
    out: its rotations …". The text is empty for other names and for values that are not texts.

    Args:
      name: a name in any spelling, such as "OFT", "OFTConfig", "prefix_tuning" or "lora_ga".
    """
    if not isinstance(name, str):
        return ""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("config")
    if plain not in _LEFT_OUT:
        return ""
    written, reason = _LEFT_OUT[plain]
    return f"{written} is left out: {reason}"
