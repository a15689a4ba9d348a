"""What the hardware rejects or silently gets wrong, as small functions; ``glass_jax.hw.verifier`` runs them."""
