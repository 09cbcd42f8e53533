"""The tokenizer helper as the C++ side sees it: a process, frames, and rows that fail alone.

Template outputs are written out by hand from transformers' documented rendering rules; the tokenizer
is a small byte-level BPE made here, so no model folder is needed.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEARCH_PATH = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "PYTHONPATH": SEARCH_PATH, "PYTHONDONTWRITEBYTECODE": "1"}
sys.path.insert(0, str(ROOT / "python"))
sys.dont_write_bytecode = True

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "{{ '<|im_start|>assistant\\n' }}\n"
    "{% endif %}\n"
)


def make_folder(folder: Path, **config) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.train_from_iterator(["hello hello world, user and assistant and user"] * 20, trainer)
    tokenizer.enable_truncation(max_length=4)  # must not apply
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "pad_token": None, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Helper:
    """One helper process; `call` sends a request and waits for its reply."""

    def __init__(self, *arguments: str, module: str = "tandem.tokenizer_helper", code: str = ""):
        start = ["-c", code] if code else ["-m", module]
        self.process = subprocess.Popen(
            [sys.executable, *start, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def call(self, request) -> dict:
        return self.call_text(json.dumps(request))

    def call_text(self, text: str) -> dict:
        payload = text.encode("utf-8")
        self.process.stdin.write(struct.pack("<I", len(payload)) + payload)
        self.process.stdin.flush()
        (size,) = struct.unpack("<I", self.process.stdout.read(4))
        return json.loads(self.process.stdout.read(size))

    def close(self) -> int:
        if not self.process.stdin.closed:
            self.process.stdin.close()
        status = self.process.wait(timeout=30)
        self.errors = self.process.stderr.read().decode() if not self.process.stderr.closed else ""
        self.process.stdout.close()
        self.process.stderr.close()
        return status


class Rendering(unittest.TestCase):
    """chat_template.ChatTemplates in this process: text for text."""

    def render(self, template, messages=(), tools=None, add_generation_prompt=True, variables=None, **kwargs):
        from tandem.chat_template import ChatTemplates

        with tempfile.TemporaryDirectory() as folder:
            templates = ChatTemplates(Path(folder), {"chat_template": template}, variables or {})
            return templates.render(list(messages), tools, add_generation_prompt, kwargs)

    def test_text(self):
        user = [{"role": "user", "content": "hi"}]
        expected = "<|im_start|>user\nhi<|im_end|>\n"
        # The newline before {% if %} stands; block lines are trimmed; the line of {{ }} keeps its end.
        self.assertEqual(self.render(CHATML, user, add_generation_prompt=False), expected)
        self.assertEqual(self.render(CHATML, user), expected + "<|im_start|>assistant\n\n")

    def test_filters_and_globals(self):
        cases = [
            ("{{ x | tojson }}", {"x": {"b": "<é'&>", "a": [1, None]}}, '{"b": "<é\'&>", "a": [1, null]}'),
            ("{{ x | tojson(indent=2) }}", {"x": {"k": 1}}, '{\n  "k": 1\n}'),
            ("{{ x | tojson }}", {"x": 10254939386542155531}, "10254939386542155531"),
            ("{{ bos_token }}|{{ pad_token }}|{{ documents is none }}", {}, "<s>||True"),
            ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", {}, "13"),
            ("a{% generation %}b{% endgeneration %}c", {}, "abc"),
            ("{{ strftime_now('%Y') | length }}", {}, "4"),
            ("{{ bos_token }}", {"bos_token": "given"}, "given"),
        ]
        for template, kwargs, expected in cases:
            with self.subTest(template=template):
                self.assertEqual(self.render(template, variables={"bos_token": "<s>"}, **kwargs), expected)

    def test_text_parts(self):
        """Content as a list of parts: joined for a template of strings, untouched for one of parts."""
        parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 1?"}]
        messages = [{"role": "user", "content": parts}]
        whole = [{"role": "user", "content": "What is 1 + 1?"}]
        of_parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
        written = "{% for m in messages %}{{ m.content }}{% endfor %}"  # would print the list itself
        as_json = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
        self.assertEqual(self.render(CHATML, messages), self.render(CHATML, whole))
        self.assertEqual(self.render(written, messages), "What is 1 + 1?")
        self.assertEqual(self.render(as_json, messages), '"What is 1 + 1?"')
        self.assertEqual(self.render(of_parts, messages), "<What is><1 + 1?>")
        for content, fault in [
            ([{"type": "image_url", "image_url": {"url": "x"}}], r"messages\[0\].content\[0\]: type 'image_url' found"),
            ([7], r"messages\[0\].content\[0\]: int 7 found"),
            (3, r"messages\[0\].content is 3, wanted a string or a list of text parts"),
            (None, r"messages\[0\].content is None, wanted a string or a list of text parts"),
        ]:
            with self.subTest(content=content), self.assertRaisesRegex((TypeError, ValueError), fault):
                self.render(CHATML, [{"role": "user", "content": content}])

    def test_refusals(self):
        for template, kind in [
            ("{{ raise_exception('roles must alternate') }}", "TemplateError"),
            ("{{ messages.append(1) }}", "SecurityError"),
            ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ]:
            with self.subTest(template=template), self.assertRaises(Exception) as caught:
                self.render(template)
            self.assertEqual(type(caught.exception).__name__, kind)

    def test_which_template(self):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        self.assertEqual(self.render(named), "plain")
        self.assertEqual(self.render(named, tools=[{"name": "f"}]), "tools")
        with self.assertRaisesRegex(ValueError, "--chat-template-path"):
            self.render([{"name": "rag", "template": "r"}])
        with self.assertRaisesRegex(ValueError, "--apply-chat-template"):
            self.render(None)


class Process(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = make_folder(
            Path(cls.temporary.name) / "model",
            chat_template=CHATML,
            added_tokens_decoder={"300": {"content": "<tool>", "special": False, "normalized": False}},
        )

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def test_encode_decode(self):
        with Helper("--folder", str(self.folder)) as helper:
            text = "hello world, user <|im_end|> é 🙂"
            rows = helper.call({"call": "encode", "texts": [text, "", "<tool>"]})["rows"]
            self.assertGreater(len(rows[0]["ids"]), 4)  # the stored truncation does not apply
            self.assertEqual(rows[1]["ids"], [])
            self.assertEqual(len(rows[2]["ids"]), 1)  # known to tokenizer_config.json alone
            ids = rows[0]["ids"]
            whole = helper.call({"call": "decode", "ids": [ids, [-1], []], "skip_special_tokens": False})["rows"]
            self.assertEqual(whole[0]["text"], text)
            self.assertIn("error", whole[1])
            self.assertEqual(whole[2]["text"], "")
            bare = helper.call({"call": "decode", "ids": [ids]})["rows"]
            self.assertEqual(bare[0]["text"], text.replace("<|im_end|>", ""))
            self.assertEqual(helper.close(), 0)

    def test_text_after_an_added_token_gets_no_space_of_its_own(self):
        """Case C45: a converted SentencePiece model whose file puts the prefix space before every stretch of
        text; "user" after an added token is 5, as at the end of a word, not 6, which is " user"."""
        vocab = {"<unk>": 0, "<s>": 1, "u": 2, "se": 3, "r": 4, "user": 5, "▁user": 6, "▁": 7, "s": 8, "e": 9,
                 "use": 10, "<0x0A>": 11}
        merges = ["s e", "u se", "use r", "▁ user"]
        file = {
            "version": "1.0", "truncation": None, "padding": None, "pre_tokenizer": None, "post_processor": None,
            "decoder": None,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "added_tokens": [{"id": 12, "content": "<|im_start|>", "special": False, "normalized": False,
                              "single_word": False, "lstrip": False, "rstrip": False}],
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": True,
                      "byte_fallback": True},
        }
        for legacy, wanted in [(False, [12, 5]), (True, [12, 6])]:
            folder = Path(self.temporary.name) / f"legacy-{legacy}"
            folder.mkdir()
            (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
            (folder / "config.json").write_text('{"model_type": "llama"}')
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast", "legacy": legacy}))
            with Helper("--folder", str(folder)) as helper:
                rows = helper.call({"call": "encode", "texts": ["<|im_start|>user", "user"]})["rows"]
                self.assertEqual(rows[0]["ids"], wanted)
                self.assertEqual(rows[1]["ids"], [6])

    def test_template_rows_fail_alone(self):
        with Helper("--folder", str(self.folder)) as helper:
            request = {
                "call": "template",
                "rows": [
                    {"messages": [{"role": "user", "content": "hello"}]},
                    {"messages": [{"role": "user"}]},
                    {"messages": [{"role": "user", "content": "\ud800"}]},
                    {"messages": [{"role": "user", "content": "world"}]},
                ],
            }
            rows = helper.call(request)["rows"]
            self.assertEqual([sorted(row) for row in rows], [["ids", "text"], ["error"], ["error"], ["ids", "text"]])
            self.assertTrue(rows[3]["text"].startswith("<|im_start|>user\nworld<|im_end|>\n"))
            again = helper.call({"call": "encode", "texts": [rows[3]["text"]]})["rows"][0]
            self.assertEqual(again["ids"], rows[3]["ids"])

    def test_a_bad_text_spoils_only_its_row(self):
        with Helper("--folder", str(self.folder)) as helper:
            rows = helper.call_text('{"call": "encode", "texts": ["hello", 7, "\\ud800", "hello"]}')["rows"]
            self.assertEqual([sorted(row) for row in rows], [["ids"], ["error"], ["error"], ["ids"]])
            self.assertEqual(rows[0], rows[3])

    def test_bad_requests_do_not_end_it(self):
        with Helper("--folder", str(self.folder)) as helper:
            self.assertIn("error", helper.call_text("{not json"))
            self.assertIn("expected info, encode", helper.call({"call": "nothing"})["error"])
            info = helper.call({"call": "info"})
            self.assertEqual(info["special_tokens"], {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
            self.assertEqual(info["templates"], ["default"])

    def test_closed_inside_a_frame_is_an_error(self):
        with Helper("--folder", str(self.folder)) as helper:
            helper.process.stdin.write(struct.pack("<I", 10) + b"abc")
            self.assertNotEqual(helper.close(), 0)
            self.assertIn("closed after 3 of a frame's 10 bytes", helper.errors)

    def test_template_file_wins_over_config(self):
        folder = make_folder(Path(self.temporary.name) / "file", chat_template="from config")
        (folder / "chat_template.jinja").write_text("from file", encoding="utf-8")
        other = Path(self.temporary.name) / "other.jinja"
        other.write_text("from flag", encoding="utf-8")
        for arguments, expected in [((), "from file"), (("--chat-template", str(other)), "from flag")]:
            with Helper("--folder", str(folder), *arguments) as helper:
                row = helper.call({"call": "template", "rows": [{"messages": []}]})["rows"][0]
                self.assertEqual(row["text"], expected)

    def test_printing_cannot_break_the_frames(self):
        code = (
            "import os, sys\n"
            "from tandem import pipe\n"
            "def answer(request):\n"
            "    print('printed'); os.write(1, b'written\\n'); assert sys.stdin.read() == ''\n"
            "    return {'twice': request['n'] * 2}\n"
            "pipe.serve(answer)\n"
        )
        with Helper(code=code) as helper:
            self.assertEqual(helper.call({"n": 10254939386542155531}), {"twice": 20509878773084311062})
            self.assertEqual(helper.close(), 0)
            self.assertIn("printed", helper.errors)
            self.assertIn("written", helper.errors)

    def test_never_imports_torch(self):
        code = "import tandem.tokenizer_helper, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
        self.assertEqual(subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
