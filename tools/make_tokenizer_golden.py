#!/usr/bin/env python3
"""Makes tests/golden/tokenizer_smollm2.json: 1,000 strings with the ids that llama.cpp gives them.

    python tools/make_tokenizer_golden.py MODEL.gguf OUT.json

llama.cpp reads the very GGUF file that tools/gguf_to_hf.py converts, with a tokenizer of its own, so
equal ids mean that the converted tokenizer.json says the same as the file. The strings go where such
tokenizers differ: digits, runs of spaces, code, emoji, CJK, combining marks, apostrophes, special
tokens inside text. Run once, in an environment that has llama-cpp-python (0.3.36 was used); the
strings depend on the seed alone.
"""

import json
import random
import sys
import unicodedata

import llama_cpp

SEED = 20250101
NUM_STRINGS = 1000

FIXED = [
    "", " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t", "\t\t x", "\r\n", "a\r\nb\r\n", "\u00a0", "a\u00a0b",
    "\u3000全角", "\u200b", "a\u200bb", "\ufeffbom", "x\u2028y", "\x0b\x0c", "\x85",
    "0", "7", "42", "1234567890", "3.14159", "1,000,000", "2024-05-31", "12:34:56", " 12", "  12", "12 ",
    "a1b2c3", "v1.2.3-rc4", "1e-5", "0x1F", "½", "²³", "Ⅷ", "٣٤٥", "१२३", "１２３", "①②", "1½ cups",
    "What is 3 + 18? Reply with the number only.", "The answer is 21.", "17+4=21", "5 + 5 = 10\n",
    "I'm you're we've they'll he'd it's don't", "I'M YOU'RE IT'S", "'s 't 're", "rock 'n' roll", "''''", "l’été",
    "Hello, world!", "hello  world", "hello   world  ", "  leading", "trailing  ", " a  b   c    d     e",
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}", "#include <vector>\n",
    "if x == 1 and y != 2:\n        pass", "SELECT * FROM t WHERE id = 42;", "{\"a\": [1, 2.5, null], \"b\": \"\\n\"}",
    "<div class=\"x\">1 &amp; 2</div>", "\\frac{1}{2} + \\sqrt{3}", "$$x^2 + y^2 = z^2$$", "https://example.org/a?b=1&c=2#d",
    "a_b_c camelCase SCREAMING_CASE", "----", "====", "....", "!!!???", "@#$%^&*()", "~`|\\/", "<<<>>>", "->=>",
    "😀", "😀😀", " 😀", "👩‍👩‍👧‍👦", "👍🏽", "🇫🇷🇯🇵", "❤️", "☃", "a😀b", "1😀2", "🏳️‍🌈 flag",
    "你好，世界！", "日本語のテキスト", "カタカナ ひらがな", "한국어 문장", "中文English混合123", "。、「」", "漢字 12 漢字",
    "Привет, мир", "Γειά σου", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดี", "Việt Nam", "Ærøskøbing", "naïve café",
    "e\u0301", "cafe\u0301 noir", "a\u0300\u0301\u0302", "\u0301", " \u0301x", "n\u0303", "ก็", "क्षि", "Z̷a̷l̷g̷o̷",
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n", "a<|im_end|>b", " <|im_end|> ",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|>", "<|im_start", "<|im_end|", "|im_end|>", "<repo_name>x", "<reponame>", "<filename>a.py",
    "<file_sep>\n", "<gh_stars>10", "<jupyter_code>print(1)", "<empty_output>", "<issue_start><issue_comment>ok<issue_closed>",
    "<|im_end|>12", "12<|im_end|>", "<|IM_END|>", "< |im_end|>", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𝟙𝟚𝟛", "\U0001f9ff\U0001fae0", "\U00020000",
    "\u0378", "\ue000", "\U000e0041", "\ufffd", "\x00", "\x01\x02\x7f", "a\x00b", "\x04", "a\x06b\x13 \x16\x1d", "\U00040000", "x\U00100000 1", "µ ﬁ ŉ", "ǅ ʰ ª", "١٫٥", "五十",
]

WORDS = ("the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
         "which one you were all her she there would their we him been has when who will no more if out so up said "
         "what its about than into them can only other time new some could these two may first then do any like my "
         "now over such our man me even most made after also did many before must well back through years where much "
         "your way down should because each just those people how too little state good very make world still see "
         "work long get here between both life being under never day same another know while last might us great old "
         "tokenizer gradient reinforcement learning language model Paris London O'Neill isn't").split()
CODE = ["def ", "return ", "    ", "\t", "\n", "(", ")", "[i]", "{", "}", ";", ":", " = ", " == ", "self.", "->", "x1", "0.5",
        "\"s\"", "'c'", "# note", "// note", "/* c */", "import os", "lambda x: ", "&&", "||", "!=", "<=", "std::", "int ", "99"]
EMOJI = ["😀", "🎉", "👍🏽", "❤️", "🚀", "👩‍💻", "🇩🇪", "☕", "✅", "🙂"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<filename>", "<jupyter_text>", "<gh_stars>"]
MARKS = "\u0300\u0301\u0302\u0303\u0308\u030a\u0327\u0328"
# Ranges that both Unicode tables in play know for long, so no difference of versions is tested.
RANGES = [(0x21, 0x7e), (0xa1, 0xff), (0x100, 0x24f), (0x370, 0x3ff), (0x400, 0x45f), (0x5d0, 0x5ea), (0x620, 0x64a),
          (0x660, 0x669), (0x905, 0x939), (0x966, 0x96f), (0xe01, 0xe3a), (0x2010, 0x2027), (0x2070, 0x208e),
          (0x20a0, 0x20b5), (0x2150, 0x218b), (0x2190, 0x21ff), (0x2200, 0x22ff), (0x2460, 0x249b), (0x3041, 0x3096),
          (0x30a1, 0x30fa), (0x4e00, 0x9fa5), (0xac00, 0xd7a3), (0xff10, 0xff5a), (0x1d400, 0x1d454), (0x1f600, 0x1f64f)]


def spaces(rng):
    return " " * rng.choice([1, 1, 1, 1, 2, 3, 4, 7])


def prose(rng):
    parts = []
    for _ in range(rng.randint(2, 12)):
        word = rng.choice(WORDS)
        parts += [rng.choice([word, word, word, word.capitalize(), word.upper()]),
                  rng.choice(["", "", "", ",", ".", "?", "'s", "'re", "..."]), spaces(rng)]
    return "".join(parts)


def numbers(rng):
    form = rng.choice(["{a} + {b} = {c}", "{a}{b}{c}", "{a}.{b}", " {a}  {b}", "${a},{b}.{c}", "{a}th of {b}", "x{a}y{b}",
                       "What is {a} + {b}? Reply with the number only.", "({a}, {b}, {c})", "{a}-{b}-{c}", "{a}%\n{b}%"])
    return form.format(a=rng.randrange(10 ** rng.randint(1, 7)), b=rng.randrange(1000), c=rng.randrange(100))


def code(rng):
    return "".join(rng.choice(CODE) for _ in range(rng.randint(3, 14)))


def whitespace(rng):
    return "".join(rng.choice([" ", " ", "  ", "\n", "\t", "a", "1", "\r\n", "!", " b"]) for _ in range(rng.randint(2, 14)))


def emoji(rng):
    return "".join(rng.choice(EMOJI + [" ", "ok", "3"]) for _ in range(rng.randint(2, 8)))


def unicode_run(rng):
    low, high = rng.choice(RANGES)
    text = ""
    for _ in range(rng.randint(2, 16)):
        char = chr(rng.randint(low, high))
        if unicodedata.category(char) != "Cn":
            text += char + rng.choice(["", "", "", " ", "1"])
    return text


def marks(rng):
    return "".join(c + (rng.choice(MARKS) if rng.random() < 0.5 else "") for c in prose(rng)[:24])


def special(rng):
    kinds = [prose, numbers, whitespace, emoji]
    return "".join(rng.choice(SPECIAL) if rng.random() < 0.4 else rng.choice(kinds)(rng)[:12] for _ in range(rng.randint(2, 6)))


def mixed(rng):
    return "".join(rng.choice([prose, numbers, code, unicode_run, emoji])(rng)[:20] for _ in range(3))


def make_strings():
    rng = random.Random(SEED)
    makers = [prose, numbers, code, whitespace, emoji, unicode_run, unicode_run, marks, special, mixed]
    strings = list(dict.fromkeys(FIXED))
    seen = set(strings)
    while len(strings) < NUM_STRINGS:
        text = makers[len(strings) % len(makers)](rng)
        if text not in seen:
            seen.add(text)
            strings.append(text)
    return strings


def main(arguments):
    if len(arguments) != 2:
        print("usage: make_tokenizer_golden.py MODEL.gguf OUT.json", file=sys.stderr)
        return 2
    model = llama_cpp.Llama(model_path=arguments[0], vocab_only=True, verbose=False)
    strings = make_strings()
    rows = [[text, model.tokenize(text.encode(), add_bos=False, special=True)] for text in strings]
    with open(arguments[1], "w", encoding="ascii") as file:
        file.write('{"made_by": "tools/make_tokenizer_golden.py", "llama_cpp_python": "%s",\n"rows": [\n'
                   % llama_cpp.__version__)
        file.write(",\n".join(json.dumps(row, separators=(",", ":")) for row in rows))
        file.write("\n]}\n")
    print(f"{arguments[1]}: {len(rows)} strings, {sum(len(ids) for _, ids in rows)} ids")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
