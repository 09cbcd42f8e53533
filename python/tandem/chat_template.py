"""Chat templates rendered as transformers renders them, with Jinja2 alone.

The environment (immutable sandbox, trim_blocks, lstrip_blocks, loop controls, the `generation` tag,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`) and the order in which a folder's
templates are looked up are transformers' own, so the rendered text is equal byte for byte. A
special token that the folder does not define is left undefined (it renders as nothing), never None.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks assistant text for masks; here the text alone counts."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise TemplateError(message)


def _strftime_now(format):
    return datetime.now().strftime(format)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def token_text(token: Any) -> str | None:
    """A special token's text from its two JSON forms: a string, or an AddedToken object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def special_tokens(config: dict, token_map: dict) -> dict[str, Any]:
    """Template variables of tokenizer_config.json, completed from special_tokens_map.json."""
    found: dict[str, Any] = {}
    for name in NAMED_TOKENS:
        text = token_text(config.get(name)) or token_text(token_map.get(name))
        if text:
            found[name] = text
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):  # a model's own names, such as image_token
        for name, token in extra.items():
            if text := token_text(token):
                found[name] = text
    more = config.get("additional_special_tokens") or token_map.get("additional_special_tokens") or []
    texts = [text for text in map(token_text, more) if text]
    if texts:
        found["additional_special_tokens"] = texts
    return found


def find_templates(folder: Path, config: dict) -> dict[str, str]:
    """Templates by name: chat_template.jinja and additional_chat_templates/*.jinja if there is a file,
    else tokenizer_config.json's chat_template (a string, or a list of {name, template})."""
    templates: dict[str, str] = {}
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if templates:
        return templates
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return dict(found) if isinstance(found, dict) else {}


def _text_of_parts(content: list, where: str) -> str:
    """The texts of OpenAI's content parts, joined by a space as SGLang joins them."""
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            found = f"type {kind!r}" if isinstance(part, dict) else f"{type(part).__name__} {part!r}"
            raise ValueError(f"{where}[{i}]: {found} found, only parts of type 'text' can be read by a text model")
        texts.append(part["text"])
    return " ".join(texts)


class ChatTemplates:
    """The templates of one model folder, or one file that stands for all of them.

    Content may be a list of text parts (OpenAI's form). A template written for such lists gets them as
    they are; to any other they are joined to one string.
    """

    def __init__(self, folder: Path, config: dict, variables: dict[str, Any], override: Path | None = None):
        self._folder = folder
        self._variables = variables
        if override:
            self._sources = {"default": override.read_text(encoding="utf-8")}
        else:
            self._sources = find_templates(folder, config)
        self._environment = make_environment()
        self._compiled: dict[str, Any] = {}
        self._reads_parts: dict[str, bool] = {}

    def names(self) -> list[str]:
        return sorted(self._sources)

    def _choose(self, tools) -> str:
        if tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if not self._sources:
            raise ValueError(
                f"{self._folder}: no chat_template.jinja and no chat_template in tokenizer_config.json; "
                "give --chat-template-path or leave out --apply-chat-template"
            )
        raise ValueError(f"{self._folder}: no template named 'default' among {self.names()}; give --chat-template-path")

    def _takes_parts(self, name: str, variables: dict) -> bool:
        """Whether the template writes a part's text, and not the list that holds it."""
        if name not in self._reads_parts:
            part = {"type": "text", "text": "the words", "key of no template": 0}
            probe = [{"role": "user", "content": [part]}]
            try:
                text = self._compiled[name].render(messages=probe, tools=None, add_generation_prompt=False, **variables)
            except Exception:  # whatever a template does with what it was not written for
                text = ""
            self._reads_parts[name] = "the words" in text and "key of no template" not in text
        return self._reads_parts[name]

    def _readable(self, messages: list, name: str, variables: dict) -> list:
        """The messages with content that the template can read; the others stay the very objects."""
        readable = []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list) and not self._takes_parts(name, variables):
                message = {**message, "content": _text_of_parts(content, f"messages[{i}].content")}
            readable.append(message)
        return readable

    def render(self, messages: list, tools: list | None, add_generation_prompt: bool, kwargs: dict) -> str:
        name = self._choose(tools)
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        variables = {**self._variables, "documents": None, **kwargs}
        given = self._readable(messages, name, variables)
        try:
            return self._compiled[name].render(
                messages=given, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except TypeError as error:  # most templates add contents to text
            for i, message in enumerate(given):
                if not isinstance(message.get("content"), str):
                    raise TypeError(f"messages[{i}].content is {message.get('content')!r}, wanted a string or a list "
                                    f"of text parts ({error})") from error
            raise
