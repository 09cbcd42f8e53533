"""Tokenizer and chat template of one Hugging Face folder, served over the framed pipe.

    python -m tandem.tokenizer_helper --folder HF_DIR [--chat-template FILE]

Requests (JSON) and replies; each reply's `rows` answers the request's rows in order, and a row that
fails holds {"error": text} while the others stand:
    {"call": "info"}                                   -> {"vocab_size", "special_tokens", "templates"}
    {"call": "encode", "texts", "add_special_tokens"}  -> {"rows": [{"ids"}]}
    {"call": "decode", "ids", "skip_special_tokens"}   -> {"rows": [{"text"}]}
    {"call": "template", "rows": [{"messages", "tools"}], "kwargs", "add_generation_prompt"}
                                                       -> {"rows": [{"text", "ids"}]}
Ids equal those of transformers' fast tokenizer for the folder. Decoded text is what the ids stand
for: ids without a token (a padded embedding's rows) give nothing, and transformers' optional removal
of spaces before punctuation is not applied.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tandem import pipe
from tandem.chat_template import NAMED_TOKENS, ChatTemplates, special_tokens


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _added_token(fields: dict) -> AddedToken:
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{name: fields[name] for name in known if name in fields})


def _is_llama_of_sentencepiece(folder: Path, tokenizer: Tokenizer, config: dict) -> bool:
    """Folders for which transformers 5 builds a LlamaTokenizer and passes over what tokenizer.json says of
    normalizing and splitting. Llama 3 names that class too but splits by bytes; other families that
    name it (Mistral, Phi) are read as their tokenizer.json stands."""
    named = (config.get("tokenizer_class") or "").removesuffix("Fast") == "LlamaTokenizer"
    family = _read_json(folder / "config.json").get("model_type")
    return named and family == "llama" and isinstance(tokenizer.model, models.BPE) and tokenizer.model.byte_fallback


def load_tokenizer(folder: Path, config: dict, variables: dict[str, Any]) -> Tokenizer:
    """tokenizer.json, completed as transformers completes it: tokens that only tokenizer_config.json
    lists are added, special tokens are matched whole, stored truncation and padding do not apply."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: no tokenizer.json (a fast tokenizer is needed; save one with transformers)")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if _is_llama_of_sentencepiece(folder, tokenizer, config):
        # Converted files put a space before every stretch of text between added tokens; the model was
        # trained with one at the very beginning only, unless the folder asks for the legacy way.
        prefix = config.get("add_prefix_space") in (None, True)
        scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    splitter = tokenizer.pre_tokenizer
    wanted_space = bool(config.get("add_prefix_space", False))
    if isinstance(splitter, pre_tokenizers.ByteLevel) and splitter.add_prefix_space != wanted_space:
        splitter.add_prefix_space = wanted_space
        tokenizer.pre_tokenizer = splitter

    known = list(tokenizer.get_added_tokens_decoder().values())
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    missing = [token for _, fields in listed if (token := _added_token(fields)) not in known]
    names = {token.content for token in known + missing}
    specials = [variables.get(name) for name in NAMED_TOKENS] + variables.get("additional_special_tokens", [])
    for text in specials:
        if text and text not in names:
            names.add(text)
            missing.append(AddedToken(text, special=True, normalized=False))
    for token in missing:
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


class TokenizerService:
    def __init__(self, folder: Path, chat_template: Path | None = None):
        config = _read_json(folder / "tokenizer_config.json")
        self._variables = special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        self._tokenizer = load_tokenizer(folder, config, self._variables)
        self._templates = ChatTemplates(folder, config, self._variables, chat_template)

    def answer(self, request: dict) -> dict:
        call = request["call"]
        if call == "info":
            return {
                "vocab_size": self._tokenizer.get_vocab_size(with_added_tokens=True),
                "special_tokens": self._variables,
                "templates": self._templates.names(),
            }
        if call == "encode":
            return {"rows": self._encode(request["texts"], request.get("add_special_tokens", False))}
        if call == "decode":
            skip = request.get("skip_special_tokens", True)
            return {"rows": pipe.row_results(lambda ids: self._decode(ids, skip), request["ids"])}
        if call == "template":
            return {"rows": self._template(request)}
        raise ValueError(f"unknown call '{call}', expected info, encode, decode or template")

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[dict]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [{"ids": encoding.ids} for encoding in encodings]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # one row spoils the batch call: find it by asking for each alone
            one = lambda text: {"ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
            return pipe.row_results(one, texts)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> dict:
        return {"text": self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)}

    def _template(self, request: dict) -> list[dict]:
        kwargs = request.get("kwargs") or {}
        add_generation_prompt = request.get("add_generation_prompt", True)

        def render(row: dict) -> dict:
            text = self._templates.render(row["messages"], row.get("tools"), add_generation_prompt, kwargs)
            text.encode("utf-8")  # a lone surrogate is this row's fault, not the reply's
            return {"text": text}

        rows = pipe.row_results(render, request["rows"])
        good = [row for row in rows if "text" in row]
        for row, encoded in zip(good, self._encode([row["text"] for row in good], False)):
            row.update(encoded)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenizer and chat template over a framed pipe.")
    parser.add_argument("--folder", type=Path, required=True, help="Hugging Face folder with tokenizer.json")
    parser.add_argument("--chat-template", type=Path, help="Jinja file used instead of the folder's templates")
    options = parser.parse_args()
    try:
        answer = TokenizerService(options.folder, options.chat_template).answer
    except Exception as error:  # a fault of the folder is the answer to every call, not a crash
        fault = pipe.error_text(error)
        answer = lambda request: {"error": fault}
    pipe.serve(answer)


if __name__ == "__main__":
    main()
