"""Test data of every family: one row each. A new family is a row of `FAMILIES` and one here.

The models are small, and their dimensions allow as many of TP 1, 2, 3, 4 and 8 as the family's
published models do or more; `tp_sizes` says which, so that a lost pair is noticed.
"""

from typing import NamedTuple

from hybridpd_geometry import AttentionFacts, ModelFacts, StateFacts

TP_SIZES = (1, 2, 3, 4, 8)
ALL = TP_SIZES
POWERS = (1, 2, 4, 8)
MQA = AttentionFacts(24, 1, 4, 4)
LATENT = AttentionFacts(24, 1, 6, 4, latent_dim=6)


class Row(NamedTuple):
    """A family's small model: state and attention dimensions over all ranks."""

    state: StateFacts | None
    attention: AttentionFacts
    tp_sizes: tuple[int, ...] = ALL

    def model(self, name: str) -> ModelFacts:
        """Two state layers (if any) around one attention layer."""
        return ModelFacts(
            name,
            attention_layers=(1,),
            state_layers=(0, 2) if self.state else (),
            attention=self.attention,
            state=self.state,
        )


ROWS: dict[str, Row] = {
    "mamba2, a group per rank": Row(
        StateFacts("mamba2", inner=48, heads=24, head_dim=2, state_size=3, groups=24),
        AttentionFacts(24, 24, 2, 2),
    ),
    "mamba2, 8 groups and 2 KV heads": Row(
        StateFacts("mamba2", inner=32, heads=16, head_dim=2, state_size=3, groups=8),
        AttentionFacts(16, 2, 4, 4),
        POWERS,
    ),
    "mamba2, one group": Row(
        StateFacts("mamba2", inner=48, heads=24, head_dim=2, state_size=3, groups=1), MQA
    ),
    "gdn": Row(StateFacts("gdn", heads=48, head_dim=2, key_heads=24, key_head_dim=3), MQA),
    "kda, latent": Row(
        StateFacts("kda", heads=24, head_dim=2, key_heads=24, key_head_dim=2), LATENT
    ),
    "mamba1": Row(StateFacts("mamba1", inner=48, state_size=3), MQA),
    "short_conv": Row(
        StateFacts("short_conv", inner=48, conv_kernel=3), AttentionFacts(8, 8, 2, 2), POWERS
    ),
    "dense": Row(None, AttentionFacts(24, 24, 2, 2)),
    "latent": Row(None, LATENT),
}
