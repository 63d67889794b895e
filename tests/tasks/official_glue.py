"""Small files in the forms in which GLUE's tasks are downloaded.

https://github.com/nyu-mll/GLUE-baselines/blob/master/download_glue_data.py
"""

from pathlib import Path

WORDS = ("good", "great", "awful", "boring", "film", "story", "music", "acting")
_LABEL_LAST = {
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "{n}\tmain-captions\tMSRvid\t2012test\t{n}\tnone\tnone\t{a} film {n}\t{b} film\t{score:.3f}",
    ),
    "QNLI": ("index\tquestion\tsentence\tlabel", "{n}\tWhat is {a}?\tThe {b} film {n}.\t{entailment}"),
    "RTE": ("index\tsentence1\tsentence2\tlabel", "{n}\tThe {a} film {n}.\tThe {b} film.\t{entailment}"),
}
"""Files whose test part lacks the last column alone: their header and a line."""
PAIRS = {
    "SST-2": ("sentence\tlabel", "{a} film {n} \t{label}", "index\tsentence", "{n}\t{a} film {n}"),
    "MRPC": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '{label}\t70{n}\t71{n}\t"{a} film , he said .\t{b} film {n} .',
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '{n}\t70{n}\t71{n}\t"{a} film , he said .\t{b} film {n} .',
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        '{n}\t1{n}\t2{n}\tWhat is "{a}" film {n}?\tWhat is {b} film?\t{label}',
        "id\tquestion1\tquestion2",
        '{n}\tWhat is "{a}" film {n}?\tWhat is {b} film?',
    ),
    **{name: (*both, *(text.rpartition("\t")[0] for text in both)) for name, both in _LABEL_LAST.items()},
}
MNLI_COLUMNS = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2"
)
MNLI_LINE = "{n}\t3{n}\t3{n}e\tfiction\t( x )\t( y )\t(P)\t(P)\tThe {a} film {n}\tThe {b} film"
BROKEN_QUESTION = ("7\t17\t27\tWhat is a film?\tIs it", '"\tgood?\t1')
"""One example of QQP's training file whose second question holds a line break."""


def write_glue(folder: Path, num_rows: int = 12) -> Path:
    """The folders CoLA to RTE with train, dev and test files, of which each part has its own texts."""
    _write(folder / "CoLA/train.tsv", *_lines("gj04\t{label}\t\tThe {a} film {n} .", 0, num_rows))
    _write(folder / "CoLA/dev.tsv", *_lines("clc95\t{label}\t*\tThe {a} story {n} .", 100, num_rows))
    _write(folder / "CoLA/test.tsv", "index\tsentence", *_lines("{n}\tThe {a} film {n} .", 0, 4))
    for name, (header, line, test_header, test_line) in PAIRS.items():
        broken = BROKEN_QUESTION if name == "QQP" else ()
        _write(folder / name / "train.tsv", header, *broken, *_lines(line, 0, num_rows))
        _write(folder / name / "dev.tsv", header, *_lines(line, 100, num_rows))
        _write(folder / name / "test.tsv", test_header, *_lines(test_line, 0, 4))
    labels = "\tlabel1\tgold_label"
    _write(folder / "MNLI/train.tsv", MNLI_COLUMNS + labels, *_lines(MNLI_LINE + "\t{mnli}\t{mnli}", 0, num_rows))
    for number, part in enumerate(("matched", "mismatched"), start=1):
        labels = "".join(f"\tlabel{annotator}" for annotator in range(1, 6)) + "\tgold_label"
        lines = _lines(MNLI_LINE + "\t{mnli}" * 6, 100 * number, num_rows)
        without_consensus = MNLI_LINE.format(n=0, a="good", b="bad") + "\tneutral" * 5 + "\t-"
        _write(folder / f"MNLI/dev_{part}.tsv", MNLI_COLUMNS + labels, without_consensus, *lines)
        _write(folder / f"MNLI/test_{part}.tsv", MNLI_COLUMNS, *_lines(MNLI_LINE, 0, 4))
    return folder


def _lines(form: str, first: int, num_rows: int) -> list[str]:
    """The label says whether both words are the same; the score how near they are."""
    lines = []
    for n in range(first, first + num_rows):
        a, b = n % 8, (n + n // 2 % 3) % 8
        labels = {"entailment": "entailment" if a == b else "not_entailment", "score": 5 - abs(a - b) * 5 / 8}
        labels |= {"label": int(a == b), "mnli": ("entailment", "neutral", "contradiction")[n % 3]}
        lines.append(form.format(n=n, a=WORDS[a], b=WORDS[b], **labels))
    return lines


def _write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
