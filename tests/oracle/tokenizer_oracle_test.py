"""Ids of the tokenizer helper against transformers' AutoTokenizer, on small tokenizers made here: tokens
that were added with every combination of their switches, with and without spaces around them, and
SentencePiece-like folders, old and new (case C45)."""

import itertools
import json
import pathlib
import shutil
import sys
import tempfile
import unittest

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
sys.dont_write_bytecode = True
from tandem.tokenizer_helper import TokenizerService  # noqa: E402

if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv.pop(1)  # the build folder, unused here

TEXT = ["hello world, user and assistant and user", "the user said hello to the world"] * 40
SWITCHES = ("lstrip", "rstrip", "single_word", "normalized", "special")


def byte_level(folder, added):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"],
        show_progress=False))
    save(folder, tokenizer, added, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"})


def sentence_piece(folder, added, **config):
    """A converted SentencePiece model as the older hub folders have it: the prefix space comes from a
    normalizer, which sees each piece of text between added tokens."""
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False))
    model = json.loads(tokenizer.to_str())
    model["pre_tokenizer"] = None
    model["normalizer"] = json.loads(normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]).__getstate__())
    model["added_tokens"] = [t for t in model["added_tokens"] if t["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(model))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    save(folder, tokenizer, added, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config)


def save(folder, tokenizer, added, config):
    folder.mkdir(parents=True, exist_ok=True)
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    decoder = {str(i): {"content": t.content, **{s: getattr(t, s) for s in SWITCHES}}
               for i, t in tokenizer.get_added_tokens_decoder().items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": decoder}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


class AddedTokens(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-tokenizer-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def compare(self, texts):
        ours = TokenizerService(self.folder)
        theirs = transformers.AutoTokenizer.from_pretrained(self.folder)
        rows = ours.answer({"call": "encode", "texts": texts})["rows"]
        for text, row in zip(texts, rows, strict=True):
            self.assertEqual(row["ids"], theirs.encode(text, add_special_tokens=False), repr(text))
        return ours

    def texts(self, tokens):
        around = ["{}user", "user{}", " {} user ", "hello  {}  world", "{}{}", "{} {}", "x{}y", "hello{}", "\n{}\n"]
        return [a.format(*[t] * a.count("{}")) for a in around for t in tokens] + ["", " ", "no token at all"]

    def test_every_combination_of_switches(self):
        for family in (byte_level, sentence_piece):
            with self.subTest(family=family.__name__):
                added = [AddedToken(f"<|{i}|>", **dict(zip(SWITCHES, values)))
                         for i, values in enumerate(itertools.product([False, True], repeat=len(SWITCHES)))]
                extra = {"tokenizer_class": "PreTrainedTokenizerFast"} if family is sentence_piece else {}
                family(self.folder, added, **extra)
                self.compare(self.texts([t.content for t in added]))

    def test_text_after_an_added_token_gets_no_space_of_its_own(self):
        added = [AddedToken("<|im_start|>", normalized=False, special=False)]
        for config in ({"legacy": False}, {"legacy": True}, {}, {"add_prefix_space": False, "legacy": False}):
            with self.subTest(config=config):
                sentence_piece(self.folder, added, tokenizer_class="LlamaTokenizerFast", **config)
                ours = self.compare(self.texts(["<|im_start|>", "</s>"]) + ["hello world", "é 🙂"])
                ids = ours.answer({"call": "encode", "texts": ["<|im_start|>user"], "add_special_tokens": True})["rows"][0]["ids"]
                pieces = [ours._tokenizer.id_to_token(i) for i in ids]
                self.assertEqual(pieces[-2:], ["<|im_start|>", "▁user" if config.get("legacy") else "user"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
