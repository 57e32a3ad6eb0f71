#!/usr/bin/env python3
"""Writes tests/goldens/bleu.json: 13a tokens and corpus BLEU of lines written here, as sacreBLEU computes them.

usage: pip install sacrebleu==2.6.0 && python3 tools/goldens/make_bleu.py
"""
import json, pathlib, random

import sacrebleu
from sacrebleu.metrics import BLEU

LINES = [
    "", " ", ".", "-", "a", "The cat sat on the mat.", "Hello, world!", "It's Tom's dog, isn't it?",
    "Der schnelle braune Fuchs springt über den faulen Hund.", "„Wirklich?“, fragte sie – und ging.",
    "Größe: 1,5 m; Gewicht: 3.200,75 kg", "Version 2.0.1-rc3 (64-Bit)", "am 3. Oktober 1990, um 12:30 Uhr",
    "1,234,567.89", ".5 and 5. and 5.x and x.5", ",,, ... .,.,", "1.2.3", "a.b.c", "9-to-5", "well-known 1990-2000 x-1 1-x",
    "--help -h", "3-", "-3", "1-2-3", "&quot;quoted&quot; &amp; &lt;b&gt;", "&amp;quot; &amp;lt; &amp;amp;", "&apos; &nbsp; &#39; &",
    "AT&T R&D", "<skipped>", "a <skipped> b", "<skip<skipped>ped>", "end of a line with a dash-\ncontinued", "two\nlines", "dash at the end-\n",
    "tab\tand\u00a0no-break\u2009thin\u3000wide", "\u0085next line\x1cfile\x1funit\x0bvertical\x0cform", "zero\u200bwidth stays one word",
    "line\u2028separator\u2029paragraph\u202fnarrow\u205fmath\u1680ogham", "\u00a0\u3000trailing\u3000\u00a0 ", "carriage\r\n",
    "我喜欢机器翻译。今天是星期一,明天是2。", "日本語のテスト、ですね。ABC、123", "한국어 문장입니다.", "Привет, мир! Это 1-й тест.",
    "Ça va? L'été, «déjà» vu…", "¿Qué? ¡Hola!", "naïve café résumé", "😀.😀, 👍🏽-5", "é.é,é-1é", "5é.5", "€5.00 £3,20 5% §7", "e\u0301.e\u0301",
    "http://example.org/path?x=1&y=2#top", "user@example.org", "C:\\temp\\x_1.txt", "{[(<|>)]}", "`a` ~b~ ^c^ _d_ |e|", "'single' \"double\" ‘curly’ “quotes”",
    "a/b + c*d = e$f", "#1 $2.50 50%-60%", "word,word.word", "1,word.2", "x,1.y", "Dr. Müller-Lüdenscheidt, Ph.D.", "  many   spaces  ", "٣.٤ ١٢-٣", "²,³ ½.",
    "\u2003.\u2003,", "a\u00ad-b", "\ufeffBOM.", "0.0.0.0,0,0-0-", "...", ". . .", "!?!?", "x" * 300,
]

GERMAN = [
    ("Das Paket enthält die Dokumentation.", "Dieses Paket enthält die Dokumentation."),
    ("Ein einfacher Editor für die Konsole, in C geschrieben.", "Ein einfacher, in C geschriebener Editor für die Konsole."),
    ("Es unterstützt Version 2.0 und neuer.", "Es werden Version 2.0 und neuere unterstützt."),
    ("Die Datei &quot;x.txt&quot; fehlt.", "Die Datei \"x.txt\" fehlt!"),
    ("Mehr als 1.000 Befehle stehen bereit.", "Über 1.000 Befehle stehen zur Verfügung."),
    ("Wörterbücher für 12 Sprachen – kostenlos.", "Wörterbücher für zwölf Sprachen – frei verfügbar."),
]
CORPORA = {
    "german": GERMAN,
    "identical": [(r, r) for _, r in GERMAN],
    "one word right": [("alpha beta gamma delta epsilon", "one two three four epsilon")],
    "nothing right": [("alpha beta gamma delta", "one two three four")],
    "empty hypotheses": [("", "Ein Satz."), ("", "Noch ein Satz.")],
    "one empty hypothesis": GERMAN + [("", "Hier kam nichts heraus.")],
    "empty reference": GERMAN + [("Hier kam zu viel heraus.", "")],
    "both empty": [("", "")],
    "shorter than four words": [("the cat", "the cat sat"), ("a b c", "a b c")],
    "only unigrams": [("a", "a"), ("b", "c")],
    "too short": [("The cat", "The cat sat on the mat in the house.")],
    "too long": [("the the the the the the the the cat sat on on the mat mat", "the cat sat on the mat")],
    "no trigrams right": [("a b x c d y e f", "a b z c d w e f")],
    "no bigrams right": [("a x b y c z", "a b c d e f")],
    "repeats clipped": [("the the the the the the the", "the cat is on the mat")],
    "CJK": [("我喜欢机器翻译。 是的", "我喜欢机器翻译。 对"), ("日本語 の テスト です ね", "日本語 の テスト です よ")],
    "case": [("THE Cat sat on the mat", "the cat sat on the mat")],
    "spaces": [("a\u00a0b\u3000c d e\u2009f", "a b c d e f"), ("  a  b c d ", "a b c d")],
}


def nasty(rng, words):
    alphabet = list("aB9 0.,-.,-'&;\"!/()<>[]{}~^_`|\\:@#$%*+=?") + ["é", "ß", "中", "😀", "\u00a0", "\u3000", "\t", "\n", "&quot;", "&amp;", "&lt;", "-\n", "<skipped>"]
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(words)))


def main():
    rng = random.Random(20)
    lines = LINES + [nasty(rng, 40) for _ in range(400)]
    vocabulary = "der die das ein Paket Programm Datei, Version 2.0 3-fach und. (oder) für über 1.000 - … AT&T".split()
    corpora = dict(CORPORA)
    for size in (1, 3, 20, 60):
        pairs = []
        for _ in range(size):
            reference = [rng.choice(vocabulary) for _ in range(rng.randrange(1, 25))]
            hypothesis = [w if rng.random() < 0.8 else rng.choice(vocabulary) for w in reference if rng.random() < 0.93]
            pairs.append((" ".join(hypothesis), " ".join(reference)))
        corpora[f"random words, {size} lines"] = pairs
    corpora["random characters"] = [(s, s[: rng.randrange(len(s) + 1)] + nasty(rng, 10)) for s in (nasty(rng, 60) for _ in range(60))]
    bleu = BLEU()
    out = {"sacrebleu": sacrebleu.__version__, "tokenize": [], "corpora": []}
    for line in lines:
        out["tokenize"].append({"line": line, "tokens": bleu._preprocess_segment(line)})
    for name, pairs in corpora.items():
        hypotheses, references = [h for h, _ in pairs], [r for _, r in pairs]
        score = bleu.corpus_score(hypotheses, [references])
        out["corpora"].append({
            "name": name, "hypotheses": hypotheses, "references": references, "score": score.score, "precisions": score.precisions,
            "bp": score.bp, "correct": score.counts, "total": score.totals, "hyp_len": score.sys_len, "ref_len": score.ref_len, "format": str(score)})
    out["signature"] = str(bleu.get_signature())
    path = pathlib.Path(__file__).resolve().parents[2] / "tests/goldens/bleu.json"
    path.write_text(json.dumps(out, indent=0, ensure_ascii=True) + "\n")
    print(path, len(out["tokenize"]), "lines,", len(out["corpora"]), "corpora")


main()
