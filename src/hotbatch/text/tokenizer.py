"""One tokenizer for both kinds of model files, built on the Rust `tokenizers` library.

`Tokenizer.from_folder` reads a Hugging Face folder (tokenizer.json and the configs beside
it), `Tokenizer.from_gguf` a GGUF file, whose vocabulary, merges or scores are turned into
the same kind of object. Nothing here imports transformers: it takes seconds to load.

A tokenizer is immutable after construction and may be used from many threads at once; the
library releases the GIL while it works.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from hotbatch.core.errors import InvalidRequestError, ModelLoadError
from hotbatch.text.gguf_metadata import read_gguf_metadata
from hotbatch.text.pre_tokenizers import rule_for
from hotbatch.text.token_bytes import TokenBytes, token_bytes_of

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


class Tokenizer:
    """Text to token ids and back.

    `bos_token` and `eos_token` are the strings templates ask for; `eos_token_ids` all ids
    that end a sequence; `adds_bos` whether `encode` puts the bos token first; `chat_template`
    the model's Jinja source, and `named_chat_templates` further ones by name.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
        named_chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`add_bos`/`add_eos` None leave it to the backend's own post-processor."""
        self.backend = backend
        backend.no_padding()
        backend.no_truncation()
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        ends = {*eos_token_ids} | ({eos_token_id} if eos_token_id is not None else set())
        self.eos_token_ids: frozenset[int] = frozenset(ends)
        self.chat_template = chat_template
        self.named_chat_templates = dict(named_chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.token_bytes: TokenBytes | None = token_bytes_of(backend)
        self.bos_token = self.id_to_token(bos_token_id)
        self.eos_token = self.id_to_token(eos_token_id)
        self.special_tokens = {
            **{k: v for k, v in (special_tokens or {}).items() if v},
            **({"bos_token": self.bos_token} if self.bos_token else {}),
            **({"eos_token": self.eos_token} if self.eos_token else {}),
        }
        framed = backend.encode("").ids
        frames_bos = bos_token_id is not None and framed[:1] == [bos_token_id]
        frames_eos = eos_token_id is not None and framed[-1:] == [eos_token_id]
        self.adds_bos = frames_bos if add_bos is None else add_bos and bos_token_id is not None
        self.adds_eos = frames_eos if add_eos is None else add_eos and eos_token_id is not None
        # The post-processor is used only where it does what is wanted; else framed by hand.
        self._backend_frames = self.adds_bos == frames_bos and self.adds_eos == frames_eos

    # --- construction ---------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json, with tokenizer_config.json, generation_config.json and
        chat_template.jinja where they exist.

        Raises:
            ModelLoadError: tokenizer.json is missing or damaged.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{folder} has no tokenizer.json; a model folder needs one (export it with "
                "a fast Hugging Face tokenizer's save_pretrained).",
                param="tokenizer",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"Cannot read {path}: {error}", param="tokenizer") from error
        config = _read_json(folder / "tokenizer_config.json")
        _add_configured_tokens(backend, config)
        specials = {
            name: _token_text(config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        template, named = _configured_templates(folder, config)
        return cls(
            backend,
            bos_token_id=_id_of(backend, specials["bos_token"]),
            eos_token_id=_id_of(backend, specials["eos_token"]),
            eos_token_ids=_generation_eos(folder),
            add_bos=_optional_bool(config.get("add_bos_token")),
            add_eos=_optional_bool(config.get("add_eos_token")),
            chat_template=template,
            named_chat_templates=named,
            special_tokens=specials,
        )

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """From a GGUF file's header. Raises: ModelLoadError."""
        return cls.from_gguf_metadata(read_gguf_metadata(path, prefix="tokenizer."))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From GGUF keys `tokenizer.*`, with plain Python values.

        Raises:
            ModelLoadError: a kind of tokenizer that is not supported, or a key is missing.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            backend, adds_bos = _byte_level_backend(metadata)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece_backend(metadata)
        else:
            raise ModelLoadError(
                f"The GGUF file's tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and "
                "'llama'.",
                param="model",
            )
        _add_gguf_special_tokens(backend, metadata)
        ids: dict[str, int | None] = {
            name: _optional_int(metadata.get(f"tokenizer.ggml.{name}_token_id"))
            for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        }
        if kind == "llama":  # the format's defaults
            ids["bos"] = 1 if ids["bos"] is None else ids["bos"]
            ids["eos"] = 2 if ids["eos"] is None else ids["eos"]
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
        template = metadata.get("tokenizer.chat_template")
        names = [str(name) for name in _listed(metadata, "tokenizer.chat_templates", [])]
        pad, unk = ids["padding"], ids["unknown"]
        return cls(
            backend,
            bos_token_id=ids["bos"],
            eos_token_id=ids["eos"],
            eos_token_ids=[i for i in (ids["eot"], ids["eom"]) if i is not None],
            add_bos=bool(add_bos),
            add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            chat_template=None if template is None else str(template),
            named_chat_templates={
                name: str(metadata[f"tokenizer.chat_template.{name}"])
                for name in names
                if f"tokenizer.chat_template.{name}" in metadata
            },
            special_tokens={
                "pad_token": (backend.id_to_token(pad) if pad is not None else None) or "",
                "unk_token": (backend.id_to_token(unk) if unk is not None else None) or "",
            },
        )

    # --- use ------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become themselves;
        `add_special_tokens` puts bos (and eos) where the model was trained with them.

        Raises:
            InvalidRequestError: the text holds a lone surrogate, which is no character. Python
                makes them from undecodable bytes, and from "\\ud800" in JSON.
        """
        framed = add_special_tokens and self._backend_frames
        try:
            # The batch call without offsets is a third faster than the single one.
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=framed)
        except TypeError as error:
            if not _has_surrogate(text):
                raise
            raise InvalidRequestError(
                "The prompt is not valid Unicode: it holds half of a surrogate pair, or bytes "
                "that are not UTF-8.",
                param="prompt",
            ) from error
        ids: list[int] = encoding.ids
        if add_special_tokens and not self._backend_frames:
            if self.adds_bos and self.bos_token_id is not None:
                ids.insert(0, self.bos_token_id)
            if self.adds_eos and self.eos_token_id is not None:
                ids.append(self.eos_token_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside of the vocabulary have none."""
        table = self.token_bytes
        if table is None:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        skip = self.special_ids if skip_special_tokens else frozenset()
        joined = b"".join([table[token] for token in ids if token not in skip])
        text = joined.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if table.strips_first_space else text

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """How one token is shown alone (in logprobs): as text, with U+FFFD for a part of a
        character, and as its exact bytes."""
        if self.token_bytes is not None:
            raw = self.token_bytes[token_id]
            return raw.decode("utf-8", errors="replace"), raw
        text = self.backend.decode([token_id], skip_special_tokens=False)
        return text, text.encode("utf-8")

    @cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters of text than this: a text longer than this
        times a limit of tokens cannot fit, whatever it says."""
        added = self.backend.get_added_tokens_decoder().values()
        if self.token_bytes is None or any(token.lstrip or token.rstrip for token in added):
            return 2**31  # a token may swallow any amount of white space
        return max(map(len, self.backend.get_vocab()), default=1)

    def id_to_token(self, token_id: int | None) -> str | None:
        """The vocabulary's own spelling of a token, or None."""
        if token_id is None or not 0 <= token_id < 2**32:
            return None
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found


# --- Hugging Face folders ---------------------------------------------------------------------


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"Cannot read {path}: {error}", param="tokenizer") from error
    return loaded if isinstance(loaded, dict) else {}


def _token_text(value: object) -> str:
    """A token in tokenizer_config.json is a string or an AddedToken written as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _id_of(backend: tokenizers.Tokenizer, token: str) -> int | None:
    found: int | None = backend.token_to_id(token) if token else None
    return found


def _optional_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows; what tokenizer.json has, keeps its form."""
    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda e: int(e[0]))
    for _, entry in entries:
        if entry.get("content") not in have:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            token = AddedToken(entry["content"], **{k: bool(entry.get(k, False)) for k in flags})
            backend.add_tokens([token])


def _configured_templates(
    folder: Path, config: Mapping[str, Any]
) -> tuple[str | None, dict[str, str]]:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {str(entry["name"]): str(entry["template"]) for entry in source}
        return named.pop("default", None), named
    return (source if isinstance(source, str) else None), {}


def _generation_eos(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        ends = _read_json(folder / name).get("eos_token_id")
        if ends is not None:
            return [ends] if isinstance(ends, int) else [i for i in ends if isinstance(i, int)]
    return []


# --- GGUF -------------------------------------------------------------------------------------


def _listed(
    metadata: Mapping[str, object], key: str, default: list[Any] | None = None
) -> list[Any]:
    value = metadata.get(key, default)
    if value is None:
        raise ModelLoadError(f"The GGUF file has no {key}.", param="model")
    if not isinstance(value, Iterable):
        raise ModelLoadError(f"The GGUF file's {key} is not a list.", param="model")
    return list(value)


def _byte_level_backend(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, bool]:
    tokens = _listed(metadata, "tokenizer.ggml.tokens")
    rule = rule_for(str(metadata.get("tokenizer.ggml.pre", "default")))
    merges = [tuple(line.split(" ", 1)) for line in _listed(metadata, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges,
            ignore_merges=rule.whole_words,
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"The GGUF file's merges are damaged: {error}", param="model"
        ) from error
    backend = tokenizers.Tokenizer(model)
    normalizer = rule.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _sentencepiece_backend(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE merges the pair whose union scores highest. As a list of merges:
    every way to split a token into two others, by the token's score (Hugging Face's
    conversion of Llama tokenizers does the same)."""
    tokens = _listed(metadata, "tokenizer.ggml.tokens")
    scores = _listed(metadata, "tokenizer.ggml.scores")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    kinds = _listed(metadata, "tokenizer.ggml.token_type", [1] * len(tokens))
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token_id, token in enumerate(tokens):
        if kinds[token_id] in (_UNKNOWN, _CONTROL):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merge = (-scores[token_id], vocab[left], vocab[right], (left, right))
                ranked.append(merge)
    ranked.sort()
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab,
        [merge for *_, merge in ranked],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _add_gguf_special_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, object]) -> None:
    tokens = _listed(metadata, "tokenizer.ggml.tokens")
    kinds = _listed(metadata, "tokenizer.ggml.token_type", [1] * len(tokens))
    added = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    backend.add_tokens(added)
