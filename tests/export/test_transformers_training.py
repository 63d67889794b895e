"""The weights of every class of an export: trained, saved, loaded, tied, resized, in another head, cast and moved."""

import pytest
import torch
import torch.nn.functional as F
from transformers.utils import is_accelerate_available

from gmlp_scale.export.hugging_face.modeling_gmlp import (
    GmlpScaleForMaskedLM,
    GmlpScaleForQuestionAnswering,
    GmlpScaleForSequenceClassification,
    GmlpScaleForTokenClassification,
    GmlpScaleModel,
)
from tests.export.tiny_heads import HEADS, HEADS_AND_KINDS, IDS, SHORT, labels_for, tiny_head, tiny_head_config
from tests.models.every_kind import FAMILIES, TINY

FLOATS = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -0.5], [0.0, 1.0, 1.5]])
IS_POSITIVE = (FLOATS > 0).float()
CLASSES = torch.tensor([2, 0, 1])
EVERY_HEAD = pytest.mark.parametrize("head", HEADS)
VOCAB_SIZE = TINY["vocab_size"]


@pytest.mark.parametrize(
    ("num_labels", "labels", "problem_type", "given", "loss"),
    [
        (1, FLOATS[:, 0], "regression", None, lambda logits: F.mse_loss(logits[:, 0], FLOATS[:, 0])),
        (3, CLASSES, "single_label_classification", None, lambda logits: F.cross_entropy(logits, CLASSES)),
        (3, IS_POSITIVE, "multi_label_classification", None,
         lambda logits: F.binary_cross_entropy(logits.sigmoid(), IS_POSITIVE)),
        (3, FLOATS, "regression", "regression", lambda logits: F.mse_loss(logits, FLOATS)),
    ],
)  # fmt: skip
def test_the_labels_decide_the_problem_type_and_its_loss_unless_it_is_given(
    num_labels, labels, problem_type, given, loss
):
    model = tiny_head(GmlpScaleForSequenceClassification, num_labels=num_labels, problem_type=given)
    output = model(IDS, labels=labels)
    assert output.logits.shape == (3, num_labels)
    torch.testing.assert_close(output.loss, loss(output.logits))
    assert model.config.problem_type == problem_type


@pytest.mark.parametrize("head", [GmlpScaleForMaskedLM, GmlpScaleForTokenClassification])
def test_labels_of_minus_100_count_for_nothing(head):
    model = tiny_head(head)
    is_counted_BN = IDS[:, :SHORT] % 4 == 1
    labels_BN = (IDS % 3).where(IDS % 4 == 1, -100)[:, :SHORT]  # a slice, which transformers' losses do not take
    output = model(IDS[:, :SHORT], labels=labels_BN)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[is_counted_BN], labels_BN[is_counted_BN]))


def test_the_loss_of_spans_is_over_all_positions_of_training():
    first_B, last_B = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])
    model = tiny_head(GmlpScaleForQuestionAnswering, masks_padding=False)
    whole = model(F.pad(IDS[:, :SHORT], (0, 5)))
    expected = (F.cross_entropy(whole.start_logits, first_B) + F.cross_entropy(whole.end_logits, last_B)) / 2
    found = model(IDS[:, :SHORT], start_positions=first_B, end_positions=last_B)
    torch.testing.assert_close(found.loss, expected)


@pytest.mark.parametrize(("head", "kind"), HEADS_AND_KINDS)
def test_every_parameter_gets_a_gradient(head, kind):
    model = tiny_head(head, kind).train()
    output = model(IDS, **labels_for(head, IDS))
    (output[0].square().mean() if head is GmlpScaleModel else output.loss).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("kind", FAMILIES)
def test_embeddings_get_a_gradient_at_tokens_alone(kind):
    model = tiny_head(GmlpScaleModel, kind)
    embeddings_BND = model.get_input_embeddings()(IDS[:, :SHORT]).detach().requires_grad_()
    mask = (torch.arange(SHORT) < 5).long().expand(3, -1)
    states_BND = model(inputs_embeds=embeddings_BND, attention_mask=mask).last_hidden_state
    states_BND[:, :5].square().sum().backward()
    assert embeddings_BND.grad[:, :5].abs().min() > 0
    assert (embeddings_BND.grad[:, 5:] == 0).all()


@pytest.mark.parametrize("kind", FAMILIES)
def test_hidden_states_keep_their_gradient(kind):
    output = tiny_head(GmlpScaleModel, kind)(IDS, output_hidden_states=True)
    output.hidden_states[0].retain_grad()
    output.last_hidden_state.square().sum().backward()
    assert output.hidden_states[0].grad.abs().min() > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_computes_blocks_twice_and_gives_the_same_gradients(kind, use_reentrant):
    model = tiny_head(GmlpScaleForTokenClassification, kind, dropout=0.3).train()
    num_passes = []
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: num_passes.append(1))

    def gradients() -> dict[str, torch.Tensor]:
        num_passes.clear()
        model.zero_grad()
        torch.manual_seed(3)
        model(IDS[:, :SHORT], labels=IDS[:, :SHORT] % 3).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    plain = gradients()
    assert len(num_passes) == 2
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed = gradients()
    assert len(num_passes) == 4
    assert checkpointed.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=0, atol=1e-6)


def outputs(model, ids=IDS, **given) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(model(ids, **given, return_dict=False)[: 2 if hasattr(model.model, "spans") else 1])


@EVERY_HEAD
def test_a_saved_model_is_loaded_with_the_same_outputs(head, tmp_path):
    model = tiny_head(head)
    model.save_pretrained(tmp_path)
    loaded, report = head.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(loaded), outputs(model))
    assert not loaded.training
    model.load_state_dict(loaded.state_dict())


def test_the_output_matrix_is_the_embedding(tmp_path):
    model = tiny_head(GmlpScaleForMaskedLM)
    model.save_pretrained(tmp_path)
    loaded = GmlpScaleForMaskedLM.from_pretrained(tmp_path)
    for tied in (model, loaded):
        assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    assert loaded.num_parameters() == GmlpScaleModel(tiny_head_config()).num_parameters()
    embedding = torch.nn.Embedding(VOCAB_SIZE, TINY["d_model"])
    loaded.set_input_embeddings(embedding)
    loaded.tie_weights()
    assert loaded.lm_head.weight is embedding.weight
    with torch.no_grad():
        expected = loaded.model.norm(loaded.model.encode(IDS)) @ embedding.weight.T
    torch.testing.assert_close(outputs(loaded)[0], expected)


def test_an_output_matrix_of_its_own_is_kept(tmp_path):
    model = tiny_head(GmlpScaleForMaskedLM, tie_word_embeddings=False)
    assert not torch.equal(model.lm_head.weight, model.model.embedding.weight)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(GmlpScaleForMaskedLM.from_pretrained(tmp_path)), outputs(model))


@pytest.mark.parametrize(
    ("asked", "multiple", "num_tokens"),
    [(VOCAB_SIZE + 9, None, VOCAB_SIZE + 9), (VOCAB_SIZE - 9, None, VOCAB_SIZE - 9), (VOCAB_SIZE + 1, 16, 48)],
)
@EVERY_HEAD
def test_the_embedding_is_resized(head, asked, multiple, num_tokens, tmp_path):
    model = tiny_head(head)
    ids, before = IDS.clamp(max=num_tokens - 1), model.get_input_embeddings().weight.clone()
    expected = outputs(model, ids)
    model.resize_token_embeddings(asked, pad_to_multiple_of=multiple)
    kept = min(num_tokens, VOCAB_SIZE)
    assert model.config.vocab_size == num_tokens == len(model.get_input_embeddings().weight)
    assert torch.equal(model.get_input_embeddings().weight[:kept], before[:kept])
    found = outputs(model, ids)
    if head is GmlpScaleForMaskedLM:
        assert found.shape[-1] == num_tokens and model.lm_head.weight is model.model.embedding.weight
        found, expected = found[..., :kept], expected[..., :kept]
    torch.testing.assert_close(found, expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(head.from_pretrained(tmp_path), ids), outputs(model, ids))


@EVERY_HEAD
def test_a_new_head_on_a_trunk_starts_as_a_new_layer_does(head, tmp_path):
    trunk = tiny_head(GmlpScaleModel)
    trunk.save_pretrained(tmp_path)
    model = head.from_pretrained(tmp_path)
    found = dict(model.named_parameters())
    for name, weight in trunk.named_parameters():
        assert torch.equal(found.pop(name), weight), name
    for name, weight in found.items():
        assert weight.abs().max() == 0 if name.endswith("bias") else 0 < weight.std() < 0.05, name


def test_a_head_s_trunk_is_loaded_alone(tmp_path):
    model = tiny_head(GmlpScaleForTokenClassification)
    model.save_pretrained(tmp_path)
    trunk = dict(GmlpScaleModel.from_pretrained(tmp_path).named_parameters())
    expected = {name: weight for name, weight in model.named_parameters() if "classifier" not in name}
    assert trunk.keys() == expected.keys() and len(expected) < len(dict(model.named_parameters()))
    assert all(torch.equal(trunk[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("head", [GmlpScaleForSequenceClassification, GmlpScaleForTokenClassification])
def test_another_number_of_classes_is_refused_or_given_a_new_layer(head, tmp_path):
    model = tiny_head(head)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        head.from_pretrained(tmp_path, num_labels=5)
    other = head.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert outputs(other).shape[-1] == 5
    assert torch.equal(other.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize(("head", "kind"), HEADS_AND_KINDS)
def test_a_model_is_cast(head, kind, tmp_path):
    model = tiny_head(head, kind)
    expected = outputs(model)
    torch.testing.assert_close(outputs(model.double()).float(), expected)
    model.float().save_pretrained(tmp_path)
    half = head.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for dtype, tolerance in ((torch.bfloat16, 0.5), (torch.float16, 0.1)):
        assert {parameter.dtype for parameter in half.to(dtype).parameters()} == {dtype}
        found = outputs(half).float()
        assert (found - expected).abs().max() < tolerance
        assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


@EVERY_HEAD
def test_a_model_moves_to_the_meta_device_and_back(head):
    model = tiny_head(head)
    expected, weights = outputs(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    model.to("meta")
    assert outputs(model, IDS.to("meta")).shape == expected.shape
    model.load_state_dict(weights, assign=True)
    assert torch.equal(outputs(model), expected)
    with torch.device("meta"):
        assert {parameter.device.type for parameter in head(tiny_head_config()).parameters()} == {"meta"}


@pytest.mark.skipif(not is_accelerate_available(), reason="device_map needs accelerate")
@pytest.mark.parametrize("kind", ["amlp", "bert-absolute", "bert-relative", "dot-product"])
def test_a_device_map_places_whole_blocks_and_the_disk_holds_some(kind, tmp_path):
    model = tiny_head(GmlpScaleForMaskedLM, kind)
    model.save_pretrained(tmp_path)
    auto = GmlpScaleForMaskedLM.from_pretrained(tmp_path, device_map="auto")
    assert torch.equal(outputs(auto, IDS[:, :SHORT]), outputs(model, IDS[:, :SHORT]))
    places = {"model.embedding": "cpu", "model.blocks.0": "disk", "model.blocks.1": "cpu", "model.norm": "disk"}
    places |= {"lm_head": "cpu"} | ({"model.positions": "disk"} if model.model.positions is not None else {})
    spread = GmlpScaleForMaskedLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "disk")
    assert {parameter.device.type for parameter in spread.model.blocks[0].parameters()} == {"meta"}
    found = outputs(spread, IDS[:, :SHORT], output_attentions=True)
    assert torch.equal(found, outputs(model, IDS[:, :SHORT]))
    assert spread._no_split_modules == {type(model.model.blocks[0]).__name__}
