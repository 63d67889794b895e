"""Training the classes of an export: their losses, gradients, and gradient checkpointing."""

import pytest
import torch
import torch.nn.functional as F

from gmlp_scale.export.hugging_face.modeling_gmlp import (
    GmlpScaleForMaskedLM,
    GmlpScaleForQuestionAnswering,
    GmlpScaleForSequenceClassification,
    GmlpScaleForTokenClassification,
    GmlpScaleModel,
)
from tests.export.tiny_heads import HEADS_AND_KINDS, IDS, SHORT, labels_for, tiny_head
from tests.models.every_kind import FAMILIES, MASKS_PADDING

FLOATS = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -0.5], [0.0, 1.0, 1.5]])
CLASSES = torch.tensor([2, 0, 1])


@pytest.mark.parametrize(
    ("num_labels", "labels", "problem_type", "loss"),
    [
        (1, FLOATS[:, 0], "regression", lambda logits: (logits[:, 0] - FLOATS[:, 0]).square().mean()),
        (3, CLASSES, "single_label_classification", lambda logits: F.cross_entropy(logits, CLASSES)),
        (
            3,
            (FLOATS > 0).float(),
            "multi_label_classification",
            lambda logits: F.binary_cross_entropy(logits.sigmoid(), (FLOATS > 0).float()),
        ),
    ],
)
def test_the_labels_decide_the_problem_type_and_its_loss(num_labels, labels, problem_type, loss):
    model = tiny_head(GmlpScaleForSequenceClassification, num_labels=num_labels)
    output = model(IDS, labels=labels)
    assert output.logits.shape == (3, num_labels)
    torch.testing.assert_close(output.loss, loss(output.logits))
    assert model.config.problem_type == problem_type


def test_a_given_problem_type_is_kept():
    model = tiny_head(GmlpScaleForSequenceClassification, problem_type="regression")
    output = model(IDS, labels=FLOATS)
    torch.testing.assert_close(output.loss, (output.logits - FLOATS).square().mean())


@pytest.mark.parametrize("head", [GmlpScaleForMaskedLM, GmlpScaleForTokenClassification])
def test_labels_of_minus_100_count_for_nothing(head):
    model = tiny_head(head)
    is_counted_BN = IDS[:, :SHORT] % 4 == 1
    labels_BN = (IDS % 3).where(IDS % 4 == 1, -100)[:, :SHORT]  # a slice, which transformers' losses do not take
    output = model(IDS[:, :SHORT], labels=labels_BN)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[is_counted_BN], labels_BN[is_counted_BN]))


def test_the_loss_of_spans_is_over_all_positions_of_training():
    first_B, last_B = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])
    model = tiny_head(GmlpScaleForQuestionAnswering)
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


@pytest.mark.parametrize("kind", MASKS_PADDING)
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
