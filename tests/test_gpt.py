"""The GPT: shapes, causality, tied weights, initialisation, generating, and both ways of attention."""

import math
import subprocess
import sys

import pytest
import torch

from lowprec_lab import gpt
from lowprec_lab.gpt import GPT, GPTConfig, preset

SMALL = GPTConfig(vocab_size=11, context=8, layers=2, heads=2, width=12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).eval()


def tokens(B=3, T=8, seed=1):
    return torch.randint(SMALL.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def test_with_targets_all_logits_and_the_loss(model):
    x, y = tokens(), tokens(seed=2)
    logits, loss = model(x, y)
    assert logits.shape == (3, 8, 11)
    by_hand = -logits.log_softmax(-1).gather(2, y[..., None]).mean()
    assert torch.allclose(loss, by_hand, rtol=0, atol=1e-6)


def test_without_targets_the_last_position_alone(model):
    logits, loss = model(tokens())
    assert logits.shape == (3, 1, 11)
    assert loss is None
    assert torch.allclose(logits, model(tokens(), tokens())[0][:, -1:], atol=1e-6)


def test_fresh_weights_know_nothing(model):
    """The loss of a fresh model is that of guessing: log V."""
    assert abs(model(tokens(64), tokens(64, seed=2))[1].item() - math.log(11)) < 0.05


def test_no_token_sees_the_future(model):
    x = tokens()
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % SMALL.vocab_size
    before, after = (model(each, each)[0] for each in (x, changed))
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(dim=-1).all()


def test_both_ways_of_attention_agree(model):
    watched = GPT(GPTConfig(**{**vars(SMALL), "fused_attention": False})).eval()
    watched.load_state_dict(model.state_dict())
    x, y = tokens(), tokens(seed=2)
    for one in (model, watched):
        one(x, y)[1].backward()
    assert torch.allclose(model(x, y)[0], watched(x, y)[0], atol=1e-6)
    for a, b in zip(model.parameters(), watched.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6)


def test_weights_are_tied_and_counted_once():
    model = GPT(preset("baby", vocab_size=65))
    assert model.head.weight is model.token_embedding.weight
    # Embeddings, then for each layer 12 C^2 and two norms, and the last norm.
    assert model.size() == (65 + 64) * 128 + 4 * (12 * 128**2 + 2 * 128) + 128
    assert GPT(preset("shakespeare_char", vocab_size=65)).size() == (65 + 256) * 384 + 6 * (12 * 384**2 + 768) + 384


def test_gpt2_has_124_million():
    with torch.device("meta"):
        assert GPT(preset("gpt2", vocab_size=50257)).size() == 124_439_808


def test_initialisation():
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=65, layers=8, width=256, bias=True))
    weights = dict(model.named_parameters())
    assert abs(weights["blocks.0.mlp.up.weight"].std() - 0.02) < 0.001
    for name in ("blocks.3.attention.out.weight", "blocks.3.mlp.down.weight"):
        assert abs(weights[name].std() - 0.02 / 4) < 0.0005
    assert weights["blocks.0.attention.qkv.bias"].abs().max() == 0
    assert torch.equal(weights["norm.weight"], torch.ones(256))


def test_without_bias_there_is_none():
    assert not [name for name, _ in GPT(SMALL).named_parameters() if "bias" in name]


def test_generating_is_repeatable_and_goes_beyond_the_context(model):
    start = tokens(2, 3)
    made = [model.generate(start, 20, top_k=5, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert made[0].shape == (2, 23)
    assert torch.equal(*made)
    assert torch.equal(made[0][:, :3], start)


def test_top_1_and_a_low_temperature_take_the_likeliest(model):
    likeliest = model(tokens())[0][:, -1].argmax(-1)
    assert torch.equal(model.generate(tokens(), 1, top_k=1)[:, -1], likeliest)
    assert torch.equal(model.generate(tokens(), 1, temperature=1e-4)[:, -1], likeliest)


def test_dropout_only_while_training():
    model = GPT(GPTConfig(vocab_size=11, context=8, layers=1, heads=2, width=12, dropout=0.5))
    x = tokens()
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 3, "width": 128}, "3 heads do not divide 128"),
        ({"layers": 0}, "layers"),
        ({"context": 2.5}, "context"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_sizes_that_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**changes)


def test_too_many_tokens(model):
    with pytest.raises(ValueError, match="9 tokens do not fit into a context of 8"):
        model(tokens(1, 9))


def test_presets():
    assert list(gpt.PRESETS) == ["baby", "baby256", "shakespeare_char", "gpt2"]
    assert preset("baby", vocab_size=100, dropout=0.1) == GPTConfig(100, 64, 4, 4, 128, 0.1)
    with pytest.raises(ValueError, match="The presets are: baby, baby256, shakespeare_char, gpt2"):
        preset("giant")


def test_it_learns_a_line_by_heart():
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    line = torch.arange(9)[None] * 7 % SMALL.vocab_size
    for _ in range(60):
        loss = model(line[:, :-1], line[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(model.generate(line[:, :1], 8, top_k=1), line)


def test_it_imports_torch_alone():
    code = "import sys, torch; before = set(sys.modules); import lowprec_lab.gpt; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if not name.startswith("torch")} == {"lowprec_lab", "lowprec_lab.gpt"}
