"""How text is cut into words before byte-pair merging, by the name GGUF files give the rule.

A GGUF file holds a vocabulary and merges, but names its pre-tokenizer only by a key
(`tokenizer.ggml.pre`). The patterns belong to the models' own tokenizer.json files; which
key stands for which pattern is llama.cpp's convention (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from hotbatch.core.errors import ModelLoadError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """`pattern` None is GPT-2's own; `digits` splits every digit off first; `whole_words`
    takes a word that is in the vocabulary as it is, without merging; `adds_bos` is what the
    family does where the file does not say."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        )
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizerRule()
_GPT2_DIGITS = PreTokenizerRule(digits=True)
_LLAMA3_RULE = PreTokenizerRule(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2_RULE = PreTokenizerRule(_QWEN2, nfc=True)

RULES: dict[str, PreTokenizerRule] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "jais": _GPT2,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "command-r": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "exaone": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe-v3": _LLAMA3_RULE,
    "falcon3": PreTokenizerRule(_LLAMA3, whole_words=True),
    "dbrx": PreTokenizerRule(_LLAMA3),
    "smaug-bpe": PreTokenizerRule(_LLAMA3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "stablelm2": PreTokenizerRule(_QWEN2),
    "megrez": PreTokenizerRule(_QWEN2),
    "tekken": PreTokenizerRule(_TEKKEN, whole_words=True, adds_bos=True),
}


def rule_for(name: str) -> PreTokenizerRule:
    """The rule for a `tokenizer.ggml.pre` value.

    Raises:
        ModelLoadError: the name is not known; a guess would tokenize wrongly in silence.
    """
    try:
        return RULES[name]
    except KeyError:
        raise ModelLoadError(
            f"The GGUF file names the pre-tokenizer {name!r}, which is not supported "
            f"(supported: {', '.join(sorted(RULES))}). Give the model's folder with its "
            "tokenizer.json instead.",
            param="model",
        ) from None
