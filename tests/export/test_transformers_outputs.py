"""What every class of an export returns: hidden states, attentions, tuples, and the same from ids and embeddings."""

import pytest
import torch

from gmlp_scale.export.hugging_face.modeling_gmlp import GmlpScaleForMaskedLM, GmlpScaleModel
from tests.export.tiny_heads import HEADS, HEADS_AND_KINDS, IDS, LENGTH, SHORT, labels_for, tiny_head
from tests.models.every_kind import FAMILIES, KINDS, TINY

EVERY_HEAD = pytest.mark.parametrize("head", HEADS)
EVERY_HEAD_AND_FAMILY = pytest.mark.parametrize(("head", "kind"), HEADS_AND_KINDS)
EVERY_FAMILY = pytest.mark.parametrize("kind", FAMILIES)
NUM_HEADS = {"amlp": 1} | {kind: fields["num_heads"] for kind, fields in KINDS.items() if "num_heads" in fields}
WITH_ATTENTION = pytest.mark.parametrize("kind", NUM_HEADS)
EVERYTHING = {"output_hidden_states": True, "output_attentions": True}
MASK = (torch.arange(SHORT) < torch.tensor([[SHORT], [5], [3]])).long()

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def tensors(output) -> list[torch.Tensor]:
    """All tensors of an output, in order."""
    values = output if isinstance(output, tuple) else output.to_tuple()
    return [tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,))]


def assert_same(found, expected):
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@EVERY_HEAD
def test_a_tuple_holds_what_the_output_holds(head):
    model = tiny_head(head)
    given = {"input_ids": IDS, **labels_for(head, IDS), **EVERYTHING}
    output, as_tuple = model(**given), model(**given, return_dict=False)
    assert isinstance(as_tuple, tuple) and len(as_tuple) == len(output)
    assert list(output)[-2:] == ["hidden_states", "attentions"]
    assert_same(as_tuple, output)
    model.config.return_dict = False
    assert_same(model(**given), output)


@EVERY_HEAD
def test_two_passes_give_the_same(head):
    model = tiny_head(head, dropout=0.5)
    for one, other in zip(tensors(model(IDS)), tensors(model(IDS)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_positions", [LENGTH, SHORT])
@EVERY_FAMILY
def test_hidden_states_are_what_blocks_read_and_the_last_state(kind, num_positions):
    model = tiny_head(GmlpScaleModel, kind)
    output = model(IDS[:, :num_positions], output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert {tuple(state.shape) for state in output.hidden_states} == {(3, num_positions, model.config.hidden_size)}
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    if num_positions == LENGTH:
        first, second, _ = output.hidden_states
        torch.testing.assert_close(model.model.blocks[0](first), second)
    model.config.output_hidden_states = True
    assert_same(model(IDS[:, :num_positions]), output)


@pytest.mark.parametrize("num_positions", [LENGTH, SHORT])
@WITH_ATTENTION
def test_attentions_have_every_head_and_pair_of_positions(kind, num_positions):
    model = tiny_head(GmlpScaleModel, kind)
    ids = IDS[:, :num_positions]
    attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == TINY["num_blocks"]
    for weights_BHNN in attentions:
        assert weights_BHNN.shape == (3, NUM_HEADS[kind], num_positions, num_positions)
        sums_BHN = weights_BHNN.sum(-1)
        torch.testing.assert_close(sums_BHN, torch.ones_like(sums_BHN))
    model.config.output_attentions = True
    assert_same(model(ids).attentions, attentions)


@WITH_ATTENTION
def test_no_attention_falls_on_padding(kind):
    attentions = tiny_head(GmlpScaleModel, kind)(IDS[:, :SHORT], MASK, output_attentions=True).attentions
    for weights_BHNN in attentions:
        for weights_HNN, num_tokens in zip(weights_BHNN, MASK.sum(-1), strict=True):
            assert (weights_HNN[..., num_tokens:] == 0).all()
            torch.testing.assert_close(weights_HNN.sum(-1), torch.ones(weights_HNN.shape[:2]))


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in NUM_HEADS])
def test_attentions_of_a_model_without_any_are_refused(kind):
    with pytest.raises(ValueError, match="has no attention: leave output_attentions out"):
        tiny_head(GmlpScaleModel, kind)(IDS, output_attentions=True)


@EVERY_HEAD_AND_FAMILY
def test_embeddings_stand_in_for_their_ids(head, kind):
    model = tiny_head(head, kind)
    embeddings_BND = model.get_input_embeddings()(IDS)
    assert_same(model(inputs_embeds=embeddings_BND), model(IDS))
    short = {"attention_mask": MASK, "output_hidden_states": True}
    assert_same(model(inputs_embeds=embeddings_BND[:, :SHORT], **short), model(IDS[:, :SHORT], **short))


def test_ids_or_embeddings_must_be_given_and_not_both():
    model = tiny_head(GmlpScaleForMaskedLM)
    for given in ({}, {"input_ids": IDS, "inputs_embeds": model.get_input_embeddings()(IDS)}):
        with pytest.raises(ValueError, match="give input_ids or inputs_embeds, and not both"):
            model(**given)


@EVERY_HEAD_AND_FAMILY
def test_a_batch_does_not_change_its_rows(head, kind):
    model = tiny_head(head, kind)
    batch = model(IDS[:, :SHORT], MASK, output_hidden_states=True)
    for row, num_tokens in enumerate(MASK.sum(-1).tolist()):
        alone = model(IDS[row : row + 1, :num_tokens], output_hidden_states=True)
        of_batch = [tensor[row : row + 1] for tensor in tensors(batch)]
        has_positions = [tensor.shape[1] == SHORT for tensor in of_batch]
        cut = [t[:, :num_tokens] if has else t for t, has in zip(of_batch, has_positions, strict=True)]
        assert_same(tuple(cut), alone)
