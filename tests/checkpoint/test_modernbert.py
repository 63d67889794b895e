"""ModernBERT's folders: ours as transformers reads them, and transformers' as we read and continue them."""

import json

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, ModernBertConfig, ModernBertForMaskedLM

from gmlp_scale.checkpoint.trained import ExportError, TrainedModel, read_export
from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer, train_tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.export import folder as folder_module
from gmlp_scale.export.folder import write_modernbert
from gmlp_scale.models import build_model
from tests.models.every_kind import perturb, tiny_config

WORDS = ("time", "year", "people", "way", "day", "woman", "life", "child", "world", "school", "state", "family")
TEXTS = [" ".join(WORDS[i % 5 :: 1 + i % 3]) + f" naïve {i}." for i in range(300)]
IDS = torch.randint(5, 300, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < torch.tensor([[12], [7], [2]])


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, folder)
    return folder


@pytest.fixture
def trained(tokenizer_folder):
    """trained(kind, fields...) -> a TrainedModel of which no parameter is at its start."""

    def make(kind: str = "modern", **fields) -> TrainedModel:
        config = tiny_config(kind, vocab_size=300, **fields)
        weights = {name: tensor.detach() for name, tensor in perturb(build_model(config)).named_parameters()}
        sha256 = Tokenizer(tokenizer_folder).sha256
        place = {"tokenizer_folder": str(tokenizer_folder), "tokenizer_sha256": sha256}
        return TrainedModel("here", config, "masked_language_model", weights, {"step": 3}, **place)

    return make


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 5},
        {"num_blocks": 2, "window": None},
        {"num_blocks": 4, "global_every": 2, "window": 5, "global_theta": 160_000.0, "local_theta": 500.0},
    ],
    ids=str,
)
def test_transformers_own_class_gives_our_states_and_logits_and_we_read_it_back(trained, tmp_path, fields):
    ours = trained(**fields)
    write_modernbert(ours, tmp_path / "hf")
    ids = IDS.masked_fill(~MASK, PAD_ID)
    model, states = ours.build(), {}
    states["found"] = AutoModel.from_pretrained(tmp_path / "hf")(ids, MASK.long()).last_hidden_state
    states["expected"] = model.norm(model.encode(ids))
    torch.testing.assert_close(states["found"][MASK], states["expected"][MASK], rtol=1e-5, atol=1e-5)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert type(theirs) is ModernBertForMaskedLM
    logits = theirs(ids, MASK.long()).logits
    torch.testing.assert_close(logits[MASK], model.head(states["expected"])[MASK], rtol=1e-5, atol=1e-5)
    text = "people of the naïve world"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"][1:-1] == ours.tokenizer().encode(text)

    theirs.save_pretrained(tmp_path / "saved")  # by another version of transformers, the fields have other names
    (tmp_path / "saved" / MODEL_NAME).write_bytes((tmp_path / "hf" / MODEL_NAME).read_bytes())
    for folder in ("hf", "saved"):
        back = read_export(tmp_path / folder)
        assert (back.config, back.head, back.step) == (ours.config, ours.head, 3)
        assert back.weights.keys() == ours.weights.keys()
        assert all(torch.equal(back.weights[name], ours.weights[name]) for name in ours.weights)


@pytest.fixture
def modernbert(tmp_path, tokenizer_folder):
    """A folder of transformers with a tokenizer like ModernBERT's, ours beside it; and the model."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 5, "num_attention_heads": 2}
    ids = {"pad_token_id": 3, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = ModernBertConfig(
        vocab_size=fast.get_vocab_size(), max_position_embeddings=64, local_attention=6, **sizes, **ids
    )
    torch.manual_seed(0)
    model = perturb(ModernBertForMaskedLM(config).eval())
    model.save_pretrained(tmp_path / "hf")
    fast.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / MODEL_NAME).write_bytes((tokenizer_folder / MODEL_NAME).read_bytes())
    return tmp_path / "hf", model, fast


def test_a_modernbert_with_another_tokenizer_gives_its_states(modernbert):
    folder, theirs, fast = modernbert
    export = read_export(folder)
    assert (export.config.global_theta, export.config.local_theta, export.config.window) == (160_000.0, 10_000.0, 6)
    model, rows_VD = export.build(), export.weights["embedding.weight"]
    found_BND = model.norm(model.encode(IDS.masked_fill(~MASK, PAD_ID)))
    expected_BND = theirs.model(inputs_embeds=rows_VD[IDS], attention_mask=MASK.long()).last_hidden_state
    torch.testing.assert_close(found_BND[MASK], expected_BND[MASK], rtol=1e-5, atol=1e-5)

    old_VD = theirs.model.embeddings.tok_embeddings.weight
    for name, theirs_name in (("<pad>", "[PAD]"), ("<unk>", "[UNK]"), ("<mask>", "[MASK]")):
        assert torch.equal(
            rows_VD[Tokenizer(folder).pieces.index(name.encode())], old_VD[fast.token_to_id(theirs_name)]
        )
    cut = {piece: fast.encode(piece.decode()).ids for piece in Tokenizer(folder).pieces[261:]}
    assert {len(ids) for ids in cut.values()} >= {1, 2}
    for row, ids in zip(rows_VD[261:], cut.values(), strict=True):
        torch.testing.assert_close(row, old_VD[ids].mean(0))


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"norm_bias": True}, "norm_bias"),
        ({"hidden_activation": "relu"}, "found {'hidden_activation': 'relu'}"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3}, "needed: 5; each n-th"),
        ({"layer_types": ["full_attention"]}, "needed: 5; each n-th"),
        ({"layer_types": 5}, "missing or of another type"),
        ({"rope_parameters": "default"}, "missing or of another type"),
        ({"num_hidden_layers": "5"}, "missing or of another type"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}},
            "needed: rope_type default",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "found {'rope_scaling'"),
        ({"sliding_window": 4}, "found {'sliding_window': 4}"),
        ({"cls_token_id": 10_000}, "missing or of another type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 24}, "make a head's width even"),
        ({"intermediate_size": 40}, "not of config.json's model"),
    ],
)
def test_a_modernbert_that_our_blocks_are_not_is_refused(modernbert, change, needle):
    path = modernbert[0] / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(ExportError, match=needle):
        read_export(modernbert[0])


def test_special_tokens_of_other_names_are_found_by_their_ids(modernbert):
    folder, theirs, _ = modernbert
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cls_token_id": 7, "sep_token_id": 8}))
    rows_VD, old_VD = read_export(folder).weights["embedding.weight"], theirs.model.embeddings.tok_embeddings.weight
    assert torch.equal(rows_VD[[CLS_ID, SEP_ID, PAD_ID]], old_VD[[7, 8, 3]])


def test_the_old_tokenizer_is_needed_whole_and_reads_no_padding(modernbert):
    folder, _, fast = modernbert
    path, expected = folder / "tokenizer.json", read_export(folder).weights["embedding.weight"]
    fast.enable_padding(length=8, pad_id=3, pad_token="[PAD]")
    fast.save(str(path))
    assert torch.equal(read_export(folder).weights["embedding.weight"], expected)
    fast.add_tokens(["added"])
    fast.save(str(path))
    with pytest.raises(ExportError, match=r"tokens, the embedding .* not of one model"):
        read_export(folder)
    path.write_text("{}")
    with pytest.raises(ExportError, match=r"tokenizer\.json, with which the model was trained, cannot be read"):
        read_export(folder)
    path.unlink()
    with pytest.raises(ExportError, match=r"tokenizer\.json, with which the model was trained, cannot be read"):
        read_export(folder)


def test_a_model_whose_last_norm_has_a_gain_of_0_is_not_written(trained, tmp_path):
    ours = trained()
    ours.weights["norm.weight"][3] = 0
    with pytest.raises(InputError, match=r"norm.weight is 0 in channels \[3\]"):
        write_modernbert(ours, tmp_path / "hf")


@pytest.mark.parametrize("kind", ["modern-rms", "gmlp"])
def test_what_no_modernbert_is_is_not_written_as_one(trained, tmp_path, kind):
    with pytest.raises(InputError, match="only a modern_transformer with norm layer_norm"):
        write_modernbert(trained(kind), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_modernbert_is_written_whole_or_not_at_all_and_damage_to_it_is_found(trained, tmp_path, monkeypatch):
    ours, weights = trained(), tmp_path / "hf/model.safetensors"
    write_modernbert(ours, tmp_path / "hf")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(ExportError, match="does not have its checksum"):
        read_export(tmp_path / "hf")

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(folder_module, "write_tokenizer", fail)
    with pytest.raises(OSError, match="no room"):
        write_modernbert(ours, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
