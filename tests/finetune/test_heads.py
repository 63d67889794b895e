"""The heads of finetuning on the shared trunk; dropout: where it acts and what it must not change."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gmlp_scale.data.batch import PAD_ID, MaskedBatch
from gmlp_scale.models import build_model
from gmlp_scale.models.task_heads import LabelledBatch, SequenceClassifier, SpanBatch, SpanPredictor, TaggedBatch
from tests.models.every_kind import KINDS, tiny_config

ALL = pytest.mark.parametrize("kind", KINDS)
CLASSIFIER = functools.partial(SequenceClassifier, num_classes=3)
TOKEN_IDS_BN = torch.randint(5, 40, (4, 12), generator=torch.Generator().manual_seed(0))
LABELLED = LabelledBatch(TOKEN_IDS_BN, torch.tensor([0, 2, 1, 1]))
SPANS = SpanBatch(TOKEN_IDS_BN, torch.tensor([0, 3, 5, 11]), torch.tensor([0, 4, 5, 11]))
SHORT_SPANS = replace(SPANS, first_positions_B=torch.tensor([0, 3, 5, 2]), last_positions_B=torch.tensor([0, 4, 5, 6]))


def tiny(kind: str, head, dropout: float = 0.0):
    model = build_model(tiny_config(kind), head=head, dropout=dropout)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@ALL
def test_classifier_reads_the_normalised_cls_state(kind):
    model = tiny(kind, CLASSIFIER)
    x_BD = model.norm(model.encode(TOKEN_IDS_BN))[:, 0]
    logits_BC = x_BD @ model.classifier.weight.T + model.classifier.bias
    assert torch.allclose(model.predict(LABELLED), logits_BC, atol=1e-6)
    expected = -logits_BC.log_softmax(-1)[range(4), [0, 2, 1, 1]].mean()
    assert torch.allclose(model(LABELLED), expected, atol=1e-6)


@ALL
def test_span_loss_is_the_mean_over_first_and_last_tokens(kind):
    model = tiny(kind, SpanPredictor)
    first_BN, last_BN = model.predict(SPANS).unbind(-1)
    assert first_BN.shape == (4, 12) and first_BN.dtype == torch.float32
    losses = F.cross_entropy(first_BN, SPANS.first_positions_B), F.cross_entropy(last_BN, SPANS.last_positions_B)
    assert torch.allclose(model(SPANS), sum(losses) / 2)


@ALL
@pytest.mark.parametrize("head, batch", [(CLASSIFIER, LABELLED), (SpanPredictor, SHORT_SPANS)])
def test_padding_changes_no_logit_and_no_loss(kind, head, batch):
    model, padded_BN = tiny(kind, head), TOKEN_IDS_BN.clone()
    padded_BN[:, 7:] = PAD_ID
    alone, padded = (replace(batch, token_ids_BN=ids_BN) for ids_BN in (TOKEN_IDS_BN[:, :7], padded_BN))
    logits = model.predict(padded)
    logits = logits[:, :7] if logits.ndim == 3 else logits
    torch.testing.assert_close(logits, model.predict(alone), rtol=0, atol=1e-6)
    torch.testing.assert_close(model(padded), model(alone), rtol=0, atol=1e-6)


def test_padding_is_cut_to_the_longest_text():
    ids_BN = torch.zeros(3, 20, dtype=torch.int64)
    for longest, length in ((1, 8), (8, 8), (9, 16), (17, 20)):
        ids_BN[1, :longest] = 5
        cut = TaggedBatch(ids_BN, ids_BN + 1).cut_padding()
        assert torch.equal(cut.token_ids_BN, ids_BN[:, :length]) and torch.equal(cut.labels_BN, cut.token_ids_BN + 1)


@pytest.mark.parametrize("head, batch", [(CLASSIFIER, LABELLED), (SpanPredictor, SPANS)])
def test_loss_of_a_batch_is_the_mean_of_its_micro_batches(head, batch):
    model = tiny("gmlp", head)
    halves = [type(batch)(*(tensor[rows] for tensor in vars(batch).values())) for rows in (slice(2), slice(2, 4))]
    assert torch.allclose(model(batch), (model(halves[0]) + model(halves[1])) / 2, atol=1e-6)


@ALL
@pytest.mark.parametrize("head", [CLASSIFIER, SpanPredictor])
def test_the_trunk_keeps_its_names_and_dropout_has_no_parameters(kind, head):
    config = tiny_config(kind)
    with torch.device("meta"):
        pretrained = {name: p.shape for name, p in build_model(config).named_parameters()}
        finetuned = {name: p.shape for name, p in build_model(config, head=head, dropout=0.1).named_parameters()}
    assert {name: shape for name, shape in finetuned.items() if name in pretrained} == pretrained
    assert all(name.startswith(("classifier.", "spans.")) for name in finetuned.keys() - pretrained.keys())


@ALL
def test_dropout_draws_in_training_only_and_on_attention_too(kind):
    model, plain = tiny(kind, CLASSIFIER, dropout=0.3), tiny(kind, CLASSIFIER)
    assert not torch.equal(model.predict(LABELLED), model.predict(LABELLED))
    attention = model.blocks[0].attention if kind.startswith(("amlp", "bert")) else None
    x_BND = torch.randn(2, 12, 16)
    assert attention is None or not torch.equal(attention(x_BND), attention(x_BND))
    model.eval()
    assert torch.equal(model.predict(LABELLED), plain.predict(LABELLED))
    assert attention is None or torch.equal(attention(x_BND), attention(x_BND))


@ALL
def test_recompute_draws_the_same_dropout_again(kind):
    gradients = []
    for recompute in ("none", "selective", "full"):
        model = tiny(kind, CLASSIFIER, dropout=0.3)
        model.set_recompute(recompute)
        torch.manual_seed(5)
        model(LABELLED).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]) and torch.equal(gradient, gradients[2][name]), name


def test_pretraining_with_dropout_keeps_its_contract():
    config = tiny_config("amlp")
    model = build_model(config, dropout=0.2)
    model.init_weights(torch.Generator().manual_seed(0))
    positions_BM = torch.tensor([[1, 4]]).expand(4, 2)
    batch = MaskedBatch(TOKEN_IDS_BN, positions_BM, TOKEN_IDS_BN.gather(1, positions_BM))
    assert model.predict(batch).shape == (4, 2, 40) and not torch.equal(model(batch), model(batch))


def test_flops_are_the_trunks():
    with torch.device("meta"):
        model = tiny("gmlp", CLASSIFIER)
    n, d, f = 12, 16, 32
    assert model.flops_per_sample() == 2 * 2 * (n * d * (f + f // 2) + n * n * f // 2)
