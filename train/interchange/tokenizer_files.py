"""A tokenizer of this project as the files of one that Transformers reads: tokenizer.json, tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..text import tokens

END = "<|end|>"


def definition(texts: tokens.Tokens) -> dict[str, Any]:
    """The JSON of a `tokenizers.Tokenizer` with the same ids.

    Errors: RuntimeError without the package tokenizers.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise RuntimeError("tokens: expected the package tokenizers, which is not installed") from None
    if texts.kind == "bytes":
        names = _byte_names()
        backend = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    elif texts.kind == "characters":
        known = texts.content()["characters"]
        vocabulary = {"<|unknown|>": 0} | {one: at for at, one in enumerate(known, 1)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        body: dict[str, Any] = json.loads(json.dumps(texts.content()["tokenizer"]))
        if texts.end is not None and _name(texts) == END:  # of a bpe: an id past those of the tokenizer itself
            added = {"id": texts.end, "content": END, "special": True, "single_word": False, "lstrip": False}
            body["added_tokens"] = [*body.get("added_tokens", []), {**added, "rstrip": False, "normalized": False}]
        return body
    result: dict[str, Any] = json.loads(backend.to_str())
    return result


def _byte_names() -> list[str]:
    """How a byte-level tokenizer spells each byte: itself where it is printable Latin-1, else the next free code point
    from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _name(texts: tokens.Tokens) -> str | None:
    """The text of the id that ends a document."""
    if texts.end is None:
        return None
    body = texts.content()["tokenizer"]
    for added in body.get("added_tokens") or ():
        if added["id"] == texts.end:
            return str(added["content"])
    names = body["model"].get("vocab")
    found = {at: name for name, at in names.items()} if isinstance(names, dict) else {}
    return str(found.get(texts.end, END))


def write(texts: tokens.Tokens, folder: Path, context: int) -> None:
    """Both files into a folder that exists. Errors: OSError."""
    name = _name(texts)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **({} if name is None else {"eos_token": name}),
    }
    for file, body in (("tokenizer.json", definition(texts)), ("tokenizer_config.json", settings)):
        (folder / file).write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
