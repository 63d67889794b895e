"""The modern Transformer against transformers' ModernBERT with the same weights; its windows against plain loops."""

import pytest
import torch
from pydantic import ValidationError
from transformers import ModernBertConfig, ModernBertModel

from gmlp_scale.data.batch import PAD_ID
from gmlp_scale.models import ModernTransformerConfig
from gmlp_scale.models.backbone import Backbone
from tests.models.every_kind import check_gradients, perturb, random_batch, tiny_config, tiny_model

CONFIGS = {
    "short windows": {"num_blocks": 7, "window": 6},
    "odd window": {"num_blocks": 3, "window": 5},
    "every second is global": {"num_blocks": 4, "window": 2, "global_every": 2},
    "none is local": {"num_blocks": 3, "window": None, "global_theta": 160_000.0},
    "window of whole rows": {"num_blocks": 3, "window": 22, "global_theta": 160_000.0},
    "angles": {"num_blocks": 4, "window": 8, "global_theta": 500.0, "local_theta": 20.0},
    "wide": {"num_blocks": 4, "window": 8, "d_model": 96, "d_ffn": 144, "num_heads": 6},
}
THEIRS = {"attention_norm": "attn_norm", "attention.qkv": "attn.Wqkv", "attention.out": "attn.Wo",
          "norm": "mlp_norm", "expand": "mlp.Wi", "project": "mlp.Wo"}  # fmt: skip


def modernbert(config: ModernTransformerConfig, model: Backbone, attention: str) -> ModernBertModel:
    """transformers' model with the same weights."""
    is_local = [config.window is not None and index % config.global_every > 0 for index in range(config.num_blocks)]
    theirs = ModernBertModel._from_config(
        ModernBertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ffn,
            num_hidden_layers=config.num_blocks,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.sequence_length,
            layer_types=["sliding_attention" if local else "full_attention" for local in is_local],
            local_attention=config.window or 128,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": config.global_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": config.local_theta},
            },
            pad_token_id=PAD_ID, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None,
        ),
        attn_implementation=attention,
    ).eval()  # fmt: skip
    state = {
        "embeddings.tok_embeddings.weight": model.embedding.weight,
        "embeddings.norm.weight": model.blocks[0].attention_norm.weight,
        "final_norm.weight": model.norm.weight,
    }
    for index, block in enumerate(model.blocks):
        names = list(THEIRS)[1:] if index == 0 else THEIRS
        state |= {f"layers.{index}.{THEIRS[name]}.weight": block.get_submodule(name).weight for name in names}
    assert len(state) == len(list(model.parameters()))
    theirs.load_state_dict(state)
    return theirs


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_states_and_gradients_are_those_of_modernbert(changes, attention):
    model = perturb(tiny_model("modern", **changes), 0.2)
    theirs = modernbert(tiny_config("modern", **changes), model, attention)
    for num_positions, lengths in (
        (12, (12, 12, 12)),
        (12, (12, 9, 2)),
        (7, (7, 7, 7)),
        (7, (7, 3, 1)),
        (1, (1, 1, 1)),
    ):
        ids_BN = random_batch(3, num_positions=12).token_ids_BN[:, :num_positions].clone()
        for ids_N, length in zip(ids_BN, lengths, strict=True):
            ids_N[length:] = PAD_ID
        is_token_BN = ids_BN != PAD_ID
        found_BND = model.norm(model.encode(ids_BN))
        expected_BND = theirs(ids_BN, is_token_BN.long()).last_hidden_state
        torch.testing.assert_close(found_BND[is_token_BN], expected_BND[is_token_BN], rtol=1e-5, atol=1e-5)
        weights = torch.randn(found_BND.shape, generator=torch.Generator().manual_seed(4)) * is_token_BN[:, :, None]
        for module, states_BND in ((model, found_BND), (theirs, expected_BND)):
            module.zero_grad()
            (states_BND * weights).sum().backward()
        for block, layer in ((model.blocks[-1], theirs.layers[-1]), (model.blocks[0], theirs.layers[0])):
            for ours, their in ((block.expand, layer.mlp.Wi), (block.attention.qkv, layer.attn.Wqkv)):
                assert (ours.weight.grad - their.weight.grad).norm() < 1e-5 * their.weight.grad.norm()


@pytest.mark.parametrize("num_positions", [12, 5])
@pytest.mark.parametrize(("index", "window"), [(0, 6), (1, 6), (2, 5), (3, 2), (4, 1)])
def test_a_local_layer_sees_half_its_window_to_each_side(index, window, num_positions):
    block = perturb(tiny_model("modern", num_blocks=5, window=window)).blocks[index]
    x_BND = torch.randn(2, num_positions, 16, generator=torch.Generator().manual_seed(3))
    weights_BHNN = block.attention_weights(x_BND)
    for i in range(num_positions):
        for j in range(num_positions):
            sees = index % 3 == 0 or abs(i - j) <= window // 2
            assert ((weights_BHNN[:, :, i, j] > 0) == sees).all()


def test_rotary_scores_depend_on_the_distance_alone():
    attention = perturb(tiny_model("modern")).blocks[0].attention
    q_BHNK, k_BHNK, _ = attention._queries_keys_values(torch.ones(1, 12, 16))
    scores_HNN = (q_BHNK @ k_BHNK.mT)[0]
    torch.testing.assert_close(scores_HNN[:, 1:, 1:], scores_HNN[:, :-1, :-1], rtol=1e-5, atol=1e-5)
    assert (scores_HNN[:, 0, 1:] - scores_HNN[:, 0, :1]).abs().min() > 1e-3


@pytest.mark.parametrize("kind", ["modern", "modern-rms"])
def test_gradients_are_right(kind):
    for block in perturb(tiny_model(kind, d_model=4, d_ffn=4, window=2).double()).blocks:
        check_gradients(block, d_model=4)


def test_rms_norm_is_its_formula_and_has_no_bias_either():
    model = perturb(tiny_model("modern-rms").double())
    x_BND = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected_BND = x_BND / (x_BND.square().mean(-1, keepdim=True) + 1e-5).sqrt() * model.norm.weight
    torch.testing.assert_close(model.norm(x_BND), expected_BND, rtol=1e-12, atol=1e-12)
    assert all(name.endswith("weight") for name, _ in model.named_parameters())


def test_a_head_needs_pairs_of_channels():
    with pytest.raises(ValidationError, match=r"d_model is 18 and num_heads 6: .* make a head's width even"):
        tiny_config("modern", d_model=18, num_heads=6)
