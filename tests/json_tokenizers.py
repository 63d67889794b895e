"""Small tokenizers of the kinds that Hugging Face's models have, as folders with tokenizer.json."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data_prep.corpora import make_texts

END = "<|endoftext|>"


def gpt2(folder: Path, **config: object) -> Path:
    """Byte-level BPE without a template. Its file cuts and pads texts, as many files of the hub say."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(model, trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet))
    model.enable_truncation(8)
    model.enable_padding(length=16)
    return save(model, folder, **config)


def bert(folder: Path, **config: object) -> Path:
    """WordPiece with `[CLS] A [SEP]`; the special tokens are the ids 0 and 7 to 10, as BERT's are 0 and 100 to 103."""
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer, model.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    names = ["[PAD]", *(f"[unused{number}]" for number in range(6)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(model, trainers.WordPieceTrainer(vocab_size=300, special_tokens=names))
    state = json.loads(model.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if "unused" not in token["content"]]
    model = Tokenizer.from_str(json.dumps(state))
    model.post_processor = processors.BertProcessing(("[SEP]", 9), ("[CLS]", 8))
    return save(model, folder, **config)


def llama(folder: Path, num_ids: int = 70_000) -> Path:
    """Words with `<s> A`, an end token of the config alone, and more ids than uint16 holds."""
    words = sorted({word for seed in range(3) for text in make_texts(300, seed) for word in text.split()})
    vocabulary = {name: id for id, name in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {word: num_ids - 1 - place for place, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(model, folder, eos_token={"content": "</s>"}, unk_token="<unk>")


def save(model: Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _train(model: Tokenizer, trainer: object) -> None:
    model.train_from_iterator([text for seed in range(3) for text in make_texts(300, seed)], trainer)
