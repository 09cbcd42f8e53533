"""The converted tokenizer gives llama.cpp's ids: tokenizer.json of the demo model's folder, through the
`tokenizers` library, against tests/golden/tokenizer_smollm2.json (1,000 strings, made from the same
GGUF file by tools/make_tokenizer_golden.py). One missing rule, such as that for digits, changes many
ids without any error, and the model then merely gets worse: only a comparison finds it. A second check
turns the ids back into text where the vocabulary has every byte. Exit code 0 or 1."""

import json
import pathlib
import sys

from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct" / "tokenizer.json"
GOLDEN = ROOT / "tests" / "golden" / "tokenizer_smollm2.json"
SHOWN = 20

if not MODEL.is_file():
    print(f"{MODEL.relative_to(ROOT)}: not there; scripts/setup.sh makes it")
    sys.exit(1)

tokenizer = Tokenizer.from_file(str(MODEL))
rows = json.loads(GOLDEN.read_text(encoding="ascii"))["rows"]
wrong = lossy = unequal_text = 0
for text, wanted in rows:
    found = tokenizer.encode(text, add_special_tokens=False).ids
    if found != wanted:
        wrong += 1
        if wrong <= SHOWN:
            print(f"{text!r}:\n  found  {found}\n  wanted {wanted}")
    back = tokenizer.decode(found, skip_special_tokens=False)
    pieces = [c for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text) for c in piece]
    if any(tokenizer.token_to_id(c) is None for c in pieces):
        lossy += 1
    elif back != text:
        unequal_text += 1
        if unequal_text <= SHOWN:
            print(f"{text!r}: decodes to {back!r}")

if len(rows) < 1000:
    print(f"{GOLDEN.name}: {len(rows)} strings, 1000 wanted")
print(f"tokenizer: {len(rows)} strings, {wrong} with other ids, {unequal_text} that do not come back "
      f"({lossy} hold a byte that the vocabulary lacks)")
sys.exit(1 if wrong or unequal_text or len(rows) < 1000 else 0)
