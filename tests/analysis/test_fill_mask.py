"""launch/fill_mask.py on a small real run."""

from launch.fill_mask import main
from tests.written_shards import VOCAB_SIZE


def test_every_mask_has_a_line_of_its_most_probable_tokens(runs, succeeds):
    printed = succeeds(main, "--run", runs / "gmlp", "--top", 2, "abcde <mask> fghij <mask>", "<mask>")
    lines = printed.splitlines()
    assert [line for line in lines if "%" not in line] == ["abcde <mask> fghij <mask>", "<mask>"]
    candidates = [line for line in lines if line.startswith("    ")]
    assert len(candidates) == 3 and all(line.count("%") == 2 for line in candidates)


def test_a_sentence_without_a_mask_is_refused(runs, launched):
    assert launched(main, "--run", runs / "gmlp", "abcde") == (2, "", "no <mask> in: abcde\n")


def test_candidates_are_as_many_as_the_vocabulary_has(runs, refuses):
    for num in (0, VOCAB_SIZE + 1):
        needed = f"--top: found {num}; needed: 1 to {VOCAB_SIZE}"
        refuses(needed, main, "--run", runs / "gmlp", "--top", num, "abcde <mask>")
