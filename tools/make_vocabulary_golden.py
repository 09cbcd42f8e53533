"""Makes tests/golden/vocabulary_*.json: a small tokenizer of each SentencePiece-like kind with the text
that the `tokenizers` library decodes for id sequences, for tests/golden/data_vocabulary_test.cpp.

    .venv/bin/python tools/make_vocabulary_golden.py

Ids are those of encoded sentences and random ones; random rows are kept where they decode to valid text.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "  Two spaces first, then\n\na new paragraph\tand a tab.",
    "Ünïcödé: naïve café, 日本語のテキスト, emoji 😀👍🏽, and math ∑∞≤.",
    "def add(a, b):\n    return a + b  # 1 + 1 = 2",
    "<|im_start|>user\nHi!<|im_end|>",
]
FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden"


def llama() -> Tokenizer:
    """BPE over ▁ with bytes as fallback, as Llama 2 and Mistral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES[:2] + SENTENCES[3:4], trainer)
    # Trained with the bytes as special tokens; in a real file they are plain entries.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(state))


def unigram() -> Tokenizer:
    """Unigram with Metaspace, as T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def main() -> None:
    random.seed(7)
    for name, make in {"llama": llama, "unigram": unigram}.items():
        tokenizer = make()
        tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
        rows = []
        for sentence in SENTENCES:
            ids = tokenizer.encode(sentence, add_special_tokens=False).ids
            rows.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False)})
        size = tokenizer.get_vocab_size()
        while len(rows) < 200:
            ids = [random.randrange(size) for _ in range(random.randrange(1, 9))]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if "\ufffd" not in text:
                rows.append({"ids": ids, "text": text})
        content = {"tokenizer": json.loads(tokenizer.to_str()), "rows": rows}
        (FOLDER / f"vocabulary_{name}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
