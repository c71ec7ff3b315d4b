"""Applications of bilevel: they use its public names only."""
